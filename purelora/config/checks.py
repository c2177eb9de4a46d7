"""What is wrong with the values of a configuration: each by itself, and all together."""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from purelora.config import declare, model_keys, schema
from purelora.core import errors
from purelora.core.paths import Path

# Key, value, what is wrong, remedy.
_Finding = tuple[str, Any, str, str]
# What every chat template is given.
_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def check(config: schema.Config) -> list[errors.Problem]:
    """All values out of range and all keys that do not fit together."""
    findings = [
        *_single_values(config),
        *_patterns(config),
        *_combinations(config),
        *_checkpoint_findings(config),
    ]
    return [errors.Problem(*finding) for finding in findings]


def _single_values(config: schema.Config) -> list[_Finding]:
    """Values that the declaration of their key does not allow."""
    findings: list[_Finding] = []
    for path, value in schema.as_flat(config).items():
        key = schema.KEYS[Path(path)].key
        if isinstance(value, str) and "\0" in value:
            findings.append((path, value, "holds a NUL character", "remove it"))
        if key.is_filled and value == "":
            findings.append((path, value, "is empty", key.remedy))
        if key.limits is not None and value is not None and not key.limits.hold(value):
            what = key.refusal or f"must be {key.limits.words}"
            findings.append((path, value, what, key.remedy))
    return findings


def _patterns(c: schema.Config) -> list[_Finding]:
    """Texts that are no prompt, regex, date or template option."""
    findings = _skip_findings(c.quant.skip) + _date_findings(c.data.template_date)
    if "" in c.sample_prompts:
        findings.append(("sample_prompts", c.sample_prompts, "holds an empty prompt", "remove it"))
    return findings + template_problems("data.chat_template_kwargs", c.data.chat_template_kwargs)


def _skip_findings(skip: Sequence[str]) -> list[_Finding]:
    findings: list[_Finding] = []
    for pattern in skip:
        try:
            re.compile(f"(?:{pattern})")
        except re.error as error:
            findings.append(("quant.skip", pattern, f"is not a regular expression: {error}", ""))
    return findings


def template_problems(where: str, options: Mapping[str, object]) -> list[_Finding]:
    """(key, value, what is wrong, remedy) of options of a chat template that are no options."""
    what = "is what the template is given for each conversation"
    return [(where, name, what, "leave it out") for name in options if name in _TEMPLATE_VARIABLES]


def _date_findings(date: str) -> list[_Finding]:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        return [("data.template_date", date, "is not a date", "write it as 2026-01-31")]
    return []


def _combinations(c: schema.Config) -> list[_Finding]:
    findings: list[_Finding] = []
    if (c.steps is None) == (c.epochs is None):
        both = "are both set" if c.steps is not None else "are both None"
        findings.append(("steps, epochs", (c.steps, c.epochs), both, "set exactly one of them"))
    if c.accum_steps >= 1 and c.batch_size % c.accum_steps:
        what = f"is not a multiple of accum_steps = {c.accum_steps}"
        low = c.batch_size - c.batch_size % c.accum_steps
        near = [n for n in (low, low + c.accum_steps) if n > 0]
        findings.append(("batch_size", c.batch_size, what, f"use {' or '.join(map(str, near))}"))
    findings += _lora_findings(c.lora)
    findings += _init_findings(c) if c.lora.enabled else _full_training_findings(c)
    return findings + _contradictions(c)


