"""Batches as a pure function of (seed, step).

`grain` gives the order: its `MapDataset` permutes the rows anew in every epoch and reaches any step
in constant time. Here the rows become arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np

from purelora.core import errors
from purelora.core.batch import Batch
from purelora.data import packing
from purelora.data.examples import Example


@dataclasses.dataclass(frozen=True)
class Batches:
    """The endless sequence of batches of a run.

    Attributes:
      examples: the tokenised examples.
      rows: which of them share a row, from `packing.plan`.
      batch_size: rows in a batch; a multiple of `accum_steps`.
      accum_steps: micro-batches in a batch.
      max_length: tokens in a row.
      seed: of the order, not negative.
      shuffle: permute the rows anew in each epoch; otherwise every epoch has them in order.
    """

    examples: Sequence[Example]
    rows: Sequence[packing.Row]
    batch_size: int
    accum_steps: int
    max_length: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size % self.accum_steps:
            raise errors.ConfigError(
                "batch_size",
                self.batch_size,
                f"is not a multiple of accum_steps = {self.accum_steps}",
                "change one of them",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the last one may be short of rows."""
        return -(-len(self.rows) // self.batch_size)

    def rows_at(self, index: int) -> list[packing.Row]:
        """The rows of batch `index`: `batch_size` of them, or fewer at the end of an epoch."""
        rows: list[packing.Row] = self._order[index]
        return rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape `[M, B, T]` of each array of a batch."""
        return self.accum_steps, self.batch_size // self.accum_steps, self.max_length

    def token_count(self, index: int) -> int:
        """Tokens of batch `index` that are not padding; builds no array."""
        rows = self.rows_at(index)
        return sum(len(self.examples[number].tokens) for row in rows for number in row)

    def batch(self, index: int, row_numbers: Sequence[int] | None = None) -> Batch:
        """Batch `index`; rows that a short batch lacks are all padding and have no weight.

        Args:
          index: of the batch.
          row_numbers: which rows of each micro-batch to build, ascending; by default all of them.
            The arrays are `[M, len(row_numbers), T]` then: what a process of several needs.
        """
        accum_steps, rows, _ = self.shape
        chosen = range(rows) if row_numbers is None else row_numbers
        numbers = [micro * rows + row for micro in range(accum_steps) for row in chosen]
        shape = (len(numbers), self.max_length)
        flat = Batch(
            tokens=np.zeros(shape, np.int32),
            targets=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            segment_ids=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
        )
        filled = self.rows_at(index)
        for place, number in enumerate(numbers):
            if number < len(filled):
                examples = [self.examples[i] for i in filled[number]]
                _fill_row(Batch(*(a[place] for a in flat)), examples)
        return Batch(*(a.reshape(self.accum_steps, -1, self.max_length) for a in flat))

    @functools.cached_property
    def _order(self) -> grain.MapDataset[list[packing.Row]]:
        rows = grain.MapDataset.source(self.rows)
        if self.shuffle:
            rows = rows.seed(self.seed).shuffle()
        # Batching before repeating keeps epochs apart; `repeat` hands each its own permutation.
        return rows.batch(self.batch_size, drop_remainder=False, batch_fn=list).repeat()


def _fill_row(row: Batch, examples: Sequence[Example]) -> None:
    """Writes `examples` one after the other into the arrays of one row."""
    start = 0
    for segment, (tokens, supervised) in enumerate(examples, start=1):
        end = start + len(tokens)
        row.tokens[start:end] = tokens
        row.targets[start : end - 1] = tokens[1:]
        row.weights[start : end - 1] = supervised[1:]
        row.segment_ids[start:end] = segment
        row.positions[start:end] = np.arange(len(tokens))
        start = end
