"""adapter_config.json: every key that it may hold decided on, read and written.

A key that changes the maths is read, or its flag is refused by name; a key that only tells how the
adapter was made is known not to matter; a key of a newer PEFT must be unset.
"""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from purelora.config import schema
from purelora.core import errors
from purelora.interop.peft.adapter_config import NAMED_LAYER, AdapterConfig
from purelora.lora import kinds, targets


class Parsed(NamedTuple):
    """A config.

    Attributes:
      config: None when there are problems.
      problems: all that is wrong with it.
      notes: keys that are set but make no difference.
    """

    config: AdapterConfig | None
    problems: tuple[errors.Problem, ...]
    notes: tuple[str, ...]


_REQUIRED = ("r", "lora_alpha")
# These change the base that the adapter is added to, and PEFT repeats the change when it loads.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_OTHER_INITS = ("gaussian", "orthogonal", "mica", "eva")

# Keys that say how the adapter came to be, or how PEFT is to run it.
HISTORY = frozenset(
    (
        "peft_type",
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_ga_config",
        "loftq_config",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
    )
)
# Keys that make no difference here, with the reason.
NO_EFFECT: Mapping[str, str] = {
    "fan_in_fan_out": "it is about Conv1D, and PEFT unsets it for linear layers",
    "runtime_config": "PEFT does not read it from a file",
    "velora_config": "it approximates gradients only",
}
# Flags that change what the adapter computes, and are not supported; with what they stand for.
REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "an adapter that is active after certain tokens only",
    "arrow_config": "a router between adapters",
    "enable_lora": "adapters on parts of a fused projection",
    "kasa_config": "a diagonal between A and B and a truncated base",
    "layer_replication": "a base with repeated layers",
    "lora_bias": "a bias on lora_B",
    "megatron_config": "layers of Megatron",
    "monteclora_config": "adapters that are sampled",
    "use_bdlora": "block-diagonal A and B",
    "use_qalora": "pooled inputs",
}


def parse(file: str, data: Mapping[str, Any]) -> Parsed:
    """Reads a PEFT config; `file` is its name in messages.

    Raises:
      ModelError: it is not of LoRA at all.
    """
    peft_type = data.get("peft_type")
    if peft_type not in kinds.PEFT_TYPES:
        what = "is missing" if peft_type is None else "is a method that is not read"
        remedy = f"known: {', '.join(kinds.PEFT_TYPES)}"
        raise errors.ModelError(f"{file}: peft_type", peft_type, what, remedy)
    kind = kinds.of_peft(peft_type, data)
    problems = _flag_problems(file, data, kind)
    values: dict[str, Any] = {"kind": kind.name}
    if not kind.is_ranked:
        values |= {"r": 1, "lora_alpha": 1.0}
    for key, field in _fields(kind).items():
        value = data.get(key)
        if value is None:
            if field in _REQUIRED:
                problems.append(errors.Problem(f"{file}: {key}", None, "is missing", "add it"))
            continue
        try:
            values[field] = PARSERS[field](value)
        except ValueError as error:
            problems.append(errors.Problem(f"{file}: {key}", value, str(error), f"correct {key}"))
    values = {field: value for field, value in values.items() if field not in _FLAGS}
    with_patterns = {}
    for key in kind.peft_patterns:
        try:
            with_patterns[key] = _modules(data.get(key) or [])
        except ValueError as error:
            problems.append(
                errors.Problem(f"{file}: {key}", data[key], str(error), f"correct {key}")
            )
    values["patterns"] = with_patterns
    if not (values.get("target_modules") or values.get("target_parameters")):
        value = data.get("target_modules")
        if value is None:
            missing = errors.Problem(f"{file}: target_modules", None, "is missing", "add it")
            problems.append(missing)
        elif "target_modules" in values:
            empty = "is empty", "correct target_modules"
            problems.append(errors.Problem(f"{file}: target_modules", value, *empty))
    if problems:
        return Parsed(None, tuple(problems), ())
    config = AdapterConfig(**values)
    return Parsed(config, tuple(combination_problems(file, config)), _notes(data, kind))


