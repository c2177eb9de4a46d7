"""What a micro-batch adds to the training loss: a model's losses, put together for the step."""

import dataclasses
from typing import Any

import jax

from purelora.core import trees
from purelora.core.batch import Batch
from purelora.models import causal_lm, decoder, layers, loss, moe
from purelora.sharding import parallel


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a forward pass is run; none of it changes the result beyond rounding.

    Attributes:
      dtype: dtype of the activations.
      scan_layers: one compiled body for all layers of a stack.
      remat: recompute each block in the backward pass.
      chunk_tokens: how many tokens' logits exist at once.
    """

    dtype: Any
    scan_layers: bool
    remat: bool
    chunk_tokens: int


def losses(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    batch: Batch,
    *,
    execution: Execution,
    shards: parallel.Shards,
    dropout: layers.Dropout | None,
    pool_router: bool,
) -> loss.Losses:
    """The losses of one micro-batch.

    Args:
      model: the model, with its adapters.
      trainable: the trained leaves.
      base: the frozen ones.
      batch: `[B, T]` arrays.
      execution: how the model is computed.
      shards: how the leaves are split over the devices.
      dropout: dropout on the adapters' inputs; None outside training.
      pool_router: as `is_pooled` of `moe.losses`.
    """
    bound = model.bind(base, trainable, shards)
    x_BTD, sums = decoder.hidden(
        model.family,
        model.config,
        bound,
        batch.inputs,
        dtype=execution.dtype,
        scan_layers=execution.scan_layers,
        remat=execution.remat,
        dropout=dropout,
    )
    xent = loss.xent_sum(
        x_BTD,
        decoder.head(bound),
        batch.targets,
        batch.weights,
        chunk_tokens=execution.chunk_tokens,
        softcap=model.config.final_softcap,
        dropout=dropout,
    )
    if sums is None:
        return loss.Losses(xent, None)
    return loss.Losses(xent, moe.losses(sums, batch.segment_ids > 0, is_pooled=pool_router))


def make_forward(
    model: causal_lm.CausalLM,
    execution: Execution,
    shards: parallel.Shards,
    dropout_rate: float,
    router: moe.RouterLossWeights,
) -> Any:
    """The `step.Forward` of a model: what one micro-batch adds to the loss.

    Args:
      model: the model, with its adapters.
      execution: how it is computed.
      shards: how its leaves are split over the devices.
      dropout_rate: probability of dropping an element of an adapter's input.
      router: coefficients of the router's losses.
    """

    def forward(
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Batch,
        *,
        key: jax.Array | None,
        rows_B: jax.Array,
        row_weight: jax.Array,
    ) -> tuple[jax.Array, loss.Losses]:
        dropout = None
        if key is not None and dropout_rate > 0:
            dropout = layers.Dropout(key, rows_B, dropout_rate)
        parts = losses(
            model,
            trainable,
            base,
            batch,
            execution=execution,
            shards=shards,
            dropout=dropout,
            pool_router=router.is_pooled,
        )
        if parts.router is None:
            return parts.xent, parts
        return parts.xent + row_weight * moe.objective(parts.router, router), parts

    return forward
