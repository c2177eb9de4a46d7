"""Adapters of a tiny two-layer Llama, in memory and as PEFT folders, for the tests of io.peft."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from purelora.interop.peft import adapter_config, artefact
from purelora.interop.peft import files as peft_files

WIDTH, INNER, VOCAB, LAYERS = 16, 24, 32, 2
# Rows and columns of each linear module.
LINEAR = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (8, WIDTH),
    "self_attn.v_proj": (8, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
NAMES = (
    "model.embed_tokens",
    *(f"model.layers.{i}.{part}" for i in range(LAYERS) for part in (*LINEAR, *NORMS)),
    "model.norm",
    "lm_head",
)
# What PEFT writes into adapter_config.json, as little as may be there.
MINIMAL = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

Modules = dict[str, dict[str, np.ndarray]]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def linear(*parts: str, r: int = 4, layers: tuple[int, ...] = (0, 1)) -> Modules:
    """LoRA of linear modules in some layers."""
    return {
        f"model.layers.{i}.{part}": {
            "lora_A": draw(r, LINEAR[part][1], seed=i),
            "lora_B": draw(LINEAR[part][0], r, seed=i),
        }
        for part in parts
        for i in layers
    }


def config(**changes: Any) -> adapter_config.AdapterConfig:
    given = {"r": 4, "lora_alpha": 8, "target_modules": ("q_proj",)} | changes
    return adapter_config.AdapterConfig(**given)


def with_kind(modules: Modules, kind: str, *shape: int) -> Modules:
    """The same modules, each with one more tensor."""
    return {name: kinds | {kind: draw(*shape, seed=3)} for name, kinds in modules.items()}


EMBEDDING_LORA: Modules = {
    "model.embed_tokens": {
        "lora_embedding_A": draw(4, VOCAB),
        "lora_embedding_B": draw(WIDTH, 4),
        "base_weight": draw(VOCAB, WIDTH),
    }
}
HEAD_LORA: Modules = {"lm_head": {"lora_A": draw(4, WIDTH), "lora_B": draw(VOCAB, 4)}}
Q = linear("self_attn.q_proj")
FULL = {
    "lm_head": {"weight": draw(VOCAB, WIDTH, seed=1)},
    "model.embed_tokens": {"weight": draw(VOCAB, WIDTH, seed=2)},
    "model.norm": {"weight": draw(WIDTH)},
}
Q_BIASES = with_kind(Q, "bias", WIDTH)
K_BIASES = {f"model.layers.{i}.self_attn.k_proj": {"bias": draw(8, seed=i)} for i in range(LAYERS)}
OTHER_BIASES = K_BIASES | {
    f"model.layers.{i}.self_attn.{part}": {"bias": draw(size, seed=i)}
    for part, size in (("o_proj", WIDTH), ("v_proj", 8))
    for i in range(LAYERS)
}
TOKENS: Modules = {"model.embed_tokens": {"trainable_tokens": draw(2, WIDTH)}}

# One adapter for each feature: its config and its tensors.
CASES: Mapping[str, tuple[adapter_config.AdapterConfig, Modules]] = {
    "lora": (
        config(target_modules=("down_proj", "q_proj"), lora_alpha=7.5, lora_dropout=0.1),
        linear("self_attn.q_proj", "mlp.down_proj"),
    ),
    "regex": (config(target_modules=r".*\.(q|k)_proj"), Q | linear("self_attn.k_proj")),
    "all-linear": (config(target_modules="all-linear"), linear(*LINEAR)),
    "patterns": (
        config(
            target_modules=("k_proj", "q_proj", "v_proj"),
            rank_pattern={"k_proj": 2, "layers.1.self_attn.q_proj": 3},
            alpha_pattern={r"^model\.layers\.0.*\.v_proj": 32.0},
        ),
        linear("self_attn.k_proj", r=2)
        | linear("self_attn.q_proj", layers=(0,))
        | linear("self_attn.q_proj", layers=(1,), r=3)
        | linear("self_attn.v_proj"),
    ),
    "layers": (
        config(layers_to_transform=(1,), layers_pattern=("layers",)),
        linear("self_attn.q_proj", layers=(1,)),
    ),
    "exclude": (
        config(exclude_modules=("layers.0.self_attn.q_proj",)),
        linear("self_attn.q_proj", layers=(1,)),
    ),
    "rslora": (config(use_rslora=True), Q),
    "gaussian": (config(init_lora_weights="gaussian"), Q),
    "eva": (config(init_lora_weights="eva"), Q),
    "dora": (config(kind="dora"), with_kind(Q, "lora_magnitude_vector", WIDTH)),
    "save": (config(modules_to_save=tuple(sorted(FULL))), Q | FULL),
    "save with bias": (
        config(modules_to_save=tuple(K_BIASES)),
        Q | with_kind(K_BIASES, "weight", 8, WIDTH),
    ),
    "save tied": (
        config(modules_to_save=("model.embed_tokens",), ensure_weight_tying=True),
        Q | {"model.embed_tokens": FULL["model.embed_tokens"]},
    ),
    "tokens": (config(trainable_token_indices={"embed_tokens": (5, 3)}), Q | TOKENS),
    "tokens of both": (
        config(trainable_token_indices={"embed_tokens": (5, 3), "lm_head": (4,)}),
        Q | TOKENS | {"lm_head": {"trainable_tokens": draw(1, WIDTH)}},
    ),
    "tokens tied": (
        # PEFT stores the rows once.
        config(trainable_token_indices={"embed_tokens": (5, 3), "lm_head": (5, 3)}),
        Q | TOKENS,
    ),
    "embedding and head": (
        config(target_modules=("embed_tokens", "lm_head")),
        EMBEDDING_LORA | with_kind(HEAD_LORA, "base_weight", VOCAB, WIDTH),
    ),
    "embedding tied": (
        config(target_modules=("embed_tokens", "q_proj"), ensure_weight_tying=True),
        Q | EMBEDDING_LORA,
    ),
    "embedding dora": (
        config(target_modules=("embed_tokens",), kind="dora"),
        with_kind(EMBEDDING_LORA, "lora_magnitude_vector", WIDTH),
    ),
    "bias all": (config(bias="all"), Q_BIASES | OTHER_BIASES),
    "bias lora_only": (config(bias="lora_only"), Q_BIASES),
}


def case(
    name: str, dtype: Any = np.float32, fingerprint: str | None = "f" * 64
) -> artefact.Adapter:
    """One of `CASES` as an adapter of another element type."""
    settings, modules = CASES[name]
    cast = {m: {k: a.astype(dtype) for k, a in kinds.items()} for m, kinds in modules.items()}
    return artefact.Adapter("memory", settings, cast, fingerprint)


def keys_of(modules: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Tensors by the keys of a PEFT file, for kinds that lie directly under their module."""
    ends = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    return {
        f"base_model.model.{module}.{ends.get(kind, kind)}": array.copy()
        for module, kinds in modules.items()
        for kind, array in kinds.items()
    }


