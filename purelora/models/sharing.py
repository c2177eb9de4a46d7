"""Layers that share the keys and values of earlier ones.

The last layers of some models have no keys and values of their own: each takes those of the last
layer of its kind that has. Layers that have hand theirs on, so that the last ones stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from purelora import params
from purelora import tree as trees
from purelora.models import scan as scan_lib
from purelora.models import stacks
from purelora.models.reading import Kind

KeysValues = tuple[jax.Array, jax.Array]
Carry = tuple[jax.Array, KeysValues | None]  # The activations, and what a layer shares.


def is_shared(groups: Sequence[stacks.Stack]) -> bool:
    """Whether any layers share keys and values."""
    return any(stack.cfg.shares_keys for stack in groups)


def owner(groups: Sequence[stacks.Stack], kind: Kind) -> tuple[int, int]:
    """Number of the stack, and position in it, of the last layer of a kind that has keys."""
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
    """`blocks.Context.mix`, with `shared` in place of what a layer does not have.

    Args:
      mix: attention.
      shared: keys and values of an earlier layer.
      keeps: whether a layer's own are given out.
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
    """`scan.run` with what layers share: returns the activations and the routers' statistics.

    Args:
      block: `(x, shared keys and values), layer, kind, stack` to a `blocks.Output` and None.
      x_BTD: the activations.
      groups: the stacks.
      bound: parameters of each.
      given: what the layers get besides, stacked over all of them.
      scan: see `scan.run`.
    """
    kinds = list(dict.fromkeys(stack.cfg.kinds[0] for stack in groups if stack.cfg.shares_keys))

    def body(
        carry: Any, layer: scan_lib.Layer, kind: scan_lib.Kind, number: int
    ) -> tuple[Any, Any]:
        x_BTD, store = carry
        own = groups[number].cfg
        place = kinds.index(own.kinds[0]) if own.kinds[0] in kinds else None
        shared = store[place] if own.shares_keys and place is not None else None
        out, _ = block((x_BTD, shared), layer, kind, number)
        if place is not None and not own.shares_keys:
            store = (*store[:place], out.mixed, *store[place + 1 :])
        return (out.x_BTD, store), out.router

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
    """What the first layer finds in the place of keys and values: arrays as all layers give."""
    number, _ = owner(groups, kind)
    zero = jnp.int32(0)
    layer = scan_lib.Layer({}, params.layer(bound[number], 0), zero, zero, params.layer(given, 0))
    like = jax.eval_shape(
        lambda x, layer: block((x, None), layer, 0, number)[0].mixed, x_BTD, layer
    )
    # Zeros of these vary over the devices as they do, which the carry of a scan must.
    zeros: KeysValues = jax.tree.map(jnp.zeros_like, like)
    return zeros
