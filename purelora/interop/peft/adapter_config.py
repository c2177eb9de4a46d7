"""adapter_config.json of PEFT: what it says about LoRA, with every key it may hold decided on.

A key that changes the maths is read, or its flag is refused by name; a key that only tells how the
adapter was made is known not to matter; a key of a newer PEFT must be unset.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from purelora.config import schema
from purelora.core import errors
from purelora.lora import targets

Bias = Literal["none", "all", "lora_only"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says, as far as the maths of LoRA needs it. PEFT's names.

    Attributes:
      target_modules: a regex for the whole module name, `all-linear`, or names or dotted suffixes.
      exclude_modules: the same for modules to leave out; () for none.
      target_parameters: names or dotted suffixes of parameters that are adapted where there is no
        linear module: experts and routers.
      rank_pattern: r by pattern, for the modules where it differs; see `rank`.
      alpha_pattern: lora_alpha by pattern.
      layers_to_transform: layer numbers that have adapters; None for all.
      layers_pattern: name of the list of layers that these numbers count in.
      init_lora_weights: how A and B began (`default`, `random`, `gaussian`, ...). Past history.
      modules_to_save: modules trained in full.
      trainable_token_indices: by embedding module, the rows that were trained.
      ensure_weight_tying: a trained embedding stays tied to the output head.
    """

    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: str | tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_dropout: float = 0.0
    bias: Bias = "none"
    init_lora_weights: str = "default"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None


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


# ---- the rules by which PEFT applies a config --------------------------------------------------

_NAMED_LAYER = r"(?:^|.*?\.){}\.(\d+)\."


def rank(config: AdapterConfig, module: str) -> int:
    """r of one module."""
    return int(targets.pattern_value(config.rank_pattern, module, config.r))


def alpha(config: AdapterConfig, module: str) -> float:
    """lora_alpha of one module."""
    return targets.pattern_value(config.alpha_pattern, module, config.lora_alpha)


def scaling(config: AdapterConfig, module: str) -> float:
    """What `B A` of one module is multiplied with."""
    r = rank(config, module)
    return targets.scaling(alpha(config, module), r, use_rslora=config.use_rslora)


def is_target(config: AdapterConfig, module: str) -> bool:
    """Whether the config gives a module (that can have one) an adapter.

    Experts and routers may be named as parameters, or as the modules that they once were.
    """
    if targets.matches(config.target_parameters, targets.parameter_name(module)):
        return True
    return any(_is_target(config, name) for name in (module, *targets.older_names(module)))


def _is_target(config: AdapterConfig, module: str) -> bool:
    if config.exclude_modules and targets.matches(config.exclude_modules, module):
        return False
    if config.target_modules == targets.ALL_LINEAR:
        return True
    if not targets.matches(config.target_modules, module):
        return False
    # In PEFT a full name in the list is taken whatever its layer.
    if config.layers_to_transform is None or module in config.target_modules:
        return True
    return _layer(config.layers_pattern, module) in config.layers_to_transform


def is_saved(config: AdapterConfig, module: str) -> bool:
    """Whether a module or one above it is named by modules_to_save; PEFT compares bare endings."""
    parts = module.split(".")
    levels = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(level.endswith(entry) for entry in config.modules_to_save for level in levels)


def _layer(patterns: tuple[str, ...], module: str) -> int | None:
    """The number of the layer that a module is in, of the lists of layers that are named."""
    if not patterns:
        return targets.layer_number(module)
    tries = [re.match(_NAMED_LAYER.format(pattern), module) for pattern in patterns]
    found = next((match for match in tries if match), None)
    return int(found[found.re.groups]) if found else None


# ---- the keys and their types ------------------------------------------------------------------

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
    kind = data.get("peft_type")
    if kind != "LORA":
        what = "is missing" if kind is None else "is not a LoRA adapter"
        raise errors.ModelError(f"{file}: peft_type", kind, what, "only 'LORA' is read")
    problems = _flag_problems(file, data)
    values: dict[str, Any] = {}
    for key, parser in PARSERS.items():
        value = data.get(key)
        if value is None:
            if key in _REQUIRED:
                problems.append(errors.Problem(f"{file}: {key}", None, "is missing", "add it"))
            continue
        try:
            values[key] = parser(value)
        except ValueError as error:
            problems.append(errors.Problem(f"{file}: {key}", value, str(error), f"correct {key}"))
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
    return Parsed(config, tuple(combination_problems(file, config)), _notes(data))


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


def _flag_problems(file: str, data: Mapping[str, Any]) -> list[errors.Problem]:
    """Set flags that are not supported, and set keys that are not known."""
    problems = []
    known = {*PARSERS, *HISTORY, *NO_EFFECT}
    for key, value in data.items():
        if key in known or _is_unset(value):
            continue
        if key in REFUSED:
            what, remedy = f"is not supported ({REFUSED[key]})", "merge it into its base in PEFT"
        else:
            what, remedy = "is a key that is not known", errors.nearest(key, sorted(known))
        problems.append(errors.Problem(f"{file}: {key}", value, what, remedy))
    return problems


def _notes(data: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [
        f"{key} is set and has no effect: {reason}"
        for key, reason in NO_EFFECT.items()
        if not _is_unset(data.get(key))
    ]
    unknown = sorted(set(data) - {*PARSERS, *HISTORY, *NO_EFFECT, *REFUSED})
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
    return tuple(_regex(name, _NAMED_LAYER) for name in names if name)


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
    "use_dora": _boolean,
    "lora_dropout": _dropout,
    "bias": _bias,
    "init_lora_weights": _init,
    "modules_to_save": _names,
    "trainable_token_indices": _token_indices,
    "ensure_weight_tying": _boolean,
    "base_model_name_or_path": _text,
}


def to_json(config: AdapterConfig) -> dict[str, Any]:
    """The config as PEFT 0.18 and later read it without a warning.

    What is empty is null, as in PEFT. Keys that came with newer versions are written only when they
    are set.
    """
    data: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "revision": None,
        "fan_in_fan_out": False,
        **{key: _plain(getattr(config, key)) for key in PARSERS},
    }
    data |= {key: data[key] or {} for key in ("rank_pattern", "alpha_pattern")}
    for key in ("target_modules", "exclude_modules"):
        if isinstance(data[key], list):
            data[key] = sorted(data[key])
    data["init_lora_weights"] = _INIT_VALUES.get(config.init_lora_weights, config.init_lora_weights)
    if config.init_lora_weights == "eva":
        data["eva_config"] = {}
    if not config.ensure_weight_tying:
        del data["ensure_weight_tying"]
    if config.target_parameters:
        # Null would be PEFT's own choice of modules.
        data["target_modules"] = data["target_modules"] or []
    else:
        del data["target_parameters"]
    return {key: data[key] for key in sorted(data)}


_INIT_VALUES: Mapping[str, bool] = {"default": True, "random": False}


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()} or None
    if isinstance(value, tuple):
        return list(value) or None
    return value
