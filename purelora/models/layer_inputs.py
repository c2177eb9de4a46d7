"""What each layer gets besides the activations, where a model has that (Gemma 4's smaller ones).

A second table holds a small embedding of every token for each layer; to it comes a projection of
the token's usual embedding.
"""

import math
from typing import Any

import einops
import jax
import jax.numpy as jnp

from purelora import tree as trees
from purelora.info import ParamInfo
from purelora.models import blocks, layers
from purelora.models.reading import Config

TABLE, PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
NORM = "per_layer_projection_norm"


def infos(cfg: Config, dtype: str) -> trees.Tree:
    """The table `[V, L·P]`, the projection `[D, L·P]` and the norm of its results."""
    if cfg.layer_inputs is None:
        return {}
    size = cfg.layer_inputs.size
    width, rows = cfg.num_hidden_layers * size, cfg.layer_inputs.vocab_size
    table = ParamInfo((rows, width), dtype, ("vocab", "embed"), contracting=-1)
    matrix = ParamInfo((cfg.hidden_size, width), dtype, ("embed", None), contracting=-2)
    return {
        TABLE: {"weight": table},
        PROJECTION: {"weight": matrix},
        NORM: blocks.norm(cfg, size, dtype, stacked=False),
    }


def of_all_layers(
    tokens_BT: jax.Array,
    x_BTD: jax.Array,
    bound: trees.Tree,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> jax.Array | None:
    """The inputs of all layers, `[L, B, T, P]`, from tokens and their embeddings."""
    if cfg.layer_inputs is None:
        return None
    projected = layers.linear(x_BTD, bound[PROJECTION], dropout)
    projected = _by_layer(projected * _rounded(cfg.hidden_size**-0.5, x_BTD), cfg)
    table = layers.embed(tokens_BT, bound[TABLE], x_BTD.dtype)
    own = _by_layer(table * _rounded(math.sqrt(cfg.layer_inputs.size), x_BTD), cfg)
    return (blocks.normed(projected, bound[NORM], cfg) + own) * _rounded(2**-0.5, x_BTD)


def _rounded(factor: float, like: jax.Array) -> jax.Array:
    """A factor in the activations' type, as the weights were trained."""
    return jnp.asarray(factor, like.dtype)


def _by_layer(x: jax.Array, cfg: Config) -> Any:
    return einops.rearrange(x, "B T (L P) -> L B T P", L=cfg.num_hidden_layers)
