"""What adapter_config.json of PEFT says about an adapter, and PEFT's rules of applying it.

`config_keys` reads and writes the file.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from purelora.core.paths import Path
from purelora.lora import kinds, targets

Bias = Literal["none", "all", "lora_only"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says, as far as the maths needs it. PEFT's names for LoRA.

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
      kind: name of the kind of its adapters, see `kinds.KINDS`.
      patterns: keys of the kind that name modules, see `Kind.peft_patterns`.
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
    kind: str = "lora"
    lora_dropout: float = 0.0
    bias: Bias = "none"
    init_lora_weights: str = "default"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None
    patterns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def adapter_kind(self) -> kinds.Kind:
        """The kind of its adapters."""
        return kinds.KINDS[self.kind]


NAMED_LAYER = r"(?:^|.*?\.){}\.(\d+)\."


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
    parts = Path(module).parts
    levels = [Path.of(parts[: i + 1]) for i in range(len(parts))]
    return any(level.endswith(entry) for entry in config.modules_to_save for level in levels)


def _layer(patterns: tuple[str, ...], module: str) -> int | None:
    """The number of the layer that a module is in, of the lists of layers that are named."""
    if not patterns:
        return targets.layer_number(module)
    tries = [re.match(NAMED_LAYER.format(pattern), module) for pattern in patterns]
    match = next((match for match in tries if match), None)
    return int(match[match.re.groups]) if match else None
