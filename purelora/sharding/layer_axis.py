"""The scan axis of stacked layers, added, removed and moved in specs and arrays alike.

    one layer          [D, F]     P("embed", "mlp")
    stacked, axis 0    [L, D, F]  P("layers", "embed", "mlp")     as purelora keeps it
    stacked, axis 1    [D, L, F]  P("embed", "layers", "mlp")     as MaxText's checkpoints keep it

A spec is a PartitionSpec, tuple or list with an entry for each dimension, of logical or mesh axes,
or None for an array without one. What comes out has the type of what went in. The functions that
add, remove and move take either

    a bare spec with the rank of its array      remove_scan_axis(P("layers", "embed"), 0, rank=3)
    a `Pair`: trees of specs and of arrays      remove_scan_axis(Pair(specs, arrays), "layers")

A spec shorter than its array gets full rank before anything else happens, so that positions from
the end mean what they say. Nothing is ever trimmed: a spec longer than its array, a name that is
absent or stands there twice, an axis out of range are a `SpecError` with the paths of all such
leaves. In a Pair one position serves spec and array, so neither moves without the other.
docs/scan_axis.md has a table of inputs and outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import PartitionSpec as P

from purelora.core import errors

Entry = Any  # str | tuple[str, ...] | None, or P.UNCONSTRAINED
Spec = P | tuple[Entry, ...] | list[Entry] | None


class SpecError(errors.UserError, ValueError):
    """A spec that does not fit its array, or an axis that is not where it should be."""


class Pair(NamedTuple):
    """Arrays and their specs: parallel trees of any kind, or one array and one spec.

    Attributes:
      specs: a spec for each array. For a QArray: a QArray of specs, or one spec (the weight's), of
        which the scale takes the entries of the dimensions that it has in full or in tiles.
      arrays: of jax or numpy, tracers, or ShapeDtypeStructs.
    """

    specs: Any
    arrays: Any


SpecOrPair = TypeVar("SpecOrPair", P, tuple[Entry, ...], list[Entry], None, Pair)


def _everywhere(path: str) -> bool:
    del path
    return True


def add_scan_axis(
    x: SpecOrPair,
    axis: int,
    name: Entry = None,
    *,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> SpecOrPair:
    """Inserts a dimension: arrays become stacks of one layer.

    Args:
      x: a bare spec or a Pair.
      axis: its position, counted in the result; from the end if negative.
      name: its entry in the specs; None leaves it unsharded.
      rank: of a bare spec's array, before the change.
      where: picks leaves of a Pair by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: `axis` is out of range, `name` is in the spec already or the spec is None, or a
        spec is longer than its array.
    """

    def change(leaf: _Leaf) -> _Leaf:
        at: int = leaf.position(axis, len(leaf.entries) + 1)
        leaf.check_new(name)
        entries = (*leaf.entries[:at], name, *leaf.entries[at:])
        return leaf.changed(entries, lambda a: a.reshape(*a.shape[:at], 1, *a.shape[at:]))

    return _transform(x, change, rank, where)


def remove_scan_axis(
    x: SpecOrPair,
    axis: int | str,
    *,
    layer: int | None = None,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> SpecOrPair:
    """Takes a dimension out: one layer of each stack is left.

    Args:
      x: a bare spec or a Pair.
      axis: its position, from the end if negative, or its name in the specs.
      layer: of a Pair, the layer to keep; None where the stack holds only one.
      rank: of a bare spec's array, before the change.
      where: picks leaves of a Pair by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: `axis` is out of range, absent, doubled or one of several names of a dimension;
        there is no such `layer`; or a spec is longer than its array.
    """

    def change(leaf: _Leaf) -> _Leaf:
        at: int = leaf.find(axis)
        leaf.check_layer(at, layer)
        entries = (*leaf.entries[:at], *leaf.entries[at + 1 :])
        return leaf.changed(entries, lambda a: a[(slice(None),) * at + (layer or 0,)])

    return _transform(x, change, rank, where)


def move_scan_axis(
    x: SpecOrPair,
    source: int | str,
    target: int,
    *,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> SpecOrPair:
    """Moves a dimension; the others keep their order.

    Args:
      x: a bare spec or a Pair.
      source: its position, from the end if negative, or its name in the specs.
      target: its position in the result, from the end if negative.
      rank: of a bare spec's array.
      where: picks leaves of a Pair by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: as for `remove_scan_axis`.
    """

    def change(leaf: _Leaf) -> _Leaf:
        order = list(range(len(leaf.entries)))
        order.insert(leaf.position(target, len(order)), order.pop(leaf.find(source)))
        return leaf.changed(tuple(leaf.entries[i] for i in order), lambda a: a.transpose(order))

    return _transform(x, change, rank, where)


def stack(layers: Sequence[Pair], axis: int = 0, name: Entry = None) -> Pair:
    """Layers (at least one) with equal specs, shapes and dtypes as one stack.

    Args:
      layers: as `unstack` gives them.
      axis: position of the new dimension, counted in the stack; from the end if negative.
      name: its entry in the specs.

    Raises:
      SpecError: there is no layer, they differ, or as for `add_scan_axis`.
    """
    if not layers:
        raise SpecError("layers", None, "holds no layer", "stack at least one")
    opened = [_open(layer) for layer in layers]
    structure = opened[0][1]
    for number, (_, other) in enumerate(opened):
        if other != structure:
            what = "has another structure than layer 0"
            raise SpecError(f"layers[{number}]", None, what, f"layer 0 is {structure}")
    specs = add_scan_axis(layers[0], axis, name).specs
    groups = zip(*(leaves for leaves, _ in opened), strict=True)
    arrays = _each(groups, lambda group: _stacked(group, axis))
    return Pair(specs, structure.unflatten(arrays))


def unstack(stacked: Pair, axis: int | str) -> list[Pair]:
    """The layers of a stack: the inverse of `stack`.

    Args:
      stacked: a Pair whose arrays all have the axis.
      axis: its position, from the end if negative, or its name in the specs.

    Raises:
      SpecError: the arrays hold different numbers of layers, there is no array, or as for
        `remove_scan_axis`.
    """
    leaves, _ = _open(stacked)
    lengths = _each(leaves, lambda leaf: leaf.array.shape[leaf.find(axis)])
    if len(set(lengths)) != 1:
        found = ", ".join(f"{n} in {leaf.path}" for leaf, n in zip(leaves, lengths, strict=True))
        what = f"does not have one number of layers ({found or 'no array'})"
        raise SpecError("stack", None, what, "give the stacked arrays alone")
    return [remove_scan_axis(stacked, axis, layer=i) for i in range(lengths[0])]


@dataclasses.dataclass(frozen=True)
class _Leaf:
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

    def check_layer(self, at: int, layer: int | None) -> None:
        if self.array is None:
            return
        length = self.array.shape[at]
        if layer is None and length != 1:
            what = f"holds {length} layers along axis {at}"
            raise self.error(what, "say which to keep (layer=), or take all with unstack")
        if layer is not None and not 0 <= layer < length:
            raise self.error(f"layer {layer} is not one of {length}", "they count from 0")

    def changed(self, entries: tuple[Entry, ...], change: Callable[[Any], Any]) -> "_Leaf":
        array = self.array
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.eval_shape(change, array)
        elif array is not None:
            array = change(array)
        return dataclasses.replace(self, entries=entries, array=array)

    @property
    def spec(self) -> Spec:
        """The spec in the type of the one that came."""
        if isinstance(self.given, P):
            return self.given.update(partitions=self.entries)
        return None if self.given is None else type(self.given)(self.entries)


def _leaf(path: str, spec: Spec, array: Any, rank: int) -> _Leaf:
    """The door: a spec of any length up to `rank` gets full rank."""
    path = path or "spec"
    if not (spec is None or isinstance(spec, P) or type(spec) in (tuple, list)):
        raise SpecError(path, spec, "is not a spec", "give a PartitionSpec, tuple, list or None")
    entries = spec.partitions if isinstance(spec, P) else tuple(spec or ())
    if len(entries) > rank:
        what = f"has {len(entries)} entries for {rank} dimensions"
        raise SpecError(path, spec, what, "give one entry a dimension")
    return _Leaf(path, spec, entries + (None,) * (rank - len(entries)), array)


def _names(entry: Entry) -> tuple[str, ...]:
    if isinstance(entry, (tuple, list)):
        return tuple(entry)
    return (entry,) if isinstance(entry, str) else ()


def _transform(
    x: Any, change: Callable[[_Leaf], _Leaf], rank: int | None, where: Callable[[str], bool]
) -> Any:
    """Changes a bare spec or every leaf of a Pair that `where` picks."""
    if (rank is None) != isinstance(x, Pair):
        what = "rank belongs with a bare spec, and a Pair knows the ranks of its arrays"
        raise SpecError("rank", rank, what, "give a Pair, or a spec and rank=")
    if rank is not None:
        return change(_leaf("", x, None, rank)).spec
    leaves, structure = _open(x)
    changed = _each(leaves, lambda leaf: change(leaf) if where(leaf.path) else leaf)
    specs, arrays = [leaf.spec for leaf in changed], [leaf.array for leaf in changed]
    return Pair(structure.unflatten(specs), structure.unflatten(arrays))


def _open(pair: Pair) -> tuple[list[_Leaf], Any]:
    """The leaves of a Pair and the structure of its arrays."""
    structure: Any
    arrays, structure = jax.tree_util.tree_flatten_with_path(pair.arrays)
    try:
        fitted = jax.tree.map(_fitted, pair.arrays, pair.specs, is_leaf=_is_quantised)
        specs = structure.flatten_up_to(fitted)
    except ValueError as error:
        what = f"have another structure than the arrays: {error}"
        raise SpecError("specs", None, what, "give one spec an array") from error
    parts = zip(arrays, specs, strict=True)

    def opened(part: Any) -> _Leaf:
        (path, array), spec = part
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _leaf(name, spec, array, len(array.shape))

    return _each(parts, opened), structure


def _is_quantised(x: Any) -> bool:
    return isinstance(x, qwix.QArray)


def _fitted(array: Any, spec: Any) -> Any:
    """The specs of a QArray's arrays, made from the one of the weight if need be."""
    if _is_quantised(spec) or not _is_quantised(array):
        return spec
    weight = _leaf("", spec, array.qvalue, array.qvalue.ndim)

    def fit(part: Any) -> Spec:
        # One scale for a whole dimension cannot be split as the codes along it are.
        pairs = zip(weight.entries, part.shape, array.qvalue.shape, strict=True)
        kept = (None if n == 1 != whole else entry for entry, n, whole in pairs)
        return dataclasses.replace(weight, entries=tuple(kept)).spec

    return jax.tree.map(fit, array)


def _each(parts: Any, function: Callable[[Any], Any]) -> list[Any]:
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


def _stacked(group: Sequence[_Leaf], axis: int) -> Any:
    """One array of the stack, from that of each layer."""
    for leaf in group:
        for field in ("shape", "dtype"):
            here, first = (getattr(one.array, field) for one in (leaf, group[0]))
            if here != first:
                raise leaf.error(f"{field} {here} in one layer, {first} in another", "they differ")
        if leaf.entries != group[0].entries:
            raise leaf.error(f"is {group[0].given} in another layer", "give equal specs")
    arrays = [leaf.array for leaf in group]
    if all(isinstance(array, np.ndarray) for array in arrays):
        return np.stack(arrays, axis)
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda parts: jnp.stack(parts, axis), arrays)
    return jnp.stack(arrays, axis)
