"""A decoder around the layers of a family: embedding, the stack of layers, last norm and head.

All layers of these families have the same parameters and are one stack, whatever kind each is of:
how far a layer sees and how it rotates is chosen by its number while the stack is run.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from purelora import params, targets
from purelora import tree as trees
from purelora.info import ParamInfo
from purelora.models import attention, blocks, layers
from purelora.models.reading import Config


class Family(Protocol):
    """What a family's module has."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """Names in a config.json that are of this family."""

    def from_hf(self, config: Mapping[str, Any], where: str) -> Config:
        """Reads a config.json; `where` names it in messages.

        Raises:
          ModelError: missing or wrong fields; all of them in one error.
        """

    def layer_infos(self, cfg: Config, dtype: str) -> trees.Tree:
        """Declarations of the parameters of the layers, each stacked over all of them."""

    def block(
        self,
        x_BTD: jax.Array,
        layer: trees.Tree,
        attend: blocks.Attend,
        cfg: Config,
        dropout: layers.Dropout | None,
    ) -> tuple[jax.Array, Any]:
        """One layer; returns the activations and what `attend` gives besides its output."""


def param_infos(family: Family, cfg: Config, dtype: str) -> trees.Tree:
    """Declarations of all parameters: kernels are [in, out], tables [V, D], stacks lead with L."""
    axes, shape = ("vocab", "embed"), (cfg.vocab_size, cfg.hidden_size)
    table = {"weight": ParamInfo(shape, dtype, axes, contracting=-1)}
    infos = {
        targets.EMBEDDING: table,
        "layers": family.layer_infos(cfg, dtype),
        "norm": blocks.norm(cfg, cfg.hidden_size, dtype, stacked=False),
    }
    return infos if cfg.tie_word_embeddings else {**infos, targets.HEAD: table}


def axis_counts(cfg: Config) -> dict[str, int]:
    """How many heads the logical axes of heads hold."""
    return {"heads": cfg.num_attention_heads, "kv_heads": cfg.num_key_value_heads}


def hf_names(cfg: Config, path: str) -> tuple[str, ...]:
    """Hugging Face name of each layer of the leaf or module at `path`; one name if not stacked."""
    if path.startswith("layers."):
        rest = path.removeprefix("layers.")
        return tuple(f"model.layers.{i}.{rest}" for i in range(cfg.num_hidden_layers))
    return (path,) if path.startswith(targets.HEAD) else (f"model.{path}",)


def modules(cfg: Config, infos: trees.Tree) -> dict[str, targets.AdaptableModule]:
    """The matrices that adapters can go to: those of the layers, then the head and the table."""
    matrices = {
        path.removesuffix(".weight"): leaf
        for path, leaf in trees.flatten(infos).items()
        if leaf.is_matrix
    }
    table = matrices.pop(targets.EMBEDDING)
    matrices.setdefault(targets.HEAD, table)
    matrices[targets.EMBEDDING] = table
    kinds: dict[str, Any] = {targets.HEAD: "head", targets.EMBEDDING: "embedding"}
    return {
        path: targets.AdaptableModule(leaf, hf_names(cfg, path), kinds.get(path, "linear"))
        for path, leaf in matrices.items()
    }


