"""Whether the tensors of an adapter are sound, and those that its config names."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.lora import kinds, targets

_AGAIN = "save or download the adapter again"
_SETS = tuple(dict.fromkeys(names for kind in kinds.KINDS.values() for names in kind.sets))
Modules = Mapping[str, Mapping[str, np.ndarray]]


def tensor_problems(where: str, modules: Modules) -> Iterator[errors.Problem]:
    """What is wrong with tensors by themselves: values, shapes, and one of a pair missing."""
    for module, tensors in modules.items():
        for tensor, array in tensors.items():
            at = f"{where}: {module} {tensor}"
            if array.ndim not in _n_dims(tensor) or not array.size:
                yield errors.Problem(at, array.shape, "is not a possible shape", _AGAIN)
            elif not np.isfinite(array).all():
                yield errors.Problem(at, None, "holds NaN or infinity", "save a sound adapter")
        for names in _SETS:
            for name in names:
                missing = [other for other in names if other not in tensors]
                if name in tensors and missing:
                    what = f"has {name}, no {missing[0]}"
                    yield errors.Problem(f"{where}: {module}", None, what, _AGAIN)
        for kind in kinds.KINDS.values():
            for value, what in kind.tensor_problems(tensors):
                yield errors.Problem(f"{where}: {module}", value, what, _AGAIN)


def _n_dims(tensor: str) -> tuple[int, ...]:
    known = kinds.TENSORS.get(tensor)
    return (2,) if known is None else known.n_dims


def fit_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> list[errors.Problem]:
    """Tensors that the config does not account for, and what it names but there is not."""
    adapted = {
        module: tensors[names[0]]
        for module, tensors in modules.items()
        for names in _SETS
        if names[0] in tensors
    }
    return [
        *_target_problems(where, config, adapted),
        *_kind_problems(where, config, modules),
        *_full_problems(where, config, modules),
        *_token_problems(where, config, modules),
    ]


def _target_problems(
    where: str, config: adapter_config.AdapterConfig, adapted: Mapping[str, np.ndarray]
) -> Iterator[errors.Problem]:
    """Adapters against target_modules, r and the patterns."""
    if not adapted:
        yield errors.Problem(
            f"{where}: target_modules", config.target_modules, "finds no adapter", _AGAIN
        )
    for module, a in adapted.items():
        if not adapter_config.is_target(config, module):
            what = f"does not name {module}, which has an adapter"
            yield errors.Problem(f"{where}: target_modules", config.target_modules, what, _AGAIN)
        r = adapter_config.rank(config, module)
        stored = config.adapter_kind.rank_of(a) if a.ndim >= 2 else None
        if stored not in (None, r):
            what = f"is the rank of {module} by the config, and its tensors have {stored}"
            yield errors.Problem(f"{where}: r", r, what, "correct r or rank_pattern")
    for entry in config.target_parameters:
        if not any(targets.matches([entry], targets.parameter_name(m)) for m in adapted):
            what = "names no parameter that has an adapter"
            yield errors.Problem(f"{where}: target_parameters", entry, what, _AGAIN)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(targets.pattern_key([pattern], module) for module in adapted):
                remedy = "name adapted modules by their ends: " + ", ".join(list(adapted)[:3])
                what = "fits no module that has an adapter"
                yield errors.Problem(f"{where}: {key}", pattern, what, remedy)


def _kind_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> Iterator[errors.Problem]:
    """Tensors of another kind than the config says, and tensors of its kind that are missing."""
    chosen = config.adapter_kind
    for module, tensors in modules.items():
        adapted = kinds.is_adapted(tensors)
        for flagged in kinds.FLAGGED:
            for name in flagged.tensors:
                if (name in tensors) != (chosen is flagged and adapted):
                    what = f"and {module} has {'a' if name in tensors else 'no'} {name}"
                    key = f"{where}: {flagged.flag}"
                    yield errors.Problem(key, chosen is flagged, what, _AGAIN)
        for kind in kinds.KINDS.values():
            names = [name for names in kind.sets for name in names if name in tensors]
            if names and kind.peft_type != chosen.peft_type and not kind.flag:
                what = f"and {module} has a {names[0]}"
                yield errors.Problem(f"{where}: peft_type", chosen.peft_type, what, _AGAIN)


def _full_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> Iterator[errors.Problem]:
    """Full weights against modules_to_save, biases against it and `bias`."""
    saved = [module for module in modules if adapter_config.is_saved(config, module)]
    for module, tensors in modules.items():
        adapted = kinds.is_adapted(tensors)
        if "weight" in tensors and module not in saved:
            what = f"does not name {module}, which has a full weight"
            remedy = "save it again with save_embedding_layers=False, or name the module"
            yield errors.Problem(f"{where}: modules_to_save", config.modules_to_save, what, remedy)
        if adapted and module in saved:
            what = f"names {module}, which has an adapter"
            yield errors.Problem(f"{where}: modules_to_save", config.modules_to_save, what, _AGAIN)
        if "base_weight" in tensors and not adapted:
            what = f"{module} has a base weight and no adapter"
            yield errors.Problem(where, None, what, _AGAIN)
        allowed = config.bias == "all" or (config.bias == "lora_only" and adapted)
        if "bias" in tensors and not allowed and module not in saved:
            what = f"and {module} has a bias"
            yield errors.Problem(f"{where}: bias", config.bias, what, _AGAIN)
    for entry in config.modules_to_save:
        one = dataclasses.replace(config, modules_to_save=(entry,))
        if not any("weight" in modules[m] and adapter_config.is_saved(one, m) for m in saved):
            what = "names no module that has a full weight"
            yield errors.Problem(f"{where}: modules_to_save", entry, what, _AGAIN)


def _token_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> Iterator[errors.Problem]:
    """Trained rows against trainable_token_indices."""
    key = f"{where}: trainable_token_indices"
    indices = config.trainable_token_indices
    rows = {
        m: tensors["trainable_tokens"]
        for m, tensors in modules.items()
        if "trainable_tokens" in tensors
    }
    for module, array in rows.items():
        names = [name for name in indices if module.endswith(name)]
        if len(names) != 1:
            what = f"names {module}, which has trained rows, {len(names)} times"
            yield errors.Problem(key, tuple(indices), what, _AGAIN)
        elif array.ndim == 2 and len(indices[names[0]]) != array.shape[0]:
            what = f"lists {len(indices[names[0]])} tokens of {module}, which has {len(array)} rows"
            yield errors.Problem(key, names[0], what, _AGAIN)
    for name in indices:
        # Of a tied embedding and head with the same tokens PEFT stores one.
        same = [other for other in indices if indices[other] == indices[name]]
        if not any(module.endswith(other) for module in rows for other in same):
            what = "names no module that has trained rows"
            yield errors.Problem(key, name, what, _AGAIN)
