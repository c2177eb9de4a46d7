"""Per-layer inputs, also known as per-layer embeddings (Gemma 4's smaller models).

Each layer gets a small vector for every token beside the activations. It is the scaled sum of two:
an embedding from a second table, which has one for every token and layer, and a projection of the
token's usual embedding. P, here, is the size of such a vector.
"""

import math
from typing import Any

import einops
import jax
import jax.numpy as jnp

from purelora.core import trees
from purelora.core.param_info import ParamInfo
from purelora.models import blocks, layers
from purelora.models.hf_config import Config

TABLE, PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
NORM = "per_layer_projection_norm"


def infos(cfg: Config, dtype: str) -> trees.Tree:
    """The table `[V, L·P]`, the projection `[D, L·P]` and its norm `[P]`; {} if `cfg` has none."""
    if cfg.layer_inputs is None:
        return {}
    size = cfg.layer_inputs.size
    width, rows = cfg.num_hidden_layers * size, cfg.layer_inputs.vocab_size
    table = ParamInfo((rows, width), dtype, ("vocab", "embed"), contracting=-1)
    matrix = ParamInfo((cfg.hidden_size, width), dtype, ("embed", None), contracting=-2)
    return {
        TABLE: {"weight": table},
        PROJECTION: {"weight": matrix},
        NORM: blocks.norm(cfg, size, dtype),
    }


def of_all_layers(
    tokens_BT: jax.Array,
    x_BTD: jax.Array,
    bound: trees.Tree,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> jax.Array | None:
    """The inputs of all layers, `[L, B, T, P]`; None for a model without.

    Args:
      tokens_BT: token ids.
      x_BTD: their usual embeddings, scaled.
      bound: the model's bound modules.
      cfg: the model.
      dropout: dropout on the input of the projection's adapter.
    """
    if cfg.layer_inputs is None:
        return None
    projected = layers.linear(x_BTD, bound[PROJECTION], dropout)
    projected = _by_layer(projected * _rounded(cfg.hidden_size**-0.5, x_BTD), cfg)
    table = layers.embed(tokens_BT, bound[TABLE], x_BTD.dtype)
    own = _by_layer(table * _rounded(math.sqrt(cfg.layer_inputs.size), x_BTD), cfg)
    return (blocks.normed(projected, bound[NORM], cfg) + own) * _rounded(2**-0.5, x_BTD)


def _rounded(factor: float, like: jax.Array) -> jax.Array:
    """A factor, rounded to the activations' dtype as in the training of the weights."""
    return jnp.asarray(factor, like.dtype)


def _by_layer(x: jax.Array, cfg: Config) -> Any:
    return einops.rearrange(x, "B T (L P) -> L B T P", L=cfg.num_hidden_layers)
