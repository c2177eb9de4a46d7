"""Writes adapters on experts as PEFT's files have them; the forms are drawn in `peft_experts`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft import experts as peft_experts
from purelora.lora import kinds, targets

Kinds = dict[str, np.ndarray]


def to_file(
    where: str,
    config: adapter_config.AdapterConfig,
    modules: peft_checks.Modules,
    *,
    interleaved: bool = False,
) -> peft_experts.Converted:
    """Converts adapters on experts from the form that they have here to that of PEFT's files.

    Args:
      where: the name of the file, for messages.
      config: the config, which names matrices of experts as modules.
      modules: tensors by module and tensor.
      interleaved: whether the rows of joined matrices alternate.

    Returns:
      The adapter whose config names parameters instead.

    Raises:
      ModelError: matrices that PEFT joins have different scalings.
    """
    experts: dict[str, dict[str, list[str]]] = {}
    for name in (name for name, tensors in modules.items() if peft_experts.is_of_experts(tensors)):
        parameter = targets.parameter_name(name)
        around = parameter.rpartition(".")[0]
        experts.setdefault(around, {}).setdefault(parameter, []).append(name)
    if not experts:
        return peft_experts.Converted(config, modules, {}, ())
    made: dict[str, Kinds] = {}
    joined: dict[str, dict[str, int]] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for around, parameters in experts.items():
        names = [f"{around}.{name}" for name in peft_experts.PARAMETERS]
        order = [name for name in reversed(names) if name in parameters]
        for level, parameter in enumerate(order):
            matrices = parameters[parameter]
            tensors, joined[parameter] = _joined(parameter, matrices, modules, interleaved)
            made[around + level * peft_experts.LEVEL] = tensors
            ranks[parameter] = r = sum(joined[parameter].values())
            alphas[parameter] = _common_alpha(where, config, matrices, r)
    rest = {n: tensors for n, tensors in modules.items() if not peft_experts.is_of_experts(tensors)}
    plain = [name for name, tensors in rest.items() if kinds.is_adapted(tensors)]
    config = _without_experts(config, plain, list(ranks))
    config = _with_patterns(config, plain, ranks, alphas)
    return peft_experts.Converted(config, {**rest, **made}, joined, ())


def _joined(
    parameter: str, names: list[str], modules: peft_checks.Modules, interleaved: bool
) -> tuple[Kinds, dict[str, int]]:
    """The adapters of matrices (called `names`) as one on their parameter, and the rank of each."""
    matrices = peft_experts.PARAMETERS[parameter.rpartition(".")[2]]
    having = {m: modules[n] for m in matrices for n in names if n.rpartition(".")[2] == m}
    ranks = {matrix: tensors["lora_A"].shape[1] for matrix, tensors in having.items()}
    a = np.concatenate([tensors["lora_A"] for tensors in having.values()], axis=1)
    experts, rows, _ = next(iter(having.values()))["lora_B"].shape
    b = np.zeros((experts, rows * len(matrices), sum(ranks.values())), a.dtype)
    first = 0
    for matrix, tensors in having.items():
        place = matrices.index(matrix) * rows
        b[:, place : place + rows, first : first + ranks[matrix]] = tensors["lora_B"]
        first += ranks[matrix]
    if interleaved:
        b = b.reshape(experts, len(matrices), rows, -1).swapaxes(1, 2).reshape(b.shape)
    flat_b = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return {"lora_A": a.reshape(-1, a.shape[2]), "lora_B": flat_b}, ranks


def _common_alpha(
    where: str, config: adapter_config.AdapterConfig, names: list[str], r: int
) -> float:
    """The alpha with which rank `r` has the scaling that all modules called `names` have.

    Raises:
      ModelError: they have different ones.
    """
    scalings = [adapter_config.scaling(config, name) for name in names]
    if not all(math.isclose(scaling, scalings[0], rel_tol=1e-9) for scaling in scalings):
        what = f"have scalings {' and '.join(f'{s:g}' for s in scalings)}, and PEFT adapts them as "
        raise errors.ModelError(f"{where}: {' and '.join(names)}", None, f"{what}one",
                                "give them one alpha / r")  # fmt: skip
    own = adapter_config.rank(config, names[0])
    return peft_experts.equal_alpha(config, adapter_config.alpha(config, names[0]), own, r)


def _without_experts(
    config: adapter_config.AdapterConfig, plain: list[str], parameters: list[str]
) -> adapter_config.AdapterConfig:
    """The config with experts named as parameters, and only real modules named as modules.

    Dropout is set to 0: it was for training only, and PEFT refuses it with parameters.

    Args:
      config: the config before.
      plain: names of the adapted modules that are not experts.
      parameters: names of the adapted parameters of experts.
    """
    known = [*parameters, *map(targets.parameter_name, plain)]
    entries = tuple(e for e in config.target_parameters
                    if any(targets.matches([e], name) for name in known))  # fmt: skip
    more = tuple(sorted(name for name in parameters if not targets.matches(entries, name)))
    modules = [n for n in plain if not targets.matches(entries, targets.parameter_name(n))]
    config = dataclasses.replace(config, target_parameters=entries + more, lora_dropout=0.0)
    if not isinstance(config.target_modules, str) and modules:
        kept = tuple(e for e in config.target_modules
                     if any(targets.matches([e], name) for name in modules))  # fmt: skip
        if all(targets.matches(kept, name) for name in modules):
            return dataclasses.replace(config, target_modules=kept)
    return dataclasses.replace(
        config,
        target_modules=tuple(sorted(modules)),
        exclude_modules=(),
        layers_to_transform=None,
        layers_pattern=(),
    )


def _with_patterns(
    config: adapter_config.AdapterConfig,
    plain: list[str],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> adapter_config.AdapterConfig:
    """The config with patterns that give parameters these ranks and alphas.

    Args:
      config: the config before.
      plain: names of the adapted modules that are not experts; patterns that match one are kept.
      ranks, alphas: of each adapted parameter, by its name.
    """
    kept = {
        key: {k: v for k, v in getattr(config, key).items()
              if any(targets.pattern_key([k], name) for name in plain)}
        for key in ("rank_pattern", "alpha_pattern")
    }  # fmt: skip
    return dataclasses.replace(
        config,
        rank_pattern=_short(ranks, config.r, kept["rank_pattern"]),
        alpha_pattern=_short(alphas, config.lora_alpha, kept["alpha_pattern"]),
    )


def _short(own: Mapping[str, Any], default: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Patterns that give parameters the values `own`, by short names where these are enough.

    Args:
      own: the values by the parameters' full names.
      default: the value of a parameter that no pattern matches.
      kept: patterns that must stay; they come last.
    """
    by_end: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        by_end.setdefault(".".join(name.split(".")[-2:]), {})[name] = value
    made: dict[str, Any] = {}
    for end, values in by_end.items():
        one = len(set(values.values())) == 1
        chosen: Iterator[tuple[str, Any]] = iter(
            [(end, next(iter(values.values())))] if one else values.items()
        )
        made |= {
            key: value
            for key, value in chosen
            if any(targets.pattern_value(kept, name, default) != value for name in values)
        }
    return made | dict(kept)
