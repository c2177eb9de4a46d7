"""Mistral 7B and NeMo: Llama's layers, all of them with a sliding window.

Later files have null for `sliding_window`: then all layers see the whole context.
"""

from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config

ARCHITECTURES = ("MistralForCausalLM",)

layer_infos, block = blocks.pre_norm_infos, blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; `sliding_window` must be there, if only as null.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads()
    window = reader.size("sliding_window") if reader.stated("sliding_window") else None
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        layer_kinds=reader.equal_layers(heads["head_dim"], window),
    )
