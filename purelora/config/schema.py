"""The settings of a run as frozen dataclasses, every key declared once.

`from_dict.parse` makes a `Config` out of nested dicts and reports every problem at once; it is
trusted afterwards. `configs/base.py` shows all keys with their comments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from purelora.config import declare
from purelora.config.declare import COUNT, Limits, between, key, section
from purelora.config.model_keys import LoraConfig, ModelConfig, QuantConfig
from purelora.config.run_keys import CheckpointConfig, DataConfig, MeshConfig, OptimConfig

# A key of `rank_pattern`, `alpha_pattern` and `mesh.overrides`: a regex for the end of a name,
# from a dot on.
MODULE_PATTERN = r"(.*\.)?({})$"
# What `target_modules` may be beside a list and a regex: all linear modules, or those of a part.
TARGET_WORDS = ("all-linear", "attention", "mlp", "experts")
# Values of `init_lora_weights` that take the adapter out of the weight.
FACTORED_INITS = ("pissa", "olora", "loftq")

_LONGEST = 2**24  # Tokens of a row.
_COEFFICIENT = Limits("at least 0 and a float32", least=0, below=float("inf"), in_float32=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    workdir: str = key(
        "runs/default",
        "Folder of everything that the run writes: metrics.jsonl, config.json, run.json, "
        "checkpoints, tokenizer and, in the end, adapter.",
        filled=True,
        remedy="name the folder that the run writes to",
        resumable=True,
        also=("base_output_directory", "output_dir", "run_name"),
    )
    task: Literal["sft", "pretrain"] = key(
        "sft",
        '"sft": train on what the assistant (or completion) says; "pretrain": on every token.',
        also=("use_sft",),
    )
    seed: int = key(
        0,
        "Seed of the adapters' initial values, the data order, the eval split and dropout.",
        limits=between(0, 2**32 - 1),
        also=("data_shuffle_seed", "init_weights_seed"),
    )
    steps: int | None = key(
        None,
        "How long to train, in optimiser steps. Set exactly one of steps and epochs.",
        unit="steps",
        limits=COUNT,
        resumable=True,
        also=("max_steps",),
    )
    epochs: int | None = key(
        None,
        "How long to train, in passes over the data.",
        unit="passes",
        limits=COUNT,
        resumable=True,
        also=("num_epoch", "num_train_epochs"),
    )
    batch_size: int = key(8, "Rows per step over all devices.", unit="rows", limits=COUNT)
    accum_steps: int = key(
        1,
        "The number of micro-batches that a step splits its rows into.",
        unit="micro-batches",
        limits=COUNT,
        also=("gradient_accumulation_steps",),
    )
    max_length: int = key(
        1024,
        "Tokens per row.",
        unit="tokens",
        limits=between(2, _LONGEST),
        also=("max_target_length", "max_seq_length", "sequence_len"),
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16",
        'Dtype of the computation: "float32" or "bfloat16". Adapters, moments and sums are '
        "float32.",
    )
    scan_layers: bool = key(
        True,
        "Compile one layer and scan over the stack (True), or compile every layer by itself "
        "(False).",
        resumable=True,
    )
    remat: Literal["none", "full"] = key(
        "none",
        '"none": keep what the large matmuls and attention produced for the backward pass; '
        '"full": recompute each layer.',
        resumable=True,
        also=("remat_policy", "gradient_checkpointing"),
    )
    loss_chunk_tokens: int = key(
        256,
        "Tokens whose logits exist at once, on each device.",
        unit="tokens",
        limits=COUNT,
        resumable=True,
    )
    router_aux_loss_coef: float = key(
        0.0,
        "For mixtures of experts: weight of the load-balancing loss beside the token loss; the "
        "losses of the router are recorded whatever their weight.",
        limits=_COEFFICIENT,
        also=("moe_aux_loss_coef", "load_balance_loss_weight"),
    )
    router_z_loss_coef: float = key(0.0, "Weight of the router z-loss.", limits=_COEFFICIENT)
    router_aux: Literal["rows", "transformers"] = key(
        "rows",
        'How the load-balancing loss counts tokens: "rows": in each row and layer by itself, so '
        'that it depends on neither mesh nor accum_steps; "transformers": over all rows and layers '
        "that a device computes at once, as that library does.",
    )
    eval_steps: int | None = key(
        None,
        "Evaluate every so many steps, and before and after training; None: only before and after.",
        unit="steps",
        limits=COUNT,
        resumable=True,
        also=("eval_interval",),
    )
    log_steps: int = key(
        1,
        "Record (and without a terminal print) the metrics every so many steps.",
        unit="steps",
        limits=COUNT,
        resumable=True,
    )
    nan_policy: Literal["abort", "skip"] = key(
        "abort",
        'What a loss or gradient that is not finite does: "abort" the run, or "skip" the update.',
        resumable=True,
    )
    sample_prompts: tuple[str, ...] = key(
        (), "Prompts to continue greedily before and after training.", resumable=True
    )
    sample_tokens: int = key(
        48,
        "How many tokens to continue them by at most.",
        unit="tokens",
        limits=COUNT,
        resumable=True,
    )
    compile_cache: str | None = key(
        "default",
        'Folder of the persistent compilation cache; "default": ~/.cache/purelora/compiled, None: '
        "off.",
        resumable=True,
        also=("jax_cache_dir",),
    )
    init_adapter: str | None = key(
        None,
        "An adapter to start a fresh run from: the folder of a purelora run or of one of its "
        "steps, or a PEFT folder, or a MaxText checkpoint. Its ranks, scalings and targets must be "
        "those of lora.*. None: start anew.",
        resumable=True,  # It is used up when the run begins.
        also=(
            "lora.lora_restore_path", "lora_restore_path", "hf_lora_adapter_path",
            "adapter_name_or_path", "lora_model_dir",
        ),
    )  # fmt: skip
    model: ModelConfig = section(ModelConfig)
    lora: LoraConfig = section(LoraConfig)
    quant: QuantConfig = section(QuantConfig)
    data: DataConfig = section(DataConfig)
    optim: OptimConfig = section(OptimConfig)
    mesh: MeshConfig = section(MeshConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch over all devices."""
        return self.batch_size // self.accum_steps


KEYS = {declared.path: declared for declared in declare.declarations(Config)}

# Settings that may differ between a run and its continuation.
RESUMABLE: Sequence[str] = tuple(path for path, it in KEYS.items() if it.key.is_resumable)
# Keys that older checkpoints lack, with the value that stands for what was done then.
LATER_KEYS: Mapping[str, Any] = {path: it.default for path, it in KEYS.items() if it.key.is_later}


def field_types() -> dict[str, Any]:
    """The type of every leaf key, by dotted name."""
    return {path: declared.annotation for path, declared in KEYS.items()}


def as_flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf key with its value, for the log and the checkpoint."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(as_flat(value, f"{prefix}{field.name}."))
        else:
            flat[f"{prefix}{field.name}"] = value
    return flat
