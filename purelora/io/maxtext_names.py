"""What MaxText calls the parameters of Hugging Face's models, and how it keeps them.

    model.layers.7.self_attn.q_proj.weight         [N·H, D]       Hugging Face
    decoder.layers.self_attention.query.kernel     [D, L, N, H]   MaxText, scanned along axis 1
    decoder.layers_7.self_attention.query.kernel   [D, N, H]      MaxText, not scanned

Kernels are [*ins, *outs], the transpose of Hugging Face's with its dimensions split. What MaxText
computes differently lies in the weights, and `Change` takes it out again:

- where its attention does not scale scores, the kernel of queries holds the factor;
- where it rotates neighbouring pairs (Llama 3.1's rotation), queries and keys are in that order;
- Gemma's table holds the factor of the embeddings, and its norms hold the factor itself and not
  what it is more than one.

These are the rules of MaxText 0.2.5's own layers (`layers/attentions.py`, `models/*.py`); its
converter (`checkpoint_conversion/utils/param_mapping.py`) has the same names.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora import errors
from purelora.models import reading


class Leaf(NamedTuple):
    """A parameter of MaxText's.

    Attributes:
      name: dotted, within its layer or the model.
      ins: names of the dimensions that a product sums over; none for a vector.
      outs: names of the other dimensions.
      is_table: whether it is stored as Hugging Face has it, [outs, ins].
      has_experts: whether it is of all experts of a layer, [experts, *ins, *outs].
    """

    name: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    is_table: bool = False
    has_experts: bool = False

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Of one layer."""
        dims = self.outs + self.ins if self.is_table else self.ins + self.outs
        experts = ("experts",) if self.has_experts else ()
        return tuple(sizes[name] for name in experts + dims)

    def group_sizes(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of `outs` and of `ins`."""
        return tuple(sizes[n] for n in self.outs), tuple(sizes[n] for n in self.ins)


class Change(NamedTuple):
    """How MaxText's values differ from Hugging Face's beside their layout.

    Attributes:
      factor: MaxText's are so many times Hugging Face's,
      offset: and by so much more.
      is_interleaved: whether elements i and i + H/2 of each head are neighbours.
    """

    factor: float = 1.0
    offset: float = 0.0
    is_interleaved: bool = False

    def undone(self, values: np.ndarray) -> np.ndarray:
        """Hugging Face's values; the last dimension is that of a head where it matters.

        They are float32 where they are computed, and otherwise of the type that they had.
        """
        if self.is_interleaved:
            values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
        if self.factor == 1 and self.offset == 0:
            return values
        with np.errstate(all="ignore"):  # Who loads values looks whether they are finite.
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
    """A mixture of experts.

    Args:
      block: MaxText's name of it.
      gate: Hugging Face's name of the router.
      experts: Hugging Face's names of an expert's matrices, without its number, by MaxText's.
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
    """How MaxText keeps the models of one architecture.

    Attributes:
      leaves: the parameters of a layer by Hugging Face name, without `model.layers.N.`.
      scales_scores: whether its attention scales; otherwise the kernel of queries is scaled.
      roles: what the names of the parts of a block of several layers end with, for each of them.
      period: how many layers make a block that is scanned, each under a name of its own there.
    """

    leaves: Mapping[str, Leaf]
    scales_scores: bool
    roles: tuple[str, ...] = ("",)
    period: int = 1

    def layers(self, count: int, is_scanned: bool) -> list["Layer"]:
        """Where each of `count` layers lies."""
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
    """Where a layer of the model lies.

    Attributes:
      block: path of what holds it.
      role: what the names of its parts there end with.
      number: which of the stack it is, None if there is none.
      depth: how many layers the stack has.
    """

    block: str
    role: str
    number: int | None = None
    depth: int = 0

    def path(self, leaf: Leaf) -> str:
        """Of one of its parameters."""
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
    """The family of a config.json.

    Raises:
      ModelError: MaxText's checkpoints of its architecture are not read.
    """
    name = reading.architecture(config)
    if not isinstance(name, str) or name not in FAMILIES:
        what = "is an architecture whose MaxText checkpoints are not read"
        remedy = f"known: {', '.join(FAMILIES)}"
        raise errors.ModelError(f"{where}: architectures", name, what, remedy)
    return FAMILIES[name]


def sizes(cfg: reading.Config) -> dict[str, int]:
    """Of the dimensions by name."""
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
    name: str, of: Family, cfg: reading.Config, config: Mapping[str, Any], where: str
) -> Change:
    """How MaxText's values of the parameter `name` (of Hugging Face) differ.

    Args:
      name: its Hugging Face name.
      of: the family.
      cfg: the model's settings.
      config: the config.json that they come from.
      where: names it in messages.

    Raises:
      ModelError: MaxText scales scores otherwise than config.json says.
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


def _check_scale(cfg: reading.Config, where: str) -> None:
    """MaxText scales by the size of a head, and Gemma 3 27B by the width over the heads."""
    width = cfg.hidden_size // cfg.num_attention_heads
    if not any(math.isclose(cfg.attention_scale, n**-0.5) for n in (cfg.head_dim, width)):
        what = "is not how MaxText scales scores, which is by the size of a head"
        value = cfg.attention_scale**-2
        raise errors.ModelError(
            f"{where}: query_pre_attn_scalar", value, what, "is it the model's?"
        )


def _is_interleaved(of: Family, config: Mapping[str, Any], where: str) -> bool:
    """Llama 3.1's rotation has a class of its own in MaxText, and that one goes by pairs."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        what = "leaves open in which order MaxText keeps queries and keys"
        raise errors.ModelError(f"{where}: rope_type", kind, what, "convert it to Hugging Face's")
    return of is _LLAMA and kind == "llama3"
