"""Generation with a cache of keys and values: `decoder.hidden` for the newest tokens alone."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purelora.core import trees
from purelora.models import blocks, decoder, kv_sharing, layers, per_layer_embeddings, scan, stacks
from purelora.models.hf_config import Config
from purelora.ops import attention


class Cache(NamedTuple):
    """Keys and values of a stack's layers, `[L, B, K, S, H]` each; slot s holds position s."""

    k: jax.Array
    v: jax.Array


Caches = tuple[Cache, ...]  # One for each stack whose layers have keys of their own, in order.


def empty(cfg: Config, rows: int, length: int, dtype: Any) -> Caches:
    """Caches of `length` slots for each of `rows` rows."""

    def of_stack(own: Config) -> Cache:
        shape = (own.num_hidden_layers, rows, own.num_key_value_heads, length, own.head_dim)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(of_stack(stack.cfg) for stack in stacks.of(cfg) if not stack.cfg.shares_keys)


def hidden(
    family: decoder.Family,
    cfg: Config,
    bound: trees.Tree,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    caches: Caches,
    *,
    dtype: Any,
) -> tuple[jax.Array, Caches]:
    """`decoder.hidden` for the tokens that come after those in the caches.

    Their keys and values are written to the slots at `positions_BT`.

    Returns:
      The activations before the head, `[B, T, D]`; and the updated caches.
    """
    length, model = caches[0].k.shape[3], stacks.of(cfg)
    bodies = _bodies(family, cfg, positions_BT, length)
    x_BTD = decoder.embedded(tokens_BT, bound, cfg, dtype)
    given = per_layer_embeddings.of_all_layers(tokens_BT, x_BTD, bound, cfg, None)
    of_stacks = decoder.bound_stacks(bound, model)
    # Carried, a cache is written in place; scanned over, all of it would be copied each token.
    (x_BTD, caches), _ = scan.run(bodies, (x_BTD, caches), model, of_stacks, given=given, scan=True)
    return blocks.normed(x_BTD, bound["norm"], cfg), caches


def _bodies(
    family: decoder.Family, cfg: Config, positions_BT: jax.Array, length: int
) -> scan.Bodies:
    """The bodies of a model's layers, whose carry is (activations, caches of `length` slots)."""
    masks = {k: layers.cache_mask(positions_BT, length, k.window) for k in cfg.kinds}
    angles, model = decoder.angles_of(cfg, positions_BT), stacks.of(cfg)
    is_padded = stacks.is_padded(model)

    def block(
        carry: tuple[jax.Array, Caches], layer: scan.Layer, *, stack: int, static_kind: int | None
    ) -> tuple[tuple[jax.Array, Caches], None]:
        (x_BTD, caches), of_stack = carry, model[stack].cfg
        kind = layer.kind_number(static_kind)
        slot, index = _slot(model, stack, layer.position)
        context = blocks.Context(
            rotate=functools.partial(layers.rope, angles=decoder.of_kind(of_stack, kind, angles)),
            mix=functools.partial(
                _mix,
                cache=caches[slot],
                index=index,
                positions_BT=positions_BT,
                mask_BTS=decoder.of_kind(of_stack, kind, masks),
                cfg=of_stack,
            ),
            is_token_BT=jnp.ones_like(positions_BT, bool),
            input_BTP=layer.given,
        )
        out = family.block(x_BTD, layer.bound, context, of_stack, None)
        return (out.x_BTD, (*caches[:slot], out.mixed, *caches[slot + 1 :])), None

    def bodies(stack: int, kind: int | None) -> scan.Body:
        body: scan.Body = functools.partial(block, stack=stack, static_kind=kind)
        return scan.skipping(body) if is_padded else body

    return bodies


def _slot(model: Sequence[stacks.Stack], number: int, position: jax.Array) -> tuple[int, jax.Array]:
    """Index of the cache that a layer uses, and position in it of the layer whose keys these are.

    The layer is at `position` in the stack with index `number`.
    """
    cfg = model[number].cfg
    if cfg.shares_keys:
        number, last = kv_sharing.owner(model, cfg.kinds[0])
        position = jnp.int32(last)
    owners = [n for n, stack in enumerate(model) if not stack.cfg.shares_keys]
    return owners.index(number), position


def _mix(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array | None,
    v_BTKH: jax.Array | None,
    *,
    cache: Cache,
    index: jax.Array,
    positions_BT: jax.Array,
    mask_BTS: jax.Array,
    cfg: Config,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Writes a layer's new keys and values, if it has any, to a cache, and attends to the cache.

    `index` is the position in the cache of the layer whose keys and values are used.
    """
    if k_BTKH is not None and v_BTKH is not None:
        rows = jnp.arange(positions_BT.shape[0])[:, None]
        cache = Cache(
            cache.k.at[index, rows, :, positions_BT].set(k_BTKH),
            cache.v.at[index, rows, :, positions_BT].set(v_BTKH),
        )
    out_BTNH = attention.cached_attention(
        q_BTNH,
        cache.k[index],
        cache.v[index],
        mask_BTS,
        cfg.attention_scale,
        softcap=cfg.attn_softcap,
        sinks_N=sinks_N,
    )
    return out_BTNH, cache
