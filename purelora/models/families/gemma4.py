"""Gemma 4, text only: Gemma 3's layers, with heads of another size where attention is full.

New beside Gemma 3: values are normalised, and may come from the keys' projection
(`attention_k_eq_v`); the last layers may share keys and values with earlier ones (`sharing`); the
output of a layer is multiplied by a constant; layers may get per-layer inputs (`layer_inputs`); and
a mixture of experts may run beside the MLP, whose output is added to the MLP's.
"""

import dataclasses
import functools
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from purelora.core import trees
from purelora.core.param_info import ParamInfo
from purelora.models import blocks, layers, moe, params
from purelora.models.families import gemma4_config
from purelora.models.hf_config import Config

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")

from_hf = gemma4_config.from_hf


def layer_infos(cfg: Config, dtype: str) -> trees.Tree:
    """Declarations of the parameters of a layer."""
    D = cfg.hidden_size
    norms = [
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ]  # fmt: skip
    attn = blocks.attention_infos(cfg, dtype, qk_norm=True)
    absent = {"v_proj"} if cfg.keys_are_values else set()
    absent |= {"k_proj", "v_proj", "k_norm"} if cfg.shares_keys else set()
    parts: trees.Tree = {
        "self_attn": {name: info for name, info in attn.items() if name not in absent},
        "mlp": blocks.mlp_infos(cfg, dtype),
        "layer_scalar": {"weight": ParamInfo((1,), dtype, (None,), "ones")},
    }
    if cfg.experts is not None:
        norms += [f"{name}_feedforward_layernorm_{n}" for name, n in
                  (("post", 1), ("pre", 2), ("post", 2))]  # fmt: skip
        parts |= {"router": _router_infos(cfg, dtype), "experts": blocks.experts_infos(cfg, dtype)}
    if cfg.layer_inputs is not None:
        P = cfg.layer_inputs.size
        norms.append("post_per_layer_input_norm")
        parts |= {
            "per_layer_input_gate": blocks.kernel(D, P, ("embed", None), dtype),
            "per_layer_projection": blocks.kernel(P, D, (None, "embed"), dtype),
        }
    return {name: blocks.norm(cfg, D, dtype) for name in norms} | parts


def _router_infos(cfg: Config, dtype: str) -> trees.Tree:
    assert cfg.experts is not None
    D, E = cfg.hidden_size, cfg.experts.count
    proj = blocks.kernel(D, E, ("embed", None), dtype)["weight"]
    return {
        "proj": {"weight": dataclasses.replace(proj, is_router=True)},
        "scale": {"weight": ParamInfo((D,), dtype, (None,), "ones")},
        "per_expert_scale": {"weight": ParamInfo((E,), dtype, (None,), "ones")},
    }


