"""Batches on the devices, one after the other: what the loop iterates over."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from purelora.core.batch import Batch
from purelora.data.batches import Batches
from purelora.sharding import host_arrays, specs


class Fed(NamedTuple):
    """One batch and what the loop says of it.

    Attributes:
      number: the step that reads it; 1 reads the first batch.
      batch: `[M, B, T]` arrays on the devices, rows split over the mesh.
      tokens: its tokens that are not padding.
    """

    number: int
    batch: Batch
    tokens: int


def feed(batches: Batches, mesh: Mesh, numbers: Iterable[int]) -> Iterator[Fed]:
    """Places the batches of the steps `numbers`, each when it is asked for.

    Of several processes each builds and places the rows of its own devices.
    """
    sharding = specs.shardings(specs.BATCH_SPEC, mesh)
    rows = host_arrays.own_indices(sharding, batches.shape, dim=1)
    place = functools.partial(jax.make_array_from_process_local_data, sharding)
    for number in numbers:
        batch = Batch(*map(place, batches.batch(number - 1, rows)))
        yield Fed(number, batch, batches.token_count(number - 1))


def first(batches: Batches, mesh: Mesh) -> Batch:
    """The first batch, placed: all others have its shape."""
    return next(feed(batches, mesh, [1])).batch
