"""The frozen base's weights: quantised layout, quantisation and the matmul that keeps shards small.

A quantised weight is a `qwix.QArray`: `qvalue` has the weight's shape, `scale` has its rank, with
1 (one scale per output channel) or the tile count in the contracting dimension, and
`weight = qvalue * repeat(scale)`. The same QArray with infos or PartitionSpecs in place of arrays
is its declaration and its layout.

`frozen_dot` is the one matmul with frozen weights. Its custom VJP takes the **local shard** as
input and keeps it as residual: codes and scales are gathered inside the forward pass and again
inside the backward pass. A gather outside the VJP would be saved for the backward pass, stacked
over all layers, whatever the remat policy.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from purelora import errors
from purelora import info as infos_lib
from purelora import tree as trees

QTYPES = {"int8": jnp.int8}

Weight = Any  # jax.Array | qwix.QArray: a QArray's fields may also hold infos or specs
Gather = Callable[[Weight], Weight]
DType = Any  # Whatever jnp.dtype takes.


def is_skipped(path: str, skip: Sequence[str]) -> bool:
    """Whether a pattern of `quant.skip` names the weight at `path` or one of its parents.

    A pattern is a regular expression that must match one whole dotted part or a run of parts:
    `embed_tokens` skips `embed_tokens.weight`, `mlp\\.(up|down)_proj` skips two in all layers.
    """
    return any(re.search(rf"(^|\.)(?:{pattern})(\.|$)", path) for pattern in skip)


def check_skip(paths: Sequence[str], skip: Sequence[str]) -> None:
    """Raises ConfigError for a pattern of `quant.skip` that names no weight.

    `lm_head` may always be named: a tied model has none of its own.
    """
    known = [*paths, "lm_head.weight"]
    names = dict.fromkeys(path.split(".")[-2] for path in paths)
    problems = [
        errors.Problem(
            "quant.skip", pattern, "names no weight of this model", f"it has {', '.join(names)}"
        )
        for pattern in skip
        if not any(is_skipped(path, [pattern]) for path in known)
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def quantised_infos(
    infos: trees.Tree, *, qtype: str, tile_size: int | None, skip: Sequence[str]
) -> trees.Tree:
    """Replaces the info of every matrix that is not skipped by a QArray of infos.

    `tile_size` must divide the contracting dimension (`specs` checks that before, with the mesh).
    """
    if qtype == "none":
        return infos
    flat = trees.flatten(infos)
    return trees.unflatten(
        {
            path: _quantised_info(leaf, qtype, tile_size)
            if leaf.is_matrix and not is_skipped(path, skip)
            else leaf
            for path, leaf in flat.items()
        }
    )


def _quantised_info(info: infos_lib.ParamInfo, qtype: str, tile_size: int | None) -> qwix.QArray:
    axis, _ = info.matrix_dims
    tiles = 1 if tile_size is None else info.shape[axis] // tile_size
    shape = (*info.shape[:axis], tiles, *info.shape[axis + 1 :])
    axes = tuple(a if n > 1 else None for a, n in zip(info.axes, shape, strict=True))
    codes = dataclasses.replace(info, dtype=qtype, init="zeros")
    scale = dataclasses.replace(info, shape=shape, dtype="float32", axes=axes, init="zeros")
    return qwix.QArray(codes, scale, None, QTYPES[qtype])


def quantise(weight: jax.Array, like: qwix.QArray) -> qwix.QArray:
    """Quantises one weight, stacked or not, to the layout of `like` (a QArray of infos).

    Scales are float32 whatever the dtype of `weight`.
    """
    info, scale = like.qvalue, like.scale
    axis = weight.ndim + info.contracting
    length, tiles = weight.shape[axis], scale.shape[info.contracting]
    tiled = {axis: length // tiles} if tiles > 1 else {}
    channelwise = tuple(i for i in range(weight.ndim) if i != axis)
    q = qwix.quantize(
        weight.astype(jnp.float32), like.qtype, channelwise_axes=channelwise, tiled_axes=tiled
    )
    return qwix.QArray(q.qvalue, q.scale, None, like.qtype)


def dequantise(weight: Weight) -> jax.Array:
    """The float values of a weight; a plain array is returned as it is."""
    return qwix.dequantize(weight) if isinstance(weight, qwix.QArray) else weight


def take_rows(weight: Weight, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`dequantise(weight)[rows]` for a `[V, D]` embedding, without dequantising the table."""
    if not isinstance(weight, qwix.QArray):
        return weight[rows].astype(dtype)
    picked = qwix.QArray(weight.qvalue[rows], weight.scale[rows], None, weight.qtype)
    tiles = picked.scale.shape[-1]
    tiled = picked.qvalue.reshape(*picked.qvalue.shape[:-1], tiles, -1).astype(jnp.float32)
    return (tiled * picked.scale[..., None]).reshape(picked.qvalue.shape).astype(dtype)