def hidden(
    family: Family,
    cfg: Config,
    bound: trees.Tree,
    inputs: layers.Inputs,
    *,
    dtype: Any,
    scan_layers: bool,
    remat: bool,
    dropout: layers.Dropout | None = None,
) -> jax.Array:
    """The activations before the head, `[B, T, D]`, after the last norm.

    Args:
      family: the model's family.
      cfg: the model.
      bound: parameters from `params.bind`.
      inputs: tokens, positions and segments.
      dtype: dtype of the activations.
      scan_layers: scan over the stack, or unroll it.
      remat: recompute every block in the backward pass.
      dropout: dropout on the adapters' inputs, None outside training.
    """
    angles = [layers.rope_angles(inputs.positions_BT, kind.rope) for kind in cfg.kinds]
    mix = functools.partial(
        attention.causal_attention,
        segments_BT=inputs.segment_ids_BT,
        scale=cfg.attention_scale,
        softcap=cfg.attn_softcap,
        windows=tuple(kind.window for kind in cfg.kinds),
    )

    def body(x_BTD: jax.Array, xs: tuple[trees.Tree, jax.Array], kind: layers.Kind) -> jax.Array:
        layer, index = xs
        attend = blocks.Attend(
            rotate=functools.partial(layers.rope, angles=layers.of_kind(kind, angles)),
            mix=lambda q, k, v: (mix(q, k, v, kind=kind), None),
        )
        layer_dropout = None if dropout is None else dropout.for_layer(index)
        return family.block(x_BTD, layer, attend, cfg, layer_dropout)[0]

    x_BTD = _embedded(inputs.tokens_BT, bound, cfg, dtype)
    stack = (bound["layers"], jnp.arange(cfg.num_hidden_layers))
    x_BTD = layers.run_stack(body, x_BTD, stack, cfg.kind_numbers, scan=scan_layers, remat=remat)
    return blocks.normed(x_BTD, bound["norm"], cfg)


def _embedded(tokens_BT: jax.Array, bound: trees.Tree, cfg: Config, dtype: Any) -> jax.Array:
    x_BTD = layers.embed(tokens_BT, bound[targets.EMBEDDING], dtype)
    # The factor is rounded to the activations' type, as the weights were trained.
    return x_BTD if cfg.embedding_scale == 1 else x_BTD * jnp.asarray(cfg.embedding_scale, dtype)


def head(bound: trees.Tree) -> params.Module:
    """The module that turns `hidden` into logits: weight [V, D], with the adapters of `lm_head`."""
    own, tied = bound.get(targets.HEAD), bound[targets.EMBEDDING]
    if own is not None and own.weight is not None:
        return own
    # The table itself, without the adapters that it has as an embedding.
    adapter = {name: None if own is None else getattr(own, name) for name in params.ADAPTER_FIELDS}
    return dataclasses.replace(tied, name=targets.HEAD, **adapter)


# ---- generation --------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Keys and values of the positions so far, `[L, B, K, S, H]` each; slot s holds position s."""

    k: jax.Array
    v: jax.Array


def empty_cache(cfg: Config, rows: int, length: int, dtype: Any) -> Cache:
    """A cache of `length` slots for each of `rows` rows."""
    shape = (cfg.num_hidden_layers, rows, cfg.num_key_value_heads, length, cfg.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def hidden_cached(
    family: Family,
    cfg: Config,
    bound: trees.Tree,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: Cache,
    *,
    dtype: Any,
) -> tuple[jax.Array, Cache]:
    """`hidden` for generation: reads the cache and writes the slots at `positions_BT`."""
    length = cache.k.shape[3]
    masks = [layers.cache_mask(positions_BT, length, kind.window) for kind in cfg.kinds]
    angles = [layers.rope_angles(positions_BT, kind.rope) for kind in cfg.kinds]

    def body(
        carry: tuple[jax.Array, Cache], xs: tuple[trees.Tree, jax.Array], kind: layers.Kind
    ) -> tuple[jax.Array, Cache]:
        x_BTD, cache = carry
        layer, index = xs
        attend = blocks.Attend(
            rotate=functools.partial(layers.rope, angles=layers.of_kind(kind, angles)),
            mix=functools.partial(
                _mix_cached,
                cache=cache,
                index=index,
                positions_BT=positions_BT,
                mask_BTS=layers.of_kind(kind, masks),
                cfg=cfg,
            ),
        )
        return family.block(x_BTD, layer, attend, cfg, None)

    x_BTD = _embedded(tokens_BT, bound, cfg, dtype)
    # Carried, the cache is written in place; scanned over, all of it would be copied each token.
    stack = (bound["layers"], jnp.arange(cfg.num_hidden_layers))
    x_BTD, cache = layers.scan_stack(body, (x_BTD, cache), stack, cfg.kind_numbers)
    return blocks.normed(x_BTD, bound["norm"], cfg), cache


def _mix_cached(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    cache: Cache,
    index: jax.Array,
    positions_BT: jax.Array,
    mask_BTS: jax.Array,
    cfg: Config,
) -> tuple[jax.Array, Cache]:
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
    )
    return out_BTNH, cache