def write_raw(
    folder: Any, data: object, tensors: Mapping[str, np.ndarray], metadata: Any = None
) -> str:
    """A folder with any config and any tensors; returns its path."""
    folder.mkdir(exist_ok=True)
    (folder / peft_files.CONFIG).write_text(json.dumps(data), encoding="utf-8")
    safetensors.numpy.save_file(dict(tensors), folder / peft_files.WEIGHTS, metadata)
    return str(folder)


def write_minimal(
    folder: Any,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    **changes: Any,
) -> str:
    """A sound little folder with LoRA on q_proj, with changes to its tensors and its config."""
    tensors = keys_of(Q)
    change(tensors)
    return write_raw(folder, MINIMAL | changes, tensors)


def assert_same(found: artefact.Adapter, wanted: artefact.Adapter) -> None:
    """Asserts equality of all but path and notes, tensors bit by bit."""
    assert found.config == wanted.config
    assert found.base_fingerprint == wanted.base_fingerprint
    assert_same_modules(found.modules, wanted.modules)


def assert_same_modules(found: peft_files.Modules, wanted: peft_files.Modules) -> None:
    assert {m: set(kinds) for m, kinds in found.items()} == {m: set(k) for m, k in wanted.items()}
    for module, kinds in wanted.items():
        for kind, array in kinds.items():
            assert found[module][kind].dtype == array.dtype
            assert found[module][kind].shape == array.shape
            assert found[module][kind].tobytes() == array.tobytes(), (module, kind)


def replaced(adapter: artefact.Adapter, **changes: Any) -> artefact.Adapter:
    """The adapter with another config."""
    return dataclasses.replace(adapter, config=dataclasses.replace(adapter.config, **changes))
