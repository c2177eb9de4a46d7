"""The axis of stacked layers, added, removed and moved in declarations, specs and arrays alike.

    one layer          [D, F]     P("embed", "mlp")
    stacked, axis 0    [L, D, F]  P("layers", "embed", "mlp")     as purelora keeps it
    stacked, axis 1    [D, L, F]  P("embed", "layers", "mlp")     as MaxText's checkpoints keep it

A spec is a PartitionSpec, tuple or list with an entry for each dimension, of logical or mesh axes,
or None for an array without one. What comes out has the type of what went in. Every function takes
one of

    declarations: a ParamInfo, or a tree of     stack([infos] * 4, name="layers")
        them and of QArrays of them
    a `Pair`: trees of specs and of arrays      remove_scan_axis(Pair(specs, arrays), "layers")
    a bare spec with the rank of its array      remove_scan_axis(P("layers", "embed"), 0, rank=3)

`stack` and `unstack` take no bare specs. A model's family declares one layer; `stack` of that is
what the tree of parameters, their specs, initial values and quantised layouts are made from.

A spec shorter than its array gets full rank before anything else happens, so that positions from
the end mean what they say. Nothing is ever trimmed: a spec longer than its array, a name that is
absent or stands there twice, an axis out of range are a `SpecError` with the paths of all such
leaves. One position serves spec and array, so neither moves without the other.
docs/scan_axis.md has a table of inputs and outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from purelora.core.param_info import LAYERS, ParamInfo
from purelora.core.spec_leaf import (
    Entry,
    Leaf,
    Pair,
    SpecError,
    closed,
    each,
    is_tree,
    leaf_of,
    open_tree,
)

__all__ = [
    "Pair", "SpecError", "add_scan_axis", "declared_layer", "layer_of", "move_scan_axis",
    "remove_scan_axis", "stack", "unstack", "with_layer",
]  # fmt: skip

Declarations = Any  # ParamInfo, qwix.QArray of them, or a dict of such
Stackable = TypeVar("Stackable", bound=P | tuple[Entry, ...] | list[Entry] | Any)


def _everywhere(path: str) -> bool:
    del path
    return True


def add_scan_axis(
    x: Stackable,
    axis: int,
    name: Entry = None,
    *,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> Stackable:
    """Inserts a dimension: arrays become stacks of one layer.

    Args:
      x: a bare spec, a Pair or declarations.
      axis: its position, counted in the result; from the end if negative.
      name: its entry in the specs; None leaves it unsharded.
      rank: of a bare spec's array, before the change.
      where: picks leaves of a tree by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: `axis` is out of range, `name` is in the spec already or the spec is None, or a
        spec is longer than its array.
    """

    def change(leaf: Leaf) -> Leaf:
        at: int = leaf.position(axis, len(leaf.entries) + 1)
        leaf.check_new(name)
        kept = range(len(leaf.entries))
        dims = (*kept[:at], None, *kept[at:])
        return leaf.changed(dims, lambda a: a.reshape(*a.shape[:at], 1, *a.shape[at:]), name)

    return _transform(x, change, rank, where)


def remove_scan_axis(
    x: Stackable,
    axis: int | str,
    *,
    layer: int | jax.Array | None = None,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> Stackable:
    """Takes a dimension out: one layer of each stack is left.

    Args:
      x: a bare spec, a Pair or declarations.
      axis: its position, from the end if negative, or its name in the specs.
      layer: of arrays or declarations, the layer to keep; None where the stack holds only one. A
        traced number is not checked.
      rank: of a bare spec's array, before the change.
      where: picks leaves of a tree by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: `axis` is out of range, absent, doubled or one of several names of a dimension;
        there is no such `layer`; or a spec is longer than its array.
    """

    def change(leaf: Leaf) -> Leaf:
        at: int = leaf.find(axis)
        leaf.check_layer(at, layer)
        dims = tuple(dim for dim in range(len(leaf.entries)) if dim != at)
        return leaf.changed(dims, lambda a: _one_layer(a, at, 0 if layer is None else layer))

    return _transform(x, change, rank, where)


def move_scan_axis(
    x: Stackable,
    source: int | str,
    target: int,
    *,
    rank: int | None = None,
    where: Callable[[str], bool] = _everywhere,
) -> Stackable:
    """Moves a dimension; the others keep their order.

    Args:
      x: a bare spec, a Pair or declarations.
      source: its position, from the end if negative, or its name in the specs.
      target: its position in the result, from the end if negative.
      rank: of a bare spec's array.
      where: picks leaves of a tree by dotted path; the others only get specs of full rank.

    Raises:
      SpecError: as for `remove_scan_axis`.
    """

    def change(leaf: Leaf) -> Leaf:
        order = list(range(len(leaf.entries)))
        order.insert(leaf.position(target, len(order)), order.pop(leaf.find(source)))
        return leaf.changed(tuple(order), lambda a: a.transpose(order))

    return _transform(x, change, rank, where)


def stack(layers: Sequence[Stackable], axis: int = 0, name: Entry = None) -> Stackable:
    """Layers (at least one) with equal specs, shapes and dtypes as one stack.

    Args:
      layers: Pairs or declarations, as `unstack` gives them.
      axis: position of the new dimension, counted in the stack; from the end if negative.
      name: its entry in the specs.

    Raises:
      SpecError: there is no layer, they differ, or as for `add_scan_axis`.
    """
    if not layers:
        raise SpecError("layers", None, "holds no layer", "stack at least one")
    # One declaration serves many layers, and is looked at once.
    of_layer = {id(layer): open_tree(layer) for layer in layers}
    opened = [of_layer[id(layer)] for layer in layers]
    structure = opened[0][1]
    for number, (_, other) in enumerate(opened):
        if other != structure:
            what = "has another structure than layer 0"
            raise SpecError(f"layers[{number}]", None, what, f"layer 0 is {structure}")
    first, _ = open_tree(add_scan_axis(layers[0], axis, name))
    of_leaf = zip(*(leaves for leaves, _ in opened), strict=True)
    stacked = each(zip(first, of_leaf, strict=True), lambda leaf: _stacked(leaf[0], leaf[1], axis))
    return closed(layers[0], stacked, structure)


def unstack(stacked: Stackable, axis: int | str) -> list[Stackable]:
    """The layers of a stack: the inverse of `stack`.

    Args:
      stacked: a Pair or declarations, of which all arrays have the axis.
      axis: its position, from the end if negative, or its name in the specs.

    Raises:
      SpecError: the arrays hold different numbers of layers, there is no array, or as for
        `remove_scan_axis`.
    """
    leaves, _ = open_tree(stacked)
    lengths = each(leaves, lambda leaf: leaf.array.shape[leaf.find(axis)])
    if len(set(lengths)) != 1:
        counts = ", ".join(f"{n} in {leaf.path}" for leaf, n in zip(leaves, lengths, strict=True))
        what = f"does not have one number of layers ({counts or 'no array'})"
        raise SpecError("stack", None, what, "give the stacked arrays alone")
    return [remove_scan_axis(stacked, axis, layer=i) for i in range(lengths[0])]


def layer_of(arrays: Any, number: int | jax.Array, axis: int = 0) -> Any:
    """One layer of a tree of stacked arrays without specs; `number` may be traced."""
    return remove_scan_axis(Pair(None, arrays), axis, layer=number).arrays


def declared_layer(info: ParamInfo) -> ParamInfo:
    """The declaration of one layer of a parameter; the parameter's own if it is not stacked."""
    return remove_scan_axis(info, LAYERS, layer=0) if info.is_stacked else info


