"""The Llama family: Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2.

Pre-norm blocks with grouped-query attention, rotary positions and a gated SiLU MLP. All blocks
are one stack; the head is the embedding table (`tie_word_embeddings`) or a matrix of its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from purelora import errors, params, targets
from purelora import tree as trees
from purelora.info import ParamInfo
from purelora.models import attention, layers, rope

ARCHITECTURES = ("LlamaForCausalLM",)


# No model comes near these; a damaged file that does would be worked on for minutes.
_MOST_LAYERS, _LARGEST_SIZE = 10_000, 2**24


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and settings of one model, named as in Hugging Face's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def from_hf(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Reads a config.json.

    Fields that the file format itself leaves out when they have their usual value
    (`num_key_value_heads`, `head_dim`, biases, `tie_word_embeddings`) take the value that the
    format defines; every size must be there.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = _Reader(config, where)
    heads = reader.size("num_attention_heads")
    hidden = reader.size("hidden_size")
    kv_heads = reader.size("num_key_value_heads", absent=heads)
    head_dim = reader.size("head_dim", absent=hidden // max(heads, 1))
    reader.check(
        kv_heads and heads % kv_heads == 0,
        "num_key_value_heads",
        kv_heads,
        f"does not divide num_attention_heads = {heads}",
    )
    reader.check(head_dim % 2 == 0, "head_dim", head_dim, "is odd; rotary positions need pairs")
    activation = config.get("hidden_act", "silu")
    reader.check(activation == "silu", "hidden_act", activation, "is not supported; only 'silu' is")
    for name, neutral in (("sliding_window", 0), ("partial_rotary_factor", 1)):
        value = config.get(name)
        reader.check(value in (None, neutral), name, value, "is not supported by this family")
    sizes: dict[str, Any] = {
        n: reader.size(n) for n in ("intermediate_size", "num_hidden_layers", "vocab_size")
    }
    flags: dict[str, Any] = {
        n: reader.flag(n) for n in ("tie_word_embeddings", "attention_bias", "mlp_bias")
    }
    eps = reader.positive("rms_norm_eps")
    reader.raise_problems()
    return LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        inv_freq=tuple(rope.inv_freq(config, head_dim, where).tolist()),
        **sizes,
        **flags,
    )


class _Reader:
    """Reads fields of a config.json and collects what is wrong with them."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where
        self.problems: list[errors.Problem] = []

    def check(self, good: object, name: str, value: object, what: str) -> None:
        if not good:
            self.problems.append(errors.Problem(f"{self.where}: {name}", value, what, ""))

    def size(self, name: str, absent: int | None = None) -> int:
        value = self.config.get(name)
        if value is None and absent is not None:
            return absent
        largest = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST_SIZE
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest:
            return value
        self.check(False, name, value, "is missing" if value is None else "is not a size")
        return 1

    def positive(self, name: str) -> float:
        value = self.config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        self.check(False, name, value, "is missing" if value is None else "is not a number > 0")
        return 1.0

    def flag(self, name: str) -> bool:
        value = self.config.get(name, False)
        self.check(isinstance(value, bool), name, value, "is neither true nor false")
        return bool(value)

    def raise_problems(self) -> None:
        if self.problems:
            raise errors.ModelError.of(self.problems)


