"""The layers that the families share.

Einsum letters, here and everywhere:
  B batch (rows)      T query position   S key position
  N query heads       K kv heads         G query heads per kv head (N = K·G)
  H head dim          D embed            F mlp
  V vocab             E experts          L layers
  R rank              M micro-batches
A name carries the letters of its dimensions: `x_BTD`, `logits_BTV`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from purelora.core import param_info, trees
from purelora.lora import kinds
from purelora.models import params
from purelora.models import rope as ropes
from purelora.ops import quant, quant_matmul


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key", "rows_B"], meta_fields=["rate"]
)
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout on the input of the adapters.

    Attributes:
      key: folded from seed, step and layer.
      rows_B: number of each row within the global batch, so that masks do not depend on the mesh.
      rate: probability of dropping an element.
    """

    key: jax.Array
    rows_B: jax.Array
    rate: float

    def __call__(self, x_BTD: jax.Array, module: params.Module) -> jax.Array:
        """Drops elements of the input of `module`, with a mask of its own for each row."""
        key = param_info.path_key(self.key, module.name)
        length, width = x_BTD.shape[1:]
        ways = module.parallel.axis_size if module.parallel.style == "row" else 1

        def keep_row(row: jax.Array) -> jax.Array:
            # The mask of the whole input, of which this device may have a part.
            shape = (length, width * ways)
            kept = jax.random.bernoulli(jax.random.fold_in(key, row), 1 - self.rate, shape)
            if ways == 1:
                return kept
            first = module.parallel.first(width)
            return jax.lax.dynamic_slice_in_dim(kept, first, width, axis=1)

        kept = jax.vmap(keep_row)(self.rows_B)
        return jnp.where(kept, x_BTD / jnp.asarray(1 - self.rate, x_BTD.dtype), 0)

    def for_layer(self, index: jax.Array) -> "Dropout":
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, index))


def linear(x: jax.Array, module: params.Module, dropout: Dropout | None = None) -> jax.Array:
    """`x W + b` with the module's adapters, in the dtype of `x`."""
    adapter_x = x if dropout is None or not takes_dropout(module) else dropout(x, module)
    return adapted(x, adapter_x, module, x.dtype)


def takes_dropout(module: params.Module) -> bool:
    """Whether dropout thins out what one of the module's adapters reads."""
    return any(adapter.kind.takes_dropout for adapter in module.adapters)


def adapted(x: jax.Array, adapter_x: jax.Array, module: params.Module, out_dtype: Any) -> jax.Array:
    """`x W + b` with adapters in `out_dtype`; they read `adapter_x`, `x` but for dropout."""
    for adapter in module.adapters:
        x = adapter.kind.input(adapter, x)
    product = functools.partial(_base_product, module=module, out_dtype=out_dtype)
    y = product(x)
    local_rows = functools.partial(_local_columns, module=module)
    call = kinds.Call(x, adapter_x, module, product, local_rows)
    for adapter in reversed(module.adapters):
        y = adapter.kind.output(adapter, y, call)
    y = module.parallel.reduce_from(y)
    if module.bias is not None:
        bias = module.bias
        for adapter in module.adapters:
            bias = adapter.kind.bias(adapter, bias, module)
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y


def _base_product(x: jax.Array, module: params.Module, out_dtype: Any) -> jax.Array:
    assert module.contracting is not None, module.name
    if module.frozen:
        return quant_matmul.frozen_dot(x, *module.frozen_operand, module.contracting, out_dtype)
    return quant_matmul.dot(x, module.gather(module.weight), module.contracting, out_dtype)


def _local_columns(ids: jax.Array, count: int, module: params.Module) -> jax.Array:
    return _own_rows(ids, module, count)[0]


def embed(tokens_BT: jax.Array, module: params.Module, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding table, `[B, T, D]`, with what is trained of them."""
    table = module.gather(module.weight)
    rows_BT, is_own_BT = _own_rows(tokens_BT, module, quant.row_count(table))
    x_BTD = quant.take_rows(table, rows_BT, dtype)
    lookup = kinds.Lookup(tokens_BT, rows_BT, dtype)
    for adapter in reversed(module.adapters):
        x_BTD = adapter.kind.embedded(adapter, x_BTD, lookup)
    if is_own_BT is None:
        return x_BTD
    return module.parallel.psum(jnp.where(is_own_BT[..., None], x_BTD, 0))


def _own_rows(
    ids: jax.Array, module: params.Module, count: int
) -> tuple[jax.Array, jax.Array | None]:
    """Token ids as rows of this device's `count` rows of a table, and which of them are there.

    A row that is elsewhere gets the number `count`; None: all are there.
    """
    if module.parallel.style != "column":
        return ids, None
    rows = ids - module.parallel.first(count)
    is_own = (rows >= 0) & (rows < count)
    return jnp.where(is_own, rows, count), is_own


def rms_norm(x: jax.Array, module: params.Module, eps: float, *, offset: float = 0.0) -> jax.Array:
    """Root mean square norm in float32 (Zhang and Sennrich 2019), times `offset` + weight."""
    weight = module.weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (_unit(x, eps) * (weight + offset)).astype(x.dtype)


def unit_norm(x: jax.Array, eps: float) -> jax.Array:
    """The root mean square norm without weights."""
    return _unit(x, eps).astype(x.dtype)


def _unit(x: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def softcapped(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap · tanh(x / cap)`, or `x` itself if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_angles(positions_BT: jax.Array, rope: ropes.Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[B, T, 1, H/2]` of the rotary angles, in float32.

    bfloat16 cannot hold 257, so positions stay float32 until after the sine.
    """
    inv_freq = np.asarray(rope.inv_freq, np.float32)
    angles = positions_BT.astype(jnp.float32)[..., None] * inv_freq[None, None]
    angles = angles[:, :, None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rope(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the two halves of each head (Su et al. 2021, in the half-split layout)."""
    cos, sin = (a.astype(x_BTNH.dtype) for a in angles)
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def cache_mask(positions_BT: jax.Array, length: int, window: int | None = None) -> jax.Array:
    """`[B, T, S]` for a cache of `length` slots, slot s holding position s: which of them are seen.

    Those up to the position; with a window, so many of the last of these.
    """
    slots, positions = jnp.arange(length)[None, None, :], positions_BT[:, :, None]
    seen = slots <= positions
    return seen if window is None else seen & (slots > positions - window)


def gated(
    gate: jax.Array, up: jax.Array, *, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """`activation(gate) · up`."""
    return activation(gate) * up


def gated_mlp(
    x_BTD: jax.Array,
    mlp: trees.Tree,
    activation: Callable[[jax.Array], jax.Array],
    dropout: Dropout | None,
) -> jax.Array:
    """`down(activation(gate(x)) · up(x))` (Shazeer 2020)."""
    x_BTD = mlp["gate_proj"].parallel.copy_to(x_BTD)
    gate_BTF = checkpoint_name(linear(x_BTD, mlp["gate_proj"], dropout), "mlp_gate")
    up_BTF = checkpoint_name(linear(x_BTD, mlp["up_proj"], dropout), "mlp_up")
    inner_BTF = gated(gate_BTF, up_BTF, activation=activation)
    return linear(inner_BTF, mlp["down_proj"], dropout)