def _full_training_findings(c: schema.Config) -> list[_Finding]:
    """What does not go with training all weights."""
    findings: list[_Finding] = []
    if c.quant.qtype != "none":
        what = "quantises the base, but lora.enabled=False trains it"
        remedy = "set quant.qtype='none', or lora.enabled=True"
        findings.append(("quant.qtype", c.quant.qtype, what, remedy))
    if c.model.weights_dtype != "float32":
        what = "would train all weights in less than float32, where small updates round away"
        remedy = "set it to 'float32'; dtype='bfloat16' still computes in bfloat16"
        findings.append(("model.weights_dtype", c.model.weights_dtype, what, remedy))
    if c.mesh.shard_adapters:
        what = "has no effect with lora.enabled=False: there are no adapters"
        findings.append(("mesh.shard_adapters", True, what, "set it to False"))
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
    values = schema.as_flat(c)
    what = "has no effect with lora.enabled=False: all weights are trained"
    findings += [(key, values[key], what, "leave it out") for key, is_set in idle.items() if is_set]
    if c.init_adapter is not None:
        what = "is set, but lora.enabled=False trains no adapter"
        remedy = "leave it out; to train on from merged weights set model.path to them"
        findings.append(("init_adapter", c.init_adapter, what, remedy))
    if c.optim.loraplus_lr_ratio != 1:
        what = "has no effect with lora.enabled=False: there are no adapters"
        findings.append(("optim.loraplus_lr_ratio", c.optim.loraplus_lr_ratio, what, "set it to 1"))
    return findings


def _contradictions(c: schema.Config) -> list[_Finding]:
    """Keys that would be ignored, or that exclude each other."""
    findings: list[_Finding] = []
    if c.quant.qtype == "none" and c.quant.tile_size is not None:
        what = "has no effect with quant.qtype='none'"
        remedy = "set quant.qtype='int8', or leave tile_size out"
        findings.append(("quant.tile_size", c.quant.tile_size, what, remedy))
    if c.data.eval is not None and c.data.eval_fraction > 0:
        remedy = "set data.eval_fraction=0, or leave data.eval out"
        what = "and data.eval are both set"
        findings.append(("data.eval_fraction", c.data.eval_fraction, what, remedy))
    if c.eval_steps is not None and c.data.eval is None and c.data.eval_fraction == 0:
        what, remedy = "is set, but there is no eval data", "set data.eval or data.eval_fraction"
        findings.append(("eval_steps", c.eval_steps, what, remedy))
    findings += _factory_findings(c.optim)
    if c.optim.factory is None and c.optim.name == "adamw" and c.optim.momentum:
        what, remedy = "has no effect with optim.name='adamw'", "set it to 0, or use optim.b1"
        findings.append(("optim.momentum", c.optim.momentum, what, remedy))
    if c.router_aux != "rows" and not c.router_aux_loss_coef:
        what, remedy = "has no effect without router_aux_loss_coef", "set that, or leave it out"
        findings.append(("router_aux", c.router_aux, what, remedy))
    if c.mesh.keep_gathered and (c.remat == "full" or not c.lora.enabled):
        why = "remat='full', which gathers with what it recomputes"
        why = why if c.lora.enabled else "lora.enabled=False: there is no frozen base"
        findings.append(
            ("mesh.keep_gathered", True, f"has no effect with {why}", "set it to False")
        )
    limit = c.optim.schedule_steps or c.steps
    return findings if limit is None else findings + warmup_problems(c.optim, limit)


def _factory_findings(optim: schema.OptimConfig) -> list[_Finding]:
    key, text = "optim.factory", optim.factory
    if text is None:
        return []
    findings: list[_Finding] = []
    if not re.fullmatch(r"[\w.]+:\w+", text):
        findings.append((key, text, "is not of the form module:function", "for example mine:lion"))
    if optim.name != schema.KEYS[Path("optim.name")].default:
        what = "has no effect with optim.factory"
        findings.append(("optim.name", optim.name, what, "leave one of them out"))
    return findings


def _checkpoint_findings(c: schema.Config) -> list[_Finding]:
    """What is wrong with when to save and what to keep."""
    saving, findings = c.checkpoint, list[_Finding]()
    if saving.save_base and not c.lora.enabled:
        what = "has no effect with lora.enabled=False: all weights are trained and saved"
        findings.append(("checkpoint.save_base", True, what, "leave it out"))
    if saving.save_steps is None:
        keeps = {"keep_every": saving.keep_every, "keep_best": saving.keep_best or None}
        what = "has no effect without checkpoint.save_steps"
        findings += [
            (f"checkpoint.{key}", value, what, "set checkpoint.save_steps, or leave it out")
            for key, value in keeps.items()
            if value is not None
        ]
        return findings
    return findings + _keep_best_findings(c, saving.save_steps)


