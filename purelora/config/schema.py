"""The configuration as frozen dataclasses, validated once at the edge and trusted afterwards.

Keys, units and defaults are documented in `configs/base.py`, the one place that holds defaults.
`parse` turns nested dicts into a `Config` and reports every problem at once.
"""

import collections.abc
import dataclasses
import datetime
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from purelora.core import errors

Patterns = str | tuple[str, ...]
# A key of `rank_pattern`, `alpha_pattern` and `mesh.overrides`: a regex for the end of a name,
# from a dot on.
MODULE_PATTERN = r"(.*\.)?({})$"
# What `target_modules` may be beside a list and a regex: all linear modules, or those of a part.
TARGET_WORDS = ("all-linear", "attention", "mlp", "experts")
# Values of `init_lora_weights` that take the adapter out of the weight.
FACTORED_INITS = ("pissa", "olora", "loftq")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str
    hf_folder: str | None
    weights_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    enabled: bool
    peft_type: str
    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: Patterns
    exclude_modules: Patterns
    target_parameters: tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "loftq"]
    modules_to_save: tuple[str, ...]
    trainable_token_indices: tuple[int, ...]
    bias: Literal["none", "all", "lora_only"]


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    qtype: Literal["none", "int8", "int4", "nf4", "fp8"]
    tile_size: int | None
    skip: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: str
    eval: str | None
    eval_fraction: float
    shuffle: bool
    packing: bool
    too_long: Literal["drop", "truncate", "raise"]
    chat_template: str | None
    chat_template_kwargs: Mapping[str, bool | int | str]
    template_date: str
    unnested_template: Literal["raise", "last_turn"]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd"]
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    schedule_steps: int | None
    warmup_steps: int
    min_lr_ratio: float
    b1: float
    b2: float
    eps: float
    momentum: float
    loraplus_lr_ratio: float
    weight_decay: float
    clip_norm: float | None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int | None
    expert: int
    tensor: int
    rules: tuple[str, ...]
    overrides: Mapping[str, str]
    shard_adapters: bool
    keep_gathered: bool


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    save_steps: int | None
    save_secs: float | None
    save_first: bool
    save_base: bool
    async_save: bool
    keep_last: int
    keep_every: int | None
    keep_best: bool
    resume: Literal["auto", "never", "must"]


