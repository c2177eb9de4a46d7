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
from purelora.models import scan as scan_lib
from purelora.models import stacks
from purelora.models.hf_config import Kind

KeysValues = tuple[jax.Array, jax.Array]
Carry = tuple[jax.Array, KeysValues | None]  # The activations, and an earlier layer's keys, values.
Made = tuple[KeysValues | None, Any]  # A layer's own keys and values, and its router's statistics.


def is_shared(groups: Sequence[stacks.Stack]) -> bool:
    """Whether any layers share keys and values."""
    return any(stack.cfg.shares_keys for stack in groups)


def owner(groups: Sequence[stacks.Stack], kind: Kind) -> tuple[int, int]:
    """Where the keys and values of a kind come from: index of the stack, and position in it."""
    found = [
        (layer, number, position)
        for number, stack in enumerate(groups)
        for position, layer in enumerate(stack.layers)
        if stack.cfg.layer_kinds[position] == kind and not stack.cfg.shares_keys
    ]
    return max(found)[1:]


def mixing(
    mix: Callable[..., jax.Array], shared: KeysValues | None, *, keeps: bool
) -> Callable[..., tuple[jax.Array, KeysValues | None]]:
    """Makes a `blocks.Context.mix` that uses an earlier layer's keys and values where needed.

    Args:
      mix: attention, from (q, k, v) to the mixed values.
      shared: keys and values of the earlier layer; None for a layer that has its own.
      keeps: whether to return a layer's own keys and values beside the mixed values.
    """

    def mixed(
        q: jax.Array, k: jax.Array | None, v: jax.Array | None, **more: jax.Array
    ) -> tuple[jax.Array, KeysValues | None]:
        if k is None or v is None:
            assert shared is not None
            return mix(q, *shared, **more), None
        return mix(q, k, v, **more), (k, v) if keeps else None

    return mixed


def run(
    block: scan_lib.Body,
    x_BTD: jax.Array,
    groups: Sequence[stacks.Stack],
    bound: Sequence[trees.Tree],
    *,
    given: Any,
    scan: bool,
) -> tuple[jax.Array, Any]:
    """`scan.run` with the shared keys and values in its carry.

    Args:
      block: one layer: (`Carry`, layer, kind, stack) to (`Carry`, `Made`).
      x_BTD: input of the first layer.
      groups: the stacks of the model.
      bound: the bound modules of each stack.
      given: see `scan.run`.
      scan: see `scan.run`.

    Returns:
      The activations after the last layer, and the routers' statistics, stacked over the layers
      with experts (None without).
    """
    kinds = list(dict.fromkeys(stack.cfg.kinds[0] for stack in groups if stack.cfg.shares_keys))

    def body(
        carry: Any, layer: scan_lib.Layer, kind: scan_lib.Kind, number: int
    ) -> tuple[Any, Any]:
        x_BTD, store = carry
        own = groups[number].cfg
        place = kinds.index(own.kinds[0]) if own.kinds[0] in kinds else None
        shared = store[place] if own.shares_keys and place is not None else None
        (x_BTD, _), (made, router) = block((x_BTD, shared), layer, kind, number)
        if place is not None and not own.shares_keys:
            made = scan_lib.if_real(layer, made, store[place])
            store = (*store[:place], made, *store[place + 1 :])
        return (x_BTD, store), router

    store = tuple(_zeros(block, x_BTD, groups, bound, given, kind) for kind in kinds)
    (x_BTD, _), router = scan_lib.run(body, (x_BTD, store), groups, bound, given=given, scan=scan)
    return x_BTD, router


def _zeros(
    block: scan_lib.Body,
    x_BTD: jax.Array,
    groups: Sequence[stacks.Stack],
    bound: Sequence[trees.Tree],
    given: Any,
    kind: Kind,
) -> KeysValues:
    """Zeros in the shape and dtype of the keys and values of a kind, to begin the carry with."""
    number, _ = owner(groups, kind)
    zero = jnp.int32(0)
    layer = scan_lib.Layer(
        {}, layer_axis.layer_of(bound[number], 0), zero, zero, layer_axis.layer_of(given, 0)
    )
    like = jax.eval_shape(lambda x, layer: block((x, None), layer, 0, number)[1][0], x_BTD, layer)
    # `zeros_like` keeps the mesh axes that these vary over, as the carry of a scan must.
    zeros: KeysValues = jax.tree.map(jnp.zeros_like, like)
    return zeros
