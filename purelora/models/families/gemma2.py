"""Gemma 2: norms before and after attention and MLP, and soft caps on scores and logits.

Every second layer, from the first on, sees a sliding window. The embeddings are multiplied by the
root of their width, and the stored weights of the norms are one less than their factors.
"""

import math
from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config

ARCHITECTURES = ("Gemma2ForCausalLM",)

layer_infos, block = blocks.sandwich_infos, blocks.sandwich


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json.

    What the format defines where it is left out: the head is the embedding, no biases, and the
    order of the layers. The window must be there, and the soft caps, if only as null.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads(has_head_dim=True)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.stated(name)
    full = hf_config.Kind(reader.one_rope(heads["head_dim"]))
    sliding = hf_config.Kind(full.rope, reader.size("sliding_window"))
    count = reader.size("num_hidden_layers")
    absent = [hf_config.FULL if i % 2 else hf_config.SLIDING for i in range(count)]
    types = reader.layer_types(absent)
    return reader.config(
        **heads,
        **settings(reader),
        attn_softcap=_softcap(reader, "attn_logit_softcapping"),
        layer_kinds=tuple(sliding if name == hf_config.SLIDING else full for name in types),
        is_tied=True,
    )


def settings(reader: hf_config.Reader) -> dict[str, Any]:
    """What this generation and the next have in common."""
    return {
        "hidden_act": reader.choice("hidden_activation", "gelu_pytorch_tanh"),
        "attention_bias": blocks.ATTENTION if reader.flag("attention_bias") else (),
        "attention_scale": reader.positive("query_pre_attn_scalar") ** -0.5,
        "final_softcap": _softcap(reader, "final_logit_softcapping"),
        "embedding_scale": math.sqrt(reader.size("hidden_size")),
        "norm_offset": 1.0,
    }


def _softcap(reader: hf_config.Reader, name: str) -> float | None:
    return None if reader.get(name) is None else reader.positive(name)