def param_infos(cfg: LlamaConfig, dtype: str) -> trees.Tree:
    """Declarations of all parameters: kernels are [in, out], tables [V, D], stacks lead with L."""
    L, D, F, V = cfg.num_hidden_layers, cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    NH = cfg.num_attention_heads * cfg.head_dim
    KH = cfg.num_key_value_heads * cfg.head_dim

    def kernel(n_in: int, n_out: int, axis_in: str, axis_out: str, has_bias: bool) -> trees.Tree:
        weight = ParamInfo((L, n_in, n_out), dtype, ("layers", axis_in, axis_out), contracting=-2)
        # What is added to the residual stream is whole, as that is.
        bias_axis = None if axis_out == "embed" else axis_out
        bias = ParamInfo((L, n_out), dtype, ("layers", bias_axis), init="zeros")
        return {"weight": weight, "bias": bias} if has_bias else {"weight": weight}

    def norm(*lead: int) -> trees.Tree:
        axes = ("layers",) * len(lead) + (None,)
        return {"weight": ParamInfo((*lead, D), dtype, axes, init="ones")}

    def table() -> trees.Tree:
        return {"weight": ParamInfo((V, D), dtype, ("vocab", "embed"), contracting=-1)}

    infos = {
        "embed_tokens": table(),
        "layers": {
            "input_layernorm": norm(L),
            "self_attn": {
                "q_proj": kernel(D, NH, "embed", "heads", cfg.attention_bias),
                "k_proj": kernel(D, KH, "embed", "kv_heads", cfg.attention_bias),
                "v_proj": kernel(D, KH, "embed", "kv_heads", cfg.attention_bias),
                "o_proj": kernel(NH, D, "heads", "embed", cfg.attention_bias),
            },
            "post_attention_layernorm": norm(L),
            "mlp": {
                "gate_proj": kernel(D, F, "embed", "mlp", cfg.mlp_bias),
                "up_proj": kernel(D, F, "embed", "mlp", cfg.mlp_bias),
                "down_proj": kernel(F, D, "mlp", "embed", cfg.mlp_bias),
            },
        },
        "norm": norm(),
    }
    return infos if cfg.tie_word_embeddings else {**infos, "lm_head": table()}


def axis_counts(cfg: LlamaConfig) -> dict[str, int]:
    """How many heads the logical axes of heads hold."""
    return {"heads": cfg.num_attention_heads, "kv_heads": cfg.num_key_value_heads}


def hf_names(cfg: LlamaConfig, path: str) -> tuple[str, ...]:
    """Hugging Face name of each layer of the leaf or module at `path`; one name if not stacked."""
    if path.startswith("layers."):
        rest = path.removeprefix("layers.")
        return tuple(f"model.layers.{i}.{rest}" for i in range(cfg.num_hidden_layers))
    return (path,) if path.startswith("lm_head") else (f"model.{path}",)


def modules(cfg: LlamaConfig, infos: trees.Tree) -> dict[str, targets.AdaptableModule]:
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


class Cache(NamedTuple):
    """Keys and values of the positions so far, `[L, B, K, S, H]` each; slot s holds position s."""

    k: jax.Array
    v: jax.Array