def with_layer(stacked: jax.Array, layer: jax.Array, number: int | jax.Array) -> jax.Array:
    """A stack along axis 0 in which one layer is replaced: what `layer_of` then gives."""
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, number, axis=0)


def _one_layer(array: Any, axis: int, number: int | jax.Array) -> Any:
    if isinstance(number, int):
        return array[(slice(None),) * axis + (number,)]
    return jax.lax.dynamic_index_in_dim(array, number, axis, keepdims=False)


def _transform(
    x: Any, change: Callable[[Leaf], Leaf], rank: int | None, where: Callable[[str], bool]
) -> Any:
    """Changes a bare spec, or every leaf of a tree that `where` picks."""
    if (rank is None) != is_tree(x):
        what = "rank belongs with a bare spec, and a Pair knows the ranks of its arrays"
        raise SpecError("rank", rank, what, "give a Pair, or a spec and rank=")
    if rank is not None:
        return change(leaf_of("", x, None, rank)).spec
    leaves, structure = open_tree(x)
    changed = each(leaves, lambda leaf: change(leaf) if where(leaf.path) else leaf)
    return closed(x, changed, structure)


def _stacked(first: Leaf, layers: Sequence[Leaf], axis: int) -> Leaf:
    """A leaf of the stack.

    Args:
      first: the stack of the first layer alone.
      layers: the leaf of each layer.
      axis: position of the new dimension.
    """
    for leaf in layers:
        for field in ("shape", "dtype"):
            here, other = (getattr(one.array, field) for one in (leaf, layers[0]))
            if here != other:
                raise leaf.error(f"{field} {here} in one layer, {other} in another", "they differ")
        if leaf.entries != layers[0].entries:
            raise leaf.error(f"is {layers[0].given} in another layer", "give equal specs")
    arrays = [leaf.array for leaf in layers]
    stacked: Any
    if isinstance(arrays[0], ParamInfo):
        _check_equal(layers)
        stacked = dataclasses.replace(first.array, shape=_of_length(first, axis, len(arrays)))
    elif isinstance(arrays[0], jax.ShapeDtypeStruct):
        stacked = jax.ShapeDtypeStruct(_of_length(first, axis, len(arrays)), first.array.dtype)
    else:
        is_on_host = all(isinstance(array, np.ndarray) for array in arrays)
        stacked = np.stack(arrays, axis) if is_on_host else jnp.stack(arrays, axis)
    return dataclasses.replace(first, array=stacked)


def _check_equal(layers: Sequence[Leaf]) -> None:
    for leaf in layers:
        if leaf.array != layers[0].array:
            what = f"is declared otherwise in another layer: {leaf.array} and {layers[0].array}"
            raise leaf.error(what, "declare all layers alike")


def _of_length(leaf: Leaf, axis: int, length: int) -> tuple[int, ...]:
    """The shape of a leaf with another length of one dimension."""
    at = axis % len(leaf.array.shape)
    shape: tuple[int, ...] = leaf.array.shape
    return (*shape[:at], length, *shape[at + 1 :])
