"""The codes of each quantisation type: how they are stored, encoded and decoded.

    qtype  stored                                                        decode
    int8   int8, the weight's shape                                      the number itself
    fp8    uint8, the bits of a float8_e4m3fn                            that number
    int4   uint8, two codes a byte: half the contracting dimension       code - 8
    nf4    uint8, the same                                               NF4_BOOK[code]

The dtypes int4 and float8 are not used for storage: XLA's CPU backend widens a whole stack of them,
once a call, to a byte a code (int4) or to float16 (float8), and gathers them so wide.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DType = Any  # Whatever jnp.dtype takes.

# Dettmers et al. 2023 (QLoRA), appendix E.
NF4_BOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Format(NamedTuple):
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


FORMATS = {
    "int8": Format(jnp.int8, "int8", 1, _encode_int8, _decode_int8),
    "fp8": Format(jnp.float8_e4m3fn, "uint8", 1, _encode_fp8, _decode_fp8),
    "int4": Format(jnp.int4, "uint8", 2, _encode_int4, _decode_int4),
    "nf4": Format("nf4", "uint8", 2, _encode_nf4, _decode_nf4),
}
BY_QTYPE = {form.qtype: form for form in FORMATS.values()}
