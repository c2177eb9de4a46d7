"""Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2.

Pre-norm blocks with grouped-query attention, rotary positions and a gated SiLU MLP. All layers see
the whole context; attention and MLP may have biases.
"""

from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config

ARCHITECTURES = ("LlamaForCausalLM",)

layer_infos, block = blocks.pre_norm_infos, blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json.

    Fields that the file format itself leaves out when they have their usual value
    (`num_key_value_heads`, `head_dim`, `rope_theta`, biases, `tie_word_embeddings`) take the value
    that the format defines; every size must be there.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads(has_kv_heads=False)
    reader.unused(sliding_window=0)
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        attention_bias=blocks.ATTENTION if reader.flag("attention_bias") else (),
        mlp_bias=blocks.MLP if reader.flag("mlp_bias") else (),
        layer_kinds=reader.equal_layers(heads["head_dim"], absent_theta=10000.0),
    )
