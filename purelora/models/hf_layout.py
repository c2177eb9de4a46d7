"""From the leaves of a model's tree to the tensors of its files, and back.

A leaf of stacked layers `[L, in, out]` is one tensor `[out, in]` for each layer. Files hold the
experts of a layer in one of three ways, here for `layers.mlp.experts.up_proj.weight` [L, E, D, F]:

    each by itself   model.layers.3.mlp.experts.5.up_proj.weight   [F, D]
    joined           model.layers.3.mlp.experts.gate_up_proj       [E, 2 F, D], up in the last rows
    interleaved      model.layers.3.mlp.experts.gate_up_proj       [E, D, 2 F], up in odd columns

Everything that reads or writes weights goes through a `Layout`, which lists the tensors and the
parts of leaves in each of them. The names of a file's tensors tell which layout it has.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from purelora.core import layer_axis
from purelora.core.param_info import ParamInfo

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
      is_joined: whether the tensor holds all experts, along its first dimension.
    """

    leaf: str
    index: tuple[int, ...]
    name: str
    tensor: str
    box: Box
    is_transposed: bool
    is_joined: bool = False

    @property
    def module(self) -> str:
        """Hugging Face name of the module."""
        return self.name.rpartition(".")[0]

    @property
    def expert(self) -> int | None:
        """The number of the expert; None if the part is no expert."""
        return self.index[1] if len(self.index) > 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part as the file has it."""
        sizes = tuple(len(range(one.start, one.stop, one.step or 1)) for one in self.box)
        return sizes[1:] if self.is_joined else sizes

    def within(self, box: Box) -> Box:
        """A box of this part, in the file's order of dimensions, as a box of the whole tensor."""
        outer, inner = self.box[: -len(box)], zip(self.box[-len(box) :], box, strict=True)
        return outer + tuple(_within(a, b) for a, b in inner)

    def put(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Writes `values`, in the leaf's order of dimensions, to their box in `tensor`."""
        tensor[self.box] = values.T if self.is_transposed else values


def _within(outer: slice, inner: slice) -> slice:
    """The numbers `inner` of those in `outer`; only `outer` may leave numbers out."""
    if outer.step is None:
        return slice(outer.start + inner.start, outer.start + inner.stop)
    first, last = (outer.start + outer.step * i for i in (inner.start, inner.stop - 1))
    return slice(first, last + 1, outer.step)


def hull(box: Box) -> Box:
    """The box with what it leaves out: whole turns of what alternates, which lie side by side."""
    steps = [(one, one.step or 1) for one in box]
    return tuple(slice(one.start // n * n, -(-one.stop // n) * n) for one, n in steps)


def steps(box: Box) -> Box:
    """What of its hull a box takes."""
    return tuple(slice(one.start % one.step if one.step else None, None, one.step) for one in box)


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
      is_interleaved: whether the matrices of one tensor alternate in it instead. Then they are
        `[in, out]`, and what alternates are columns, and elements of biases.
    """

    block: str
    matrices: Mapping[str, tuple[str, ...]]
    has_numbers: bool
    is_interleaved: bool = False


_ALONE = ("gate_proj", "up_proj", "down_proj")
_GATE_UP = ("gate_proj", "up_proj")
NUMBERED, MIXTRAL, FUSED, GPT_OSS = "numbered", "mixtral", "fused", "gpt_oss"
_JOINED = {"gate_up_proj": _GATE_UP, "down_proj": ("down_proj",)}
CONVENTIONS: Mapping[str, Convention] = {
    NUMBERED: Convention("mlp", {name: (name,) for name in _ALONE}, True),
    MIXTRAL: Convention(
        "block_sparse_moe", {"w1": ("gate_proj",), "w3": ("up_proj",), "w2": ("down_proj",)}, True
    ),
    FUSED: Convention("mlp", _JOINED, False),
    GPT_OSS: Convention("mlp", _JOINED, False, is_interleaved=True),
}


def beside(convention: str) -> tuple[str, ...]:
    """The conventions that files of a family may follow whose own is `convention`.

    Tensors that are interleaved cannot be told from others by their names.
    """
    is_alone = CONVENTIONS[convention].is_interleaved
    return tuple(
        name
        for name, other in CONVENTIONS.items()
        if name == convention or not (is_alone or other.is_interleaved)
    )


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
        one = layer_axis.declared_layer(info)
        for layer, name in enumerate(names[path]):
            index = (layer,) if info.is_stacked else ()
            if info.has_experts:
                found += _experts(path, one, index, name, naming, shapes)
                continue
            is_beside = any(path.startswith(f"{mixture}.") for mixture in mixtures)
            tensor = name.replace(".mlp.", f".{naming.block}.") if is_beside else name
            shapes[tensor] = one.file_shape
            box = tuple(slice(0, size) for size in one.file_shape)
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
    """The parts of one layer of experts, declared by `info`; adds their tensors to `shapes`."""
    around, _, rest = name.rpartition(".experts.")
    around = f"{around[: -len('mlp')]}{naming.block}" if around.endswith(".mlp") else around
    matrix, _, kind = rest.rpartition(".")
    own, joined = next((o, all_) for o, all_ in naming.matrices.items() if matrix in all_)
    is_transposed = info.is_transposed and not naming.is_interleaved
    size = info.file_shape if is_transposed else info.shape
    # Outputs are rows of what is transposed, and else the last dimension.
    dim = 1 if is_transposed else len(size) - 1
    tensor_size = [*size[1:dim], len(joined) * size[dim], *size[dim + 1 :]]
    place, count = joined.index(matrix), len(joined)
    inner = [slice(0, length) for length in size[1:]]
    inner[dim - 1] = slice(place * size[dim], (place + 1) * size[dim])
    if naming.is_interleaved and count > 1:
        last = place + count * (size[dim] - 1)
        inner[dim - 1] = slice(place, last + 1, count)
    for expert in range(size[0]):
        if naming.has_numbers:
            tensor, box = f"{around}.experts.{expert}.{own}.{kind}", tuple(inner)
            shapes[tensor] = tuple(tensor_size)
        else:
            tensor = f"{around}.experts.{own}" + ("" if kind == "weight" else f"_{kind}")
            box = (slice(expert, expert + 1), *inner)
            shapes[tensor] = (size[0], *tensor_size)
        is_joined = not naming.has_numbers
        yield Part(path, (*index, expert), name, tensor, box, is_transposed, is_joined)
