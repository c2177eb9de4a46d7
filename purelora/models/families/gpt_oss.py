"""gpt-oss: attention with sinks, and a mixture of experts with biases in place of the MLP.

Every second layer sees a window. A token goes to the experts with the largest of the router's
logits, with routing weights that are the softmax of these. An expert's activation is clamped: with
gate and up no larger than a limit, `(up + 1) · gate · sigmoid(alpha · gate)`.

The files hold gate and up in alternating columns of one tensor, `[in, out]` where other families
have `[out, in]`; the published ones hold it packed (`purelora.formats.mxfp4`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from purelora.core import trees
from purelora.models import blocks, hf_config, hf_layout, layers, moe

ARCHITECTURES = ("GptOssForCausalLM",)
# What the format means by leaving it out, which the published files do.
_ALPHA = 1.702


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; left out, `layer_types` is every second layer, and alpha 1.702.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads(has_head_dim=True)
    reader.stated("attention_bias")
    if reader.get("rope_parameters") is None:
        # The format does not mean plain rotations by leaving it out.
        reader.check(reader.get("rope_scaling") is not None, "rope_scaling", None, "is missing")
    alternating = (hf_config.SLIDING, hf_config.FULL) * reader.size("num_hidden_layers")
    types = reader.layer_types(alternating[: reader.size("num_hidden_layers")])
    window = reader.size("sliding_window") if hf_config.SLIDING in types else None
    rope = reader.one_rope(heads["head_dim"])
    experts = reader.experts("num_local_experts", "intermediate_size", files=hf_layout.GPT_OSS)
    clamp = hf_config.Clamp(
        reader.positive("swiglu_alpha", _ALPHA), reader.positive("swiglu_limit")
    )
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        attention_bias=blocks.ATTENTION if reader.flag("attention_bias") else (),
        mlp_bias=blocks.MLP,
        layer_kinds=tuple(
            hf_config.Kind(rope, window if name == hf_config.SLIDING else None) for name in types
        ),
        experts=dataclasses.replace(experts, clamp=clamp),
    )


def layer_infos(cfg: hf_config.Config, dtype: str) -> trees.Tree:
    """Declarations of the parameters of a layer."""
    attn = blocks.attention_infos(cfg, dtype) | {"sinks": blocks.sinks_infos(cfg, dtype)}
    router = blocks.router_infos(cfg, dtype, bias=True)
    mixture = {"router": router, "experts": blocks.experts_infos(cfg, dtype)}
    return blocks.pre_norm_infos(cfg, dtype) | {"self_attn": attn, "mlp": mixture}


def _mixture(
    x_BTD: jax.Array,
    module: trees.Tree,
    context: blocks.Context,
    cfg: hf_config.Config,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, moe.RouterSums]:
    """The mixture of experts of a layer."""
    assert cfg.experts is not None and cfg.experts.clamp is not None
    routing, sums = moe.route(x_BTD, module["router"], context.is_token_BT, cfg.experts, dropout)
    gated = functools.partial(_clamped, clamp=cfg.experts.clamp)
    return moe.experts(x_BTD, module["experts"], routing, gated, cfg.experts), sums


def _clamped(gate: jax.Array, up: jax.Array, *, clamp: hf_config.Clamp) -> jax.Array:
    gate = jnp.minimum(gate, clamp.limit)
    up = jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.alpha * gate)


block = functools.partial(blocks.pre_norm, feed_forward=_mixture)
