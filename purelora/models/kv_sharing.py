"""KV sharing: layers that attend to the keys and values of an earlier layer.

The last layers of some models (Gemma 4's smaller ones) have no projections of keys and values. Each
uses those of the last layer of its kind (sliding window or full) that has them. While the layers
run, each layer with keys and values overwrites those of its kind in the carry, so that at the end
the last layer's are there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from purelora.core import layer_axis, trees
from purelora.models import scan, stacks
from purelora.models.hf_config import Kind

KeysValues = tuple[jax.Array, jax.Array]
Carry = tuple[jax.Array, KeysValues | None]  # The activations, and an earlier layer's keys, values.
Made = tuple[KeysValues | None, Any]  # A layer's own keys and values, and its router's statistics.


def is_shared(model: Sequence[stacks.Stack]) -> bool:
    """Whether any layers of a model's stacks share keys and values."""
    return any(stack.cfg.shares_keys for stack in model)


def owner(model: Sequence[stacks.Stack], kind: Kind) -> tuple[int, int]:
    """Where the keys and values of a kind come from: index of the stack, and position in it."""
    owners = [
        (layer, number, position)
        for number, stack in enumerate(model)
        for position, layer in enumerate(stack.layers)
        if stack.cfg.layer_kinds[position] == kind and not stack.cfg.shares_keys
    ]
    return max(owners)[1:]


def mixing(
    mix: Callable[..., tuple[jax.Array, None]], shared: KeysValues | None
) -> Callable[..., tuple[jax.Array, KeysValues | None]]:
    """Makes a `blocks.Context.mix` that uses an earlier layer's keys and values where needed.

    Args:
      mix: attention, from (q, k, v) to (mixed values, None).
      shared: keys and values of the earlier layer; None for a layer that has its own.

    Returns:
      The same, with a layer's own keys and values beside the mixed values.
    """

    def mixed(
        q: jax.Array, k: jax.Array | None, v: jax.Array | None, **more: jax.Array
    ) -> tuple[jax.Array, KeysValues | None]:
        if k is None or v is None:
            assert shared is not None
            return mix(q, *shared, **more)
        return mix(q, k, v, **more)[0], (k, v)

    return mixed


def run(
    bodies: scan.Bodies,
    x_BTD: jax.Array,
    model: Sequence[stacks.Stack],
    bound: Sequence[trees.Tree],
    *,
    given: Any,
    scan_layers: bool,
) -> tuple[jax.Array, Any]:
    """`scan.run` with the shared keys and values in its carry.

    Args:
      bodies: bodies of single layers: (`Carry`, layer) to (`Carry`, `Made`).
      x_BTD: input of the first layer.
      model: the stacks of the model.
      bound: the bound modules of each stack.
      given: see `scan.run`.
      scan_layers: see `scan` of `scan.run`.

    Returns:
      The activations after the last layer, and the routers' statistics, stacked over the layers
      with experts (None without).
    """
    kinds = list(dict.fromkeys(stack.cfg.kinds[0] for stack in model if stack.cfg.shares_keys))

    def storing(stack: int, kind: int | None) -> scan.Body:
        block, cfg = bodies(stack, kind), model[stack].cfg
        slot = kinds.index(cfg.kinds[0]) if cfg.kinds[0] in kinds else None

        def body(carry: Any, layer: scan.Layer) -> tuple[Any, Any]:
            x_BTD, store = carry
            shared = store[slot] if cfg.shares_keys and slot is not None else None
            (x_BTD, _), (keys_values, router) = block((x_BTD, shared), layer)
            if slot is not None and not cfg.shares_keys:
                keys_values = scan.if_real(layer, keys_values, store[slot])
                store = (*store[:slot], keys_values, *store[slot + 1 :])
            return (x_BTD, store), router

        return body

    store = tuple(_zeros(bodies, x_BTD, model, bound, given, kind) for kind in kinds)
    (x_BTD, _), router = scan.run(
        storing, (x_BTD, store), model, bound, given=given, scan=scan_layers
    )
    return x_BTD, router


def _zeros(
    bodies: scan.Bodies,
    x_BTD: jax.Array,
    model: Sequence[stacks.Stack],
    bound: Sequence[trees.Tree],
    given: Any,
    kind: Kind,
) -> KeysValues:
    """Zeros in the shape and dtype of the keys and values of a kind, to begin the carry with."""
    number, _ = owner(model, kind)
    zero = jnp.int32(0)
    first, more = layer_axis.layer_of((bound[number], given), 0)
    layer = scan.Layer({}, first, zero, zero, more)
    block = bodies(number, 0)
    like = jax.eval_shape(lambda x, layer: block((x, None), layer)[1][0], x_BTD, layer)
    # `zeros_like` keeps the mesh axes that these vary over, as the carry of a scan must.
    zeros: KeysValues = jax.tree.map(jnp.zeros_like, like)
    return zeros
