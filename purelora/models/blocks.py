"""The parts of a decoder layer, each with the declarations of its parameters.

A layer's tree says what it has: a bias, or norms of queries and keys, is used where it is declared.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
from jax.ad_checkpoint import checkpoint_name

from purelora.core import layer_axis, trees
from purelora.core.param_info import ParamInfo
from purelora.models import layers, moe, params
from purelora.models.hf_config import Config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Context(NamedTuple):
    """What a layer gets besides activations and parameters, in training or with a cache.

    Attributes:
      rotate: rotary positions of queries or keys `[B, T, N, H]`.
      mix: (q, k, v), rotated, to (mixed values `[B, T, N, H]`, what comes out besides). A layer
        that shares keys and values gives None for both; one that has sinks gives `sinks_N` too.
      is_token_BT: which positions hold a token, and not padding.
      input_BTP: what the layer gets besides the activations, if the model has that.
    """

    rotate: Callable[[jax.Array], jax.Array]
    mix: Callable[..., tuple[jax.Array, Any]]
    is_token_BT: jax.Array
    input_BTP: jax.Array | None


# As `mlp` is called.
FeedForward = Callable[..., tuple[jax.Array, moe.RouterSums | None]]


class Output(NamedTuple):
    """What a layer gives.

    Attributes:
      x_BTD: the activations.
      mixed: what `Context.mix` gives besides its output.
      router: statistics of the routing to experts; None without them.
    """

    x_BTD: jax.Array
    mixed: Any
    router: moe.RouterSums | None


# ---- declarations: of ONE layer; `decoder.param_infos` stacks them -------------------------------


def kernel(
    n_in: int,
    n_out: int,
    axes: tuple[str | None, str | None],
    dtype: str,
    *,
    bias: bool = False,
) -> trees.Tree:
    """A matrix `[in, out]` and, if it has one, its bias `[out]`."""
    weight = ParamInfo((n_in, n_out), dtype, axes, contracting=-2)
    if not bias:
        return {"weight": weight}
    return {"weight": weight, "bias": ParamInfo((n_out,), dtype, (_bias_axis(axes),), "zeros")}


def _bias_axis(axes: tuple[str | None, str | None]) -> str | None:
    """The axis of the bias beside a matrix with these axes.

    What is added to the residual stream is whole, as that is.
    """
    return None if axes[1] == "embed" else axes[1]


def norm(cfg: Config, size: int, dtype: str) -> trees.Tree:
    """The weight of a norm over `size` elements, the same on every device."""
    init = "zeros" if cfg.norm_offset else "ones"
    return {"weight": ParamInfo((size,), dtype, (None,), init)}


def attention_infos(cfg: Config, dtype: str, *, qk_norm: bool = False) -> trees.Tree:
    """Projections of queries, keys, values and outputs, and norms of the first two."""
    D, H = cfg.hidden_size, cfg.head_dim
    heads, kv_heads = cfg.num_attention_heads * H, cfg.num_key_value_heads * H
    shapes = {
        "q_proj": (D, heads, ("embed", "heads")),
        "k_proj": (D, kv_heads, ("embed", "kv_heads")),
        "v_proj": (D, kv_heads, ("embed", "kv_heads")),
        "o_proj": (heads, D, ("heads", "embed")),
    }
    infos = {
        name: kernel(*shape, dtype, bias=name in cfg.attention_bias)
        for name, shape in shapes.items()
    }
    norms = ("q_norm", "k_norm") if qk_norm else ()
    return infos | {name: norm(cfg, H, dtype) for name in norms}


def sinks_infos(cfg: Config, dtype: str) -> trees.Tree:
    """The sinks of attention, one score for each head `[N]`."""
    return {"weight": ParamInfo((cfg.num_attention_heads,), dtype, ("heads",), "zeros")}


def mlp_infos(cfg: Config, dtype: str) -> trees.Tree:
    """The three matrices of a gated MLP."""
    return _gated_infos(cfg, cfg.intermediate_size, dtype)


def _gated_infos(cfg: Config, width: int, dtype: str) -> trees.Tree:
    D, F = cfg.hidden_size, width
    shapes = {
        "gate_proj": (D, F, ("embed", "mlp")),
        "up_proj": (D, F, ("embed", "mlp")),
        "down_proj": (F, D, ("mlp", "embed")),
    }
    return {
        name: kernel(*shape, dtype, bias=name in cfg.mlp_bias) for name, shape in shapes.items()
    }


def experts_infos(cfg: Config, dtype: str) -> trees.Tree:
    """The three matrices of a gated MLP, `[E, in, out]`: one of each for every expert.

    And their biases `[E, out]`, if they have them.
    """
    assert cfg.experts is not None
    one = _gated_infos(cfg, cfg.experts.intermediate_size, dtype)
    return layer_axis.stack([one] * cfg.experts.count, name="experts")


def router_infos(cfg: Config, dtype: str, *, bias: bool = False) -> trees.Tree:
    """A router `[D, E]` and, if it has one, its bias `[E]`."""
    assert cfg.experts is not None
    router = kernel(cfg.hidden_size, cfg.experts.count, ("embed", None), dtype, bias=bias)
    return router | {"weight": dataclasses.replace(router["weight"], is_router=True)}


def moe_infos(cfg: Config, dtype: str) -> trees.Tree:
    """A router, called `gate`, and the experts."""
    return {"gate": router_infos(cfg, dtype), "experts": experts_infos(cfg, dtype)}


def pre_norm_infos(cfg: Config, dtype: str, *, qk_norm: bool = False) -> trees.Tree:
    """The parameters of `pre_norm`."""
    D = cfg.hidden_size
    return {
        "input_layernorm": norm(cfg, D, dtype),
        "self_attn": attention_infos(cfg, dtype, qk_norm=qk_norm),
        "post_attention_layernorm": norm(cfg, D, dtype),
        "mlp": mlp_infos(cfg, dtype) if cfg.experts is None else moe_infos(cfg, dtype),
    }


def sandwich_infos(cfg: Config, dtype: str, *, qk_norm: bool = False) -> trees.Tree:
    """The parameters of `sandwich`."""
    D = cfg.hidden_size
    return pre_norm_infos(cfg, dtype, qk_norm=qk_norm) | {
        "pre_feedforward_layernorm": norm(cfg, D, dtype),
        "post_feedforward_layernorm": norm(cfg, D, dtype),
    }


# ---- computation -------------------------------------------------------------------------------


def normed(x: jax.Array, module: params.Module, cfg: Config) -> jax.Array:
    """The model's root mean square norm."""
    return layers.rms_norm(x, module, cfg.rms_norm_eps, offset=cfg.norm_offset)


