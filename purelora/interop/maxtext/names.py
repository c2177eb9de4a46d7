"""MaxText's names and shapes for the parameters of Hugging Face's models.

    model.layers.7.self_attn.q_proj.weight         [N·H, D]       Hugging Face
    decoder.layers.self_attention.query.kernel     [D, L, N, H]   MaxText, scanned along axis 1
    decoder.layers_7.self_attention.query.kernel   [D, N, H]      MaxText, not scanned

A kernel is [*ins, *outs]: the transpose of Hugging Face's, with heads as dimensions of their own.
Some values differ too, because MaxText's layers compute differently. `Change` describes how:

- where attention does not scale the scores, the query kernel is multiplied by the scale;
- where rotary positions rotate neighbouring pairs (for Llama 3.1's scaled frequencies), the columns
  of the query and key kernels are in that order within each head;
- Gemma's embedding table is multiplied by the scale of the embeddings, and its norms store the
  whole factor, where Hugging Face stores the factor less 1.

Source: MaxText 0.2.5's layers (`layers/attentions.py`, `models/*.py`), whose names its converter
(`checkpoint_conversion/utils/param_mapping.py`) has too.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors
from purelora.models import hf_config


class Leaf(NamedTuple):
    """A parameter of MaxText's models; its dimensions are named by the keys of `sizes`.

    Attributes:
      name: its dotted path within its layer, or within the model if it is in no layer.
      ins: the dimensions that a matmul sums over; empty for a vector.
      outs: the other dimensions.
      is_table: whether it is stored as [*outs, *ins], as Hugging Face's is.
      has_experts: whether it holds all experts of a layer, [experts, *ins, *outs].
    """

    name: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    is_table: bool = False
    has_experts: bool = False

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one layer, as it is stored."""
        dims = self.outs + self.ins if self.is_table else self.ins + self.outs
        experts = ("experts",) if self.has_experts else ()
        return tuple(sizes[name] for name in experts + dims)

    def group_sizes(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of `outs` and of `ins`."""
        return tuple(sizes[n] for n in self.outs), tuple(sizes[n] for n in self.ins)


class Change(NamedTuple):
    """How MaxText's values differ from Hugging Face's: `factor · value + offset`, and their order.

    Attributes:
      factor: by what Hugging Face's values are multiplied.
      offset: what is then added.
      is_interleaved: whether elements i and i + H/2 of each head are stored as neighbours.
    """

    factor: float = 1.0
    offset: float = 0.0
    is_interleaved: bool = False

    def undone(self, values: np.ndarray) -> np.ndarray:
        """Hugging Face's values for MaxText's `values`, in the same shape.

        Interleaved ones are `[..., H]`, with a head as the last dimension. The result is float32 if
        there is a factor or an offset, else of the dtype of `values`.
        """
        if self.is_interleaved:
            values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
        if self.factor == 1 and self.offset == 0:
            return values
        with np.errstate(all="ignore"):  # `io.load` refuses values that are not finite.
            changed = (values.astype(np.float32) - self.offset) / self.factor
        return changed.astype(np.float32)


_UNCHANGED = Change()
_QUERY, _KEY = "self_attn.q_proj", "self_attn.k_proj"
_HEADS, _KV_HEADS = ("heads", "head_dim"), ("kv_heads", "head_dim")

_TABLE = Leaf("token_embedder.embedding", ("embed",), ("vocab",), is_table=True)
TOP: Mapping[str, Leaf] = {
    "model.embed_tokens.weight": _TABLE,
    "model.norm.weight": Leaf("decoder.decoder_norm.scale", (), ("embed",)),
    "lm_head.weight": Leaf("decoder.logits_dense.kernel", ("embed",), ("vocab",)),
}
_MODULES: Mapping[str, Leaf] = {
    "self_attn.q_proj.weight": Leaf("self_attention.query.kernel", ("embed",), _HEADS),
    "self_attn.k_proj.weight": Leaf("self_attention.key.kernel", ("embed",), _KV_HEADS),
    "self_attn.v_proj.weight": Leaf("self_attention.value.kernel", ("embed",), _KV_HEADS),
    "self_attn.o_proj.weight": Leaf("self_attention.out.kernel", _HEADS, ("embed",)),
    "mlp.gate_proj.weight": Leaf("mlp.wi_0.kernel", ("embed",), ("mlp",)),
    "mlp.up_proj.weight": Leaf("mlp.wi_1.kernel", ("embed",), ("mlp",)),
    "mlp.down_proj.weight": Leaf("mlp.wo.kernel", ("mlp",), ("embed",)),
}
_ATTENTION = {name: leaf for name, leaf in _MODULES.items() if name.startswith("self_attn.")}
_BIASES: Mapping[str, Leaf] = {
    "self_attn.q_proj.bias": Leaf("self_attention.query.bias", (), _HEADS),
    "self_attn.k_proj.bias": Leaf("self_attention.key.bias", (), _KV_HEADS),
    "self_attn.v_proj.bias": Leaf("self_attention.value.bias", (), _KV_HEADS),
}
_HEAD_NORMS: Mapping[str, Leaf] = {
    "self_attn.q_norm.weight": Leaf("self_attention.query_norm.scale", (), ("head_dim",)),
    "self_attn.k_norm.weight": Leaf("self_attention.key_norm.scale", (), ("head_dim",)),
}
_TWO_NORMS: Mapping[str, Leaf] = {
    "input_layernorm.weight": Leaf("pre_self_attention_layer_norm.scale", (), ("embed",)),
    "post_attention_layernorm.weight": Leaf("post_self_attention_layer_norm.scale", (), ("embed",)),
}
_FOUR_NORMS: Mapping[str, Leaf] = {
    "input_layernorm.weight": Leaf("pre_self_attention_norm.scale", (), ("embed",)),
    "post_attention_layernorm.weight": Leaf("post_self_attention_norm.scale", (), ("embed",)),
    "pre_feedforward_layernorm.weight": Leaf("pre_ffw_norm.scale", (), ("embed",)),
    "post_feedforward_layernorm.weight": Leaf("post_ffw_norm.scale", (), ("embed",)),
}


def _mixture(block: str, gate: str, experts: Mapping[str, str]) -> dict[str, Leaf]:
    """The parameters of a mixture of experts, by Hugging Face name.

    Args:
      block: MaxText's name of the mixture.
      gate: Hugging Face's name of the router.
      experts: from MaxText's name of an expert's matrix to Hugging Face's, without the number of
        the expert.
    """
    ins = {"wi_0": "embed", "wi_1": "embed", "wo": "expert_mlp"}
    outs = {"wi_0": "expert_mlp", "wi_1": "expert_mlp", "wo": "embed"}
    return {
        gate: Leaf(f"{block}.gate.kernel", ("embed",), ("experts",)),
        **{
            name: Leaf(f"{block}.{own}", (ins[own],), (outs[own],), has_experts=True)
            for own, name in experts.items()
        },
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """How MaxText stores the models of one architecture.

    Attributes:
      leaves: the parameters of a layer by Hugging Face name, without `model.layers.N.`.
      scales_scores: whether attention scales the scores; if not, the query kernel is scaled.
      roles: suffixes of the parts of one MaxText layer that holds several of Hugging Face's, one
        for each of these (Gemma 2: `_local` and `_global`).
      period: how many layers, each under a name of its own, make the block that is scanned
        (Gemma 3: five local ones and a global one).
    """

    leaves: Mapping[str, Leaf]
    scales_scores: bool
    roles: tuple[str, ...] = ("",)
    period: int = 1

    def layers(self, count: int, is_scanned: bool) -> list["Layer"]:
        """Where each of the `count` layers of a model is stored."""
        roles = self.roles
        if not is_scanned:
            return [
                Layer(f"decoder.layers_{i // len(roles)}", roles[i % len(roles)])
                for i in range(count)
            ]
        if self.period == 1:
            depth = count // len(roles)
            return [
                Layer("decoder.layers", roles[i % len(roles)], i // len(roles), depth)
                for i in range(count)
            ]
        depth = count // self.period
        stacked = depth * self.period
        return [
            Layer(f"decoder.layers.layers_{i % self.period}", "", i // self.period, depth)
            if i < stacked
            else Layer(f"decoder.layers_remainder.layers_{i - stacked}", "")
            for i in range(count)
        ]


class Layer(NamedTuple):
    """Where a layer of a model is stored.

    Attributes:
      block: path of the MaxText layer or block that holds it.
      role: suffix of the names of its parts there.
      number: its position in a stack of layers; None if it is not in a stack.
      depth: how many layers the stack has; 0 without one.
    """

    block: str
    role: str
    number: int | None = None
    depth: int = 0

    def path(self, leaf: Leaf) -> str:
        """The path of one of its parameters in MaxText's model."""
        part, _, rest = leaf.name.partition(".")
        return f"{self.block}.{part}{self.role}.{rest}"


_LLAMA = Family({**_MODULES, **_TWO_NORMS}, scales_scores=False)
_QWEN = Family({**_MODULES, **_BIASES, **_HEAD_NORMS, **_TWO_NORMS}, scales_scores=True)
_MIXTRAL_EXPERTS = _mixture(
    "MoeBlock_0",
    "block_sparse_moe.gate.weight",
    {
        "wi_0": "block_sparse_moe.experts.w1.weight",
        "wi_1": "block_sparse_moe.experts.w3.weight",
        "wo": "block_sparse_moe.experts.w2.weight",
    },
)
_QWEN_EXPERTS = _mixture(
    "moe_block",
    "mlp.gate.weight",
    {
        "wi_0": "mlp.experts.gate_proj.weight",
        "wi_1": "mlp.experts.up_proj.weight",
        "wo": "mlp.experts.down_proj.weight",
    },
)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": Family(
        {**_ATTENTION, **_TWO_NORMS, **_MIXTRAL_EXPERTS}, scales_scores=False
    ),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": Family(
        {**_ATTENTION, **_BIASES, **_HEAD_NORMS, **_TWO_NORMS, **_QWEN_EXPERTS}, scales_scores=True
    ),
    "Gemma2ForCausalLM": Family(
        {**_MODULES, **_FOUR_NORMS}, scales_scores=False, roles=("_local", "_global")
    ),
    "Gemma3ForCausalLM": Family(
        {**_MODULES, **_HEAD_NORMS, **_FOUR_NORMS}, scales_scores=True, period=6
    ),
}


