"""Quantised weights of the frozen base: their declarations, quantisation and dequantisation.

A quantised weight is a `qwix.QArray` whose `scale` has the weight's rank, with 1 (one scale per
output channel) or the tile count in the contracting dimension, and

    weight = decode(qvalue) * repeat(scale)

with the codes of `quant_codes`. Byte j of two codes holds the rows 2j (low half) and 2j + 1 of the
contracting dimension, so any cut between bytes is a cut between rows and shards need no care.

The same QArray with infos or PartitionSpecs in place of arrays is its declaration and its layout.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from purelora.core import errors, layer_axis, param_info, trees
from purelora.core.paths import Path
from purelora.ops import quant_codes

_LEAST_SHARE = 0.95  # Of the elements of the layers' matrices, see `check_coverage`.

Weight = Any  # jax.Array | qwix.QArray: a QArray's fields may also hold infos or specs
Gather = Callable[[Weight], Weight]  # From a device's shard to the unsharded weight.


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
    weights = [*paths, "lm_head.weight"]
    names = dict.fromkeys(Path(path).parent.name for path in paths)
    problems = [
        errors.Problem(
            "quant.skip", pattern, "names no weight of this model", f"it has {', '.join(names)}"
        )
        for pattern in skip
        if not any(is_skipped(path, [pattern]) for path in weights)
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def quantised_infos(
    infos: trees.Tree, *, qtype: str, tile_size: int | None, skip: Sequence[str]
) -> trees.Tree:
    """Replaces the info of each matrix by a QArray of infos, but for routers and `skip`.

    `tile_size` must divide the contracting dimension (`specs` checks that before, with the mesh).

    Raises:
      ConfigError: matrices whose tiles or contracting dimension cannot hold two codes a byte.
    """
    if qtype == "none":
        return infos
    flat = trees.flatten(infos)
    chosen = {p: i for p, i in flat.items() if i.is_quantisable and not is_skipped(p, skip)}
    if quant_codes.FORMATS[qtype].codes_per_byte == 2:
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
        names = ", ".join(Path(path).without("weight") for path in left)
        what = f"quantises {share:.1%} of the layers' matrices; {names} would stay as they are"
        remedy = "name them in quant.skip if that is meant, or use quant.qtype='none'"
        raise errors.ConfigError("quant.qtype", qtype, what, remedy)


def _check_pairs(
    matrices: dict[str, param_info.ParamInfo], qtype: str, tile_size: int | None
) -> None:
    """Raises ConfigError where two codes of a byte would not share a scale.

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
    form = quant_codes.FORMATS[qtype]
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
    length = info.shape[axis] * quant_codes.BY_QTYPE[like.qtype].codes_per_byte
    return dataclasses.replace(info, shape=(*info.shape[:axis], length, *info.shape[axis + 1 :]))


def quantise(weight: jax.Array, like: qwix.QArray) -> qwix.QArray:
    """Quantises one weight, stacked or not, to the layout of `like` (a QArray of infos).

    Scales are float32 whatever the dtype of `weight`.
    """
    form, contracting = quant_codes.BY_QTYPE[like.qtype], like.qvalue.contracting
    axis = weight.ndim + contracting
    length, tiles = weight.shape[axis], like.scale.shape[contracting]
    tiled = {axis: length // tiles} if tiles > 1 else {}
    channelwise = tuple(i for i in range(weight.ndim) if i != axis)
    weight = weight.astype(jnp.float32)
    q = qwix.quantize(weight, like.qtype, channelwise_axes=channelwise, tiled_axes=tiled)
    codes = form.encode(q.qvalue, scaled(weight, 1 / q.scale, axis))
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
    return _dequantised_along(weight, differing[0] if differing else 0)


def _dequantised_along(weight: qwix.QArray, axis: int) -> jax.Array:
    """`dequantise` where `axis` is the contracting dimension."""
    form = quant_codes.BY_QTYPE[weight.qtype]
    parts = [form.decode(codes, jnp.float32) for codes in unpacked(weight)]
    shape = (*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
    values = jnp.stack(parts, axis + 1).reshape(shape) if len(parts) > 1 else parts[0]
    return scaled(values, weight.scale, axis)


def unpacked(weight: qwix.QArray) -> list[jax.Array]:
    """The codes one by one: all of them, or those of the even and those of the odd rows."""
    if quant_codes.BY_QTYPE[weight.qtype].codes_per_byte == 1:
        return [weight.qvalue]
    return [weight.qvalue & 0xF, weight.qvalue >> 4]


def scaled(values: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
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
    return _dequantised_along(picked, picked.qvalue.ndim - 1).astype(dtype)
