"""Causal grouped-query attention that keeps only its inputs, its output and one number a row.

The backward pass forms the scores again from `q`, `k` and the log-sum-exp (Dao et al. 2022,
section 3.1), so no `[T, S]` array is ever saved. Queries are worked off in blocks, each against
the keys up to its end: what causality hides is not computed.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

# Large and negative, but finite: a row that may see nothing then gets a uniform softmax, not NaN.
MASKED = -1e30
_LEAST_BLOCK = 128
_MOST_BLOCKS = 8


class _Saved(NamedTuple):
    """What the forward pass leaves for the backward pass; heads are grouped by key-value head."""

    q_BKGTH: jax.Array
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    out_BKGTH: jax.Array
    lse_BKGT: jax.Array
    segments_BT: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def causal_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    scale: float,
) -> jax.Array:
    """Softmax attention, causal inside each segment and blind across their borders.

    A padding query (segment 0) sees the padding before it, so its softmax is finite; no real query
    sees padding.

    Args:
      q_BTNH: queries; N is a multiple of K.
      k_BSKH: keys, S = T.
      v_BSKH: values.
      segments_BT: int32 segment of each position.
      scale: factor of the scores.

    Returns:
      `[B, T, N, H]` in the dtype of `q`; scores and softmax are float32.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, segments_BT, scale)[0]


def _forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array, scale: float
) -> tuple[jax.Array, _Saved]:
    kv_heads = k_BSKH.shape[2]
    q = einops.rearrange(q_BTNH, "B T (K G) H -> B K G T H", K=kv_heads)
    k, v = (einops.rearrange(x, "B S K H -> B K S H") for x in (k_BSKH, v_BSKH))
    outs, lses = [], []
    for start, end in _blocks(q.shape[3]):
        scores = _scores(q[:, :, :, start:end], k[:, :, :end], segments_BT, start, end, scale)
        top = scores.max(axis=-1, keepdims=True)
        exps = jnp.exp(scores - top)
        total = exps.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "BKGTS,BKSH->BKGTH",
            exps.astype(v.dtype),
            v[:, :, :end],
            preferred_element_type=jnp.float32,
        )
        outs.append((mixed / total).astype(q.dtype))
        lses.append((top + jnp.log(total))[..., 0])
    out = checkpoint_name(jnp.concatenate(outs, axis=3), "attention_out")
    lse = checkpoint_name(jnp.concatenate(lses, axis=3), "attention_lse")
    saved = _Saved(q, k, v, out, lse, segments_BT)
    return einops.rearrange(out, "B K G T H -> B T (K G) H"), saved


def _backward(
    scale: float, saved: _Saved, g_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, out, lse, segments_BT = saved
    g = einops.rearrange(g_BTNH, "B T (K G) H -> B K G T H", K=k.shape[1])
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    dqs = []
    dk, dv = (jnp.zeros_like(x, dtype=jnp.float32) for x in (k, v))
    for start, end in _blocks(q.shape[3]):
        q_b, g_b = q[:, :, :, start:end], g[:, :, :, start:end]
        keys, values = k[:, :, :end], v[:, :, :end]
        scores = _scores(q_b, keys, segments_BT, start, end, scale)
        probs = jnp.exp(scores - lse[:, :, :, start:end, None])
        d_probs = _f32("BKGTH,BKSH->BKGTS", g_b, values)
        d_scores = (probs * (d_probs - delta[:, :, :, start:end, None]) * scale).astype(q.dtype)
        dqs.append(_f32("BKGTS,BKSH->BKGTH", d_scores, keys).astype(q.dtype))
        dk = dk.at[:, :, :end].add(_f32("BKGTS,BKGTH->BKSH", d_scores, q_b))
        dv = dv.at[:, :, :end].add(_f32("BKGTS,BKGTH->BKSH", probs.astype(g.dtype), g_b))
    dq = einops.rearrange(jnp.concatenate(dqs, axis=3), "B K G T H -> B T (K G) H")
    dk, dv = (einops.rearrange(x.astype(q.dtype), "B K S H -> B S K H") for x in (dk, dv))
    return dq, dk, dv, None


causal_attention.defvjp(_forward, _backward)


def _f32(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _scores(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    segments_BT: jax.Array,
    start: int,
    end: int,
    scale: float,
) -> jax.Array:
    """Masked scores of the queries start:end against the keys :end, float32."""
    scores = _f32("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH) * scale
    causal = np.arange(start, end)[:, None] >= np.arange(end)[None, :]
    same = segments_BT[:, start:end, None] == segments_BT[:, None, :end]
    return jnp.where((same & causal[None])[:, None, None], scores, MASKED)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Borders of the query blocks: at most `_MOST_BLOCKS`, of `_LEAST_BLOCK` or more."""
    size = max(_LEAST_BLOCK, -(-length // _MOST_BLOCKS))
    for start in range(0, length, size):
        yield start, min(start + size, length)


def cached_attention(
    q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array, scale: float
) -> jax.Array:
    """Attention for generation, over the slots of a cache that `mask` shows; not differentiated."""
    q = einops.rearrange(q_BTNH, "B T (K G) H -> B K G T H", K=k_BKSH.shape[1])
    scores = _f32("BKGTH,BKSH->BKGTS", q, k_BKSH) * scale
    scores = jnp.where(mask_BTS[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
    out = jnp.einsum("BKGTS,BKSH->BKGTH", weights, v_BKSH)
    return einops.rearrange(out, "B K G T H -> B T (K G) H")
