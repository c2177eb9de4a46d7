"""Where the layers of a model's leaves lie in the tensors of its files.

Most leaves are one tensor for each layer, `[out, in]` where the leaf is `[in, out]`. Files hold the
experts of a layer in one of two ways, here for `layers.mlp.experts.up_proj.weight` [L, E, D, F]:

    each by itself   model.layers.3.mlp.experts.5.up_proj.weight   [F, D]
    joined           model.layers.3.mlp.experts.gate_up_proj       [E, 2 F, D], up in the last rows

All that reads or writes weights goes through a `Layout`: the tensors, and the parts of leaves in
each of them. Which layout a file has is seen from the names of its tensors.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from purelora.info import ParamInfo

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer, or one expert of a layer, of a leaf in a tensor of a file.

    Attributes:
      leaf: path of the leaf.
      index: which of its layers, and of their experts; empty if the leaf has no layers.
      name: Hugging Face name of that layer of the leaf; of all experts together.
      tensor: name of the tensor.
      box: the part of the tensor that it is.
      is_transposed: whether that is the other way round than the leaf.
    """

    leaf: str
    index: tuple[int, ...]
    name: str
    tensor: str
    box: Box
    is_transposed: bool

    @property
    def module(self) -> str:
        """Hugging Face name of the module."""
        return self.name.rpartition(".")[0]

    @property
    def expert(self) -> int | None:
        """The number of the expert, if it is of one."""
        return self.index[1] if len(self.index) > 1 else None

    def within(self, box: Box) -> Box:
        """`box`, of the part itself as the file has it, as a box of the tensor."""
        outer, inner = self.box[: -len(box)], zip(self.box[-len(box) :], box, strict=True)
        return outer + tuple(slice(a.start + b.start, a.start + b.stop) for a, b in inner)

    def put(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Writes `values`, as the leaf has them, to their place in a tensor."""
        tensor[self.box] = values.T if self.is_transposed else values


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of a file and what they hold.

    Attributes:
      shapes: shape of every tensor, by name.
      parts: parts of every leaf, by its path, in the order of layers and experts.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Part, ...]]

    @functools.cached_property
    def contents(self) -> Mapping[str, tuple[Part, ...]]:
        """The parts in every tensor, by its name."""
        found: dict[str, list[Part]] = {name: [] for name in self.shapes}
        for parts in self.parts.values():
            for part in parts:
                found[part.tensor].append(part)
        return {name: tuple(parts) for name, parts in found.items()}


@dataclasses.dataclass(frozen=True)
class Convention:
    """How one kind of files names a mixture of experts and its matrices.

    Attributes:
      block: what it calls the module `mlp`.
      matrices: the matrices of an expert that one of its tensors holds one after the other, by its
        name of that tensor.
      has_numbers: whether each expert has tensors of its own.
    """

    block: str
    matrices: Mapping[str, tuple[str, ...]]
    has_numbers: bool


_ALONE = ("gate_proj", "up_proj", "down_proj")
_GATE_UP = ("gate_proj", "up_proj")
NUMBERED, MIXTRAL, FUSED = "numbered", "mixtral", "fused"
CONVENTIONS: Mapping[str, Convention] = {
    NUMBERED: Convention("mlp", {name: (name,) for name in _ALONE}, True),
    MIXTRAL: Convention(
        "block_sparse_moe", {"w1": ("gate_proj",), "w3": ("up_proj",), "w2": ("down_proj",)}, True
    ),
    FUSED: Convention("mlp", {"gate_up_proj": _GATE_UP, "down_proj": ("down_proj",)}, False),
}


def layout(
    infos: Mapping[str, ParamInfo], names: Mapping[str, Sequence[str]], convention: str
) -> Layout:
    """The layout of the files of one convention.

    Args:
      infos: declarations of the leaves, by path.
      names: Hugging Face name of each layer of every leaf.
      convention: one of `CONVENTIONS`.
    """
    naming = CONVENTIONS[convention]
    mixtures = {p.partition(".experts.")[0] for p, info in infos.items() if info.has_experts}
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for path, info in infos.items():
        found: list[Part] = []
        for layer, name in enumerate(names[path]):
            index = (layer,) if info.is_stacked else ()
            if info.has_experts:
                found += _experts(path, info, index, name, naming, shapes)
                continue
            is_beside = any(path.startswith(f"{mixture}.") for mixture in mixtures)
            tensor = name.replace(".mlp.", f".{naming.block}.") if is_beside else name
            shapes[tensor] = info.file_shape
            box = tuple(slice(0, size) for size in info.file_shape)
            found.append(Part(path, index, name, tensor, box, info.is_transposed))
        parts[path] = tuple(found)
    return Layout(shapes, parts)


def _experts(
    path: str,
    info: ParamInfo,
    index: tuple[int, ...],
    name: str,
    naming: Convention,
    shapes: dict[str, tuple[int, ...]],
) -> Iterator[Part]:
    """The experts of one layer of a leaf; adds the shapes of their tensors."""
    around, _, rest = name.rpartition(".experts.")
    around = f"{around[: -len('mlp')]}{naming.block}" if around.endswith(".mlp") else around
    matrix = rest.removesuffix(".weight")
    own, joined = next((o, all_) for o, all_ in naming.matrices.items() if matrix in all_)
    count, rows, columns = info.file_shape
    first = joined.index(matrix) * rows
    inner: Box = (slice(first, first + rows), slice(0, columns))
    for expert in range(count):
        tensor, box = f"{around}.experts.{own}", inner
        shape: tuple[int, ...] = (len(joined) * rows, columns)
        if naming.has_numbers:
            tensor = f"{around}.experts.{expert}.{own}.weight"
        else:
            box, shape = (slice(expert, expert + 1), *inner), (count, *shape)
        shapes[tensor] = shape
        yield Part(path, (*index, expert), name, tensor, box, info.is_transposed)