def block(
    x_BTD: jax.Array,
    layer: trees.Tree,
    context: blocks.Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> blocks.Output:
    """Attention, MLP (and experts beside it) and per-layer input, each between its norms."""
    with jax.named_scope("attention"):
        inner = blocks.normed(x_BTD, layer["input_layernorm"], cfg)
        out_BTD, mixed = _attention(inner, layer["self_attn"], context, cfg, dropout)
        out_BTD = checkpoint_name(out_BTD, "attention_added")
        x_BTD = x_BTD + blocks.normed(out_BTD, layer["post_attention_layernorm"], cfg)
    with jax.named_scope("mlp"):
        inner = blocks.normed(x_BTD, layer["pre_feedforward_layernorm"], cfg)
        activation = blocks.ACTIVATIONS[cfg.hidden_act]
        out_BTD = layers.gated_mlp(inner, layer["mlp"], activation, dropout)
        out_BTD, router = checkpoint_name(out_BTD, "mlp_added"), None
        if cfg.experts is not None:
            out_BTD = blocks.normed(out_BTD, layer["post_feedforward_layernorm_1"], cfg)
            added_BTD, router = _experts(x_BTD, layer, context, cfg, dropout)
            out_BTD = out_BTD + added_BTD
        x_BTD = x_BTD + blocks.normed(out_BTD, layer["post_feedforward_layernorm"], cfg)
    if context.input_BTP is not None:
        with jax.named_scope("layer_input"):
            x_BTD = x_BTD + _of_input(x_BTD, context.input_BTP, layer, cfg, dropout)
    # Hugging Face's model holds it as a buffer, which is not trained.
    factor = jax.lax.stop_gradient(layer["layer_scalar"].weight).astype(x_BTD.dtype)
    return blocks.Output(x_BTD * factor.reshape(1, 1, 1), mixed, router)


def _attention(
    x_BTD: jax.Array,
    attn: trees.Tree,
    context: blocks.Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, Any]:
    x_BTD = attn["q_proj"].parallel.copy_to(x_BTD)

    def heads(name: str) -> jax.Array:
        joined = layers.linear(x_BTD, attn[name], dropout)
        return einops.rearrange(joined, "B T (N H) -> B T N H", H=cfg.head_dim)

    q, k, v = checkpoint_name(heads("q_proj"), "attention_query"), None, None
    q = context.rotate(blocks.normed(q, attn["q_norm"], cfg))
    if not cfg.shares_keys:
        k = v = checkpoint_name(heads("k_proj"), "attention_key")
        if not cfg.keys_are_values:
            v = checkpoint_name(heads("v_proj"), "attention_value")
        k = context.rotate(blocks.normed(k, attn["k_norm"], cfg))
        v = layers.unit_norm(v, cfg.rms_norm_eps)
    out_BTNH, mixed = context.mix(q, k, v)
    joined = einops.rearrange(out_BTNH, "B T N H -> B T (N H)")
    return layers.linear(joined, attn["o_proj"], dropout), mixed


def _experts(
    x_BTD: jax.Array,
    layer: trees.Tree,
    context: blocks.Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, moe.RouterSums]:
    """What the experts add; router and experts read `x_BTD` through norms of their own."""
    assert cfg.experts is not None
    router = layer["router"]
    scale_D = _vector(router["scale"], x_BTD.dtype) * jnp.asarray(
        cfg.hidden_size**-0.5, x_BTD.dtype
    )
    asked = layers.unit_norm(x_BTD, cfg.rms_norm_eps) * scale_D.reshape(1, 1, -1)
    routing, sums = moe.route(asked, router["proj"], context.is_token_BT, cfg.experts, dropout)
    scale_E = _vector(router["per_expert_scale"], jnp.dtype("float32"))
    # The number of padding, E, is clipped: its weights are never used.
    own_BTK = scale_E.at[routing.ids_BTK].get(mode="clip")
    routing = routing._replace(weights_BTK=routing.weights_BTK * own_BTK)
    inner = blocks.normed(x_BTD, layer["pre_feedforward_layernorm_2"], cfg)
    gated = functools.partial(layers.gated, activation=blocks.ACTIVATIONS[cfg.hidden_act])
    out_BTD = moe.experts(inner, layer["experts"], routing, gated, cfg.experts)
    return blocks.normed(out_BTD, layer["post_feedforward_layernorm_2"], cfg), sums


def _vector(module: params.Module, dtype: Any) -> jax.Array:
    array: jax.Array = module.weight
    return array.astype(dtype)


def _of_input(
    x_BTD: jax.Array,
    input_BTP: jax.Array,
    layer: trees.Tree,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> jax.Array:
    """What the per-layer input adds, after a gate that depends on the activations."""
    gate_BTP = layers.linear(x_BTD, layer["per_layer_input_gate"], dropout)
    opened_BTP = blocks.ACTIVATIONS[cfg.hidden_act](gate_BTP) * input_BTP
    out_BTD = layers.linear(opened_BTP, layer["per_layer_projection"], dropout)
    return blocks.normed(out_BTD, layer["post_per_layer_input_norm"], cfg)
