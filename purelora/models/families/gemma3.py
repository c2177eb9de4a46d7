"""Gemma 3, its text model: Gemma 2's layers without soft caps, with norms of queries and keys.

Five layers see a sliding window, the sixth everything, and so on; what is left over at the end sees
the window. The two kinds rotate by different thetas.
"""

import functools
from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config, hf_multimodal
from purelora.models.families import gemma2

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

layer_infos = functools.partial(blocks.sandwich_infos, qk_norm=True)
block = blocks.sandwich

# Names of the field that holds the number of layers from one that sees everything to the next.
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
# What the files of models with images leave out of the nested config.
_ABSENT = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json.

    What the format defines where it is left out: the head is the embedding, no biases, no soft
    caps. The kinds of the layers must be there as `layer_types` or `sliding_window_pattern`, and
    both thetas. In the config nested in that of a model with images more may be left out.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    text = hf_multimodal.text_of(config, where, _ABSENT)
    reader = hf_config.Reader(text.fields, text.where)
    heads = reader.heads(has_head_dim=True)
    head_dim = heads["head_dim"]
    kinds = {
        hf_config.FULL: hf_config.Kind(reader.nested_rope(hf_config.FULL, "rope_theta", head_dim)),
        hf_config.SLIDING: hf_config.Kind(
            reader.nested_rope(hf_config.SLIDING, "rope_local_base_freq", head_dim),
            reader.size("sliding_window"),
        ),
    }
    return reader.config(
        **heads,
        **gemma2.settings(reader),
        layer_kinds=tuple(kinds[name] for name in _layer_types(reader)),
        prefix=text.prefix,
        is_tied=True,
    )


def _layer_types(reader: hf_config.Reader) -> list[str]:
    count, pattern = reader.size("num_hidden_layers"), 1
    if reader.get("layer_types") is None:
        pattern = reader.size(reader.spelling(*_PATTERNS))
    types = [hf_config.SLIDING if (i + 1) % pattern else hf_config.FULL for i in range(count)]
    return list(reader.layer_types(types))