def _keep_best_findings(c: schema.Config, save_steps: int) -> list[_Finding]:
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


def warmup_problems(optim: schema.OptimConfig, limit: int) -> list[_Finding]:
    """What is wrong with a warm-up in `limit` steps; with `epochs` only the data tells them."""
    if optim.warmup_steps <= limit:
        return []
    what = f"is more than the {limit} steps there are"
    remedy = "the learning rate would never reach optim.learning_rate"
    return [("optim.warmup_steps", optim.warmup_steps, what, remedy)]


def _lora_findings(lora: schema.LoraConfig) -> list[_Finding]:
    findings: list[_Finding] = []
    if not (lora.target_modules or lora.target_parameters):
        remedy = "use 'all-linear', a list of module names or a regex"
        findings.append(("lora.target_modules", lora.target_modules, "is empty", remedy))
    findings += _pattern_findings("lora.rank_pattern", lora.rank_pattern)
    findings += _pattern_findings("lora.alpha_pattern", lora.alpha_pattern)
    findings += [
        (f"lora.rank_pattern[{name!r}]", r, f"must be at most {model_keys.LARGEST_RANK}", "")
        for name, r in lora.rank_pattern.items()
        if r > model_keys.LARGEST_RANK
    ]
    return findings + _layer_findings(lora) + _token_findings(lora)


def _pattern_findings(key: str, pattern: Mapping[str, float]) -> list[_Finding]:
    findings: list[_Finding] = []
    for name, value in pattern.items():
        if not 0 < declare.as_float32(value) < float("inf"):
            findings.append((f"{key}[{name!r}]", value, "must be above 0", ""))
        try:
            re.compile(schema.MODULE_PATTERN.format(name))
        except re.error as error:
            findings.append((key, name, f"is not a regular expression: {error}", ""))
    return findings


def _layer_findings(lora: schema.LoraConfig) -> list[_Finding]:
    key, layers = "lora.layers_to_transform", lora.layers_to_transform
    if layers is None:
        return []
    if not layers:
        return [(key, layers, "names no layer, so nothing would train", "use None for all layers")]
    if isinstance(lora.target_modules, str) and lora.target_modules not in schema.TARGET_WORDS:
        what = "does not go with a regex in lora.target_modules"
        return [(key, layers, what, "put the layers into the regex, or list module names")]
    findings: list[_Finding] = [
        (key, n, "is not the number of a layer", "") for n in layers if n < 0
    ]
    doubled = sorted({n for n in layers if layers.count(n) > 1})
    return findings + [(key, n, "is listed twice", "list it once") for n in doubled]


def _token_findings(lora: schema.LoraConfig) -> list[_Finding]:
    key, ids = "lora.trainable_token_indices", lora.trainable_token_indices
    findings: list[_Finding] = [(key, i, "is not a token id", "") for i in ids if i < 0]
    doubled = sorted({i for i in ids if ids.count(i) > 1})
    return findings + [(key, i, "is listed twice", "list it once") for i in doubled]


def _init_findings(c: schema.Config) -> list[_Finding]:
    """Initial values of the adapters that other keys rule out."""
    key, init = "lora.init_lora_weights", c.lora.init_lora_weights
    findings: list[_Finding] = []
    if init in schema.FACTORED_INITS and c.lora.use_dora:
        what = "does not go with use_dora: the adapter could not be exported for the original base"
        findings.append((key, init, what, "use 'default' or 'gaussian'"))
    if init in schema.FACTORED_INITS and c.init_adapter is not None:
        what = "would change the base that init_adapter was trained on"
        findings.append((key, init, what, "use 'default': the adapter comes from init_adapter"))
    if init == "loftq" and c.quant.qtype == "none":
        what = "makes up for the error of a quantised base, and quant.qtype is 'none'"
        findings.append((key, init, what, "set quant.qtype, or use 'pissa'"))
    return findings