def pre_norm(
    x_BTD: jax.Array,
    layer: trees.Tree,
    context: Context,
    cfg: Config,
    dropout: layers.Dropout | None,
    *,
    feed_forward: FeedForward | None = None,
) -> Output:
    """Attention and MLP, each with a norm before it; `feed_forward` is in place of `mlp`."""
    with jax.named_scope("attention"):
        inner = normed(x_BTD, layer["input_layernorm"], cfg)
        out_BTD, mixed = attention(inner, layer["self_attn"], context, cfg, dropout)
        x_BTD = checkpoint_name(x_BTD + out_BTD, "after_attention")
    with jax.named_scope("mlp"):
        inner = normed(x_BTD, layer["post_attention_layernorm"], cfg)
        out_BTD, router = (feed_forward or mlp)(inner, layer["mlp"], context, cfg, dropout)
        return Output(x_BTD + out_BTD, mixed, router)


def sandwich(
    x_BTD: jax.Array,
    layer: trees.Tree,
    context: Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> Output:
    """Attention and MLP, each with a norm before and a norm after it."""
    with jax.named_scope("attention"):
        inner = normed(x_BTD, layer["input_layernorm"], cfg)
        out_BTD, mixed = attention(inner, layer["self_attn"], context, cfg, dropout)
        out_BTD = checkpoint_name(out_BTD, "attention_added")
        x_BTD = x_BTD + normed(out_BTD, layer["post_attention_layernorm"], cfg)
    with jax.named_scope("mlp"):
        inner = normed(x_BTD, layer["pre_feedforward_layernorm"], cfg)
        out_BTD, router = mlp(inner, layer["mlp"], context, cfg, dropout)
        out_BTD = checkpoint_name(out_BTD, "mlp_added")
        x_BTD = x_BTD + normed(out_BTD, layer["post_feedforward_layernorm"], cfg)
        return Output(x_BTD, mixed, router)


def attention(
    x_BTD: jax.Array,
    attn: trees.Tree,
    context: Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, Any]:
    """Grouped-query attention with rotary positions, and with sinks if the layer has them."""
    x_BTD = attn["q_proj"].parallel.copy_to(x_BTD)
    q, k, v = (
        einops.rearrange(
            layers.linear(x_BTD, attn[name], dropout), "B T (N H) -> B T N H", H=cfg.head_dim
        )
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if "q_norm" in attn:
        # Kept for the backward pass is what the norms read: all that follows is cheap.
        q, k = checkpoint_name(q, "attention_query"), checkpoint_name(k, "attention_key")
        q = context.rotate(normed(q, attn["q_norm"], cfg))
        k = context.rotate(normed(k, attn["k_norm"], cfg))
    else:
        q = checkpoint_name(context.rotate(q), "attention_query")
        k = checkpoint_name(context.rotate(k), "attention_key")
    sinks = {}
    if "sinks" in attn:
        sinks = {"sinks_N": attn["sinks"].gather(attn["sinks"].weight)}
    out_BTNH, mixed = context.mix(q, k, checkpoint_name(v, "attention_value"), **sinks)
    joined = einops.rearrange(out_BTNH, "B T N H -> B T (N H)")
    return layers.linear(joined, attn["o_proj"], dropout), mixed


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,  # Its approximation by tanh is JAX's default.
}


def mlp(
    x_BTD: jax.Array,
    module: trees.Tree,
    context: Context,
    cfg: Config,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, moe.RouterSums | None]:
    """The gated MLP with the model's activation, or the mixture of experts in its place."""
    activation = ACTIVATIONS[cfg.hidden_act]
    if "experts" not in module:
        return layers.gated_mlp(x_BTD, module, activation, dropout), None
    assert cfg.experts is not None
    routing, sums = moe.route(x_BTD, module["gate"], context.is_token_BT, cfg.experts, dropout)
    gated = functools.partial(layers.gated, activation=activation)
    return moe.experts(x_BTD, module["experts"], routing, gated, cfg.experts), sums
