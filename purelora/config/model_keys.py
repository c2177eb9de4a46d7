"""The keys of the model and of what is trained in it: `model.*`, `lora.*` and `quant.*`."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from purelora.config.declare import COUNT, FRACTION, POSITIVE, between, key

Patterns = str | tuple[str, ...]
LARGEST_RANK = 2**16


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    path: str = key(
        "",
        'A built-in model ("smollm2-135m", "tiny"), a Hugging Face folder, a .gguf file, or the '
        "folder of a purelora run or of one of its steps: of one that trained all weights, or "
        'saved its base. "random:FILE": random weights of the shape in a config.json, and a token '
        "for each byte. Or a MaxText checkpoint: its run, its checkpoints, one of its steps, or "
        "the step's items.",
        filled=True,
        remedy="name a model, a folder or a file",
        resumable=True,  # The fingerprints of base and data say whether they are the same.
        also=("load_parameters_path", "model_name", "model_name_or_path", "base_model"),
    )
    hf_folder: str | None = key(
        None,
        "For a MaxText checkpoint, which holds neither: a folder with config.json and tokenizer in "
        "Hugging Face's form.",
        filled=True,
        remedy="name a folder, or None",
        resumable=True,
    )
    weights_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        'Dtype that unquantised base weights are kept in: "float32" or "bfloat16".',
        also=("weight_dtype",),
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is trained: adapters, or all weights."""

    enabled: bool = key(
        True,
        "Train adapters on a frozen base (True), or all weights (False).",
        also=("lora.enable_lora",),
    )
    peft_type: str = key(
        "lora",
        "The method, by PEFT's name for it in small letters: lora, ia3 (without r and alpha) or "
        "loha.",
        later=True,
    )
    r: int = key(
        16,
        "Rank of the adapters; their output is scaled by lora_alpha / r.",
        limits=between(1, LARGEST_RANK),
        remedy="8 and 16 are usual",
        also=("lora.lora_rank", "lora.rank", "lora.lora_r"),
    )
    lora_alpha: float = key(
        32.0,
        "Numerator of that scaling.",
        limits=POSITIVE,
        refusal="makes the scaling alpha / r zero or not a number, so nothing would train",
        remedy="2 · r is usual",
        also=("lora.alpha",),
    )
    lora_dropout: float = key(
        0.0,
        "Probability of dropping an element of an adapter's input, in training only.",
        limits=FRACTION,
        also=("lora.dropout",),
    )
    target_modules: Patterns = key(
        "all-linear",
        '"all-linear" (all but the output head and routers), of these "attention", "mlp" (with the '
        'experts) or "experts", a list of names or dotted suffixes, or a regex for a module\'s '
        "full name (model.layers.7.self_attn.q_proj; model.layers.7.mlp.experts.gate_proj is all "
        "of its experts).",
    )
    target_parameters: tuple[str, ...] = key(
        (),
        'More targets, by PEFT\'s names of parameters: "mlp.experts.gate_up_proj" (gate_proj and '
        'up_proj), "mlp.experts.down_proj", "mlp.gate.weight" (the router).',
    )
    exclude_modules: Patterns = key((), "Modules to leave out, as a list or a regex.")
    layers_to_transform: tuple[int, ...] | None = key(
        None,
        "Numbers of the layers to adapt, for such a word or a list of names; None: all.",
        also=("lora.peft_layers_to_transform",),
    )
    rank_pattern: Mapping[str, int] = key(
        {},
        "Ranks of single modules: {regex: rank}. A regex must match the end of a module's name "
        'from a dot on ("k_proj", "layers.3.self_attn.k_proj"); the first one that does counts.',
    )
    alpha_pattern: Mapping[str, float] = key({}, "Alphas of single modules, in the same way.")
    use_rslora: bool = key(
        False,
        "Scale by lora_alpha / sqrt(r) (rsLoRA) instead of lora_alpha / r.",
        also=("lora.use_rs_lora", "lora.peft_use_rslora"),
    )
    use_dora: bool = key(
        False,
        "Learn a magnitude for each output channel beside the adapters' direction (DoRA).",
        also=("lora.peft_use_dora",),
    )
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "loftq"] = key(
        "default",
        'How adapters begin. "default": lora_a uniform and lora_b zero; "gaussian": lora_a normal '
        "with standard deviation 1 / r. Out of the weights, which then hold the rest: "
        '"pissa" (largest singular values), "olora" (QR); "loftq": what quantisation takes from '
        "the weights.",
    )
    modules_to_save: tuple[str, ...] = key(
        (),
        'Modules to train in full beside the adapters ("lm_head", "embed_tokens", "norm"), in '
        "float32. A tied embedding stays tied.",
        also=("lora.lora_modules_to_save",),
    )
    trainable_token_indices: tuple[int, ...] = key(
        (),
        "Rows of the embedding to train, by token id; for a tied model they are rows of the head "
        "too.",
    )
    bias: Literal["none", "all", "lora_only"] = key(
        "none",
        'Train the model\'s own biases: "none", "all", or "lora_only" those of adapted modules.',
    )


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How the frozen base is kept."""

    qtype: Literal["none", "int8", "int4", "nf4", "fp8"] = key(
        "none",
        'Type of the frozen base\'s matrices: "none", "int8", "fp8" (float8_e4m3fn), "int4" or '
        '"nf4" (QLoRA\'s, usually with tile_size=64).',
        also=("lora.lora_weight_qtype",),
    )
    tile_size: int | None = key(
        None,
        "Inputs that share a scale; None: one scale per output channel.",
        unit="inputs",
        limits=COUNT,
        also=("lora.lora_tile_size",),
    )
    skip: tuple[str, ...] = key(
        ("embed_tokens",),
        "Weights that stay unquantised: regexes over the dotted parts of their names.",
    )
