"""What a step reads: token ids, their targets, and which of them count."""

from typing import Any, NamedTuple

import jax


class Inputs(NamedTuple):
    """What a forward pass reads, each `[B, T]` int32.

    Attributes:
      tokens_BT: token ids.
      positions_BT: position of each token in its own document.
      segment_ids_BT: which document of the row a token belongs to; 0 is padding.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    segment_ids_BT: jax.Array


class Batch(NamedTuple):
    """One global batch in M micro-batches, each array `[M, B, T]`.

    Attributes:
      tokens: int32 ids, 0 in the padding.
      targets: int32, the next token of the same document; 0 where there is none.
      weights: float32, 1 where the target is trained on, else 0.
      segment_ids: int32, 1, 2, ... for the documents of a row, 0 for the padding. Padding is known
        by this and not by a token id.
      positions: int32, from 0 in every document; 0 in the padding.
    """

    tokens: Any
    targets: Any
    weights: Any
    segment_ids: Any
    positions: Any

    @property
    def inputs(self) -> Inputs:
        """What a model reads of it."""
        return Inputs(self.tokens, self.positions, self.segment_ids)
