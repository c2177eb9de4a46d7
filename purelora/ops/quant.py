"""The frozen base's weights: quantised layout, quantisation and the matmul that keeps shards small.

A quantised weight is a `qwix.QArray` whose `scale` has the weight's rank, with 1 (one scale per
output channel) or the tile count in the contracting dimension, and

    weight = decode(qvalue) * repeat(scale)

    qtype  qvalue                                                        decode
    int8   int8, the weight's shape                                      the number itself
    fp8    uint8, the bits of a float8_e4m3fn                            that number
    int4   uint8, two codes a byte: half the contracting dimension       code - 8
    nf4    uint8, the same                                               NF4_BOOK[code]

Byte j of two codes holds the rows 2j (low half) and 2j + 1 of the contracting dimension, so any cut
between bytes is a cut between rows and shards need no care. The dtypes int4 and float8 are not used
for storage: XLA's CPU backend widens a whole stack of them, once a call, to a byte a code (int4) or
to float16 (float8), and gathers them so wide.

The same QArray with infos or PartitionSpecs in place of arrays is its declaration and its layout.

`frozen_dot` is the one matmul with frozen weights. Its custom VJP takes the **local shard** as
input and keeps it as residual: codes and scales are gathered inside the forward pass and again
inside the backward pass. A gather outside the VJP would be saved for the backward pass, stacked
over all layers, whatever the remat policy.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix

from purelora.core import errors, layer_axis, param_info, trees

_LEAST_SHARE = 0.95  # Of the elements of the layers' matrices, see `check_coverage`.

Weight = Any  # jax.Array | qwix.QArray: a QArray's fields may also hold infos or specs
Gather = Callable[[Weight], Weight]
DType = Any  # Whatever jnp.dtype takes.

# Dettmers et al. 2023 (QLoRA), appendix E.
NF4_BOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class _Format(NamedTuple):
    """How the codes of one qtype are kept.

    Attributes:
      qtype: what qwix calls it.
      stored: dtype of `qvalue`.
      codes_per_byte: 1 or 2.
      encode: `(codes of qwix, weight / scale)` as integers of `stored`, one each.
      decode: such integers as numbers of a float dtype.
    """

    qtype: Any
    stored: str
    codes_per_byte: int
    encode: Callable[[jax.Array, jax.Array], jax.Array]
    decode: Callable[[jax.Array, DType], jax.Array]


def _encode_int8(codes: jax.Array, relative: jax.Array) -> jax.Array:
    del relative
    return codes


def _decode_int8(codes: jax.Array, dtype: DType) -> jax.Array:
    return codes.astype(dtype)


def _encode_int4(codes: jax.Array, relative: jax.Array) -> jax.Array:
    del relative
    return (codes.astype(jnp.int8) + jnp.int8(8)).astype(jnp.uint8)


def _decode_int4(codes: jax.Array, dtype: DType) -> jax.Array:
    return (codes.astype(jnp.int8) - jnp.int8(8)).astype(dtype)


def _encode_nf4(codes: jax.Array, relative: jax.Array) -> jax.Array:
    # qwix measures the distance to all 16 numbers: 20 times slower, with twice the weight's memory.
    del codes
    borders = [(low + high) / 2 for low, high in itertools.pairwise(NF4_BOOK)]
    above = [(relative > border).astype(jnp.uint8) for border in borders]
    return functools.reduce(jnp.add, above)


def _decode_nf4(codes: jax.Array, dtype: DType) -> jax.Array:
    # Of lookups and trees of selects this was the fastest or near it, for 1 to 128 rows.
    return jnp.asarray(NF4_BOOK, dtype).at[codes].get(mode="promise_in_bounds")


def _encode_fp8(codes: jax.Array, relative: jax.Array) -> jax.Array:
    del relative
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def _decode_fp8(codes: jax.Array, dtype: DType) -> jax.Array:
    # float16 has one exponent bit more, so that a shift by 7 gives the number times 2^(7 - 15).
    # A conversion from float8 costs the CPU ten times as much.
    bits = codes.astype(jnp.uint16)
    halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    small = jax.lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
    return (small * jnp.float32(256)).astype(dtype)


_FORMATS = {
    "int8": _Format(jnp.int8, "int8", 1, _encode_int8, _decode_int8),
    "fp8": _Format(jnp.float8_e4m3fn, "uint8", 1, _encode_fp8, _decode_fp8),
    "int4": _Format(jnp.int4, "uint8", 2, _encode_int4, _decode_int4),
    "nf4": _Format("nf4", "uint8", 2, _encode_nf4, _decode_nf4),
}
_BY_QTYPE = {form.qtype: form for form in _FORMATS.values()}


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
    """Replaces the info of each matrix by a QArray of infos; not of routers and what `skip` names.

    `tile_size` must divide the contracting dimension (`specs` checks that before, with the mesh).

    Raises:
      ConfigError: matrices whose tiles or contracting dimension cannot hold two codes a byte.
    """
    if qtype == "none":
        return infos
    flat = trees.flatten(infos)
    chosen = {p: i for p, i in flat.items() if i.is_quantisable and not is_skipped(p, skip)}
    if _FORMATS[qtype].codes_per_byte == 2:
        _check_pairs(chosen, qtype, tile_size)
    return trees.unflatten(
        {
            path: _quantised_info(leaf, qtype, tile_size) if path in chosen else leaf
            for path, leaf in flat.items()
        }
    )


def check_coverage(
    infos: Mapping[str, param_info.ParamInfo],
    quantised: Mapping[str, Any],
    *,
    qtype: str,
    skip: Sequence[str],
) -> None:
    """Checks that a quantised base is quantised nearly everywhere, unless `skip` says otherwise.

    It guards against weights that a family declares without a contracting dimension, which would
    silently stay floats. Of all elements of the layers' weights with two or more dimensions a
    layer, 95 % must be in QArrays. Routers and what `skip` names are not counted; embedding and
    head are in no layer.

    Args:
      infos: declarations of the frozen weights, by leaf path.
      quantised: what `quantised_infos` made of them, by leaf path.
      qtype: as in `quantised_infos`.
      skip: as in `quantised_infos`.

    Raises:
      ConfigError: more than 5 % would stay unquantised.
    """
    if qtype == "none":
        return
    counted = {
        path: math.prod(leaf.shape)
        for path, leaf in infos.items()
        if leaf.is_stacked and len(leaf.shape) > 2 and not leaf.is_router
        and not is_skipped(path, skip)
    }  # fmt: skip
    left = {p: n for p, n in counted.items() if not isinstance(quantised[p], qwix.QArray)}
    if sum(left.values()) > (1 - _LEAST_SHARE) * sum(counted.values()):
        share = 1 - sum(left.values()) / sum(counted.values())
        names = ", ".join(path.removesuffix(".weight") for path in left)
        what = f"quantises {share:.1%} of the layers' matrices; {names} would stay as they are"
        remedy = "name them in quant.skip if that is meant, or use quant.qtype='none'"
        raise errors.ConfigError("quant.qtype", qtype, what, remedy)


def _check_pairs(
    matrices: dict[str, param_info.ParamInfo], qtype: str, tile_size: int | None
) -> None:
    """Two codes share a byte and never a scale apart: their count must be even.

    With fewer than 4 the shapes alone would not tell which dimension is packed.
    """
    problems = []
    for path, leaf in matrices.items():
        length, axis = leaf.shape[leaf.matrix_dims[0]], leaf.axes[leaf.matrix_dims[0]]
        count = length if tile_size is None else tile_size
        if count % 2 == 0 and count >= 4:
            continue
        what = f"{path}: {qtype} keeps two codes a byte, so {{}} must be even and at least 4"
        if tile_size is None:
            what, remedy = what.format(f"{axis} = {length}"), "use 'int8', or name it in quant.skip"
            problems.append(errors.Problem("quant.qtype", qtype, what, remedy))
        else:
            good = [t for t in range(4, length + 1, 2) if length % t == 0]
            near = min(good, key=lambda t: abs(t - count), default=None)
            remedy = f"use {near}" if near else "use 'int8', or name it in quant.skip"
            what = what.format("the tile size")
            problems.append(errors.Problem("quant.tile_size", tile_size, what, remedy))
    if problems:
        raise errors.ConfigError.of(problems)


def _quantised_info(info: param_info.ParamInfo, qtype: str, tile_size: int | None) -> qwix.QArray:
    """The layout of a weight: of stacked layers, the stack of the layout of one."""
    if info.is_stacked:
        at = info.axes.index(param_info.LAYERS)
        layer = _quantised_info(layer_axis.declared_layer(info), qtype, tile_size)
        layers: list[qwix.QArray] = [layer] * info.shape[at]
        return layer_axis.stack(layers, at, param_info.LAYERS)
    form = _FORMATS[qtype]
    axis, _ = info.matrix_dims
    length = info.shape[axis]
    tiles = 1 if tile_size is None else length // tile_size
    scale_shape = (*info.shape[:axis], tiles, *info.shape[axis + 1 :])
    axes = tuple(a if n > 1 else None for a, n in zip(info.axes, scale_shape, strict=True))
    codes_shape = (*info.shape[:axis], length // form.codes_per_byte, *info.shape[axis + 1 :])
    codes = dataclasses.replace(info, shape=codes_shape, dtype=form.stored, init="zeros")
    scale = dataclasses.replace(info, shape=scale_shape, dtype="float32", axes=axes, init="zeros")
    return qwix.QArray(codes, scale, None, form.qtype)


def weight_info(like: qwix.QArray) -> param_info.ParamInfo:
    """The declaration of the codes (a QArray of infos) with the weight's own shape."""
    info: param_info.ParamInfo = like.qvalue
    axis, _ = info.matrix_dims
    length = info.shape[axis] * _BY_QTYPE[like.qtype].codes_per_byte
    return dataclasses.replace(info, shape=(*info.shape[:axis], length, *info.shape[axis + 1 :]))


