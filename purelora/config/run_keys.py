"""The keys of data, optimiser, devices and checkpoints: `data.*`, `optim.*`, `mesh.*` and so on."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from purelora.config.declare import COUNT, FRACTION, POSITIVE, Limits, between, key


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    train: str = key(
        "wordnet-definitions",
        'A built-in set ("wordnet-definitions") or a .jsonl or .json file.',
        resumable=True,  # The fingerprint of the data says whether it is the same.
        also=("hf_path", "dataset_path"),
    )
    eval: str | None = key(None, "A set or file to evaluate on; None: see eval_fraction.")
    eval_fraction: float = key(
        0.0,
        "Share of the training records to hold out and evaluate on instead.",
        limits=FRACTION,
    )
    shuffle: bool = key(True, "Visit the rows of each epoch in an order of its own.")
    packing: bool = key(
        True,
        "Put several records into a row; they do not see each other.",
        also=("packing", "sample_packing"),
    )
    too_long: Literal["drop", "truncate", "raise"] = key(
        "drop",
        'Records longer than max_length: "drop" them, "truncate" them, or "raise" an error.',
        also=("data.truncation", "excess_length_strategy"),
    )
    chat_template: str | None = key(
        None, "A Jinja file to use instead of the model's own chat template."
    )
    chat_template_kwargs: Mapping[str, bool | int | str] = key(
        {},
        'Further variables of the template, such as {"enable_thinking": False} for Qwen3\'s.',
    )
    template_date: str = key(
        "2026-01-01",
        "The date that a template which prints today's date is given, so that runs repeat.",
    )
    unnested_template: Literal["raise", "last_turn"] = key(
        "raise",
        'A template that renders a conversation\'s beginning differently once it goes on: "raise" '
        'an error, or train on the "last_turn" only.',
    )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How the trained leaves are moved."""

    name: str = key(
        "adamw",
        'The optimiser: "adamw", "sgd", or another name in OPTIMISERS of '
        "purelora/training/optimisers.py.",
        also=("opt_type",),
    )
    factory: str | None = key(
        None,
        'An optimiser of your own in its place: "module:function", found in the folder of the '
        "config or the current one. The function is given these settings and returns an "
        "optax.GradientTransformation without learning rate, such as optax.scale_by_lion().",
        later=True,
    )
    learning_rate: float = key(
        2e-4,
        "Peak learning rate.",
        limits=POSITIVE,
        also=("learning_rate", "optim.lr"),
    )
    schedule: str = key(
        "cosine",
        'The learning rate after the warm-up: "constant", or "linear" or "cosine" down to '
        "min_lr_ratio times the peak, or another name in SCHEDULES of that file.",
        also=("lr_scheduler_type",),
    )
    min_lr_ratio: float = key(
        0.1, "What is left of the learning rate at the end of the decay.", limits=between(0, 1)
    )
    warmup_steps: int = key(
        0,
        "Steps of linear warm-up.",
        unit="steps",
        limits=Limits("at least 0", least=0),
        also=("warmup_steps",),
    )
    schedule_steps: int | None = key(
        None,
        "The step at which the decay ends; None: the last step. Set it if you may continue the run "
        "for longer.",
        unit="steps",
        limits=COUNT,
        also=("learning_rate_schedule_steps",),
    )
    b1: float = key(0.9, "Adam's decay rate of the gradients' mean.", limits=FRACTION)
    b2: float = key(0.999, "Adam's decay rate of the squared gradients' mean.", limits=FRACTION)
    eps: float = key(1e-8, "Adam's epsilon.", limits=POSITIVE)
    momentum: float = key(0.0, "Momentum of SGD.", limits=FRACTION)
    loraplus_lr_ratio: float = key(
        1.0,
        "LoRA+: the learning rate of lora_b (and of magnitudes, biases and norms) is so many times "
        "that of the rest; adapters of the embedding keep the plain one.",
        limits=POSITIVE,
        also=("loraplus_lr_ratio", "lora.loraplus_lr_ratio"),
    )
    weight_decay: float = key(
        0.0,
        "Decoupled weight decay, on adapters and matrices only.",
        limits=Limits("at least 0", least=0, below=float("inf")),
        also=("weight_decay",),
    )
    clip_norm: float | None = key(
        1.0,
        "Largest global norm of the gradient; None: no clipping.",
        limits=POSITIVE,
        also=("gradient_clipping_threshold", "max_grad_norm"),
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How batch and weights are split over the devices; data, fsdp, expert and tensor use all."""

    data: int = key(
        1,
        "Devices along which the batch is split.",
        unit="devices",
        limits=COUNT,
        resumable=True,
        also=("ici_data_parallelism", "dcn_data_parallelism"),
    )
    fsdp: int | None = key(
        None,
        "Devices along which the batch and the storage of the base are split; None: all devices "
        "that the others leave.",
        unit="devices",
        limits=COUNT,
        resumable=True,
        also=("ici_fsdp_parallelism", "dcn_fsdp_parallelism", "dp_shard_size"),
    )
    expert: int = key(
        1,
        "Devices along which the batch and the experts are split.",
        unit="devices",
        limits=COUNT,
        resumable=True,
        also=("ici_expert_parallelism", "expert_parallel_size"),
    )
    tensor: int = key(
        1,
        "Devices along which the matmuls are split, by heads, MLP width and vocabulary.",
        unit="devices",
        limits=COUNT,
        resumable=True,
        also=("ici_tensor_parallelism", "tensor_parallel_size"),
    )
    rules: tuple[str, ...] = key(
        (
            "embed:fsdp", "experts:expert",
            "heads:tensor", "kv_heads:tensor", "mlp:tensor", "vocab:tensor",
        ),
        'From logical axis to mesh axis; "none" keeps an axis whole. The first rule wins whose '
        "mesh axis is not used in the same array yet. A large weight that no rule splits is an "
        'error, unless a rule with "none" asks for it.',
        resumable=True,
        also=("logical_axis_rules",),
    )  # fmt: skip
    overrides: Mapping[str, str] = key(
        {},
        "Rules for some modules, which come before the others: from a regular expression for the "
        "end of a module's path to rules with commas between: "
        '{"lm_head": "vocab:fsdp,embed:none"}.',
        resumable=True,
    )
    shard_adapters: bool = key(
        False,
        "Split the adapters along fsdp too, instead of keeping a copy on each device.",
        resumable=True,
    )
    keep_gathered: bool = key(
        False,
        "Keep what was gathered of a sharded base for the backward pass: one gather of each weight "
        "a micro-batch instead of two, and then the whole base (its codes) on every device. Only "
        'with remat="none": with "full" the backward pass shares a gather with what it recomputes.',
        resumable=True,
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves, what it keeps and whether it resumes."""

    save_steps: int | None = key(
        None,
        "Save every so many steps, beside the end of the run and what the next keys add; None: "
        "only then.",
        unit="steps",
        limits=COUNT,
        resumable=True,
        also=("checkpoint_period", "save_steps"),
    )
    save_secs: float | None = key(
        None,
        "Save also at the first step that ends so many seconds after the last save; None: not by "
        "time.",
        unit="seconds",
        limits=Limits("above 0", above=0),
        resumable=True,
    )
    save_first: bool = key(
        True,
        "Save the first step after each start too and wait for it, so that a disk that cannot be "
        "written to ends the run at once and not after hours.",
        resumable=True,
    )
    save_base: bool = key(
        False,
        "Save the frozen base too: a checkpoint is then a whole model, which model.path may name. "
        "Not with lora.modules_to_save, lora.bias or adapters that begin out of the weights "
        '("pissa", "olora", "loftq"): the original of what these change is not in it.',
        resumable=True,
    )
    async_save: bool = key(
        True,
        "Train on while a checkpoint is being written; the step waits only for the copy to the "
        "host.",
        resumable=True,
        also=("async_checkpointing",),
    )
    keep_last: int = key(
        2,
        "How many of the newest checkpoints to keep.",
        unit="checkpoints",
        limits=COUNT,
        resumable=True,
        also=("max_num_checkpoints_to_keep", "save_total_limit", "checkpoint_max_to_keep"),
    )
    keep_every: int | None = key(
        None,
        "Keep the steps that are multiples of this as well; None: none of them.",
        unit="steps",
        limits=COUNT,
        resumable=True,
        also=("keep_period",),
    )
    keep_best: bool = key(
        False,
        "Keep the checkpoint with the lowest eval loss as well; eval_steps must be a multiple of "
        "save_steps.",
        resumable=True,
        also=("load_best_model_at_end",),
    )
    resume: Literal["auto", "never", "must"] = key(
        "auto",
        '"auto": continue the run in workdir if there is one; "must": fail if there is none; '
        '"never": fail if there is one. A run is continued with the settings it began with, but '
        "for the resumable ones: init_adapter is used up; of model.path, model.hf_folder and "
        "data.train fingerprints tell whether they are the same; scan_layers, remat, "
        "loss_chunk_tokens and mesh.* change rounding only.",
        resumable=True,
        also=("resume_from_checkpoint",),
    )