@dataclasses.dataclass(frozen=True)
class Config:
    workdir: str
    task: Literal["sft", "pretrain"]
    seed: int
    steps: int | None
    epochs: int | None
    batch_size: int
    accum_steps: int
    max_length: int
    dtype: Literal["float32", "bfloat16"]
    scan_layers: bool
    remat: Literal["none", "full"]
    loss_chunk_tokens: int
    router_aux_loss_coef: float
    router_z_loss_coef: float
    router_aux: Literal["rows", "transformers"]
    eval_steps: int | None
    log_steps: int
    nan_policy: Literal["abort", "skip"]
    sample_prompts: tuple[str, ...]
    sample_tokens: int
    compile_cache: str | None
    init_adapter: str | None
    model: ModelConfig
    lora: LoraConfig
    quant: QuantConfig
    data: DataConfig
    optim: OptimConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch over all devices."""
        return self.batch_size // self.accum_steps


# What users of MaxText, PEFT, TRL and Axolotl write, and the key that does it here.
FOREIGN_KEYS = {
    "lora.lora_rank": "lora.r",
    "lora.rank": "lora.r",
    "lora.lora_r": "lora.r",
    "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout",
    "lora.enable_lora": "lora.enabled",
    "lora.lora_module_path": "lora.target_modules (names or a regex over Hugging Face names)",
    "lora.lora_weight_qtype": "quant.qtype",
    "lora.lora_tile_size": "quant.tile_size",
    "lora.lora_restore_path": "init_adapter",
    "lora_restore_path": "init_adapter",
    "hf_lora_adapter_path": "init_adapter",
    "adapter_name_or_path": "init_adapter",
    "lora_model_dir": "init_adapter",
    "lora.peft_use_dora": "lora.use_dora",
    "lora.use_rs_lora": "lora.use_rslora",
    "lora.peft_use_rslora": "lora.use_rslora",
    "lora.lora_modules_to_save": "lora.modules_to_save",
    "lora.peft_layers_to_transform": "lora.layers_to_transform",
    "loraplus_lr_ratio": "optim.loraplus_lr_ratio",
    "lora.loraplus_lr_ratio": "optim.loraplus_lr_ratio",
    # What PEFT has and purelora has not.
    "lora.fan_in_fan_out": "no key: it is for Conv1D weights, which none of the families has",
    "lora.lora_bias": "no key: a bias on lora_b is not supported; lora.bias trains the model's own",
    "lora.layer_replication": "no key: replicated layers are not supported",
    "lora.use_qalora": "no key: QA-LoRA is not supported",
    "lora.megatron_config": "no key: mesh.* splits the model",
    "lora.loftq_config": "no key: LoftQ uses quant.qtype and one iteration",
    "lora.ensure_weight_tying": "no key: a tied embedding that is trained stays tied",
    "load_parameters_path": "model.path",
    "load_full_state_path": "workdir with checkpoint.resume='must'",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "tokenizer_path": "model.path (the tokenizer is the model's; of MaxText's: model.hf_folder)",
    "base_output_directory": "workdir",
    "output_dir": "workdir",
    "run_name": "workdir",
    "max_target_length": "max_length",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "per_device_batch_size": "batch_size (rows per update over all devices)",
    "per_device_train_batch_size": "batch_size (rows per update over all devices)",
    "micro_batch_size": "batch_size and accum_steps (batch_size / accum_steps rows each)",
    "gradient_accumulation_steps": "accum_steps",
    "gradient_clipping_threshold": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "learning_rate": "optim.learning_rate",
    "learning_rate_schedule_steps": "optim.schedule_steps",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup_steps",
    "weight_decay": "optim.weight_decay",
    "opt_type": "optim.name",
    "optim.lr": "optim.learning_rate",
    "remat_policy": "remat",
    "gradient_checkpointing": "remat",
    "weight_dtype": "model.weights_dtype",
    "use_sft": "task",
    "packing": "data.packing",
    "data.truncation": "data.too_long",
    "excess_length_strategy": "data.too_long",
    "sample_packing": "data.packing",
    "hf_path": "data.train",
    "dataset_path": "data.train",
    "num_epoch": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "checkpoint_period": "checkpoint.save_steps",
    "save_steps": "checkpoint.save_steps",
    "max_num_checkpoints_to_keep": "checkpoint.keep_last",
    "save_total_limit": "checkpoint.keep_last",
    "checkpoint_max_to_keep": "checkpoint.keep_last",
    "keep_period": "checkpoint.keep_every",
    "load_best_model_at_end": "checkpoint.keep_best",
    "async_checkpointing": "checkpoint.async_save",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_interval": "eval_steps",
    "data_shuffle_seed": "seed",
    "init_weights_seed": "seed",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "ici_data_parallelism": "mesh.data",
    "dcn_data_parallelism": "mesh.data",
    "dcn_fsdp_parallelism": "mesh.fsdp",
    "ici_tensor_parallelism": "mesh.tensor",
    "tensor_parallel_size": "mesh.tensor",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "load_balance_loss_weight": "router_aux_loss_coef",
    "ici_expert_parallelism": "mesh.expert",
    "expert_parallel_size": "mesh.expert",
    "dp_shard_size": "mesh.fsdp",
    "logical_axis_rules": "mesh.rules",
    "sharding_tolerance": "mesh.overrides (keeps a named weight whole; no other large one may be)",
    "jax_cache_dir": "compile_cache",
}


def parse(raw: Mapping[str, Any]) -> Config:
    """Builds the Config from nested dicts.

    Raises:
      ConfigError: unknown or missing keys, wrong types, values out of range and keys that do not
        fit together, all in one error. Values are only checked when names and types are right.
    """
    problems: list[errors.Problem] = []
    config = _build(Config, raw, "", problems)
    if problems:
        raise errors.ConfigError.of(problems)
    problems = check(config)
    if problems:
        raise errors.ConfigError.of(problems)
    return config


def field_types() -> dict[str, Any]:
    """The type of every leaf key, by dotted name."""
    return dict(_fields(Config, ""))


def unknown_key(key: str) -> errors.Problem:
    """The problem of a key that does not exist: names what does the same, or what is nearest."""
    if key in FOREIGN_KEYS:
        answer = FOREIGN_KEYS[key]
        remedy = answer if answer.startswith("no key") else f"use {answer}"
        return errors.Problem(key, None, "is not a key of purelora", remedy)
    known = list(field_types())
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    by_leaf = {k.rpartition(".")[2]: k for k in known}
    near_leaf = [by_leaf[k] for k in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.75)]
    near = dict.fromkeys([*same_leaf, *difflib.get_close_matches(key, known, n=2), *near_leaf])
    remedy = (
        "did you mean " + " or ".join(near) + "?" if near else "configs/base.py names every key"
    )
    return errors.Problem(key, None, "is not a key of purelora", remedy)


def type_problem(key: str, value: Any, annotation: Any) -> errors.Problem | None:
    """A problem if `value` is not of the key's type."""
    if _fits(value, annotation):
        return None
    return errors.Problem(key, value, f"must be {describe(annotation)}", "")


