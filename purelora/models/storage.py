"""From the leaves of a model's tree to the tensors of its files, and back.

A leaf of stacked layers `[L, in, out]` is one tensor `[out, in]` for each layer. Files hold the
experts of a layer in one of two ways, here for `layers.mlp.experts.up_proj.weight` [L, E, D, F]:

    each by itself   model.layers.3.mlp.experts.5.up_proj.weight   [F, D]
    joined           model.layers.3.mlp.experts.gate_up_proj       [E, 2 F, D], up in the last rows

Everything that reads or writes weights goes through a `Layout`, which lists the tensors and the
parts of leaves in each of them. The names of a file's tensors tell which layout it has.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from purelora.info import ParamInfo

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer of a leaf, or one expert of a layer, as a box of a file's tensor.

    Attributes:
      leaf: path of the leaf.
      index: position in the leaf: (layer,) or (layer, expert); () for a leaf without layers.
      name: Hugging Face name of the layer of the leaf; for an expert, without its number.
      tensor: name of the tensor in the file.
      box: a slice of each dimension of the tensor.
      is_transposed: whether the last two dimensions are swapped between leaf and tensor.
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
        """The number of the expert; None if the part is no expert."""
        return self.index[1] if len(self.index) > 1 else None

    def within(self, box: Box) -> Box:
        """A box of this part, in the file's order of dimensions, as a box of the whole tensor."""
        outer, inner = self.box[: -len(box)], zip(self.box[-len(box) :], box, strict=True)
        return outer + tuple(slice(a.start + b.start, a.start + b.stop) for a, b in inner)

    def put(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Writes `values`, in the leaf's order of dimensions, to their box in `tensor`."""
        tensor[self.box] = values.T if self.is_transposed else values


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of a file and the parts of leaves that they hold.

    Attributes:
      shapes: shape of every tensor, by its name.
      parts: the parts of every leaf, by its path; layer after layer, and expert after expert.
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
    """How the files of one kind name a mixture of experts and its matrices.

    Attributes:
      block: their name of the module that is called `mlp` here.
      matrices: which matrices of an expert a tensor holds, one after the other along the rows; by
        the last part of the tensor's name.
      has_numbers: whether each expert has tensors of its own, with its number in their names.
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
    """The layout of a model's files by one convention.

    Args:
      infos: declarations of the leaves, by path.
      names: Hugging Face names of the layers of every leaf, by the leaf's path.
      convention: a key of `CONVENTIONS`.
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
    """The parts of one layer of a leaf of experts; adds their tensors to `shapes`."""
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
