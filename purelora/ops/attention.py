"""Causal grouped-query attention that keeps only its inputs, its output and one number a row.

The backward pass forms the scores again from `q`, `k` and the log-sum-exp (Dao et al. 2022,
section 3.1), so no `[T, S]` array is ever saved. Queries are worked off in blocks, each against
the keys from the first that its window shows up to its end: other keys are not computed with.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    sinks_BKG: jax.Array | None
    kind: jax.Array | None


class _Static(NamedTuple):
    """Settings; `windows` are those of the kinds of layers, and `window` is the one meant."""

    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]
    window: int | None = None


def causal_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    scale: float,
    *,
    softcap: float | None = None,
    windows: tuple[int | None, ...] = (None,),
    kind: int | jax.Array = 0,
    sinks_N: jax.Array | None = None,
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
      softcap: c in `c · tanh(score / c)`; None: no cap.
      windows: how many keys a query sees at most, itself included, in layers of each kind.
      kind: which of `windows` counts; if traced, one of them is branched to.
      sinks_N: scores of nothing: each joins the sum that its head's softmax divides by, and adds no
        value (Xiao et al. 2023, equation 2).

    Returns:
      `[B, T, N, H]` in the dtype of `q`; scores and softmax are float32.
    """
    if isinstance(kind, int):
        windows = (windows[kind],)
    branch = jnp.asarray(kind, jnp.int32) if len(windows) > 1 else None
    static = _Static(scale, softcap, windows)
    return _attention(
        q_BTNH, k_BSKH, v_BSKH, segments_BT, _of_rows(sinks_N, q_BTNH), branch, static
    )


def _of_rows(sinks_N: jax.Array | None, q_BTNH: jax.Array) -> jax.Array | None:
    """Sinks of each row of the batch, float32; made from q, they vary over the mesh as it does."""
    if sinks_N is None:
        return None
    zeros_BN = jnp.zeros_like(q_BTNH[:, 0, :, 0], dtype=jnp.float32)
    return sinks_N.astype(jnp.float32)[None] + zeros_BN


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    sinks_BN: jax.Array | None,
    kind: jax.Array | None,
    static: _Static,
) -> jax.Array:
    return _forward(q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_BN, kind, static)[0]


def _of_kind(
    function: Callable[..., Any], kind: jax.Array | None, static: _Static, *operands: Any
) -> Any:
    """`function` with the window of the layer's kind.

    The branches lie inside the custom VJP, so they share what is saved.
    """
    branches = [functools.partial(function, static._replace(window=w)) for w in static.windows]
    if kind is None:
        return branches[0](*operands)
    return jax.lax.switch(kind, branches, *operands)


def _forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    sinks_BN: jax.Array | None,
    kind: jax.Array | None,
    static: _Static,
) -> tuple[jax.Array, _Saved]:
    kv_heads = k_BSKH.shape[2]
    q = einops.rearrange(q_BTNH, "B T (K G) H -> B K G T H", K=kv_heads)
    k, v = (einops.rearrange(x, "B S K H -> B K S H") for x in (k_BSKH, v_BSKH))
    sinks = _grouped(sinks_BN, kv_heads)
    out, lse = _of_kind(_mixed, kind, static, q, k, v, segments_BT, sinks)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    saved = _Saved(q, k, v, out, lse, segments_BT, sinks, kind)
    return einops.rearrange(out, "B K G T H -> B T (K G) H"), saved


def _grouped(sinks_BN: jax.Array | None, kv_heads: int) -> jax.Array | None:
    """`[B, N] -> [B, K, G]`."""
    if sinks_BN is None:
        return None
    return einops.rearrange(sinks_BN, "B (K G) -> B K G", K=kv_heads)