def describe(annotation: Any) -> str:
    """A type as a user reads it."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in typing.get_args(annotation))
    if origin is tuple:
        kind = typing.get_args(annotation)[0]
        return "a list of whole numbers" if kind is int else "a list of strings"
    if origin is collections.abc.Mapping:
        named = {int: "whole numbers", float: "numbers", str: "strings", bool: "True or False"}
        kinds = typing.get_args(_value(annotation)) or (_value(annotation),)
        return f"a dict from names to {', '.join(named[kind] for kind in kinds)}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
    return names.get(annotation, "None")


def _fields(cls: type, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            found += _fields(typing.cast(type, annotation), f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", annotation))
    return found


def _value(annotation: Any) -> Any:
    """The type of the values of a `Mapping[str, ...]`."""
    return typing.get_args(annotation)[1]


def _fits(value: Any, annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return any(value == option for option in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(annotation))
    if origin is tuple:
        kind = typing.get_args(annotation)[0]
        return isinstance(value, (tuple, list)) and all(_fits(v, kind) for v in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(
            isinstance(k, str) and _fits(v, _value(annotation)) for k, v in value.items()
        )
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is type(None):
        return value is None
    return isinstance(value, annotation)


def _build(
    cls: Callable[..., Any], raw: Mapping[str, Any], prefix: str, problems: list[errors.Problem]
) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name in raw:
        if name not in hints:
            problems.append(unknown_key(f"{prefix}{name}"))
    for name, annotation in hints.items():
        key = f"{prefix}{name}"
        if name not in raw:
            remedy = "start the config from configs/base.py, which holds every key"
            problems.append(errors.Problem(key, None, "is missing", remedy))
        elif dataclasses.is_dataclass(annotation):
            if isinstance(raw[name], Mapping):
                nested = _build(typing.cast(type, annotation), raw[name], f"{key}.", problems)
                values[name] = nested
            else:
                problems.append(errors.Problem(key, raw[name], "must be a section of keys", ""))
        else:
            problem = type_problem(key, raw[name], annotation)
            if problem:
                problems.append(problem)
            values[name] = _normal(raw[name], annotation)
    return None if problems else cls(**values)


def _normal(value: Any, annotation: Any) -> Any:
    """Lists become tuples, and whole numbers floats where the key (or a dict's value) is one."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Mapping):
        return {key: _normal(v, _value(annotation)) for key, v in value.items()}
    options = typing.get_args(annotation) or (annotation,)
    if isinstance(value, int) and not isinstance(value, bool) and float in options:
        # Beyond float64 it is out of every range.
        return float(value) if abs(value) < 10**300 else math.inf
    return value


def check(config: Config) -> list[errors.Problem]:
    """All values out of range and all keys that do not fit together."""
    found = [*_ranges(config), *_combinations(config), *_checkpoint_problems(config)]
    return [errors.Problem(key, value, what, remedy) for key, value, what, remedy in found]


_Found = tuple[str, Any, str, str]
_LARGEST = 2**31 - 1  # Steps are counted in int32.
_LONGEST = 2**24  # Tokens of a row.
_LARGEST_RANK = 2**16


def _ranges(c: Config) -> list[_Found]:
    at_least_1 = {
        "batch_size": c.batch_size,
        "accum_steps": c.accum_steps,
        "loss_chunk_tokens": c.loss_chunk_tokens,
        "log_steps": c.log_steps,
        "sample_tokens": c.sample_tokens,
        "steps": c.steps,
        "epochs": c.epochs,
        "eval_steps": c.eval_steps,
        "quant.tile_size": c.quant.tile_size,
        "optim.schedule_steps": c.optim.schedule_steps,
        "mesh.data": c.mesh.data,
        "mesh.fsdp": c.mesh.fsdp,
        "mesh.expert": c.mesh.expert,
        "mesh.tensor": c.mesh.tensor,
        "checkpoint.save_steps": c.checkpoint.save_steps,
        "checkpoint.keep_last": c.checkpoint.keep_last,
        "checkpoint.keep_every": c.checkpoint.keep_every,
    }
    found: list[_Found] = [
        (key, value, f"must be from 1 to {_LARGEST}", "")
        for key, value in at_least_1.items()
        if value is not None and not 1 <= value <= _LARGEST
    ]
    found += [
        (key, value, "holds a NUL character", "remove it")
        for key, value in as_flat(c).items()
        if isinstance(value, str) and "\0" in value
    ]
    if not 2 <= c.max_length <= _LONGEST:
        found.append(("max_length", c.max_length, f"must be from 2 to {_LONGEST}", ""))
    if not 0 <= c.seed < 2**32:
        found.append(("seed", c.seed, "must be from 0 to 4294967295", ""))
    if not c.workdir:
        found.append(("workdir", c.workdir, "is empty", "name the folder that the run writes to"))
    if "" in c.sample_prompts:
        found.append(("sample_prompts", c.sample_prompts, "holds an empty prompt", "remove it"))
    if not c.model.path:
        found.append(("model.path", c.model.path, "is empty", "name a model, a folder or a file"))
    if c.model.hf_folder == "":
        found.append(("model.hf_folder", "", "is empty", "name a folder, or None"))
    found += _skip_problems(c.quant.skip) + _date_problem(c.data.template_date)
    found += template_problems("data.chat_template_kwargs", c.data.chat_template_kwargs)
    return found + _fractions(c) + _optim_ranges(c.optim)


def _skip_problems(skip: Sequence[str]) -> list[_Found]:
    found: list[_Found] = []
    for pattern in skip:
        try:
            re.compile(f"(?:{pattern})")
        except re.error as error:
            found.append(("quant.skip", pattern, f"is not a regular expression: {error}", ""))
    return found


# What every chat template is given.
_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def template_problems(where: str, options: Mapping[str, object]) -> list[tuple[str, Any, str, str]]:
    """(key, value, what is wrong, remedy) of options of a chat template that are no options."""
    what = "is what the template is given for each conversation"
    return [(where, name, what, "leave it out") for name in options if name in _TEMPLATE_VARIABLES]


def _date_problem(date: str) -> list[_Found]:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        return [("data.template_date", date, "is not a date", "write it as 2026-01-31")]
    return []


def _as_float32(value: float) -> float:
    """What the compiled step sees of a number: 1e-50 becomes 0, and 1 - 1e-12 becomes 1."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _fractions(c: Config) -> list[_Found]:
    zero_to_one = {
        "lora.lora_dropout": c.lora.lora_dropout,
        "data.eval_fraction": c.data.eval_fraction,
        "optim.b1": c.optim.b1,
        "optim.b2": c.optim.b2,
        "optim.momentum": c.optim.momentum,
    }
    found: list[_Found] = [
        (key, value, "must be at least 0 and below 1", "")
        for key, value in zero_to_one.items()
        if not 0 <= _as_float32(value) < 1
    ]
    coefs = {
        "router_aux_loss_coef": c.router_aux_loss_coef,
        "router_z_loss_coef": c.router_z_loss_coef,
    }
    found += [
        (key, value, "must be at least 0 and a float32", "")
        for key, value in coefs.items()
        if not 0 <= _as_float32(value) < float("inf")
    ]
    if not 0 <= c.optim.min_lr_ratio <= 1:
        found.append(("optim.min_lr_ratio", c.optim.min_lr_ratio, "must be from 0 to 1", ""))
    return found


def _optim_ranges(o: OptimConfig) -> list[_Found]:
    found: list[_Found] = []
    positive = {
        "optim.learning_rate": o.learning_rate,
        "optim.eps": o.eps,
        "optim.clip_norm": o.clip_norm,
        "optim.loraplus_lr_ratio": o.loraplus_lr_ratio,
    }
    for key, value in positive.items():
        # The comparison is written so that NaN fails it.
        if value is not None and not 0 < _as_float32(value) < float("inf"):
            found.append((key, value, "must be a float32 above 0", ""))
    if not 0 <= o.weight_decay < float("inf"):
        found.append(("optim.weight_decay", o.weight_decay, "must be at least 0", ""))
    if o.warmup_steps < 0:
        found.append(("optim.warmup_steps", o.warmup_steps, "must be at least 0", ""))
    return found


def _combinations(c: Config) -> list[_Found]:
    found: list[_Found] = []
    if (c.steps is None) == (c.epochs is None):
        both = "are both set" if c.steps is not None else "are both None"
        found.append(("steps, epochs", (c.steps, c.epochs), both, "set exactly one of them"))
    if c.accum_steps >= 1 and c.batch_size % c.accum_steps:
        what = f"is not a multiple of accum_steps = {c.accum_steps}"
        low = c.batch_size - c.batch_size % c.accum_steps
        near = [n for n in (low, low + c.accum_steps) if n > 0]
        found.append(("batch_size", c.batch_size, what, f"use {' or '.join(map(str, near))}"))
    found += _lora_ranges(c.lora)
    found += _init_problems(c) if c.lora.enabled else _full_problems(c)
    return found + _contradictions(c)


def _full_problems(c: Config) -> list[_Found]:
    """What does not go with training all weights."""
    found: list[_Found] = []
    if c.quant.qtype != "none":
        what = "quantises the base, but lora.enabled=False trains it"
        remedy = "set quant.qtype='none', or lora.enabled=True"
        found.append(("quant.qtype", c.quant.qtype, what, remedy))
    if c.model.weights_dtype != "float32":
        what = "would train all weights in less than float32, where small updates round away"
        remedy = "set it to 'float32'; dtype='bfloat16' still computes in bfloat16"
        found.append(("model.weights_dtype", c.model.weights_dtype, what, remedy))
    if c.mesh.shard_adapters:
        what = "has no effect with lora.enabled=False: there are no adapters"
        found.append(("mesh.shard_adapters", True, what, "set it to False"))
    idle = {
        "lora.lora_dropout": c.lora.lora_dropout != 0,
        "lora.exclude_modules": bool(c.lora.exclude_modules),
        "lora.layers_to_transform": c.lora.layers_to_transform is not None,
        "lora.rank_pattern": bool(c.lora.rank_pattern),
        "lora.alpha_pattern": bool(c.lora.alpha_pattern),
        "lora.use_rslora": c.lora.use_rslora,
        "lora.use_dora": c.lora.use_dora,
        "lora.init_lora_weights": c.lora.init_lora_weights != "default",
        "lora.modules_to_save": bool(c.lora.modules_to_save),
        "lora.trainable_token_indices": bool(c.lora.trainable_token_indices),
        "lora.bias": c.lora.bias != "none",
    }
    values = as_flat(c)
    what = "has no effect with lora.enabled=False: all weights are trained"
    found += [(key, values[key], what, "leave it out") for key, is_set in idle.items() if is_set]
    if c.init_adapter is not None:
        what = "is set, but lora.enabled=False trains no adapter"
        remedy = "leave it out; to train on from merged weights set model.path to them"
        found.append(("init_adapter", c.init_adapter, what, remedy))
    if c.optim.loraplus_lr_ratio != 1:
        what = "has no effect with lora.enabled=False: there are no adapters"
        found.append(("optim.loraplus_lr_ratio", c.optim.loraplus_lr_ratio, what, "set it to 1"))
    return found


def _contradictions(c: Config) -> list[_Found]:
    """Keys that would be ignored, or that exclude each other."""
    found: list[_Found] = []
    if c.quant.qtype == "none" and c.quant.tile_size is not None:
        what = "has no effect with quant.qtype='none'"
        remedy = "set quant.qtype='int8', or leave tile_size out"
        found.append(("quant.tile_size", c.quant.tile_size, what, remedy))
    if c.data.eval is not None and c.data.eval_fraction > 0:
        remedy = "set data.eval_fraction=0, or leave data.eval out"
        what = "and data.eval are both set"
        found.append(("data.eval_fraction", c.data.eval_fraction, what, remedy))
    if c.eval_steps is not None and c.data.eval is None and c.data.eval_fraction == 0:
        what, remedy = "is set, but there is no eval data", "set data.eval or data.eval_fraction"
        found.append(("eval_steps", c.eval_steps, what, remedy))
    if c.optim.name == "adamw" and c.optim.momentum:
        what, remedy = "has no effect with optim.name='adamw'", "set it to 0, or use optim.b1"
        found.append(("optim.momentum", c.optim.momentum, what, remedy))
    if c.router_aux != "rows" and not c.router_aux_loss_coef:
        what, remedy = "has no effect without router_aux_loss_coef", "set that, or leave it out"
        found.append(("router_aux", c.router_aux, what, remedy))
    if c.mesh.keep_gathered and (c.remat == "full" or not c.lora.enabled):
        why = "remat='full', which gathers with what it recomputes"
        why = why if c.lora.enabled else "lora.enabled=False: there is no frozen base"
        found.append(("mesh.keep_gathered", True, f"has no effect with {why}", "set it to False"))
    limit = c.optim.schedule_steps or c.steps
    return found if limit is None else found + warmup_problems(c.optim, limit)


def _checkpoint_problems(c: Config) -> list[_Found]:
    """What is wrong with when to save and what to keep."""
    saving, found = c.checkpoint, list[_Found]()
    if saving.save_secs is not None and not 0 < saving.save_secs < float("inf"):
        found.append(("checkpoint.save_secs", saving.save_secs, "must be above 0", ""))
    if saving.save_base and not c.lora.enabled:
        what = "has no effect with lora.enabled=False: all weights are trained and saved"
        found.append(("checkpoint.save_base", True, what, "leave it out"))
    if saving.save_steps is None:
        keeps = {"keep_every": saving.keep_every, "keep_best": saving.keep_best or None}
        what = "has no effect without checkpoint.save_steps"
        found += [
            (f"checkpoint.{key}", value, what, "set checkpoint.save_steps, or leave it out")
            for key, value in keeps.items()
            if value is not None
        ]
        return found
    return found + _keep_best_problems(c, saving.save_steps)


def _keep_best_problems(c: Config, save_steps: int) -> list[_Found]:
    if not c.checkpoint.keep_best:
        return []
    if c.eval_steps is None:
        what = "has no effect without evals during the run"
        remedy = "set eval_steps and data.eval or data.eval_fraction, or leave it out"
        return [("checkpoint.keep_best", True, what, remedy)]
    # Values out of range are reported as such.
    if save_steps > 0 and c.eval_steps % save_steps:
        what = f"evaluates steps that checkpoint.save_steps = {save_steps} does not save"
        remedy = "keep_best needs a multiple of it"
        return [("eval_steps", c.eval_steps, what, remedy)]
    return []


def warmup_problems(optim: OptimConfig, limit: int) -> list[_Found]:
    """What is wrong with a warm-up in `limit` steps; with `epochs` only the data tells them."""
    if optim.warmup_steps <= limit:
        return []
    what = f"is more than the {limit} steps there are"
    remedy = "the learning rate would never reach optim.learning_rate"
    return [("optim.warmup_steps", optim.warmup_steps, what, remedy)]


def _lora_ranges(lora: LoraConfig) -> list[_Found]:
    found: list[_Found] = []
    if not 1 <= lora.r <= _LARGEST_RANK:
        what = f"must be from 1 to {_LARGEST_RANK}"
        found.append(("lora.r", lora.r, what, "8 and 16 are usual"))
    if not 0 < _as_float32(lora.lora_alpha) < float("inf"):
        what = "makes the scaling alpha / r zero or not a number, so nothing would train"
        found.append(("lora.lora_alpha", lora.lora_alpha, what, "2 · r is usual"))
    if not (lora.target_modules or lora.target_parameters):
        remedy = "use 'all-linear', a list of module names or a regex"
        found.append(("lora.target_modules", lora.target_modules, "is empty", remedy))
    found += _pattern_problems("lora.rank_pattern", lora.rank_pattern)
    found += _pattern_problems("lora.alpha_pattern", lora.alpha_pattern)
    found += [
        (f"lora.rank_pattern[{name!r}]", r, f"must be at most {_LARGEST_RANK}", "")
        for name, r in lora.rank_pattern.items()
        if r > _LARGEST_RANK
    ]
    return found + _layer_problems(lora) + _token_problems(lora)


def _pattern_problems(key: str, pattern: Mapping[str, float]) -> list[_Found]:
    found: list[_Found] = []
    for name, value in pattern.items():
        if not 0 < _as_float32(value) < float("inf"):
            found.append((f"{key}[{name!r}]", value, "must be above 0", ""))
        try:
            re.compile(MODULE_PATTERN.format(name))
        except re.error as error:
            found.append((key, name, f"is not a regular expression: {error}", ""))
    return found


def _layer_problems(lora: LoraConfig) -> list[_Found]:
    key, layers = "lora.layers_to_transform", lora.layers_to_transform
    if layers is None:
        return []
    if not layers:
        return [(key, layers, "names no layer, so nothing would train", "use None for all layers")]
    if isinstance(lora.target_modules, str) and lora.target_modules not in TARGET_WORDS:
        what = "does not go with a regex in lora.target_modules"
        return [(key, layers, what, "put the layers into the regex, or list module names")]
    found: list[_Found] = [(key, n, "is not the number of a layer", "") for n in layers if n < 0]
    doubled = sorted({n for n in layers if layers.count(n) > 1})
    return found + [(key, n, "is listed twice", "list it once") for n in doubled]


def _token_problems(lora: LoraConfig) -> list[_Found]:
    key, ids = "lora.trainable_token_indices", lora.trainable_token_indices
    found: list[_Found] = [(key, i, "is not a token id", "") for i in ids if i < 0]
    doubled = sorted({i for i in ids if ids.count(i) > 1})
    return found + [(key, i, "is listed twice", "list it once") for i in doubled]


def _init_problems(c: Config) -> list[_Found]:
    """Initial values of the adapters that other keys rule out."""
    key, init = "lora.init_lora_weights", c.lora.init_lora_weights
    found: list[_Found] = []
    if init in FACTORED_INITS and c.lora.use_dora:
        what = "does not go with use_dora: the adapter could not be exported for the original base"
        found.append((key, init, what, "use 'default' or 'gaussian'"))
    if init in FACTORED_INITS and c.init_adapter is not None:
        what = "would change the base that init_adapter was trained on"
        found.append((key, init, what, "use 'default': the adapter comes from init_adapter"))
    if init == "loftq" and c.quant.qtype == "none":
        what = "makes up for the error of a quantised base, and quant.qtype is 'none'"
        found.append((key, init, what, "set quant.qtype, or use 'pissa'"))
    return found


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


def from_flat(flat: Mapping[str, Any]) -> Config:
    """The Config that `as_flat` was given, also after JSON; keys that are no settings are left out.

    Raises:
      ConfigError: a key is missing, or one is not of this version.
    """
    nested: dict[str, Any] = {}
    for key, value in {**LATER_KEYS, **flat}.items():
        if " " in key:  # A fact beside the settings ("config.json: hidden_size").
            continue
        *sections, name = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return parse(nested)


# Keys that older checkpoints lack, with the value that stands for what was done then.
LATER_KEYS: Mapping[str, Any] = {"lora.peft_type": "lora"}

# Settings that may differ between a run and its continuation.
RESUMABLE: Sequence[str] = (
    "model.hf_folder",
    "model.path",  # The fingerprints of base and data say whether they are the same.
    "data.train",
    "workdir",
    "init_adapter",  # It is used up when the run begins.
    "steps",
    "epochs",
    "eval_steps",
    "log_steps",
    "nan_policy",
    "sample_prompts",
    "sample_tokens",
    "compile_cache",
    "scan_layers",
    "remat",
    "loss_chunk_tokens",
    "mesh.data",
    "mesh.fsdp",
    "mesh.expert",
    "mesh.tensor",
    "mesh.rules",
    "mesh.overrides",
    "mesh.shard_adapters",
    "mesh.keep_gathered",
    "checkpoint.save_steps",
    "checkpoint.save_secs",
    "checkpoint.save_first",
    "checkpoint.save_base",
    "checkpoint.async_save",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "checkpoint.resume",
)
