"""Adapters on experts: from PEFT's files to the form that they have here, and back.

Here, each matrix of the experts has an adapter of its own, with all experts stacked. PEFT adapts
the parameters of transformers' module of experts, in which gate and up projection are one:

    here        ….mlp.experts.gate_proj      lora_A [E, r, D]    lora_B [E, F, r]
                ….mlp.experts.up_proj        lora_A [E, r, D]    lora_B [E, F, r]

    PEFT        ….mlp.experts.gate_up_proj   lora_A [E R, D]     lora_B [2 F, R E]

    PEFT, with transformers before version 5
                ….mlp.experts.5.gate_proj    lora_A [r, D]       lora_B [F, r]

In PEFT's flattened factors of a parameter, the rows of lora_A are indexed by (expert, rank) and the
columns of lora_B by (rank, expert). If several parameters of a module are adapted, PEFT nests their
wrappers: the tensors of the last one have the module's name, and those of each one before it have
one `.base_layer` more.

In gpt-oss the rows of `gate_up_proj` alternate, one of gate and one of up. Such a lora_B is put in
order when it is read, and put back when it is written.

Writing joins the adapters of gate and up projection to one whose rank R is the sum of theirs. Its
lora_A has the rows of both, and its lora_B is block diagonal, so the update is exactly the same.
Metadata in the file state the two ranks. Reading takes such an adapter apart again; any other
adapter of the joined parameter becomes two with the same lora_A.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora import errors, targets
from purelora.io import peft_checks, peft_config

Kinds = dict[str, np.ndarray]
# By PEFT's name of a parameter: the rank of each matrix that is joined in it, in order.
Joined = Mapping[str, Mapping[str, int]]

_AGAIN = "save or download the adapter again"
_LEVEL = ".base_layer"
# The matrices in each parameter of transformers' module of experts, in the order it declares them.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {**targets.JOINED, "down_proj": ("down_proj",)}
_NUMBERED = re.compile(
    r"(?P<around>.+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<number>0|[1-9][0-9]*)\.(?P<matrix>\w+)"
)


class Found(NamedTuple):
    """An adapter after its experts were converted to the other form.

    Attributes:
      config: its config, with ranks and alphas under the new names.
      modules: its tensors by module and kind ("lora_A", ...).
      joined: how matrices are joined in its parameters; empty in the form that they have here.
      problems: what is wrong with it.
    """

    config: peft_config.AdapterConfig
    modules: peft_checks.Modules
    joined: Joined
    problems: tuple[errors.Problem, ...]


def is_of_experts(kinds: Mapping[str, np.ndarray]) -> bool:
    """Whether the tensors of a module, in the form that adapters have here, are of experts."""
    return "lora_A" in kinds and kinds["lora_A"].ndim == 3


def parameters(
    configs: Iterable[peft_config.AdapterConfig], modules: peft_checks.Modules
) -> dict[str, str]:
    """For adapted modules that PEFT can only name as parameters: that name, by module.

    Args:
      configs: configs whose `target_parameters` tell which modules are named so.
      modules: tensors by module and kind.
    """
    named = [config.target_parameters for config in configs]
    return {
        module: parameter
        for module, kinds in modules.items()
        if (parameter := targets.parameter_name(module)) and peft_checks.is_adapted(kinds)
        and (is_of_experts(kinds) or any(targets.matches(own, parameter) for own in named))
    }  # fmt: skip


# ---- out of files ------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """The adapter of one parameter or matrix: a `[E, r, in]`, b `[E, out, r]` and its alpha."""

    a: np.ndarray
    b: np.ndarray
    alpha: float


def of_file(
    where: str,
    config: peft_config.AdapterConfig,
    modules: peft_checks.Modules,
    joined: Joined,
    *,
    interleaved: bool = False,
) -> Found:
    """Converts adapters on experts from the form of PEFT's files to the form that they have here.

    Args:
      where: the name of the file, for messages.
      config: the contents of adapter_config.json.
      modules: the file's tensors by module and kind; names of nested ones end in `.base_layer`.
      joined: which ranks the file's metadata state for joined matrices; empty if they do not.
      interleaved: whether the rows of joined matrices alternate.
    """
    problems: list[errors.Problem] = []
    made: dict[str, _Factors] = {}
    levels, numbered, rest = _sorted(modules)
    found = [*(one for many in (levels, numbered) for one in many.values()), rest]
    if sum(len(one) for one in found) < len(modules):
        what = "has one module under an older and a newer name"
        problems.append(errors.Problem(where, None, what, _AGAIN))
    with errors.collected(problems):
        for around, nested in levels.items():
            made |= _of_parameters(where, config, around, nested, joined, interleaved)
    with errors.collected(problems):
        for stack, experts in numbered.items():
            if stack in made:
                what = "has adapters on single experts and on all together"
                raise errors.ModelError(f"{where}: {stack}", None, what, _AGAIN)
            made[stack] = _of_numbered(where, config, modules, stack, experts)
    if not made and rest.keys() == modules.keys():
        return Found(config, modules, {}, tuple(problems))
    ranks = {name: factors.a.shape[1] for name, factors in made.items()}
    alphas = {name: factors.alpha for name, factors in made.items()}
    for newer, name in _renamed(modules, rest).items():
        ranks[newer] = peft_config.rank(config, name)
        alphas[newer] = peft_config.alpha(config, name)
    # Patterns that match nothing are kept, so that `peft_checks` reports them.
    plain = [n for n in rest if n in modules and peft_checks.is_adapted(rest[n])]
    gone = [n for n in modules if n not in rest] + list(map(targets.parameter_name, made))
    saved = tuple(map(targets.newer_name, config.modules_to_save))
    config = dataclasses.replace(
        config,
        rank_pattern=_patterns(config.rank_pattern, config.r, ranks, plain, gone),
        alpha_pattern=_patterns(config.alpha_pattern, config.lora_alpha, alphas, plain, gone),
        modules_to_save=saved,
    )
    tensors = {name: {"lora_A": f.a, "lora_B": f.b} for name, f in made.items()}
    return Found(config, {**rest, **tensors}, {}, tuple(problems))


def _sorted(
    modules: peft_checks.Modules,
) -> tuple[
    dict[str, dict[int, Mapping[str, np.ndarray]]],
    dict[str, dict[int, str]],
    dict[str, Mapping[str, np.ndarray]],
]:
    """Sorts a file's modules by the form that they have.

    Returns:
      Adapted parameters of experts: tensors by module and nesting level. Adapted single experts:
      their names by (stacked) matrix and number. And the tensors of all other modules, by the
      names that these have since version 5 of transformers.
    """
    levels: dict[str, dict[int, Mapping[str, np.ndarray]]] = {}
    numbered: dict[str, dict[int, str]] = {}
    rest: dict[str, Mapping[str, np.ndarray]] = {}
    for name, kinds in modules.items():
        bare, match = name.replace(_LEVEL, ""), _NUMBERED.fullmatch(name)
        if match:
            matrix = targets.OLDER_MATRICES.get(match["matrix"], match["matrix"])
            stack = f"{match['around']}.mlp.experts.{matrix}"
            numbered.setdefault(stack, {})[int(match["number"])] = name
        elif bare.endswith(".experts") and not kinds.keys().isdisjoint(("lora_A", "lora_B")):
            levels.setdefault(bare, {})[name.count(_LEVEL)] = kinds
        else:
            rest[targets.newer_name(name)] = kinds
    return levels, numbered, rest


def _renamed(modules: peft_checks.Modules, rest: Iterable[str]) -> dict[str, str]:
    """The names in a file of adapted modules, no experts, that are called otherwise now."""
    newer = {targets.newer_name(name): name for name in modules}
    return {
        new: name
        for new, name in newer.items()
        if new != name and new in rest and peft_checks.is_adapted(modules[name])
    }


def _patterns(
    patterns: Mapping[str, Any],
    default: Any,
    own: Mapping[str, Any],
    plain: list[str],
    gone: list[str],
) -> dict[str, Any]:
    """The `rank_pattern` or `alpha_pattern` of a converted adapter.

    Args:
      patterns: the pattern before.
      default: the value of a module that no pattern matches.
      own: the values that modules must get; put first, where the others would give another.
      plain: names of adapted modules that were not converted: what matches them is kept.
      gone: names that no longer exist: what matches only them is left out.
    """
    kept = {
        key: value
        for key, value in patterns.items()
        if any(targets.pattern_key([key], name) for name in plain)
        or not any(targets.pattern_key([key], name) for name in gone)
    }
    differing = {
        name: value
        for name, value in own.items()
        if targets.pattern_value(kept, name, default) != value
    }
    return differing | kept


def _of_parameters(
    where: str,
    config: peft_config.AdapterConfig,
    around: str,
    nested: Mapping[int, Mapping[str, np.ndarray]],
    joined: Joined,
    interleaved: bool,
) -> dict[str, _Factors]:
    """The adapters of each matrix of one module of experts, out of those of its parameters.

    Args:
      where: the name of the file, for messages.
      config: its config.
      around: name of the module of experts.
      nested: tensors of its adapted parameters by nesting level.
      joined: see `of_file`.

    Raises:
      ModelError: these are not the parameters that the config names, or their shapes do not fit.
    """
    names = [f"{around}.{name}" for name in _PARAMETERS]
    named = [name for name in names if targets.matches(config.target_parameters, name)]
    if sorted(nested) != list(range(len(named))):
        what = f"has adapters of {len(nested)} parameters, but target_parameters names "
        what += f"{', '.join(named) or 'none'}"
        raise errors.ModelError(f"{where}: {around}", None, what, _AGAIN)
    found: dict[str, _Factors] = {}
    for level, parameter in enumerate(reversed(named)):
        r, alpha = peft_config.rank(config, parameter), peft_config.alpha(config, parameter)
        a, b = _unflattened(f"{where}: {parameter}", nested[level], r)
        matrices = _PARAMETERS[parameter.rpartition(".")[2]]
        if interleaved and b.shape[1] % len(matrices) == 0:
            b = np.concatenate([b[:, i :: len(matrices)] for i in range(len(matrices))], axis=1)
        ranks = joined.get(parameter) or _ranks(matrices, b)
        is_sound = sum(ranks.values()) == r or set(ranks.values()) == {r}
        if not is_sound or not ranks.keys() <= set(matrices) or b.shape[1] % len(matrices):
            what = f"has {b.shape[1]} rows and rank {r}, which are not those of {dict(ranks)}"
            raise errors.ModelError(f"{where}: {parameter}", None, what, _AGAIN)
        if sum(ranks.values()) == r and not _is_apart(matrices, ranks, b):
            # Joined by one who took the rows for others than they are.
            ranks = dict.fromkeys(matrices, r)
        first, rows = 0, b.shape[1] // len(matrices)
        for matrix, rank in ranks.items():
            place = matrices.index(matrix) * rows
            columns = slice(first, first + rank) if sum(ranks.values()) == r else slice(None)
            first += rank
            own_alpha = _alpha(config, alpha, r, rank)
            b_own = b[:, place : place + rows, columns]
            found[f"{around}.{matrix}"] = _Factors(a[:, columns], b_own, own_alpha)
    return found


def _unflattened(
    where: str, kinds: Mapping[str, np.ndarray], r: int
) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's factors `[E r, in]` and `[out, r E]` of a parameter as `[E, r, in]`, `[E, out, r]`."""
    if kinds.keys() != {"lora_A", "lora_B"}:
        what = f"has {', '.join(sorted(kinds))}, where an adapter on experts has lora_A and lora_B"
        raise errors.ModelError(where, None, what, _AGAIN)
    a, b = kinds["lora_A"], kinds["lora_B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % r:
        what = f"has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which hold no experts of "
        raise errors.ModelError(where, None, f"{what}rank {r}", "correct r or rank_pattern")
    experts = a.shape[0] // r
    return (
        a.reshape(experts, r, a.shape[1]),
        b.reshape(b.shape[0], r, experts).transpose(2, 0, 1),
    )


def _ranks(matrices: tuple[str, ...], b: np.ndarray) -> dict[str, int]:
    """The rank of each matrix of a parameter whose lora_B is `[E, out, r]`.

    If that is block diagonal, the matrices share the rank equally; otherwise each has all of it.
    """
    r, count = b.shape[2], len(matrices)
    if count == 1 or r % count or b.shape[1] % count or not b.any():
        return {matrix: r for matrix in matrices}
    blocks = b.reshape(b.shape[0], count, -1, count, r // count)
    outside = [(i, j) for i in range(count) for j in range(count) if i != j]
    is_apart = not any(blocks[:, i, :, j].any() for i, j in outside)
    own = r // count if is_apart else r
    return {matrix: own for matrix in matrices}


def _is_apart(matrices: tuple[str, ...], ranks: Mapping[str, int], b: np.ndarray) -> bool:
    """Whether lora_B `[E, out, r]` is zero but for the blocks of matrices of these ranks."""
    inside, first = np.zeros(b.shape[1:], bool), 0
    for matrix, rank in ranks.items():
        rows = b.shape[1] // len(matrices)
        place = matrices.index(matrix) * rows
        inside[place : place + rows, first : first + rank] = True
        first += rank
    return not b[:, ~inside].any()


def _alpha(config: peft_config.AdapterConfig, alpha: float, r: int, new_r: int) -> float:
    """The alpha with which rank `new_r` has the scaling that `alpha` gives rank `r`."""
    if r == new_r:
        return alpha
    return alpha * (math.sqrt(new_r / r) if config.use_rslora else new_r / r)


def _of_numbered(
    where: str,
    config: peft_config.AdapterConfig,
    modules: peft_checks.Modules,
    stack: str,
    experts: Mapping[int, str],
) -> _Factors:
    """The adapters of single experts, stacked.

    Raises:
      ModelError: an expert has none, or another rank, alpha or size than the others.
    """
    where = f"{where}: {stack}"
    missing = next(number for number in range(len(experts) + 1) if number not in experts)
    if missing < len(experts):
        what = f"has no adapter on expert {missing}"
        raise errors.ModelError(where, None, what, "adapt all experts of a layer, or none")
    present = [experts[number] for number in range(len(experts))]
    for name in present:
        if modules[name].keys() != {"lora_A", "lora_B"}:
            what = f"has {', '.join(sorted(modules[name]))} on expert {name}"
            raise errors.ModelError(where, None, what, "merge the adapter into its base in PEFT")
    settings = {(peft_config.rank(config, n), peft_config.alpha(config, n)) for n in present}
    shapes = {tuple(array.shape for array in modules[n].values()) for n in present}
    if len(settings) > 1 or len(shapes) > 1:
        what = f"has experts of different ranks, alphas or sizes: {sorted(settings)}"
        raise errors.ModelError(where, None, what, "merge the adapter into its base in PEFT")
    ((_, alpha),) = settings
    a, b = (np.stack([modules[name][kind] for name in present]) for kind in ("lora_A", "lora_B"))
    return _Factors(a, b, alpha)


# ---- into files --------------------------------------------------------------------------------


def to_file(
    where: str,
    config: peft_config.AdapterConfig,
    modules: peft_checks.Modules,
    *,
    interleaved: bool = False,
) -> Found:
    """Converts adapters on experts from the form that they have here to that of PEFT's files.

    Args:
      where: the name of the file, for messages.
      config: the config, which names matrices of experts as modules.
      modules: tensors by module and kind.
      interleaved: whether the rows of joined matrices alternate.

    Returns:
      The adapter whose config names parameters instead.

    Raises:
      ModelError: matrices that PEFT joins have different scalings.
    """
    experts: dict[str, dict[str, list[str]]] = {}
    for name in (name for name, kinds in modules.items() if is_of_experts(kinds)):
        parameter = targets.parameter_name(name)
        around = parameter.rpartition(".")[0]
        experts.setdefault(around, {}).setdefault(parameter, []).append(name)
    if not experts:
        return Found(config, modules, {}, ())
    made: dict[str, Kinds] = {}
    joined: dict[str, dict[str, int]] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for around, parameters in experts.items():
        names = [f"{around}.{name}" for name in _PARAMETERS]
        order = [name for name in reversed(names) if name in parameters]
        for level, parameter in enumerate(order):
            matrices = parameters[parameter]
            kinds, joined[parameter] = _joined(parameter, matrices, modules, interleaved)
            made[around + level * _LEVEL] = kinds
            ranks[parameter] = r = sum(joined[parameter].values())
            alphas[parameter] = _common_alpha(where, config, matrices, r)
    plain = [name for name, kinds in modules.items()
             if peft_checks.is_adapted(kinds) and not is_of_experts(kinds)]  # fmt: skip
    config = _without_experts(config, plain, list(ranks))
    kept = {
        key: {k: v for k, v in getattr(config, key).items()
              if any(targets.pattern_key([k], name) for name in plain)}
        for key in ("rank_pattern", "alpha_pattern")
    }  # fmt: skip
    config = dataclasses.replace(
        config,
        rank_pattern=_short(ranks, config.r, kept["rank_pattern"]),
        alpha_pattern=_short(alphas, config.lora_alpha, kept["alpha_pattern"]),
    )
    rest = {name: kinds for name, kinds in modules.items() if not is_of_experts(kinds)}
    return Found(config, {**rest, **made}, joined, ())


def _joined(
    parameter: str, names: list[str], modules: peft_checks.Modules, interleaved: bool
) -> tuple[Kinds, dict[str, int]]:
    """The adapters of matrices (called `names`) as one on their parameter, and the rank of each."""
    matrices = _PARAMETERS[parameter.rpartition(".")[2]]
    having = {m: modules[n] for m in matrices for n in names if n.rpartition(".")[2] == m}
    ranks = {matrix: kinds["lora_A"].shape[1] for matrix, kinds in having.items()}
    a = np.concatenate([kinds["lora_A"] for kinds in having.values()], axis=1)
    experts, rows, _ = next(iter(having.values()))["lora_B"].shape
    b = np.zeros((experts, rows * len(matrices), sum(ranks.values())), a.dtype)
    first = 0
    for matrix, kinds in having.items():
        place = matrices.index(matrix) * rows
        b[:, place : place + rows, first : first + ranks[matrix]] = kinds["lora_B"]
        first += ranks[matrix]
    if interleaved:
        b = b.reshape(experts, len(matrices), rows, -1).swapaxes(1, 2).reshape(b.shape)
    flat_b = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return {"lora_A": a.reshape(-1, a.shape[2]), "lora_B": flat_b}, ranks


def _common_alpha(where: str, config: peft_config.AdapterConfig, names: list[str], r: int) -> float:
    """The alpha with which rank `r` has the scaling that all modules called `names` have.

    Raises:
      ModelError: they have different ones.
    """
    scalings = [peft_config.scaling(config, name) for name in names]
    if not all(math.isclose(scaling, scalings[0], rel_tol=1e-9) for scaling in scalings):
        what = f"have scalings {' and '.join(f'{s:g}' for s in scalings)}, and PEFT adapts them as "
        raise errors.ModelError(f"{where}: {' and '.join(names)}", None, f"{what}one",
                                "give them one alpha / r")  # fmt: skip
    own = peft_config.rank(config, names[0])
    return _alpha(config, peft_config.alpha(config, names[0]), own, r)


def _without_experts(
    config: peft_config.AdapterConfig, plain: list[str], parameters: list[str]
) -> peft_config.AdapterConfig:
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
