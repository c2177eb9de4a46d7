"""The matmul with frozen weights, quantised or not, that keeps shards small.

The custom VJP of `frozen_dot` takes the **local shard** as input and keeps it as residual: codes
and scales are gathered inside the forward pass and again inside the backward pass. A gather outside
the VJP would be saved for the backward pass, stacked over all layers, whatever the remat policy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from purelora.ops import quant, quant_codes


def dot(
    x: jax.Array,
    weight: quant.Weight,
    contracting: int = -2,
    out_dtype: quant_codes.DType | None = None,
) -> jax.Array:
    """`x[..., K] · weight` over the weight's `contracting` dimension (-2: [K, N], -1: [N, K]).

    Channel scales multiply the result, so the codes are never expanded to a float weight. Of two
    codes a byte, those of the even and of the odd rows are two products, which is faster than to
    put them in order. The result is in `out_dtype`, by default that of `x`.
    """
    out = x.dtype if out_dtype is None else out_dtype
    if not isinstance(weight, qwix.QArray):
        return _contract(x, weight.astype(x.dtype), contracting, out)
    parts = _parts(weight, contracting, x.dtype)
    products = [
        _contract(x[..., i :: len(parts)], part, contracting, jnp.float32)
        for i, part in enumerate(parts)
    ]
    y = functools.reduce(jnp.add, products)
    if weight.scale.shape[contracting] == 1:
        y = y * _channel_scale(weight.scale, y.ndim)
    return y.astype(out)


def dot_transposed(g: jax.Array, weight: quant.Weight, contracting: int) -> jax.Array:
    """The cotangent of `x` in `dot(x, weight, contracting)`: contracts the other dimension."""
    other = -3 - contracting
    if not isinstance(weight, qwix.QArray):
        return _contract(g, weight.astype(g.dtype), other)
    if weight.scale.shape[contracting] == 1:
        scaled = g.astype(jnp.float32) * _channel_scale(weight.scale, g.ndim)
        g = scaled.astype(g.dtype)
    parts = [_contract(g, part, other) for part in _parts(weight, contracting, g.dtype)]
    if len(parts) == 1:
        return parts[0]
    return jnp.stack(parts, axis=-1).reshape(*g.shape[:-1], -1)


def _parts(weight: qwix.QArray, contracting: int, dtype: quant_codes.DType) -> list[jax.Array]:
    """What `quant.unpacked` gives, in `dtype`; times the tile scales, without channel scales."""
    decode = quant_codes.BY_QTYPE[weight.qtype].decode
    if weight.scale.shape[contracting] == 1:
        return [decode(codes, dtype) for codes in quant.unpacked(weight)]
    axis = weight.qvalue.ndim + contracting
    return [
        quant.scaled(decode(codes, jnp.float32), weight.scale, axis).astype(dtype)
        for codes in quant.unpacked(weight)
    ]


def _channel_scale(scale: jax.Array, ndim: int) -> jax.Array:
    return scale.reshape((1,) * (ndim - 1) + (-1,))


def _contract(x: jax.Array, w: jax.Array, contracting: int, out_dtype: Any = None) -> jax.Array:
    # One dot_general that names the dimension: a transposed copy of w would cost bf16 its speed.
    dims = (((x.ndim - 1,), (w.ndim + contracting,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def frozen_dot(
    x: jax.Array,
    shard: quant.Weight,
    gather: quant.Gather,
    contracting: int = -2,
    out_dtype: quant_codes.DType | None = None,
) -> jax.Array:
    """`dot(x, gather(shard))`, differentiable in `x` only.

    Args:
      x: `[..., K]`.
      shard: this device's part of a frozen weight.
      gather: from a shard to the unsharded weight (the identity on one device); hashable.
      contracting: the weight's contracting dimension, counted from the end.
      out_dtype: dtype of the result, by default that of `x`.

    Returns:
      `[..., N]`.
    """
    return dot(x, gather(shard), contracting, out_dtype)


def _frozen_dot_fwd(
    x: jax.Array,
    shard: quant.Weight,
    gather: quant.Gather,
    contracting: int,
    out_dtype: quant_codes.DType | None,
) -> tuple[jax.Array, tuple[quant.Weight, jax.Array]]:
    # Of `x` only the dtype is needed, which an empty array carries.
    y = dot(x, gather(shard), contracting, out_dtype)
    return y, (shard, jnp.zeros((0,), x.dtype))


def _frozen_dot_bwd(
    gather: quant.Gather,
    contracting: int,
    out_dtype: quant_codes.DType | None,
    saved: tuple[quant.Weight, jax.Array],
    g: jax.Array,
) -> tuple[jax.Array, None]:
    del out_dtype
    shard, like_x = saved
    return dot_transposed(g.astype(like_x.dtype), gather(shard), contracting), None


frozen_dot.defvjp(_frozen_dot_fwd, _frozen_dot_bwd)
