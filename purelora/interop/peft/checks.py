"""Whether the tensors of an adapter are sound, and those that its config names."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.lora import targets

_AGAIN = "save or download the adapter again"
# Three are those of experts.
_N_DIMS = {"lora_magnitude_vector": (1,), "bias": (1,), "weight": (1, 2),
           "lora_A": (2, 3), "lora_B": (2, 3)}  # fmt: skip
PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
Modules = Mapping[str, Mapping[str, np.ndarray]]


def is_adapted(kinds: Mapping[str, np.ndarray]) -> bool:
    """Whether a module with these tensors has an adapter."""
    return any(a in kinds for a, _ in PAIRS)


def tensor_problems(where: str, modules: Modules) -> Iterator[errors.Problem]:
    """What is wrong with tensors by themselves: values, shapes, and one of a pair missing."""
    for module, kinds in modules.items():
        for kind, array in kinds.items():
            at = f"{where}: {module} {kind}"
            if array.ndim not in _N_DIMS.get(kind, (2,)) or not array.size:
                yield errors.Problem(at, array.shape, "is not a possible shape", _AGAIN)
            elif not np.isfinite(array).all():
                yield errors.Problem(at, None, "holds NaN or infinity", "save a sound adapter")
        for one, other in (*PAIRS, *((b, a) for a, b in PAIRS)):
            if one in kinds and other not in kinds:
                yield errors.Problem(f"{where}: {module}", None, f"has {one}, no {other}", _AGAIN)
        yield from _pair_problems(f"{where}: {module}", kinds)


def _pair_problems(where: str, kinds: Mapping[str, np.ndarray]) -> Iterator[errors.Problem]:
    """Shapes of one module's tensors that do not fit together."""
    if all(kind in kinds for pair in PAIRS for kind in pair):
        yield errors.Problem(where, None, "has adapters of two kinds", _AGAIN)
    for a, b in PAIRS:
        if not (a in kinds and b in kinds and kinds[a].ndim == kinds[b].ndim >= 2):
            continue
        shapes = kinds[a].shape, kinds[b].shape
        if shapes[0][-2] != shapes[1][-1]:
            yield errors.Problem(where, shapes, f"{a} and {b} differ in r", _AGAIN)
        if shapes[0][:-2] != shapes[1][:-2]:
            yield errors.Problem(where, shapes, f"{a} and {b} differ in experts", _AGAIN)
        magnitude = kinds.get("lora_magnitude_vector")
        if magnitude is not None and magnitude.shape != shapes[1][:1]:
            what = f"lora_magnitude_vector does not fit the rows of {b}"
            yield errors.Problem(where, (magnitude.shape, shapes[1]), what, _AGAIN)


def fit_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> list[errors.Problem]:
    """Tensors that the config does not account for, and what it names but there is not."""
    adapted = {
        module: kinds[a] for module, kinds in modules.items() for a, _ in PAIRS if a in kinds
    }
    return [
        *_target_problems(where, config, adapted),
        *_dora_problems(where, config, modules),
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
        if a.ndim >= 2 and a.shape[-2] != r:
            what = f"is the rank of {module} by the config, and its tensors have {a.shape[-2]}"
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


def _dora_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> Iterator[errors.Problem]:
    for module, kinds in modules.items():
        adapted = is_adapted(kinds)
        if ("lora_magnitude_vector" in kinds) != (config.use_dora and adapted):
            has = "has a" if "lora_magnitude_vector" in kinds else "has no"
            what = f"and {module} {has} lora_magnitude_vector"
            yield errors.Problem(f"{where}: use_dora", config.use_dora, what, _AGAIN)


def _full_problems(
    where: str, config: adapter_config.AdapterConfig, modules: Modules
) -> Iterator[errors.Problem]:
    """Full weights against modules_to_save, biases against it and `bias`."""
    saved = [module for module in modules if adapter_config.is_saved(config, module)]
    for module, kinds in modules.items():
        adapted = is_adapted(kinds)
        if "weight" in kinds and module not in saved:
            what = f"does not name {module}, which has a full weight"
            remedy = "save it again with save_embedding_layers=False, or name the module"
            yield errors.Problem(f"{where}: modules_to_save", config.modules_to_save, what, remedy)
        if adapted and module in saved:
            what = f"names {module}, which has an adapter"
            yield errors.Problem(f"{where}: modules_to_save", config.modules_to_save, what, _AGAIN)
        if "base_weight" in kinds and not adapted:
            what = f"{module} has a base weight and no adapter"
            yield errors.Problem(where, None, what, _AGAIN)
        allowed = config.bias == "all" or (config.bias == "lora_only" and adapted)
        if "bias" in kinds and not allowed and module not in saved:
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
        m: kinds["trainable_tokens"] for m, kinds in modules.items() if "trainable_tokens" in kinds
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