def empty_cache(cfg: LlamaConfig, rows: int, length: int, dtype: Any) -> Cache:
    """A cache of `length` slots for each of `rows` rows."""
    shape = (cfg.num_hidden_layers, rows, cfg.num_key_value_heads, length, cfg.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def hidden(
    bound: trees.Tree,
    inputs: layers.Inputs,
    cfg: LlamaConfig,
    *,
    dtype: Any,
    scan_layers: bool,
    remat: bool,
    dropout: layers.Dropout | None = None,
) -> jax.Array:
    """The activations before the head, `[B, T, D]`, after the last norm.

    Args:
      bound: parameters from `params.bind`.
      inputs: tokens, positions and segments.
      cfg: the model.
      dtype: dtype of the activations.
      scan_layers: scan over the stack, or unroll it.
      remat: recompute every block in the backward pass.
      dropout: dropout on the adapters' inputs, None outside training.
    """
    angles = layers.rope_angles(inputs.positions_BT, np.asarray(cfg.inv_freq))

    def body(x_BTD: jax.Array, xs: tuple[trees.Tree, jax.Array]) -> tuple[jax.Array, None]:
        layer, index = xs
        layer_dropout = None if dropout is None else dropout.for_layer(index)
        attend = functools.partial(
            _attend, segments_BT=inputs.segment_ids_BT, angles=angles, cfg=cfg
        )
        return _block(x_BTD, layer, attend, cfg, layer_dropout)

    x_BTD = layers.embed(inputs.tokens_BT, bound["embed_tokens"], dtype)
    stack = (bound["layers"], jnp.arange(cfg.num_hidden_layers))
    x_BTD, _ = layers.run_stack(body, x_BTD, stack, scan=scan_layers, remat=remat)
    return layers.rms_norm(x_BTD, bound["norm"], cfg.rms_norm_eps)


def hidden_cached(
    bound: trees.Tree,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: Cache,
    cfg: LlamaConfig,
    *,
    dtype: Any,
) -> tuple[jax.Array, Cache]:
    """`hidden` for generation: reads the cache and writes the slots at `positions_BT`."""
    mask_BTS = layers.cache_mask(positions_BT, cache.k.shape[3])
    angles = layers.rope_angles(positions_BT, np.asarray(cfg.inv_freq))

    def body(
        carry: tuple[jax.Array, Cache], xs: tuple[trees.Tree, jax.Array]
    ) -> tuple[tuple[jax.Array, Cache], None]:
        x_BTD, cache = carry
        layer, index = xs
        attend = functools.partial(
            _attend_cached,
            cache=cache,
            index=index,
            positions_BT=positions_BT,
            mask_BTS=mask_BTS,
            angles=angles,
            cfg=cfg,
        )
        return _block(x_BTD, layer, attend, cfg, None), None

    x_BTD = layers.embed(tokens_BT, bound["embed_tokens"], dtype)
    # Carried, the cache is written in place; scanned over, all of it would be copied each token.
    stack = (bound["layers"], jnp.arange(cfg.num_hidden_layers))
    (x_BTD, cache), _ = jax.lax.scan(body, (x_BTD, cache), stack)
    return layers.rms_norm(x_BTD, bound["norm"], cfg.rms_norm_eps), cache


def head(bound: trees.Tree) -> params.Module:
    """The module that turns `hidden` into logits: weight [V, D], with the adapters of `lm_head`."""
    own, tied = bound.get(targets.HEAD), bound[targets.EMBEDDING]
    if own is not None and own.weight is not None:
        return own
    # The table itself, without the adapters that it has as an embedding.
    adapter = {name: None if own is None else getattr(own, name) for name in params.ADAPTER_FIELDS}
    return dataclasses.replace(tied, name=targets.HEAD, **adapter)


# (q_BTNH, k_BSKH, v_BSKH) before rotation -> (out_BTNH, what the stack collects)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Angles = tuple[jax.Array, jax.Array]


def _block(
    x_BTD: jax.Array,
    layer: trees.Tree,
    attend: Attend,
    cfg: LlamaConfig,
    dropout: layers.Dropout | None,
) -> tuple[jax.Array, Any]:
    """One pre-norm block; returns the activations and what `attend` gives besides its output."""
    with jax.named_scope("attention"):
        attn = layer["self_attn"]
        normed = layers.rms_norm(x_BTD, layer["input_layernorm"], cfg.rms_norm_eps)
        normed = attn["q_proj"].parallel.spread(normed)
        q, k, v = (
            einops.rearrange(
                layers.linear(normed, attn[name], dropout), "B T (N H) -> B T N H", H=cfg.head_dim
            )
            for name in ("q_proj", "k_proj", "v_proj")
        )
        out_BTNH, extra = attend(q, k, v)
        joined = einops.rearrange(out_BTNH, "B T N H -> B T (N H)")
        x_BTD = x_BTD + layers.linear(joined, attn["o_proj"], dropout)
        x_BTD = checkpoint_name(x_BTD, "after_attention")
    with jax.named_scope("mlp"):
        normed = layers.rms_norm(x_BTD, layer["post_attention_layernorm"], cfg.rms_norm_eps)
        x_BTD = x_BTD + layers.gated_mlp(normed, layer["mlp"], jax.nn.silu, dropout)
    return x_BTD, extra


def _attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array,
    angles: Angles,
    cfg: LlamaConfig,
) -> tuple[jax.Array, None]:
    q = checkpoint_name(layers.rope(q_BTNH, angles), "attention_query")
    k = checkpoint_name(layers.rope(k_BSKH, angles), "attention_key")
    v = checkpoint_name(v_BSKH, "attention_value")
    return attention.causal_attention(q, k, v, segments_BT, cfg.head_dim**-0.5), None


def _attend_cached(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    cache: Cache,
    index: jax.Array,
    positions_BT: jax.Array,
    mask_BTS: jax.Array,
    angles: Angles,
    cfg: LlamaConfig,
) -> tuple[jax.Array, Cache]:
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    cache = Cache(
        cache.k.at[index, rows, :, positions_BT].set(layers.rope(k_BTKH, angles)),
        cache.v.at[index, rows, :, positions_BT].set(v_BTKH),
    )
    q = layers.rope(q_BTNH, angles)
    k_BKSH, v_BKSH = cache.k[index], cache.v[index]
    return attention.cached_attention(q, k_BKSH, v_BKSH, mask_BTS, cfg.head_dim**-0.5), cache
