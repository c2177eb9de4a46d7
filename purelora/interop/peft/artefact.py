"""An adapter in memory: plain arrays under Hugging Face module names, in PEFT's shapes."""

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft import experts as peft_experts
from purelora.lora import kinds, targets

Modules = peft_checks.Modules


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
      path: where it comes from, for messages.
      config: what its adapter_config.json says.
      modules: its tensors by Hugging Face module name and `kinds.TENSORS`, in stored types.
      base_fingerprint: `source.fingerprint` of the base that it was trained on, if it says.
      notes: what a user should be told about it.
      interleaved: whether in its files the rows of experts' matrices that are one parameter
        alternate; see `peft_experts`.
    """

    path: str
    config: adapter_config.AdapterConfig
    modules: Modules
    base_fingerprint: str | None
    notes: tuple[str, ...] = ()
    interleaved: bool = False


_LEVELS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def place(adapter: Adapter, names: Collection[str]) -> Adapter:
    """The adapter under the module names of a base, with one level of difference allowed.

    The level (a leading `model.`, a `language_model.`) must be the same for all names that are not
    those of the base already. If names change, the config is rewritten to name every module in
    full, so that its patterns mean what they meant.

    Args:
      adapter: an adapter with the names of the model that it was trained on.
      names: all module names of the base.

    Raises:
      ModelError: modules that the base has not, whatever the level.
    """
    known = frozenset(names)
    tries = [_renamed(adapter.modules, known, old, new) for old in _LEVELS for new in _LEVELS]
    tries = [names for names in tries if len(set(names.values())) == len(names)]
    best = max(tries, key=lambda new_names: sum(name in known for name in new_names.values()))
    surplus = [old for old, new in best.items() if new not in known]
    if surplus:
        problems = [
            errors.Problem(
                f"{adapter.path}: {name}",
                None,
                "is no module of the base",
                errors.nearest(best[name], sorted(known)),
            )
            for name in surplus
        ]
        raise errors.ModelError.of(errors.first(problems, adapter.path))
    changed = {old: new for old, new in best.items() if old != new}
    if not changed:
        return adapter
    old = next(iter(changed))
    return dataclasses.replace(
        adapter,
        config=_explicit(adapter.config, adapter.modules, best),
        modules={best[module]: tensors for module, tensors in adapter.modules.items()},
        notes=(*adapter.notes, f"its {old} is taken as {changed[old]}, and so on"),
    )


def _renamed(
    modules: Collection[str], known: Collection[str], old: str, new: str
) -> dict[str, str]:
    """New name of every module, with the level `new` in place of `old` where that is a name."""
    return {
        module: new + module[len(old) :]
        if module not in known and module.startswith(old)
        else module
        for module in modules
    }


def _explicit(
    config: adapter_config.AdapterConfig, modules: Modules, names: Mapping[str, str]
) -> adapter_config.AdapterConfig:
    """The config of an adapter whose modules get other names, with no pattern in it."""
    adapted = [m for m, tensors in modules.items() if kinds.is_adapted(tensors)]
    parameters = peft_experts.parameters([config], modules)
    ranks = {names[m]: adapter_config.rank(config, m) for m in adapted}
    alphas = {names[m]: adapter_config.alpha(config, m) for m in adapted}
    tokens = {
        names[m]: ids
        for name, ids in config.trainable_token_indices.items()
        for m, tensors in modules.items()
        if "trainable_tokens" in tensors and m.endswith(name)
    }
    return dataclasses.replace(
        config,
        target_modules=tuple(sorted(names[m] for m in adapted if m not in parameters)),
        target_parameters=tuple(sorted({targets.parameter_name(names[m]) for m in parameters})),
        exclude_modules=(),
        rank_pattern={name: r for name, r in ranks.items() if r != config.r},
        alpha_pattern={name: a for name, a in alphas.items() if a != config.lora_alpha},
        layers_to_transform=None,
        layers_pattern=(),
        modules_to_save=tuple(sorted(names[m] for m in modules if "weight" in modules[m])),
        trainable_token_indices=tokens,
    )


def check_equal(read: Adapter, wanted: Adapter) -> None:
    """Raises ModelError unless both hold the same tensors, bit for bit, at the same scalings."""
    same_names = read.modules.keys() == wanted.modules.keys() and all(
        read.modules[name].keys() == wanted.modules[name].keys() for name in wanted.modules
    )
    if not same_names or not all(
        np.array_equal(read.modules[name][tensor], array)
        and _have_one_scaling(read.config, wanted.config, name)
        for name, tensors in wanted.modules.items()
        for tensor, array in tensors.items()
    ):
        what = "does not read back as it was written"
        raise errors.ModelError(read.path, None, what, "is the disk sound?")


def _have_one_scaling(
    one: adapter_config.AdapterConfig, other: adapter_config.AdapterConfig, name: str
) -> bool:
    """Whether two configs give a module the same scaling.

    The last bits may differ: where adapters are joined, alpha is computed from a sum of ranks.
    """
    scalings = (adapter_config.scaling(config, name) for config in (one, other))
    return math.isclose(*scalings, rel_tol=1e-12)
