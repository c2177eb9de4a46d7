"""Adapters with every feature, and leaves as after some steps."""

from typing import Any

import numpy as np

from purelora.core import trees
from purelora.lora import adapters
from purelora.models import causal_lm

# Every feature that changes which tensors there are or what they are multiplied with.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "some layers": {"target_modules": r".*layers\.[02]\..*(q_proj|down_proj)"},
    "layers_to_transform": {"target_modules": ("q_proj", "up_proj"), "layers_to_transform": (1,)},
    "rank_pattern": {
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 32.0, "layers.1.self_attn.q_proj": 3.0},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 9}},
    "dora": {"use_dora": True, "target_modules": ("q_proj", "down_proj", "lm_head")},
    "dora in some layers": {"use_dora": True, "target_modules": r".*\.1\..*(v|up)_proj"},
    "head": {"target_modules": ("lm_head", "v_proj")},
    "embedding": {"target_modules": ("embed_tokens", "v_proj")},
    "norms": {"target_modules": ("v_proj",), "modules_to_save": ("input_layernorm",)},
    "tokens": {"target_modules": ("v_proj",), "trainable_token_indices": (5, 2)},
    "tokens and head": {
        "target_modules": ("v_proj", "lm_head"),
        "trainable_token_indices": (5, 2),
    },
    "all biases": {"target_modules": ("q_proj", "down_proj"), "bias": "all"},
    "own biases": {"target_modules": ("q_proj",), "bias": "lora_only"},
    "ia3": {"peft_type": "ia3", "target_modules": ("k_proj", "v_proj", "down_proj")},
    "ia3 in some layers": {
        "peft_type": "ia3",
        "target_modules": r".*layers\.[02]\..*(q|down)_proj",
        "modules_to_save": ("norm",),
    },
    "loha": {"peft_type": "loha", "target_modules": ("q_proj", "down_proj", "lm_head")},
    "loha of several ranks": {
        "peft_type": "loha",
        "target_modules": ("k_proj", "up_proj"),
        "layers_to_transform": (0, 1),
        "rank_pattern": {r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"k_proj": 3.0},
    },
}
UNTIED = {
    "saved head": {"target_modules": ("v_proj",), "modules_to_save": ("lm_head",)},
    "saved table": {"target_modules": ("v_proj",), "modules_to_save": ("embed_tokens",)},
}
# Those where a tied head makes a difference come with one too.
TIED = ("plain", "dora", "loha", "head", "embedding", "tokens", "tokens and head", "saved table")
CASES = [(name, False) for name in FEATURES | UNTIED] + [(name, True) for name in TIED]


def trained(m: causal_lm.CausalLM, base: trees.Tree) -> dict[str, np.ndarray]:
    """Leaves of everything that `m` trains, as after some steps; whole ones near the base's."""
    infos = trees.flatten(m.adapter_infos())
    rng = np.random.default_rng(3)
    flat_base = trees.flatten(base)
    found = {}
    for path, info in infos.items():
        noise = 0.2 * rng.standard_normal(info.shape).astype(np.float32)
        found[path] = noise + np.asarray(flat_base.get(path, np.float32(0)))
        if path.endswith("lora_magnitude"):
            found[path] = np.abs(noise) + 1
    for path, info in infos.items():  # The padding of ranks is zero.
        if "rank" in info.axes:
            target, shape = m.adaptation.targets[path.parent], [1] * len(info.shape)
            shape[0] = len(target.ranks)
            shape[info.axes.index("rank")] = target.r
            found[path] *= adapters.rank_mask(target).reshape(shape)
    return found
