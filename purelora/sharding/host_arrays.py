"""Arrays of the host onto the mesh, and back: each process touches its own shards only.

A value that every process has is cut to what its devices hold; no byte of it goes from one process
to another.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# A box of an array: a slice for each dimension.
Index = tuple[slice, ...]


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays where `shardings`, a parallel tree, say.

    Arrays of the host, or of one process alone, must be the same in all processes. Arrays that are
    spread over the processes move between them.
    """
    return jax.tree.map(_place, tree, shardings)


def _place(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, jax.Array):
        if sharding.is_fully_addressable and array.is_fully_addressable:
            return jax.device_put(array, sharding)
        if not array.is_fully_addressable:
            moved: jax.Array = jax.jit(_same, out_shardings=sharding)(array)
            return moved
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _same(array: jax.Array) -> jax.Array:
    return array


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array on every host; all processes must call it."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def whole_box(shape: tuple[int, ...]) -> Index:
    """The box that is all of an array."""
    return tuple(slice(0, size) for size in shape)


def own_box(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Index:
    """The smallest box of an array that has all shards of this process's devices."""
    places = [
        [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    ]
    return tuple(
        slice(min(start for start, _ in dim), max(stop for _, stop in dim))
        for dim in zip(*places, strict=True)
    )


def own_indices(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dim: int) -> list[int]:
    """The positions along `dim` that this process's devices hold, ascending."""
    found: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        if index is not None:
            found.update(range(*index[dim].indices(shape[dim])))
    return sorted(found)


def from_box(
    box: Index, part: np.ndarray, sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> jax.Array:
    """An array of `shape` of which each process has the values in its own `box`: see `own_box`."""

    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # It is None only for devices of other processes.
        spans = [one.indices(size) for one, size in zip(index, shape, strict=True)]
        return part[
            tuple(
                slice(start - outer.start, stop - outer.start)
                for (start, stop, _), outer in zip(spans, box, strict=True)
            )
        ]

    return jax.make_array_from_callback(shape, sharding, read)