def family(config: Mapping[str, Any], where: str) -> Family:
    """How MaxText stores the model of a config.json; `where` names that file in messages.

    Raises:
      ModelError: no family is known for the architecture.
    """
    name = hf_config.architecture(config)
    if name is None or name not in FAMILIES:
        what = "is an architecture whose MaxText checkpoints are not read"
        remedy = f"known: {', '.join(FAMILIES)}"
        raise errors.ModelError(f"{where}: architectures", name, what, remedy)
    return FAMILIES[name]


def sizes(cfg: hf_config.Config) -> dict[str, int]:
    """Sizes of the dimensions by the names that `Leaf` uses."""
    experts = {}
    if cfg.experts is not None:
        experts = {"experts": cfg.experts.count, "expert_mlp": cfg.experts.intermediate_size}
    return {
        **experts,
        "embed": cfg.hidden_size,
        "mlp": cfg.intermediate_size,
        "heads": cfg.num_attention_heads,
        "kv_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "vocab": cfg.vocab_size,
    }


def change(
    name: str, of: Family, cfg: hf_config.Config, config: Mapping[str, Any], where: str
) -> Change:
    """How MaxText's values of a parameter differ from Hugging Face's.

    Args:
      name: Hugging Face name of the parameter.
      of: how MaxText stores the model.
      cfg: the model's settings.
      config: the config.json that they come from.
      where: the name of that file, for messages.

    Raises:
      ModelError: config.json asks for a scale of the scores that MaxText does not use, or for a
        rotation with which the order of queries and keys is not known.
    """
    module = name.rpartition(".")[0]
    if name == "model.embed_tokens.weight":
        return Change(factor=cfg.embedding_scale)
    if module.endswith("norm"):
        return Change(offset=cfg.norm_offset)
    is_query = module.endswith(_QUERY)
    if not (is_query or module.endswith(_KEY)):
        return _UNCHANGED
    factor = 1.0
    if is_query and of.scales_scores:
        _check_scale(cfg, where)
    elif is_query:
        factor = cfg.attention_scale
    return Change(factor=factor, is_interleaved=_is_interleaved(of, config, where))


def _check_scale(cfg: hf_config.Config, where: str) -> None:
    """Raises ModelError unless MaxText scales the scores so: by H, or (Gemma 3 27B) by D / N."""
    width = cfg.hidden_size // cfg.num_attention_heads
    if not any(math.isclose(cfg.attention_scale, n**-0.5) for n in (cfg.head_dim, width)):
        what = "is not how MaxText scales scores, which is by the size of a head"
        value = cfg.attention_scale**-2
        raise errors.ModelError(
            f"{where}: query_pre_attn_scalar", value, what, "is it the model's?"
        )


def _is_interleaved(of: Family, config: Mapping[str, Any], where: str) -> bool:
    """Whether neighbouring elements are rotated, as by MaxText's class for Llama 3.1's rotation."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        what = "leaves open in which order MaxText keeps queries and keys"
        raise errors.ModelError(f"{where}: rope_type", kind, what, "convert it to Hugging Face's")
    return of is _LLAMA and kind == "llama3"