def dot(
    x: jax.Array, weight: Weight, contracting: int = -2, out_dtype: DType | None = None
) -> jax.Array:
    """`x[..., K] · weight` over the weight's `contracting` dimension (-2: [K, N], -1: [N, K]).

    Channel scales multiply the result, so the codes are never expanded to a float weight. The
    result is in `out_dtype`, by default that of `x`.
    """
    out = x.dtype if out_dtype is None else out_dtype
    if not isinstance(weight, qwix.QArray):
        return _contract(x, weight.astype(x.dtype), contracting, out)
    if weight.scale.shape[contracting] > 1:
        return _contract(x, dequantise(weight).astype(x.dtype), contracting, out)
    y = _contract(x, weight.qvalue.astype(x.dtype), contracting, jnp.float32)
    return (y * _channel_scale(weight.scale, y.ndim)).astype(out)


def _dot_transposed(g: jax.Array, weight: Weight, contracting: int) -> jax.Array:
    """The cotangent of `x` in `dot(x, weight, contracting)`: contracts the other dimension."""
    other = -3 - contracting
    if not isinstance(weight, qwix.QArray):
        return _contract(g, weight.astype(g.dtype), other)
    if weight.scale.shape[contracting] > 1:
        return _contract(g, dequantise(weight).astype(g.dtype), other)
    scaled = g.astype(jnp.float32) * _channel_scale(weight.scale, g.ndim)
    return _contract(scaled.astype(g.dtype), weight.qvalue.astype(g.dtype), other)


def _channel_scale(scale: jax.Array, ndim: int) -> jax.Array:
    return scale.reshape((1,) * (ndim - 1) + (-1,))


def _contract(x: jax.Array, w: jax.Array, contracting: int, out_dtype: Any = None) -> jax.Array:
    # One dot_general that names the dimension: a transposed copy of w would cost bf16 its speed.
    dims = (((x.ndim - 1,), (w.ndim + contracting,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def frozen_dot(
    x: jax.Array,
    shard: Weight,
    gather: Gather,
    contracting: int = -2,
    out_dtype: DType | None = None,
) -> jax.Array:
    """`dot(x, gather(shard))`, differentiable in `x` only.

    Args:
      x: `[..., K]`.
      shard: this device's part of a frozen weight.
      gather: makes the weight whole (the identity on one device); hashable.
      contracting: the weight's contracting dimension, counted from the end.
      out_dtype: dtype of the result, by default that of `x`.

    Returns:
      `[..., N]`.
    """
    return dot(x, gather(shard), contracting, out_dtype)


def _frozen_dot_fwd(
    x: jax.Array, shard: Weight, gather: Gather, contracting: int, out_dtype: DType | None
) -> tuple[jax.Array, tuple[Weight, jax.Array]]:
    # Of `x` only the dtype is needed, which an empty array carries.
    y = dot(x, gather(shard), contracting, out_dtype)
    return y, (shard, jnp.zeros((0,), x.dtype))


def _frozen_dot_bwd(
    gather: Gather,
    contracting: int,
    out_dtype: DType | None,
    saved: tuple[Weight, jax.Array],
    g: jax.Array,
) -> tuple[jax.Array, None]:
    del out_dtype
    shard, like_x = saved
    return _dot_transposed(g.astype(like_x.dtype), gather(shard), contracting), None


frozen_dot.defvjp(_frozen_dot_fwd, _frozen_dot_bwd)