def combination_problems(file: str, config: AdapterConfig) -> list[errors.Problem]:
    """Keys that PEFT does not take together."""
    problems = []
    for key in ("layers_to_transform", "layers_pattern"):
        value = getattr(config, key)
        if isinstance(config.target_modules, str) and value:
            what = "needs a list of names in target_modules, which is a regex"
            remedy = "name the layers in the regex"
            problems.append(errors.Problem(f"{file}: {key}", value, what, remedy))
    if config.layers_pattern and config.layers_to_transform is None:
        what = "has no effect without layers_to_transform"
        value = config.layers_pattern
        problems.append(errors.Problem(f"{file}: layers_pattern", value, what, "remove it"))
    return problems


def _fields(kind: kinds.Kind) -> Mapping[str, str]:
    """The keys of an adapter's config, each with the field of `AdapterConfig` that it fills."""
    return {key: key for key in PARSERS} if kind.peft_keys is None else kind.peft_keys


def _known(kind: kinds.Kind) -> list[str]:
    """All keys that a config of this kind may have set."""
    no_effect = NO_EFFECT if kind.peft_keys is None else {}
    return [*_fields(kind), *kind.peft_patterns, *kind.peft_history, *HISTORY, *no_effect]


def _flag_problems(file: str, data: Mapping[str, Any], kind: kinds.Kind) -> list[errors.Problem]:
    """Set flags that are not supported, and set keys that are not known."""
    problems = []
    known = set(_known(kind))
    for key, value in data.items():
        if key in known or _is_unset(value):
            continue
        if key in REFUSED and kind.peft_keys is None:
            what, remedy = f"is not supported ({REFUSED[key]})", "merge it into its base in PEFT"
        else:
            what, remedy = "is a key that is not known", errors.nearest(key, sorted(known))
        problems.append(errors.Problem(f"{file}: {key}", value, what, remedy))
    return problems


def _notes(data: Mapping[str, Any], kind: kinds.Kind) -> tuple[str, ...]:
    notes = [
        f"{key} is set and has no effect: {reason}"
        for key, reason in NO_EFFECT.items()
        if kind.peft_keys is None and not _is_unset(data.get(key))
    ]
    unknown = sorted(set(data) - {*_known(kind), *REFUSED})
    if unknown:
        notes.append(f"keys that are not known are unset: {', '.join(unknown)}")
    return tuple(notes)


def _is_unset(value: object) -> bool:
    """Whether a value is null, false or empty: what all of PEFT's own switches are by default."""
    return value is None or value is False or value in ("", [], {})


