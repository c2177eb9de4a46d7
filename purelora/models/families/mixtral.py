"""Mixtral: Mistral's layers with a mixture of experts in place of the MLP.

A token goes to its best two experts, whose routing weights sum to 1.
"""

from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config, hf_layout

ARCHITECTURES = ("MixtralForCausalLM",)

layer_infos, block = blocks.pre_norm_infos, blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; without `sliding_window` a token sees all before it.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads()
    window = None if reader.get("sliding_window") is None else reader.size("sliding_window")
    count = reader.spelling("num_local_experts", "num_experts")
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        layer_kinds=reader.equal_layers(heads["head_dim"], window),
        experts=reader.experts(count, "intermediate_size", files=hf_layout.MIXTRAL),
    )
