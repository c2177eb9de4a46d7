"""Mixtral: Mistral's layers with a mixture of experts in place of the MLP.

A token goes to its best two experts, whose factors sum to 1.
"""

from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, reading, storage

ARCHITECTURES = ("MixtralForCausalLM",)

layer_infos, block = blocks.pre_norm_infos, blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> reading.Config:
    """Reads a config.json; without `sliding_window` a token sees all before it.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = reading.Reader(config, where)
    heads = reader.heads()
    reader.unused(layer_types=None, partial_rotary_factor=1)
    window = None if config.get("sliding_window") is None else reader.size("sliding_window")
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        layer_kinds=reader.equal_layers(heads["head_dim"], window),
        experts=reader.experts("num_local_experts", "intermediate_size", files=storage.MIXTRAL),
    )
