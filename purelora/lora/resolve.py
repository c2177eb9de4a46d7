"""From the settings of `lora.*` to what a model trains, by PEFT's rules over Hugging Face names.

Whatever a setting names and the model does not have is an error.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from purelora.config import schema
from purelora.core import errors
from purelora.core.paths import Path
from purelora.lora import kinds
from purelora.lora.targets import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    AdaptableModule,
    Adaptation,
    Target,
    layer_number,
    matches,
    parameter_name,
    pattern_key,
    pattern_value,
    scaling,
)

_, ATTENTION, MLP, EXPERTS = schema.TARGET_WORDS
# The parts of names of the linear modules that a word takes.
_PARTS = {
    ATTENTION: {"self_attn"},
    MLP: {"mlp", "experts"},
    EXPERTS: {"experts", "shared_expert", "shared_experts"},
}
_MODULE_LEAVES = (".weight", ".bias")  # What names of a module's leaves end in.


def resolve(
    settings: schema.LoraConfig,
    modules: Mapping[str, AdaptableModule],
    leaves: Mapping[str, Sequence[str]],
) -> Adaptation:
    """What the settings train.

    Args:
      settings: the section `lora`.
      modules: what adapters can go to, by tree path (`layers.self_attn.q_proj`).
      leaves: Hugging Face names of every parameter's layers, by leaf path.

    Raises:
      ConfigError: no module matches; an entry of a list, a pattern or a layer matches nothing; or
        two settings train the same weight in two ways.
    """
    targets = _targets(settings, modules)
    problems: list[errors.Problem] = []
    full: tuple[str, ...] = ()
    with errors.collected(problems):
        full = _full_leaves(settings, modules, leaves, targets)
    with errors.collected(problems):
        _check_token_ids(settings, modules)
    problems += _parameter_problems(settings, modules, targets, full)
    if problems:
        raise errors.ConfigError.of(problems)
    adaptation = Adaptation(targets, full, settings.trainable_token_indices)
    problems = kinds.conflicts(adaptation, is_tied=f"{HEAD}.weight" not in leaves)
    if problems:
        raise errors.ConfigError.of(problems)
    return adaptation


def rank_and_scaling(settings: schema.LoraConfig, name: str) -> tuple[int, float]:
    """Rank and scaling of the module called `name`."""
    if not kinds.of_settings(settings).is_ranked:
        return 1, 1.0
    r = int(pattern_value(settings.rank_pattern, name, settings.r))
    alpha = pattern_value(settings.alpha_pattern, name, settings.lora_alpha)
    return r, scaling(alpha, r, use_rslora=settings.use_rslora)


def _targets(
    settings: schema.LoraConfig, modules: Mapping[str, AdaptableModule]
) -> dict[str, Target]:
    names = [name for module in modules.values() for name in module.names]
    _check_patterns(settings, names)
    kind = kinds.of_settings(settings)
    targets: dict[str, Target] = {}
    for path, module in modules.items():
        chosen = [i for i, name in enumerate(module.names) if _is_target(settings, name, module)]
        if not chosen:
            continue
        picked = tuple(module.names[i] for i in chosen)
        ranks, scalings = zip(*(rank_and_scaling(settings, name) for name in picked), strict=True)
        is_embedding = module.kind == "embedding"
        layers = tuple(chosen) if module.is_stacked else ()
        # One variant for a stack: it goes by the last part of the name, which its layers share.
        how = is_embedding, kind.name, kind.variant(picked[0], {})
        targets[path] = Target(layers, picked, ranks, scalings, *how)
    if not targets and settings.layers_to_transform is not None:
        layers = settings.layers_to_transform
        what = "are layers in which no module is adapted"
        numbers = {n for n in map(layer_number, names) if n is not None}
        remedy = f"the model has layers 0 to {max(numbers)}"
        raise errors.ConfigError("lora.layers_to_transform", layers, what, remedy)
    if not targets:
        excluded = settings.exclude_modules or settings.modules_to_save
        raise errors.ConfigError(
            "lora.target_modules",
            settings.target_modules,
            "matches no linear module" + (" that is not excluded" if excluded else ""),
            _offer(names),
        )
    _check_matched(settings, targets)
    return targets


def _is_target(settings: schema.LoraConfig, name: str, module: AdaptableModule) -> bool:
    """Whether the module called `name` gets an adapter."""
    excluded = settings.exclude_modules
    if (excluded and matches(excluded, name)) or _is_saved(settings.modules_to_save, name):
        return False
    layers, chosen = settings.layers_to_transform, settings.target_modules
    parameter = parameter_name(name)
    # As in PEFT, a full name in the list is taken whatever its layer.
    is_named = parameter in settings.target_parameters
    is_named |= not isinstance(chosen, str) and name in chosen
    if layers is not None and not is_named and layer_number(name) not in layers:
        return False
    if matches(settings.target_parameters, parameter):
        return True
    if chosen == ALL_LINEAR:
        return module.is_layer
    if isinstance(chosen, str) and chosen in _PARTS:
        return module.is_layer and not _PARTS[chosen].isdisjoint(Path(name).parts)
    return matches(chosen, name)


def _is_saved(modules_to_save: Iterable[str], name: str) -> bool:
    """Whether `name` is one of `modules_to_save` or lies in one."""
    return any(re.fullmatch(rf"(.*\.)?{re.escape(m)}(\..*)?", name) for m in modules_to_save)


def _full_leaves(
    settings: schema.LoraConfig,
    modules: Mapping[str, AdaptableModule],
    leaves: Mapping[str, Sequence[str]],
    targets: Mapping[str, Target],
) -> tuple[str, ...]:
    """Paths of the leaves that `modules_to_save` and `bias` name."""
    is_tied = HEAD in modules and f"{HEAD}.weight" not in leaves
    known = {path: tuple(Path(name).parent for name in names)
             for path, names in leaves.items()}  # fmt: skip
    if is_tied:  # Both names are of the one table.
        known[f"{EMBEDDING}.weight"] += tuple(map(Path, modules[HEAD].names))
    problems: list[errors.Problem] = []
    chosen: dict[str, None] = {}
    for entry in settings.modules_to_save:
        matched = [
            path for path, names in known.items() if any(_is_saved([entry], n) for n in names)
        ]
        if not matched:
            offer = dict.fromkeys(n.name for names in known.values() for n in names)
            what = "names no module of this model"
            problems.append(errors.Problem(
                "lora.modules_to_save", entry, what, f"it has {', '.join(offer)}"))  # fmt: skip
        bare = [leaves[path][0] for path in matched if not leaves[path][0].endswith(_MODULE_LEAVES)]
        for name in bare:
            what = f"would train {name}, which is no weight of a module: no adapter holds it"
            remedy = "name the modules in it, or train all weights with lora.enabled=False"
            problems.append(errors.Problem("lora.modules_to_save", entry, what, remedy))
        for path in matched:
            tied = is_tied and path == f"{EMBEDDING}.weight"
            if not tied and not all(_is_saved([entry], n) for n in known[path]):
                what = f"names some of the layers of {path}, and a stack is trained as a whole"
                remedy = f"name {re.sub(r'.*[.][0-9]+[.]', '', known[path][0])}"
                problems.append(errors.Problem("lora.modules_to_save", entry, what, remedy))
        chosen.update(dict.fromkeys(matched))
    if problems:
        raise errors.ConfigError.of(problems)
    chosen.update(dict.fromkeys(_biases(settings, modules, leaves, targets)))
    return tuple(path for path in leaves if path in chosen)


def _biases(
    settings: schema.LoraConfig,
    modules: Mapping[str, AdaptableModule],
    leaves: Mapping[str, Sequence[str]],
    targets: Mapping[str, Target],
) -> list[str]:
    if settings.bias == "none":
        return []
    biases = [path for path in leaves if path.endswith(".bias")]
    experts = [p for p in biases if modules[Path(p).parent].kind == "experts"]
    if experts and settings.bias == "all":
        what = f"would train {experts[0]}, and no adapter holds biases of experts"
        remedy = "use 'none' or 'lora_only', or train all weights with lora.enabled=False"
        raise errors.ConfigError("lora.bias", settings.bias, what, remedy)
    if settings.bias == "lora_only":
        # As in PEFT, which adapts parameters of the experts, and those have no biases.
        adapted = targets.keys() - {Path(path).parent for path in experts}
        biases = [path for path in biases if Path(path).parent in adapted]
    if not biases:
        where = "adapted module" if settings.bias == "lora_only" else "module of this model"
        raise errors.ConfigError("lora.bias", settings.bias, f"no {where} has a bias", "use 'none'")
    for path in biases if settings.bias == "lora_only" else []:
        count = len(targets[Path(path).parent].names)
        if count < len(leaves[path]):
            what = f"{path} has {len(leaves[path])} layers, of which {count} are adapted"
            raise errors.ConfigError("lora.bias", settings.bias, what, "use 'all' or 'none'")
    return biases


def _parameter_problems(
    settings: schema.LoraConfig,
    modules: Mapping[str, AdaptableModule],
    targets: Mapping[str, Target],
    full: Sequence[str],
) -> list[errors.Problem]:
    """Problems with settings that PEFT does not support on experts and routers."""
    problems = [
        errors.Problem("lora.modules_to_save", settings.modules_to_save,
                       f"would train {Path(path).without('weight')} whole, which no adapter holds",
                       "adapt the experts, or train all weights with lora.enabled=False")
        for path in full
        if (module := modules.get(Path(path).without("weight"))) and module.kind == "experts"
    ]  # fmt: skip
    adapted = [target.names[0] for path, target in targets.items() if modules[path].is_parameter]
    places = {modules[path].kind for path in targets if modules[path].is_parameter}
    kind = kinds.of_settings(settings)
    kind_key, kind_value = kind.setting
    refused = {
        kind_key.removeprefix("lora."): not kind.places.issuperset(places) and kind_value,
        "lora_dropout": settings.lora_dropout > 0 and settings.lora_dropout,
        "init_lora_weights": settings.init_lora_weights in schema.FACTORED_INITS
        and settings.init_lora_weights,
    }
    for key, value in refused.items() if adapted else ():
        if value:
            what = f"does not go with adapters on experts and routers ({adapted[0]})"
            remedy = "leave it out, or name other modules in lora.target_modules ('attention')"
            problems.append(errors.Problem(f"lora.{key}", value, what, remedy))
    return problems + _joined_problems(targets)


def _joined_problems(targets: Mapping[str, Target]) -> list[errors.Problem]:
    """A problem with the first matrices that PEFT adapts as one but that differ in scaling."""
    scalings: dict[str, dict[str, float]] = {}
    for target in targets.values():
        for name, factor in zip(target.names, target.scalings, strict=True):
            scalings.setdefault(parameter_name(name), {})[name] = factor
    for factors in scalings.values():
        values = [f"{factor:.6g}" for factor in factors.values()]
        if len(set(values)) > 1:
            what = f"are the scalings of {' and '.join(factors)}, which PEFT adapts as one"
            remedy = "give them one alpha / r, in every layer"
            return [errors.Problem("lora.alpha_pattern", " and ".join(values), what, remedy)]
    return []


def _check_token_ids(settings: schema.LoraConfig, modules: Mapping[str, AdaptableModule]) -> None:
    if not settings.trainable_token_indices:
        return
    rows = modules[EMBEDDING].weight.shape[0]
    problems = [
        errors.Problem(
            "lora.trainable_token_indices", i, f"the embedding has {rows} rows", f"0 to {rows - 1}"
        )
        for i in settings.trainable_token_indices
        if i >= rows
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def _check_patterns(settings: schema.LoraConfig, names: Sequence[str]) -> None:
    """Raises ConfigError for all entries of target and exclude that match nothing."""
    if settings.exclude_modules == ALL_LINEAR:
        raise errors.ConfigError(
            "lora.exclude_modules",
            settings.exclude_modules,
            "would leave out everything",
            _offer(names),
        )
    parameters = list(dict.fromkeys(map(parameter_name, names)))
    problems = [
        *_unmatched("lora.target_modules", settings.target_modules, names),
        *_unmatched("lora.exclude_modules", settings.exclude_modules, names),
        *(
            errors.Problem("lora.target_parameters", entry, "matches no parameter of this model",
                           errors.nearest(entry, parameters))
            for entry in settings.target_parameters
            if not any(matches([entry], parameter) for parameter in parameters)
        ),
    ]  # fmt: skip
    if problems:
        raise errors.ConfigError.of(problems)


def _check_matched(settings: schema.LoraConfig, targets: Mapping[str, Target]) -> None:
    """Raises ConfigError for patterns and layers that no adapted module has."""
    names = [name for target in targets.values() for name in target.names]
    problems = [
        errors.Problem(
            f"lora.{key}", pattern, "matches no adapted module", f"these are {names[0]} and others"
        )
        for key in ("rank_pattern", "alpha_pattern")
        for pattern in {"rank_pattern": settings.rank_pattern,
                        "alpha_pattern": settings.alpha_pattern}[key]
        if not any(pattern_key([pattern], name) for name in names)
    ]  # fmt: skip
    numbers = {layer_number(name) for name in names}
    problems += [
        errors.Problem("lora.layers_to_transform", n, "no module of that layer is adapted", "")
        for n in settings.layers_to_transform or ()
        if n not in numbers
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def _unmatched(
    key: str, pattern: str | Sequence[str], names: Sequence[str]
) -> list[errors.Problem]:
    """A problem for each entry of a list (or the regex) that matches no module."""
    if not pattern or (key == "lora.target_modules" and pattern in schema.TARGET_WORDS):
        return []
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            return [errors.Problem(key, pattern, f"is not a regular expression: {error}", "")]
    entries = [pattern] if isinstance(pattern, str) else [[entry] for entry in pattern]
    return [
        errors.Problem(
            key,
            entry if isinstance(entry, str) else entry[0],
            "matches no linear module of this model",
            _remedy(entry, names),
        )
        for entry in entries
        if not any(matches(entry, name) for name in names)
    ]


def _remedy(entry: str | Sequence[str], names: Sequence[str]) -> str:
    """What else to write; a lone module name where a regex is expected is the usual slip."""
    if isinstance(entry, str) and any(matches([entry], name) for name in names):
        return f"a string is a regex for the whole name ({names[0]}); for a name write [{entry!r}]"
    if entry[0] in schema.TARGET_WORDS:
        return "that word stands for modules only in lora.target_modules, and only alone"
    return _offer(names)


def _offer(names: Sequence[str]) -> str:
    short = dict.fromkeys(Path(name).name for name in names)
    return f"it has {', '.join(short)} (for example {names[0]}), or use 'all-linear'"