def quantise(weight: jax.Array, like: qwix.QArray) -> qwix.QArray:
    """Quantises one weight, stacked or not, to the layout of `like` (a QArray of infos).

    Scales are float32 whatever the dtype of `weight`.
    """
    form, contracting = _BY_QTYPE[like.qtype], like.qvalue.contracting
    axis = weight.ndim + contracting
    length, tiles = weight.shape[axis], like.scale.shape[contracting]
    tiled = {axis: length // tiles} if tiles > 1 else {}
    channelwise = tuple(i for i in range(weight.ndim) if i != axis)
    weight = weight.astype(jnp.float32)
    q = qwix.quantize(weight, like.qtype, channelwise_axes=channelwise, tiled_axes=tiled)
    codes = form.encode(q.qvalue, _scaled(weight, 1 / q.scale, axis))
    if form.codes_per_byte == 2:
        low, high = (jax.lax.slice_in_dim(codes, i, None, 2, axis) for i in (0, 1))
        codes = low | (high << 4)
    return qwix.QArray(codes, q.scale, None, like.qtype)


def dequantise(weight: Weight) -> jax.Array:
    """The float32 values of a quantised weight; a plain array is returned as it is."""
    if not isinstance(weight, qwix.QArray):
        return weight
    pairs = zip(weight.qvalue.shape, weight.scale.shape, strict=True)
    # No dimension differs where each code has a scale of its own; then any will do.
    differing = [i for i, (codes, scales) in enumerate(pairs) if codes != scales]
    return _whole(weight, differing[0] if differing else 0)


def _whole(weight: qwix.QArray, axis: int) -> jax.Array:
    """`dequantise` with the contracting dimension given."""
    form = _BY_QTYPE[weight.qtype]
    parts = [form.decode(codes, jnp.float32) for codes in _codes(weight)]
    shape = (*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
    values = jnp.stack(parts, axis + 1).reshape(shape) if len(parts) > 1 else parts[0]
    return _scaled(values, weight.scale, axis)


def _codes(weight: qwix.QArray) -> list[jax.Array]:
    """The codes one by one: all of them, or those of the even and those of the odd rows."""
    if _BY_QTYPE[weight.qtype].codes_per_byte == 1:
        return [weight.qvalue]
    return [weight.qvalue & 0xF, weight.qvalue >> 4]


def _scaled(values: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """Multiplies each tile along `axis` with its scale."""
    before, length, after = values.shape[:axis], values.shape[axis], values.shape[axis + 1 :]
    tiles = scale.shape[axis]
    tiled = values.reshape(*before, tiles, length // tiles, *after)
    return (tiled * jnp.expand_dims(scale, axis + 1)).reshape(values.shape)


def row_count(weight: Weight) -> int:
    """V of a `[V, D]` table, quantised or not."""
    stored = weight.qvalue if isinstance(weight, qwix.QArray) else weight
    rows: int = stored.shape[0]
    return rows


def take_rows(weight: Weight, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`dequantise(weight)[rows]` for a `[V, D]` embedding, without dequantising the table."""
    if not isinstance(weight, qwix.QArray):
        return weight[rows].astype(dtype)
    picked = qwix.QArray(weight.qvalue[rows], weight.scale[rows], None, weight.qtype)
    return _whole(picked, picked.qvalue.ndim - 1).astype(dtype)


def dot(
    x: jax.Array, weight: Weight, contracting: int = -2, out_dtype: DType | None = None
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


def dot_transposed(g: jax.Array, weight: Weight, contracting: int) -> jax.Array:
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


def _parts(weight: qwix.QArray, contracting: int, dtype: DType) -> list[jax.Array]:
    """The weight of `_codes` in `dtype`, without the scales where there is one per channel."""
    decode = _BY_QTYPE[weight.qtype].decode
    if weight.scale.shape[contracting] == 1:
        return [decode(codes, dtype) for codes in _codes(weight)]
    axis = weight.qvalue.ndim + contracting
    return [
        _scaled(decode(codes, jnp.float32), weight.scale, axis).astype(dtype)
        for codes in _codes(weight)
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
    return dot_transposed(g.astype(like_x.dtype), gather(shard), contracting), None


frozen_dot.defvjp(_frozen_dot_fwd, _frozen_dot_bwd)
