"""How each GGUF architecture translates to Hugging Face names and settings: one row for each."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from purelora.core import errors


@dataclasses.dataclass(frozen=True)
class Arch:
    """How one GGUF architecture translates.

    Attributes:
      model_type: `model_type` of the Hugging Face config.
      architecture: its class name.
      implied: config keys that the architecture's name alone settles.
      top: GGUF names of the tensors outside the layers, without `.weight`, to Hugging Face's.
      layer: the same for the tensors of a layer, without `blk.N.`.
      biases: config keys that say whether all projections of a part of a layer have biases, with
        that part.
      permuted: the tensors whose rows are stored in the order of interleaved rotary embeddings,
        with the config key that holds their number of heads.
      settings: entries like those of `_CONFIG_KEYS` that only this architecture has.
      norm_offset: what is added to Hugging Face's weights of norms in these files.
      derived: from (path of the file, prefix of its metadata, config so far) to the config keys
        that llama.cpp computes from others. Raises ModelError for settings whose meaning in
        llama.cpp and in Hugging Face's model differs.
    """

    model_type: str
    architecture: str
    implied: Mapping[str, Any]
    top: Mapping[str, str]
    layer: Mapping[str, str]
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    permuted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: tuple[tuple[str, type, str], ...] = ()
    norm_offset: float = 0.0
    derived: Callable[[str, str, Mapping[str, Any]], dict[str, Any]] | None = None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp recognises Gemma 3 27B by its number of layers.
_GEMMA3_27B_LAYERS = 62


def _derive_gemma3(path: str, prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`query_pre_attn_scalar`: the head size H, but D / N in the 27B model."""
    scaling = config.get("rope_scaling")
    if scaling and scaling != {"rope_type": "linear", "factor": scaling.get("factor")}:
        # The released models have no other; what it would be for layers with a window is not clear.
        what, remedy = "is not read; only linear is", "use the model's safetensors folder instead"
        raise errors.ModelError(f"{path}: {prefix}.rope.scaling", scaling, what, remedy)
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    scalar = config.get("head_dim")
    if config.get("num_hidden_layers") == _GEMMA3_27B_LAYERS and width and heads:
        scalar = width // heads
    return {} if scalar is None else {"query_pre_attn_scalar": scalar}


ARCHS: Mapping[str, Arch] = {
    "llama": Arch(
        model_type="llama",
        architecture="LlamaForCausalLM",
        implied={"hidden_act": "silu"},
        top=_TOP,
        layer=_LAYER,
        biases={"attention_bias": "self_attn", "mlp_bias": "mlp"},
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
    "qwen2": Arch(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        implied={"hidden_act": "silu", "use_sliding_window": False},
        top=_TOP,
        layer=_LAYER,
    ),
    "qwen3": Arch(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        implied={"hidden_act": "silu", "use_sliding_window": False},
        top=_TOP,
        layer=_LAYER | _QK_NORMS,
        biases={"attention_bias": "self_attn"},
    ),
    "gemma3": Arch(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        # The last two are llama.cpp's constants, for files that do not state them.
        implied={
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 1e4,
        },
        top=_TOP,
        layer=_LAYER | _QK_NORMS | _SANDWICH_NORMS,
        biases={"attention_bias": "self_attn"},
        settings=(
            ("attention.sliding_window_pattern", int, "sliding_window_pattern"),
            ("rope.freq_base_swa", float, "rope_local_base_freq"),
            ("final_logit_softcapping", float, "final_logit_softcapping"),
        ),
        norm_offset=1.0,
        derived=_derive_gemma3,
    ),
}
