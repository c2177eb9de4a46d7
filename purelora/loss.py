"""Chunked cross-entropy: the logits of a large vocabulary never exist whole.

The loss is a sum over tokens, so its gradient can be formed chunk by chunk in the forward pass:
each chunk's logits are used twice while they are there and never recomputed. What is kept for the
backward pass is the gradient of the activations, not the logits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from purelora import params, quant
from purelora.models import layers


def token_nll(logits_NV: jax.Array, targets_N: jax.Array) -> jax.Array:
    """`-log softmax(logits)[target]` of each token, `[N]` float32."""
    logits = logits_NV.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets_N[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def xent_sum(
    x_BTD: jax.Array,
    head: params.Module,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk_tokens: int,
) -> jax.Array:
    """Weighted sum of the tokens' cross-entropies, a float32 scalar.

    Args:
      x_BTD: activations after the last norm.
      head: weight [V, D], its adapters, and whether it is trained.
      targets_BT: token ids to predict.
      weights_BT: weight of each target; 0 leaves it out.
      chunk_tokens: how many tokens' logits exist at once.
    """
    d = x_BTD.shape[-1]
    count = targets_BT.size
    chunks = -(-count // chunk_tokens)
    size = -(-count // chunks)
    pad = chunks * size - count

    def chunked(flat: jax.Array) -> jax.Array:
        padded = jnp.pad(flat, ((0, pad),) + ((0, 0),) * (flat.ndim - 1))
        return padded.reshape(chunks, size, *flat.shape[1:])

    trained, frozen = _split_head(head)
    return _chunked_sum(
        chunked(x_BTD.reshape(count, d)),
        trained,
        frozen,
        chunked(targets_BT.reshape(count)),
        chunked(weights_BT.reshape(count)),
        (head.gather, head.frozen, head.contracting),
    )


def _split_head(head: params.Module) -> tuple[Any, Any]:
    """The head's arrays as (those that get a gradient, those that do not)."""
    adapters = (head.lora_a, head.lora_b)
    if head.frozen:
        return (adapters, None), (head.weight, head.scaling)
    return (adapters, head.weight), (None, head.scaling)


def _chunk_nll(
    x_ND: jax.Array,
    trained: Any,
    frozen: Any,
    targets_N: jax.Array,
    weights_N: jax.Array,
    contracting: int,
) -> jax.Array:
    """Weighted loss sum of one chunk; the weights in `trained` and `frozen` are whole here."""
    (lora_a, lora_b), trained_weight = trained
    frozen_weight, scaling = frozen
    weight = frozen_weight if trained_weight is None else trained_weight
    head = params.Module(
        weight=weight,
        bias=None,
        lora_a=lora_a,
        lora_b=lora_b,
        scaling=scaling,
        name="lm_head",
        gather=params.whole,
        contracting=contracting,
        frozen=trained_weight is None,
    )
    with jax.named_scope("head"):
        logits_NV = layers.linear(x_ND, head)
        return jnp.sum(token_nll(logits_NV, targets_N) * weights_N)


Static = tuple[quant.Gather, bool, int]  # gather, frozen and contracting of the head


def _gathered(trained: Any, frozen: Any, gather: quant.Gather) -> tuple[Any, Any]:
    (adapters, trained_weight), (frozen_weight, scaling) = trained, frozen
    whole_trained = None if trained_weight is None else gather(trained_weight)
    whole_frozen = None if frozen_weight is None else gather(frozen_weight)
    return (adapters, whole_trained), (whole_frozen, scaling)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked_sum(
    x: jax.Array, trained: Any, frozen: Any, targets: jax.Array, weights: jax.Array, static: Static
) -> jax.Array:
    gather, _, contracting = static
    trained, frozen = _gathered(trained, frozen, gather)

    def body(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        x_ND, targets_N, weights_N = chunk
        return total + _chunk_nll(x_ND, trained, frozen, targets_N, weights_N, contracting), None

    total, _ = jax.lax.scan(body, _zero_sum(x), (x, targets, weights))
    return total


def _chunked_sum_fwd(
    x: jax.Array, trained: Any, frozen: Any, targets: jax.Array, weights: jax.Array, static: Static
) -> tuple[jax.Array, Any]:
    gather, _, contracting = static
    (full_trained, full_frozen) = _gathered(trained, frozen, gather)

    def body(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
        total, d_trained = carry
        x_ND, targets_N, weights_N = chunk
        nll, (dx, d_chunk) = jax.value_and_grad(_chunk_nll, argnums=(0, 1))(
            x_ND, full_trained, full_frozen, targets_N, weights_N, contracting
        )
        return (total + nll, jax.tree.map(jnp.add, d_trained, d_chunk)), dx

    init = (_zero_sum(x), jax.tree.map(jnp.zeros_like, full_trained))
    (total, d_full), dx = jax.lax.scan(body, init, (x, targets, weights))
    # The gradient of a gathered weight goes back the way the weight came: one reduce-scatter.
    _, pull = jax.vjp(lambda t: _gathered(t, frozen, gather)[0], trained)
    return total, (dx, pull(d_full)[0])


def _chunked_sum_bwd(static: Static, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    del static
    dx, d_trained = jax.tree.map(lambda d: d * g.astype(d.dtype), residuals)
    return dx, d_trained, None, None, None


_chunked_sum.defvjp(_chunked_sum_fwd, _chunked_sum_bwd)


def _zero_sum(x: jax.Array) -> jax.Array:
    """A float32 zero that varies over the mesh as `x` does, so that a loop can carry it."""
    return jnp.zeros_like(x, shape=(), dtype=jnp.float32)