def _mixed(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BT: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Mixed values `[B, K, G, T, H]` and the log-sum-exp of scores and sinks `[B, K, G, T]`."""
    outs, lses = [], []
    for block in _blocks(q.shape[3], static.window):
        scores = _scores(q, k, segments_BT, block, static)
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = jnp.maximum(top, sinks[..., None, None])
        exps = jnp.exp(scores - top)
        total = exps.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks[..., None, None] - top)
        mixed = _f32("BKGTS,BKSH->BKGTH", exps.astype(v.dtype), v[:, :, block.keys])
        outs.append((mixed / total).astype(q.dtype))
        lses.append((top + jnp.log(total))[..., 0])
    return jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)


def _backward(
    static: _Static, saved: _Saved, g_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None, None]:
    g = einops.rearrange(g_BTNH, "B T (K G) H -> B K G T H", K=saved.k_BKSH.shape[1])
    dq, dk, dv, d_sinks = _of_kind(_gradients, saved.kind, static, saved, g)
    dq = einops.rearrange(dq, "B K G T H -> B T (K G) H")
    dk, dv = (einops.rearrange(x, "B K S H -> B S K H") for x in (dk, dv))
    if d_sinks is not None:
        d_sinks = einops.rearrange(d_sinks, "B K G -> B (K G)")
    return dq, dk, dv, None, d_sinks, None


def _gradients(
    static: _Static, saved: _Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    q, k, v, out, lse, segments_BT, sinks, _ = saved
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Of the softmax's backward pass, p · (dp - Σ p dp), a sink has only the sum: it has no value.
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[..., None] - lse) * delta, axis=-1)
    dqs = []
    dk, dv = (jnp.zeros_like(x, dtype=jnp.float32) for x in (k, v))
    for block in _blocks(q.shape[3], static.window):
        rows, keys = block
        q_b, g_b = q[:, :, :, rows], g[:, :, :, rows]
        scores = _scores(q, k, segments_BT, block, static)
        probs = jnp.exp(scores - lse[:, :, :, rows, None])
        d_probs = _f32("BKGTH,BKSH->BKGTS", g_b, v[:, :, keys])
        d_scores = probs * (d_probs - delta[:, :, :, rows, None]) * static.scale
        if static.softcap is not None:
            # The mask's large numbers would overflow; at the cap itself the slope is zero.
            capped = jnp.maximum(scores, -static.softcap) / static.softcap
            d_scores = d_scores * (1 - jnp.square(capped))
        d_scores = d_scores.astype(q.dtype)
        dqs.append(_f32("BKGTS,BKSH->BKGTH", d_scores, k[:, :, keys]).astype(q.dtype))
        dk = dk.at[:, :, keys].add(_f32("BKGTS,BKGTH->BKSH", d_scores, q_b))
        dv = dv.at[:, :, keys].add(_f32("BKGTS,BKGTH->BKSH", probs.astype(g.dtype), g_b))
    return jnp.concatenate(dqs, axis=3), dk.astype(q.dtype), dv.astype(q.dtype), d_sinks


_attention.defvjp(_forward, _backward)


def _f32(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


class _Block(NamedTuple):
    """Some queries, and the keys that any of them sees."""

    rows: slice
    keys: slice


def _scores(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    segments_BT: jax.Array,
    block: _Block,
    static: _Static,
) -> jax.Array:
    """Masked scores of a block, float32; what is not seen is below any score."""
    rows, keys = block
    scores = _capped_scores(q_BKGTH[:, :, :, rows], k_BKSH[:, :, keys], static)
    back = np.arange(rows.start, rows.stop)[:, None] - np.arange(keys.start, keys.stop)[None, :]
    seen = back >= 0 if static.window is None else (back >= 0) & (back < static.window)
    same = segments_BT[:, rows, None] == segments_BT[:, None, keys]
    return jnp.where((same & seen[None])[:, None, None], scores, MASKED)


def _capped_scores(q_BKGTH: jax.Array, k_BKSH: jax.Array, static: _Static) -> jax.Array:
    scores = _f32("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH) * static.scale
    if static.softcap is None:
        return scores
    return static.softcap * jnp.tanh(scores / static.softcap)


def _blocks(length: int, window: int | None) -> Iterator[_Block]:
    """The query blocks: at most `_MOST_BLOCKS`, of `_LEAST_BLOCK` or more."""
    size = max(_LEAST_BLOCK, -(-length // _MOST_BLOCKS))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        yield _Block(slice(start, end), slice(first, end))


def cached_attention(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    mask_BTS: jax.Array,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention for generation, over the slots of a cache that `mask` shows; not differentiated."""
    q = einops.rearrange(q_BTNH, "B T (K G) H -> B K G T H", K=k_BKSH.shape[1])
    scores = _capped_scores(q, k_BKSH, _Static(scale, softcap, (None,)))
    scores = jnp.where(mask_BTS[:, None, None], scores, MASKED)
    if sinks_N is not None:
        sinks = einops.rearrange(sinks_N.astype(jnp.float32), "(K G) -> 1 K G 1 1", K=q.shape[1])
        lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.logaddexp(lse, sinks)).astype(v_BKSH.dtype)
    else:
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
    out = jnp.einsum("BKGTS,BKSH->BKGTH", weights, v_BKSH)
    return einops.rearrange(out, "B K G T H -> B T (K G) H")