def _integer(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError("is not a positive integer")
    return value


def _number(value: object) -> float:
    # The upper limit also refuses integers too long for a float; NaN fails both comparisons.
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError("is not a positive number")
    return value  # type: ignore[return-value]


def _dropout(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise ValueError("is not a number from 0 to below 1")
    return value  # type: ignore[return-value]


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not a string")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError("is not a list of names")
    return tuple(value)


def _regex(value: str, form: str = "{}") -> str:
    try:
        # As it will be used: inside another pattern, global flags are an error.
        re.compile(form.format(value))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


def _modules(value: object) -> str | tuple[str, ...]:
    # In PEFT a list of names is a set, and is saved in any order.
    return _regex(value) if isinstance(value, str) and value else tuple(sorted(_names(value)))


def _layer_patterns(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else _names(value)
    return tuple(_regex(name, NAMED_LAYER) for name in names if name)


def _indices(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("is not a list of indices")
    if len(set(value)) != len(value):
        raise ValueError("lists an index twice")
    return tuple(value)


def _layers(value: object) -> tuple[int, ...] | None:
    # PEFT takes an empty list as no limit.
    return _indices([value] if type(value) is int else value) or None


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    by_module = {targets.EMBEDDING: value} if isinstance(value, list) else value
    if not isinstance(by_module, dict) or "" in by_module:
        raise ValueError("is neither a list of token ids nor an object of such lists")
    return {module: _indices(ids) for module, ids in by_module.items() if ids != []}


def _patterns(parser: Callable[[object], Any]) -> Callable[[object], dict[str, Any]]:
    """Parser of an object from patterns to what `parser` reads."""

    def parse_patterns(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("is not an object")
        parsed = {}
        for key, item in value.items():
            try:
                parsed[_regex(key, schema.MODULE_PATTERN)] = parser(item)
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from error
        return parsed

    return parse_patterns


def _bias(value: object) -> str:
    if value not in ("none", "all", "lora_only"):
        raise ValueError("is none of 'none', 'all' and 'lora_only'")
    return str(value)


def _init(value: object) -> str:
    if isinstance(value, bool):
        return "default" if value else "random"
    if not isinstance(value, str):
        raise ValueError("is neither true, false nor a string")
    if value.startswith(_CHANGES_BASE):
        raise ValueError(
            "is not supported: the adapter adds to a base that this initialisation has changed; "
            "save it in PEFT with path_initial_model_for_weight_conversion, which makes it plain"
        )
    if value not in _OTHER_INITS:
        raise ValueError("is an initialisation that is not known")
    return value


PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "r": _integer,
    "lora_alpha": _number,
    "target_modules": _modules,
    "target_parameters": _names,
    "exclude_modules": _modules,
    "rank_pattern": _patterns(_integer),
    "alpha_pattern": _patterns(_number),
    "layers_to_transform": _layers,
    "layers_pattern": _layer_patterns,
    "use_rslora": _boolean,
    **{kind.flag: _boolean for kind in kinds.FLAGGED},
    "lora_dropout": _dropout,
    "bias": _bias,
    "init_lora_weights": _init,
    "modules_to_save": _names,
    "trainable_token_indices": _token_indices,
    "ensure_weight_tying": _boolean,
    "base_model_name_or_path": _text,
}
_FLAGS = frozenset(kind.flag for kind in kinds.FLAGGED)


def to_json(config: AdapterConfig) -> dict[str, Any]:
    """The config as PEFT 0.18 and later read it without a warning.

    What is empty is null, as in PEFT. Keys that came with newer versions are written only when they
    are set.
    """
    kind = config.adapter_kind
    flags = {flagged.flag: flagged is kind for flagged in kinds.FLAGGED}
    values = {field: flags.get(field, getattr(config, field, None)) for field in PARSERS}
    data: dict[str, Any] = {
        "peft_type": kind.peft_type,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "revision": None,
        **{key: _plain(values[field]) for key, field in _fields(kind).items()},
        **{key: _plain(config.patterns.get(key)) or [] for key in kind.peft_patterns},
        **kind.peft_history,
    }
    for key in ("target_modules", "exclude_modules"):
        if isinstance(data[key], list):
            data[key] = sorted(data[key])
    data |= {key: data[key] or {} for key in ("rank_pattern", "alpha_pattern") if key in data}
    if kind.peft_keys is None:
        data = _of_lora(config, data)
    return {key: data[key] for key in sorted(data)}


def _of_lora(config: AdapterConfig, data: dict[str, Any]) -> dict[str, Any]:
    """What only a config of LoRA has."""
    init = _INIT_VALUES.get(config.init_lora_weights, config.init_lora_weights)
    data = data | {"fan_in_fan_out": False, "init_lora_weights": init}
    if config.init_lora_weights == "eva":
        data["eva_config"] = {}
    if not config.ensure_weight_tying:
        del data["ensure_weight_tying"]
    if config.target_parameters:
        # Null would be PEFT's own choice of modules.
        data["target_modules"] = data["target_modules"] or []
    else:
        del data["target_parameters"]
    return data


_INIT_VALUES: Mapping[str, bool] = {"default": True, "random": False}


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()} or None
    if isinstance(value, tuple):
        return list(value) or None
    return value
