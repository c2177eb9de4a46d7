"""Qwen3 (dense): Llama's layers with a norm over each head of the queries and of the keys.

The size of the heads is a field of its own, and mostly not hidden_size / num_attention_heads.
"""

import functools
from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config
from purelora.models.families import qwen2

ARCHITECTURES = ("Qwen3ForCausalLM",)

layer_infos = functools.partial(blocks.pre_norm_infos, qk_norm=True)
block = blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; window settings, biases and `tie_word_embeddings` may be left out.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads(has_head_dim=True)
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        attention_bias=blocks.ATTENTION if reader.flag("attention_bias") else (),
        layer_kinds=qwen2.layer_kinds(reader, heads["head_dim"]),
    )
