"""An independent decoder for comparison: one document at a time, merged weights, nothing clever.

It shares no code with purelora and takes another route wherever there is one: adapters are merged
into the weights, weights are dequantised whole, rotary positions are complex numbers, heads and
layers are Python loops, and the loss sees all logits.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import qwix

from purelora.core import trees

Flat = dict[str, jax.Array]


def dequantised(base: Mapping[str, Any]) -> Flat:
    """Flat float weights: each code times the scale of its tile."""
    flat: Flat = {}
    for path, leaf in trees.flatten(base).items():
        if hasattr(leaf, "qvalue"):
            codes, scale = _numbers(leaf), np.asarray(leaf.scale)
            for axis, (length, tiles) in enumerate(zip(codes.shape, scale.shape, strict=True)):
                scale = np.repeat(scale, length // tiles, axis)
            leaf = jnp.asarray(codes * scale)
        flat[path] = leaf
    return flat


def _numbers(leaf: Any) -> np.ndarray:
    """What the codes stand for, one float an element."""
    codes = np.asarray(leaf.qvalue)
    if leaf.qtype == "nf4" or leaf.qtype == jnp.int4:
        # Two a byte, along the dimension that the scales are fewer in.
        axis = int(np.argmax(np.array(codes.shape) != leaf.scale.shape))
        pairs = np.stack([codes % 16, codes // 16], axis=axis + 1)
        codes = pairs.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
        if leaf.qtype == "nf4":
            book = qwix.QArray(jnp.arange(16, dtype=jnp.uint8), jnp.ones((1,)), None, "nf4")
            return np.asarray(qwix.dequantize(book))[codes]
        return codes.astype(np.float32) - 8
    if leaf.qtype == jnp.float8_e4m3fn:
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32)


def merged(weights: Flat, adapters: Mapping[str, Any], scaling: float) -> Flat:
    """`W + scaling · A B`; tables are [V, D], so theirs is transposed."""
    flat, out = trees.flatten(adapters), dict(weights)
    for path in dict.fromkeys(name.rpartition(".")[0] for name in flat):
        delta = scaling * (flat[f"{path}.lora_a"] @ flat[f"{path}.lora_b"])
        own = path if f"{path}.weight" in weights else "embed_tokens"
        transposed = path == "lm_head"
        out[f"{path}.weight"] = weights[f"{own}.weight"] + (delta.T if transposed else delta)
    return out


def logits(
    weights: Flat,
    tokens_T: jax.Array,
    config: Mapping[str, Any],
    routed: list[jax.Array] | None = None,
) -> jax.Array:
    """Logits `[T, V]` of one document; those of its routers `[T, E]` are added to `routed`."""
    routed = [] if routed is None else routed
    x = weights["embed_tokens.weight"][tokens_T]
    if _is_gemma(config):
        x = x * config["hidden_size"] ** 0.5
    for index in range(config["num_hidden_layers"]):
        layer = {
            path.removeprefix("layers."): array[index]
            for path, array in weights.items()
            if path.startswith("layers.")
        }
        inner = _norm(x, layer["input_layernorm.weight"], config)
        out = _attention(inner, layer, config, _kind(config, index))
        if _is_gemma(config):
            x = x + _norm(out, layer["post_attention_layernorm.weight"], config)
            inner = _norm(x, layer["pre_feedforward_layernorm.weight"], config)
            out = _mlp(inner, layer, config, routed)
            x = x + _norm(out, layer["post_feedforward_layernorm.weight"], config)
        else:
            x = x + out
            inner = _norm(x, layer["post_attention_layernorm.weight"], config)
            x = x + _mlp(inner, layer, config, routed)
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    out = _norm(x, weights["norm.weight"], config) @ head.T
    return _capped(out, config.get("final_logit_softcapping"))


def _is_gemma(config: Mapping[str, Any]) -> bool:
    return config["architectures"][0].startswith("Gemma")


def _kind(config: Mapping[str, Any], index: int) -> tuple[int | None, float, Any]:
    """Window, theta and scaling of positions (of each pair, where they differ) of a layer."""
    window, theta = config.get("sliding_window"), config.get("rope_theta", 1e4)
    slowed = (config.get("rope_scaling") or {}).get("factor", 1.0)
    match config["architectures"][0]:
        case "LlamaForCausalLM" | "Qwen3ForCausalLM" | "Qwen2ForCausalLM" | "Qwen3MoeForCausalLM":
            return None, theta, slowed
        case "MistralForCausalLM" | "MixtralForCausalLM":
            return window, theta, slowed
        case "GptOssForCausalLM":
            return (None if index % 2 else window), theta, _yarn(config)
        case "Gemma2ForCausalLM":
            return (None if index % 2 else window), theta, slowed
        case "Gemma3ForCausalLM":
            is_full = (
                index % config["sliding_window_pattern"] == config["sliding_window_pattern"] - 1
            )
            return (
                (None, theta, slowed) if is_full else (window, config["rope_local_base_freq"], 1.0)
            )
    raise AssertionError(config["architectures"])


def _yarn(config: Mapping[str, Any]) -> np.ndarray:
    """By how much each pair turns slower: not at all if it turns `beta_fast` times in the context
    that the model was first made for, by the whole factor if `beta_slow` times, and between."""
    fields, half = config["rope_scaling"], config["head_dim"] // 2
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    turns = np.log(fields["original_max_position_embeddings"] / waves)
    fast, slow = np.log(fields["beta_fast"]), np.log(fields["beta_slow"])
    kept = np.clip((turns - slow) / (fast - slow), 0, 1)
    return 1 / (kept + (1 - kept) / fields["factor"])


def _capped(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else jnp.tanh(x / cap) * cap


def loss_sum(
    weights: Flat, tokens: Any, targets: Any, token_weights: Any, config: Mapping[str, Any]
) -> jax.Array:
    """Weighted loss sum of rows `[R, T]` that hold one document each, padded at the end."""

    def row(tokens_T: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits(weights, tokens_T, config), axis=-1)
        return -jnp.sum(log_p[jnp.arange(len(targets_T)), targets_T] * weights_T)

    return jax.vmap(row)(*map(jnp.asarray, (tokens, targets, token_weights))).sum()


def _norm(x_TD: jax.Array, weight_D: jax.Array, config: Mapping[str, Any]) -> jax.Array:
    mean_square = (x_TD**2).mean(-1, keepdims=True)
    factor_D = weight_D + 1 if _is_gemma(config) else weight_D
    return x_TD / jnp.sqrt(mean_square + config["rms_norm_eps"]) * factor_D[None]


def _linear(x_TD: jax.Array, layer: Flat, name: str) -> jax.Array:
    y = x_TD @ layer[f"{name}.weight"]
    return y + layer[f"{name}.bias"][None] if f"{name}.bias" in layer else y


def router_losses(
    weights: Flat, tokens: Any, is_token: Any, config: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Load-balancing loss and z-loss of each layer, summed over rows `[R, T]` as in `loss_sum`."""
    count, best = _experts(config), config["num_experts_per_tok"]

    def row(tokens_T: jax.Array, is_token_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        routed: list[jax.Array] = []
        logits(weights, tokens_T, config, routed)
        length = jnp.maximum(is_token_T.sum(), 1).astype(jnp.float32)
        balance, z = [], []
        for logits_TE in routed:
            probs = jnp.exp(logits_TE) / jnp.exp(logits_TE).sum(axis=1, keepdims=True)
            order = jnp.argsort(-probs, axis=1)[:, :best]
            went = (
                (order[:, :, None] == jnp.arange(count)[None, None]).any(axis=1).astype(jnp.float32)
            )
            share = jnp.where(is_token_T[:, None], went, 0).sum(axis=0) / length
            mean = jnp.where(is_token_T[:, None], probs, 0).sum(axis=0) / length
            balance.append(count * jnp.sum(share * mean))
            squares = jnp.log(jnp.exp(logits_TE).sum(axis=1)) ** 2
            z.append(jnp.where(is_token_T, squares, 0).sum() / length)
        return jnp.stack(balance), jnp.stack(z)

    balance_RL, z_RL = jax.vmap(row)(*map(jnp.asarray, (tokens, is_token)))
    return balance_RL.sum(axis=0), z_RL.sum(axis=0)


def _experts(config: Mapping[str, Any]) -> int:
    count: int = config.get("num_experts") or config["num_local_experts"]
    return count


def _mixture(
    x_TD: jax.Array, layer: Flat, config: Mapping[str, Any], routed: list[jax.Array]
) -> jax.Array:
    """Every expert sees every token; those that a token does not go to count nothing."""
    logits_TE = _linear(x_TD, layer, _router(layer))
    routed.append(logits_TE)
    probs = jax.nn.softmax(logits_TE, axis=1)
    least = jnp.sort(probs, axis=1)[:, -config["num_experts_per_tok"]]
    factors = jnp.where(probs >= least[:, None], probs, 0)
    if config.get("norm_topk_prob", True):
        factors = factors / factors.sum(axis=1, keepdims=True)
    total = jnp.zeros_like(x_TD)
    for e in range(_experts(config)):
        own = {
            path.replace("experts.", ""): leaf[e]
            for path, leaf in layer.items()
            if path.startswith("mlp.experts.")
        }
        total = total + factors[:, e, None] * _mlp(x_TD, own, config, routed)
    return total


def _mlp(
    x_TD: jax.Array, layer: Flat, config: Mapping[str, Any], routed: list[jax.Array]
) -> jax.Array:
    if f"{_router(layer)}.weight" in layer:
        return _mixture(x_TD, layer, config, routed)
    gate = _linear(x_TD, layer, "mlp.gate_proj")
    if "swiglu_limit" in config:
        limit = config["swiglu_limit"]
        up = jnp.clip(_linear(x_TD, layer, "mlp.up_proj"), -limit, limit)
        gate = jnp.where(gate > limit, limit, gate)
        return _linear(gate / (1 + jnp.exp(-1.702 * gate)) * (1 + up), layer, "mlp.down_proj")
    if _is_gemma(config):
        cubic = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        active = 0.5 * gate * (1 + jnp.tanh(cubic))
    else:
        active = gate * jax.nn.sigmoid(gate)
    return _linear(active * _linear(x_TD, layer, "mlp.up_proj"), layer, "mlp.down_proj")


def _router(layer: Flat) -> str:
    return "mlp.router" if "mlp.router.weight" in layer else "mlp.gate"


def _attention(
    x_TD: jax.Array,
    layer: Flat,
    config: Mapping[str, Any],
    kind: tuple[int | None, float, float],
) -> jax.Array:
    (window, theta, slowed), length = kind, len(x_TD)
    # Where positions are slowed by pairs, queries and keys are scaled up too (Peng et al. 2023).
    grown = 1.0 if np.ndim(slowed) == 0 else 0.1 * np.log(config["rope_scaling"]["factor"]) + 1
    heads = config["num_attention_heads"]
    group = heads // config.get("num_key_value_heads", heads)
    size = config.get("head_dim", config["hidden_size"] // heads)
    scale = config.get("query_pre_attn_scalar", size) ** -0.5 * float(grown) ** 2
    q, k, v = (_linear(x_TD, layer, f"self_attn.{n}_proj") for n in "qkv")
    back = np.arange(length)[:, None] - np.arange(length)[None]
    hidden = (back < 0) | (back >= (window or length))
    outs = []
    for n in range(heads):
        own, shared = slice(n * size, (n + 1) * size), n // group
        kv = slice(shared * size, (shared + 1) * size)
        q_TH, k_TH = q[:, own], k[:, kv]
        if "self_attn.q_norm.weight" in layer:
            q_TH = _norm(q_TH, layer["self_attn.q_norm.weight"], config)
            k_TH = _norm(k_TH, layer["self_attn.k_norm.weight"], config)
        scores = _rotated(q_TH, theta, slowed) @ _rotated(k_TH, theta, slowed).T * scale
        scores = _capped(scores, config.get("attn_logit_softcapping"))
        scores = jnp.where(hidden, -jnp.inf, scores)
        if "self_attn.sinks.weight" in layer:
            nothing = jnp.broadcast_to(layer["self_attn.sinks.weight"][n], (length, 1))
            scores = jnp.concatenate([scores, nothing], axis=1)
        outs.append(jax.nn.softmax(scores, axis=-1)[:, :length] @ v[:, kv])
    return _linear(jnp.concatenate(outs, axis=1), layer, "self_attn.o_proj")


def _rotated(x_TH: jax.Array, theta: float, slowed: Any) -> jax.Array:
    """Position p turns the pair (i, i + H/2) by `p · theta^(-2i/H)`, as complex numbers."""
    half = x_TH.shape[1] // 2
    frequencies = theta ** -(np.arange(half) / half) / slowed
    angles = np.arange(len(x_TH))[:, None] * frequencies[None]
    turned = jax.lax.complex(x_TH[:, :half], x_TH[:, half:]) * np.exp(1j * angles).astype("c8")
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
