"""Specs beside their arrays: the leaves that `layer_axis` changes.

A leaf is one spec of full rank with its array: of a bare spec (without one), of a Pair, or of
declarations, which have shape and logical axes in one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import qwix
from jax.sharding import PartitionSpec as P

from purelora.core import errors
from purelora.core.param_info import ParamInfo

Entry = Any  # str | tuple[str, ...] | None, or P.UNCONSTRAINED
Spec = P | tuple[Entry, ...] | list[Entry] | None


class SpecError(errors.UserError, ValueError):
    """A spec that does not fit its array, or an axis that is not where it should be."""


class Pair(NamedTuple):
    """Arrays and their specs: parallel trees of any kind, or one array and one spec.

    Attributes:
      specs: a spec for each array. For a QArray: a QArray of specs, or one spec (the weight's), of
        which the scale takes the entries of the dimensions that it has in full or in tiles. None
        in place of a tree: no array has a spec.
      arrays: of jax or numpy, tracers, or ShapeDtypeStructs.
    """

    specs: Any
    arrays: Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One spec of full rank, and its array.

    Attributes:
      path: dotted, or "spec" at the root.
      given: the spec as it came.
      entries: of each dimension.
      array: None for a bare spec.
    """

    path: str
    given: Spec
    entries: tuple[Entry, ...]
    array: Any

    def error(self, what: str, remedy: str) -> SpecError:
        return SpecError(self.path, self.given, what, remedy)

    def position(self, axis: int, rank: int) -> int:
        """`axis` as a position from the front."""
        if not -rank <= axis < rank:
            raise self.error(f"axis {axis} is out of range", f"there are {rank} dimensions")
        return axis % rank

    def find(self, axis: int | str) -> int:
        """The position of an axis given by position or by name."""
        if not isinstance(axis, str):
            return self.position(axis, len(self.entries))
        found = [i for i, entry in enumerate(self.entries) if axis in _names(entry)]
        if len(found) != 1:
            what = f"has {axis!r} {len(found)} times" if found else f"has no axis {axis!r}"
            raise self.error(what, "give the position")
        if len(_names(self.entries[found[0]])) > 1:
            what = f"has {axis!r} in one dimension with other axes"
            raise self.error(what, "give the position")
        return found[0]

    def check_new(self, name: Entry) -> None:
        used = {one for entry in self.entries for one in _names(entry)}
        if self.given is None and name is not None:
            raise self.error(f"has no place for the name {name!r}", "give the array a spec")
        if used & set(_names(name)):
            raise self.error(f"has {name!r} already", "choose another name")

    def check_layer(self, at: int, layer: int | jax.Array | None) -> None:
        if self.array is None or isinstance(layer, jax.Array):
            return
        length = self.array.shape[at]
        if layer is None and length != 1:
            what = f"holds {length} layers along axis {at}"
            raise self.error(what, "say which to keep (layer=), or take all with unstack")
        if layer is not None and not 0 <= layer < length:
            raise self.error(f"layer {layer} is not one of {length}", "they count from 0")

    def changed(
        self, dims: Sequence[int | None], change: Callable[[Any], Any], name: Entry = None
    ) -> "Leaf":
        """The leaf with other dimensions.

        Args:
          dims: the old position of each; None for a new one, of length 1.
          change: does the same to an array.
          name: the entry of the new dimension.
        """
        entries = tuple(name if dim is None else self.entries[dim] for dim in dims)
        array = self.array
        if isinstance(array, ParamInfo):
            array = self._declared(array, dims, entries)
        elif isinstance(array, jax.ShapeDtypeStruct):
            array = jax.eval_shape(change, array)
        elif array is not None:
            array = change(array)
        return dataclasses.replace(self, entries=entries, array=array)

    def _declared(
        self, info: ParamInfo, dims: Sequence[int | None], entries: tuple[Entry, ...]
    ) -> ParamInfo:
        shape = tuple(1 if dim is None else info.shape[dim] for dim in dims)
        contracting = info.contracting
        if contracting is not None:
            inner = len(info.shape) + contracting
            if inner not in dims:
                raise self.error(f"axis {inner} is what a matmul sums over", "keep it")
            contracting = dims.index(inner) - len(dims)
        return dataclasses.replace(info, shape=shape, axes=entries, contracting=contracting)

    @property
    def spec(self) -> Spec:
        """The spec in the type of the one that came."""
        if isinstance(self.given, P):
            return self.given.update(partitions=self.entries)
        return None if self.given is None else type(self.given)(self.entries)


def leaf_of(path: str, spec: Spec, array: Any, rank: int) -> Leaf:
    """The door: a spec of any length up to `rank` gets full rank."""
    path = path or "spec"
    if not (spec is None or isinstance(spec, P) or type(spec) in (tuple, list)):
        raise SpecError(path, spec, "is not a spec", "give a PartitionSpec, tuple, list or None")
    entries = spec.partitions if isinstance(spec, P) else tuple(spec or ())
    if len(entries) > rank:
        what = f"has {len(entries)} entries for {rank} dimensions"
        raise SpecError(path, spec, what, "give one entry a dimension")
    return Leaf(path, spec, entries + (None,) * (rank - len(entries)), array)


def _names(entry: Entry) -> tuple[str, ...]:
    if isinstance(entry, (tuple, list)):
        return tuple(entry)
    return (entry,) if isinstance(entry, str) else ()


def is_tree(x: Any) -> bool:
    return isinstance(x, (Pair, ParamInfo, qwix.QArray, Mapping))


def open_tree(x: Any) -> tuple[list[Leaf], Any]:
    """The leaves of a Pair or of declarations, and the structure of its arrays."""
    structure: Any
    is_pair = isinstance(x, Pair)
    arrays, structure = jax.tree_util.tree_flatten_with_path(x.arrays if is_pair else x)
    specs = _specs_of(x, structure) if is_pair else [info.axes for _, info in arrays]
    parts = zip(arrays, specs, strict=True)

    def opened(part: Any) -> Leaf:
        (path, array), spec = part
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return leaf_of(name, spec, array, len(array.shape))

    return each(parts, opened), structure


def _specs_of(pair: Pair, structure: Any) -> list[Spec]:
    """The spec of each array of a Pair."""
    if pair.specs is None:
        return [None] * structure.num_leaves
    try:
        fitted = jax.tree.map(_fitted, pair.arrays, pair.specs, is_leaf=_is_quantised)
        specs: list[Spec] = structure.flatten_up_to(fitted)
    except ValueError as error:
        what = f"have another structure than the arrays: {error}"
        raise SpecError("specs", None, what, "give one spec an array") from error
    return specs


def closed(x: Any, leaves: Sequence[Leaf], structure: Any) -> Any:
    """What `open_tree` opened, from its leaves."""
    arrays = structure.unflatten([leaf.array for leaf in leaves])
    if not isinstance(x, Pair):
        return _in_order(arrays, x)
    if x.specs is None:
        return Pair(None, arrays)
    return Pair(structure.unflatten([leaf.spec for leaf in leaves]), arrays)


def _in_order(tree: Any, like: Any) -> Any:
    """The tree with the keys of its dicts in the order of another's; jax sorts them."""
    if not isinstance(like, Mapping):
        return tree
    return {key: _in_order(tree[key], like[key]) for key in like}


def _is_quantised(x: Any) -> bool:
    return isinstance(x, qwix.QArray)


def _fitted(array: Any, spec: Any) -> Any:
    """The specs of a QArray's arrays, made from the one of the weight if need be."""
    if _is_quantised(spec) or not _is_quantised(array):
        return spec
    weight = leaf_of("", spec, array.qvalue, array.qvalue.ndim)

    def fit(part: Any) -> Spec:
        # One scale for a whole dimension cannot be split as the codes along it are.
        pairs = zip(weight.entries, part.shape, array.qvalue.shape, strict=True)
        kept = (None if n == 1 != whole else entry for entry, n, whole in pairs)
        return dataclasses.replace(weight, entries=tuple(kept)).spec

    return jax.tree.map(fit, array)


def each(parts: Any, function: Callable[[Any], Any]) -> list[Any]:
    """`function` of each part; what is wrong with any of them is one error."""
    results: list[Any] = []
    problems: list[errors.Problem] = []
    for part in parts:
        try:
            results.append(function(part))
        except SpecError as error:
            problems.extend(error.problems)
    if problems:
        raise SpecError.of(problems)
    return results
