"""Reads a config.json of Gemma 4."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from purelora.models import blocks, hf_config, hf_layout, hf_multimodal

# The fields that may differ in layers with full attention (`per_layer_config` may state others).
_OWN_FIELDS = ("head_dim", "num_key_value_heads")
_PATTERN = 6
_ROPES = "rope_parameters"


def from_hf(config: Mapping[str, Any], where: str) -> hf_config.Config:
    """Reads a config.json.

    Fields that may be left out, with the meaning that the format gives to this: a head that is tied
    to the embedding; no biases, logit softcapping, experts, KV sharing, `attention_k_eq_v` or
    double-wide MLPs; and full attention in every sixth layer. The last layer always has full
    attention. The head size of layers with full attention must be stated, as `global_head_dim` or
    in `per_layer_config`.

    Raises:
      ModelError: a missing or wrong field; all of them in one error.
    """
    text = hf_multimodal.text_of(config, where, {})
    reader = hf_config.Reader(text.fields, text.where)
    heads = reader.heads(has_head_dim=True)
    types = _layer_types(reader)
    # With "vision" only tokens of images attend both ways; text stays causal.
    if reader.get("use_bidirectional_attention") != "vision":
        reader.unused(use_bidirectional_attention=None)
    full = _full_heads(reader, types, heads)
    kinds = {
        hf_config.FULL: hf_config.Kind(
            reader.nested_rope(hf_config.FULL, _ROPES, full["head_dim"])
        ),
        hf_config.SLIDING: hf_config.Kind(
            reader.nested_rope(hf_config.SLIDING, _ROPES, heads["head_dim"]),
            reader.size("sliding_window"),
        ),
    }
    has_softcap = reader.get("final_logit_softcapping") is not None
    return reader.config(
        **heads,
        hidden_act=reader.choice("hidden_activation", "gelu_pytorch_tanh"),
        attention_bias=blocks.ATTENTION if reader.flag("attention_bias") else (),
        attention_scale=1.0,
        final_softcap=reader.positive("final_logit_softcapping") if has_softcap else None,
        embedding_scale=math.sqrt(reader.size("hidden_size")),
        layer_kinds=tuple(kinds[name] for name in types),
        layer_inputs=_layer_inputs(reader),
        experts=_experts(reader),
        groups=_groups(reader, types, full),
        prefix=text.prefix,
        is_tied=True,
    )


def _layer_types(reader: hf_config.Reader) -> list[str]:
    count = reader.size("num_hidden_layers")
    absent = [hf_config.SLIDING if (i + 1) % _PATTERN else hf_config.FULL for i in range(count)]
    return [*reader.layer_types(absent)[:-1], hf_config.FULL]


def _full_heads(
    reader: hf_config.Reader, types: Sequence[str], heads: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `Config` in which the layers with full attention differ from the others."""
    keys_are_values = reader.flag("attention_k_eq_v")
    listed = reader.get("per_layer_config")
    if listed is not None:
        own = _one_of_all(reader, listed, types)
    else:
        own = {"head_dim": reader.size("global_head_dim")}
        if keys_are_values and reader.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = reader.get("num_global_key_value_heads")
    mine = hf_config.Reader({**reader.fields, **own}, f"{reader.where}: layers that see everything")
    found = mine.heads(has_head_dim=True)
    reader.problems += [p for p in mine.problems if p not in reader.problems]
    return {name: found[name] for name in _OWN_FIELDS} | {"keys_are_values": keys_are_values}


def _one_of_all(reader: hf_config.Reader, listed: Any, types: Sequence[str]) -> dict[str, Any]:
    """The entries of `per_layer_config`, which must be those of the layers with full attention.

    They must all be the same; otherwise a problem is noted, and the result is {}.
    """
    full = [str(i) for i, name in enumerate(types) if name == hf_config.FULL]
    what = f"is not the same for the layers {', '.join(full)}, and for them alone"
    is_known = isinstance(listed, Mapping) and all(isinstance(v, Mapping) for v in listed.values())
    entries = [dict(entry) for entry in listed.values()] if is_known else []
    # As text: True is 1 otherwise.
    alike = len({str(sorted(entry.items())) for entry in entries}) == 1
    good = is_known and alike and sorted(listed) == sorted(full)
    reader.check(good, "per_layer_config", listed, what)
    if not good:
        return {}
    unknown = [name for name in entries[0] if name not in _OWN_FIELDS]
    reader.check(not unknown, "per_layer_config", unknown, "is not supported by this family")
    return entries[0]


def _layer_inputs(reader: hf_config.Reader) -> hf_config.LayerInputs | None:
    size = reader.size("hidden_size_per_layer_input", least=0)
    if not size:
        return None
    rows, tokens = reader.size("vocab_size_per_layer_input"), reader.size("vocab_size")
    what = f"is less than vocab_size = {tokens}"
    reader.check(rows >= tokens, "vocab_size_per_layer_input", rows, what)
    return hf_config.LayerInputs(size, rows)


def _experts(reader: hf_config.Reader) -> hf_config.Experts | None:
    count = reader.get("num_experts")
    if not reader.flag("enable_moe_block"):
        reader.check(not count, "num_experts", count, "does not go with enable_moe_block = False")
        return None
    return reader.experts(
        "num_experts", "moe_intermediate_size", per_token="top_k_experts", files=hf_layout.FUSED
    )


def _groups(
    reader: hf_config.Reader, types: Sequence[str], full: Mapping[str, Any]
) -> tuple[hf_config.Group, ...]:
    """Groups the layers by kind (sliding window or full) and by whether they share keys, values."""
    shared = reader.size("num_kv_shared_layers", absent=0, least=0)
    first = max(len(types) - shared, 0)
    lacking = sorted(set(types) - set(types[:first]))
    what = f"leaves no {' and no '.join(lacking)} layer with keys and values of its own"
    reader.check(not lacking, "num_kv_shared_layers", shared, what)
    wide = 2 if reader.flag("use_double_wide_mlp") else 1
    sharing = {
        "shares_keys": True, "intermediate_size": wide * reader.size("intermediate_size"),
    }  # fmt: skip
    found = []
    for name, kind, own in (("sliding", hf_config.SLIDING, {}), ("full", hf_config.FULL, full)):
        for suffix, more, numbers in (
            ("", {}, range(first)), ("_shared", sharing, range(first, len(types))),
        ):  # fmt: skip
            chosen = tuple(i for i in numbers if types[i] == kind)
            changes = tuple({**own, **more}.items())
            found += [hf_config.Group(name + suffix, chosen, changes)] if chosen else []
    return tuple(found)
