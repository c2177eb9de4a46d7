"""Qwen2 and Qwen2.5: Llama's layers with biases on the projections of queries, keys and values.

With `use_sliding_window` the layers from `max_window_layers` on see a window only; the published
models leave that off. Long context is yarn's.
"""

from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config

ARCHITECTURES = ("Qwen2ForCausalLM",)

layer_infos, block = blocks.pre_norm_infos, blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; `head_dim`, window settings and `tie_word_embeddings` may be left out.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads()
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        attention_bias=("q_proj", "k_proj", "v_proj"),
        layer_kinds=layer_kinds(reader, heads["head_dim"]),
    )


def layer_kinds(reader: hf_config.Reader, head_dim: int) -> tuple[hf_config.Kind, ...]:
    """How the layers of a Qwen model attend, by `layer_types` or the older fields."""
    count, full = reader.size("num_hidden_layers"), hf_config.Kind(reader.one_rope(head_dim))
    absent = [hf_config.FULL] * count
    has_window = reader.flag("use_sliding_window")
    if has_window and reader.get("layer_types") is None:
        first = reader.size("max_window_layers", least=0)
        absent = [hf_config.FULL if i < first else hf_config.SLIDING for i in range(count)]
    types = reader.layer_types(absent)
    if hf_config.SLIDING not in types:
        return (full,) * count
    reader.check(has_window, "use_sliding_window", False, "does not go with these layer_types")
    sliding = hf_config.Kind(full.rope, reader.size("sliding_window"))
    return tuple(sliding if name == hf_config.SLIDING else full for name in types)
