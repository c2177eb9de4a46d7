"""Chunked cross-entropy: the logits of a large vocabulary never exist whole.

The loss is a sum over tokens, so its gradient can be formed chunk by chunk in the forward pass:
each chunk's logits are used twice while they are there and never recomputed. What is kept for the
backward pass is the gradient of the activations, not the logits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from purelora.models import layers, moe, params
from purelora.sharding import parallel as parallel_lib


class Losses(NamedTuple):
    """The losses of one micro-batch or of a whole batch, float32 sums.

    Attributes:
      xent: cross-entropy of the tokens, each times its weight.
      router: the losses of the router, summed over rows; None for a model without experts.
    """

    xent: jax.Array
    router: moe.RouterLosses | None


class Tokens(NamedTuple):
    """What the head turns into losses, `[B, T]` or in chunks `[C, N]`.

    Attributes:
      x: activations after the last norm, `[..., D]`.
      adapter_x: what the head's adapters read: `x`, with dropout while training.
      targets: token ids to predict.
      weights: float32 weight of each target; 0 leaves it out.
    """

    x: jax.Array
    adapter_x: jax.Array
    targets: Any
    weights: Any


def token_nll(
    logits_NV: jax.Array, targets_N: jax.Array, parallel: parallel_lib.Parallel = parallel_lib.WHOLE
) -> jax.Array:
    """`-log softmax(logits)[target]` of each token, `[N]` float32.

    Where the head is split by outputs, V is a device's part of the vocabulary.
    """
    logits = logits_NV.astype(jnp.float32)
    count = logits.shape[-1]
    top = parallel.pmax(jax.lax.stop_gradient(logits.max(axis=-1)))
    total = jnp.exp(logits - top[:, None]).sum(axis=-1)
    rows = targets_N - parallel.first(count)
    is_own = (rows >= 0) & (rows < count)
    column = jnp.clip(rows, 0, count - 1)[:, None]
    picked = jnp.where(is_own, jnp.take_along_axis(logits, column, axis=-1)[:, 0], 0)
    total, picked = parallel.psum((total, picked))
    return jnp.log(total) + top - picked


def xent_sum(
    x_BTD: jax.Array,
    head: params.Module,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk_tokens: int,
    softcap: float | None = None,
    dropout: layers.Dropout | None = None,
) -> jax.Array:
    """Weighted sum of the tokens' cross-entropies, a float32 scalar; logits are float32.

    Args:
      x_BTD: activations after the last norm.
      head: weight [V, D], its adapters, and whether it is trained.
      targets_BT: token ids to predict.
      weights_BT: weight of each target; 0 leaves it out.
      chunk_tokens: how many tokens' logits exist at once.
      softcap: c in `c · tanh(logit / c)`; None: no cap.
      dropout: dropout on the input of the head's adapters.
    """
    chex.assert_rank([x_BTD, targets_BT, weights_BT], [3, 2, 2])
    chex.assert_equal_shape_prefix([x_BTD, targets_BT, weights_BT], 2)
    x_BTD = head.parallel.copy_to(x_BTD)
    is_dropped = dropout is not None and layers.takes_dropout(head)
    adapter_x = dropout(x_BTD, head) if dropout is not None and is_dropped else x_BTD
    count = targets_BT.size
    chunks = -(-count // chunk_tokens)
    size = -(-count // chunks)

    def chunked(array: jax.Array) -> jax.Array:
        flat = array.reshape(count, *array.shape[2:])
        padded = jnp.pad(flat, ((0, chunks * size - count),) + ((0, 0),) * (flat.ndim - 1))
        return padded.reshape(chunks, size, *flat.shape[1:])

    tokens = Tokens(*map(chunked, (x_BTD, adapter_x, targets_BT, weights_BT)))
    return _chunked_sum(tokens, *_split(head), softcap)


def _split(head: params.Module) -> tuple[params.Module, params.Module]:
    """The head as two modules: what gets a gradient, and what does not."""
    parts = [adapter.split() for adapter in head.adapters]
    trained = dataclasses.replace(
        head,
        weight=None if head.frozen else head.weight,
        adapters=tuple(part for part, _ in parts),
        bias=None,
    )
    constant = tuple(part for _, part in parts)
    weight = head.weight if head.frozen else None
    return trained, dataclasses.replace(head, weight=weight, adapters=constant)


def _joined(trained: params.Module, frozen: params.Module) -> params.Module:
    weight = frozen.weight if trained.weight is None else trained.weight
    pairs = zip(trained.adapters, frozen.adapters, strict=True)
    adapters = tuple(one.joined(other) for one, other in pairs)
    return dataclasses.replace(frozen, weight=weight, adapters=adapters)


def _whole(head: params.Module) -> params.Module:
    """The head with its weight gathered: once, not for each chunk."""
    weight = None if head.weight is None else head.gather(head.weight)
    return dataclasses.replace(head, weight=weight, gather=parallel_lib.whole)


def _chunk_nll(
    inputs: tuple[jax.Array, jax.Array],
    trained: params.Module,
    frozen: params.Module,
    chunk: Tokens,
    softcap: float | None,
) -> jax.Array:
    """Weighted loss sum of one chunk of `[N]` tokens; the weights are whole here."""
    with jax.named_scope("head"):
        logits_NV = layers.adapted(*inputs, _joined(trained, frozen), jnp.float32)
        logits_NV = layers.softcapped(logits_NV, softcap)
        nll_N = token_nll(logits_NV, chunk.targets, frozen.parallel)
        return jnp.sum(nll_N * chunk.weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked_sum(
    tokens: Tokens, trained: params.Module, frozen: params.Module, softcap: float | None
) -> jax.Array:
    trained, frozen = _whole(trained), _whole(frozen)

    def body(total: jax.Array, chunk: Tokens) -> tuple[jax.Array, None]:
        return total + _chunk_nll(chunk[:2], trained, frozen, chunk, softcap), None

    total, _ = jax.lax.scan(body, _zero_sum(tokens.weights), tokens)
    return total


def _chunked_sum_fwd(
    tokens: Tokens, trained: params.Module, frozen: params.Module, softcap: float | None
) -> tuple[jax.Array, Any]:
    whole_frozen = _whole(frozen)
    # The gradient of a gathered weight goes back the way the weight came: one reduce-scatter.
    whole_trained, pull = jax.vjp(_whole, trained)

    def body(carry: Any, chunk: Tokens) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        total, d_trained = carry
        nll, (d_inputs, d_chunk) = jax.value_and_grad(_chunk_nll, argnums=(0, 1))(
            chunk[:2], whole_trained, whole_frozen, chunk, softcap
        )
        return (total + nll, jax.tree.map(jnp.add, d_trained, d_chunk)), d_inputs

    init = (_zero_sum(tokens.weights), jax.tree.map(jnp.zeros_like, whole_trained))
    (total, d_whole), d_inputs = jax.lax.scan(body, init, tokens)
    return total, (d_inputs, pull(d_whole)[0])


def _chunked_sum_bwd(softcap: float | None, residuals: Any, g: jax.Array) -> tuple[Any, Any, None]:
    del softcap
    (dx, d_adapter_x), d_trained = jax.tree.map(lambda d: d * g.astype(d.dtype), residuals)
    return Tokens(dx, d_adapter_x, None, None), d_trained, None


_chunked_sum.defvjp(_chunked_sum_fwd, _chunked_sum_bwd)


def _zero_sum(like: jax.Array) -> jax.Array:
    """A float32 zero that varies over the mesh as `like` does, so that a loop can carry it."""
    return jnp.zeros_like(like, shape=(), dtype=jnp.float32)
