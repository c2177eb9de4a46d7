"""Qwen3-MoE: Qwen3's layers with a mixture of many small experts in place of the MLP.

Some layers may have a plain MLP (dense layers): those of `mlp_only_layers`, and with
`decoder_sparse_step` = n all layers but every n-th.
"""

import functools
from collections.abc import Mapping
from typing import Any

from purelora.models import blocks, hf_config

ARCHITECTURES = ("Qwen3MoeForCausalLM",)

layer_infos = functools.partial(blocks.pre_norm_infos, qk_norm=True)
block = blocks.pre_norm


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json; as in Qwen3 fields may be left out, and those that name dense layers.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    reader = hf_config.Reader(config, where)
    heads = reader.heads(has_head_dim=True)
    reader.stated("norm_topk_prob")
    experts = reader.experts(
        # Newer versions of transformers write the other name.
        reader.spelling("num_experts", "num_local_experts"),
        "moe_intermediate_size",
        is_normalised=reader.flag("norm_topk_prob"),
    )
    dense = _dense_layers(reader)
    sparse = tuple(i for i in range(reader.size("num_hidden_layers")) if i not in dense)
    mixed = (
        hf_config.Group("dense", dense, (("experts", None),)),
        hf_config.Group("sparse", sparse),
    )
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_act", "silu"),
        attention_bias=blocks.ATTENTION if reader.flag("attention_bias") else (),
        layer_kinds=reader.equal_layers(heads["head_dim"], _window(reader)),
        experts=experts if sparse else None,
        groups=mixed if dense and sparse else (),
    )


def _window(reader: hf_config.Reader) -> int | None:
    """The window of all layers: unlike in Qwen3, none of them is without."""
    if not reader.flag("use_sliding_window"):
        return None
    first = reader.get("max_window_layers")
    what = "is not supported: with use_sliding_window every layer of this family has a window"
    reader.check(first in (None, 0), "max_window_layers", first, what, "set it to 0")
    return reader.size("sliding_window")


def _dense_layers(reader: hf_config.Reader) -> tuple[int, ...]:
    count, step = reader.size("num_hidden_layers"), reader.size("decoder_sparse_step", absent=1)
    named = reader.get("mlp_only_layers")
    named = [] if named is None else named
    is_list = isinstance(named, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < count for i in named
    )
    reader.check(is_list, "mlp_only_layers", named, f"is not a list of layers below {count}")
    return tuple(i for i in range(count) if (i + 1) % step or (is_list and i in named))
