"""Reads adapters on experts out of PEFT's files; the forms are drawn in `peft_experts`."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft import experts as peft_experts
from purelora.lora import kinds, targets

_AGAIN = "save or download the adapter again"
_NUMBERED = re.compile(
    r"(?P<around>.+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<number>0|[1-9][0-9]*)\.(?P<matrix>\w+)"
)


class _Factors(NamedTuple):
    """The adapter of one parameter or matrix: a `[E, r, in]`, b `[E, out, r]` and its alpha."""

    a: np.ndarray
    b: np.ndarray
    alpha: float


def of_file(
    where: str,
    config: adapter_config.AdapterConfig,
    modules: peft_checks.Modules,
    joined: peft_experts.Joined,
    *,
    interleaved: bool = False,
) -> peft_experts.Converted:
    """Converts adapters on experts from the form of PEFT's files to the form that they have here.

    Args:
      where: the name of the file, for messages.
      config: the contents of adapter_config.json.
      modules: the file's tensors by module and tensor; names of nested ones end in `.base_layer`.
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
        return peft_experts.Converted(config, modules, {}, tuple(problems))
    config = _new_config(config, modules, made, rest)
    tensors = {name: {"lora_A": f.a, "lora_B": f.b} for name, f in made.items()}
    return peft_experts.Converted(config, {**rest, **tensors}, {}, tuple(problems))


def _new_config(
    config: adapter_config.AdapterConfig,
    modules: peft_checks.Modules,
    made: Mapping[str, _Factors],
    rest: peft_checks.Modules,
) -> adapter_config.AdapterConfig:
    """The config with ranks and alphas under the names that modules have after the conversion.

    Args:
      config: the config before.
      modules: tensors by the names in the file.
      made: the adapters of matrices of experts, by their new names.
      rest: tensors of all other modules, by their new names.
    """
    ranks = {name: factors.a.shape[1] for name, factors in made.items()}
    alphas = {name: factors.alpha for name, factors in made.items()}
    for newer, name in _renamed(modules, rest).items():
        ranks[newer] = adapter_config.rank(config, name)
        alphas[newer] = adapter_config.alpha(config, name)
    # Patterns that match nothing are kept, so that `peft_checks` reports them.
    plain = [n for n in rest if n in modules and kinds.is_adapted(rest[n])]
    gone = [n for n in modules if n not in rest] + list(map(targets.parameter_name, made))
    return dataclasses.replace(
        config,
        rank_pattern=_patterns(config.rank_pattern, config.r, ranks, plain, gone),
        alpha_pattern=_patterns(config.alpha_pattern, config.lora_alpha, alphas, plain, gone),
        modules_to_save=tuple(map(targets.newer_name, config.modules_to_save)),
    )


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
    for name, tensors in modules.items():
        bare, match = name.replace(peft_experts.LEVEL, ""), _NUMBERED.fullmatch(name)
        if match:
            matrix = targets.OLDER_MATRICES.get(match["matrix"], match["matrix"])
            stack = f"{match['around']}.mlp.experts.{matrix}"
            numbered.setdefault(stack, {})[int(match["number"])] = name
        elif bare.endswith(".experts") and not tensors.keys().isdisjoint(("lora_A", "lora_B")):
            levels.setdefault(bare, {})[name.count(peft_experts.LEVEL)] = tensors
        else:
            rest[targets.newer_name(name)] = tensors
    return levels, numbered, rest


def _renamed(modules: peft_checks.Modules, rest: Iterable[str]) -> dict[str, str]:
    """The names in a file of adapted modules, no experts, that are called otherwise now."""
    newer = {targets.newer_name(name): name for name in modules}
    return {
        new: name
        for new, name in newer.items()
        if new != name and new in rest and kinds.is_adapted(modules[name])
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
    config: adapter_config.AdapterConfig,
    around: str,
    nested: Mapping[int, Mapping[str, np.ndarray]],
    joined: peft_experts.Joined,
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
    names = [f"{around}.{name}" for name in peft_experts.PARAMETERS]
    named = [name for name in names if targets.matches(config.target_parameters, name)]
    if sorted(nested) != list(range(len(named))):
        what = f"has adapters of {len(nested)} parameters, but target_parameters names "
        what += f"{', '.join(named) or 'none'}"
        raise errors.ModelError(f"{where}: {around}", None, what, _AGAIN)
    found: dict[str, _Factors] = {}
    for level, parameter in enumerate(reversed(named)):
        r, alpha = adapter_config.rank(config, parameter), adapter_config.alpha(config, parameter)
        a, b = _unflattened(f"{where}: {parameter}", nested[level], r)
        matrices = peft_experts.PARAMETERS[parameter.rpartition(".")[2]]
        if interleaved and b.shape[1] % len(matrices) == 0:
            b = np.concatenate([b[:, i :: len(matrices)] for i in range(len(matrices))], axis=1)
        ranks = joined.get(parameter) or _ranks(matrices, b)
        is_sound = sum(ranks.values()) == r or set(ranks.values()) == {r}
        if not is_sound or not ranks.keys() <= set(matrices) or b.shape[1] % len(matrices):
            what = f"has {b.shape[1]} rows and rank {r}, which are not those of {dict(ranks)}"
            raise errors.ModelError(f"{where}: {parameter}", None, what, _AGAIN)
        if sum(ranks.values()) == r and not _is_apart(matrices, ranks, b):
            # peft_experts.Joined by one who took the rows for others than they are.
            ranks = dict.fromkeys(matrices, r)
        first, rows = 0, b.shape[1] // len(matrices)
        for matrix, rank in ranks.items():
            place = matrices.index(matrix) * rows
            columns = slice(first, first + rank) if sum(ranks.values()) == r else slice(None)
            first += rank
            own_alpha = peft_experts.equal_alpha(config, alpha, r, rank)
            b_own = b[:, place : place + rows, columns]
            found[f"{around}.{matrix}"] = _Factors(a[:, columns], b_own, own_alpha)
    return found


def _unflattened(
    where: str, tensors: Mapping[str, np.ndarray], r: int
) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's factors `[E r, in]` and `[out, r E]` of a parameter as `[E, r, in]`, `[E, out, r]`."""
    if tensors.keys() != {"lora_A", "lora_B"}:
        what = (
            f"has {', '.join(sorted(tensors))}, where an adapter on experts has lora_A and lora_B"
        )
        raise errors.ModelError(where, None, what, _AGAIN)
    a, b = tensors["lora_A"], tensors["lora_B"]
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


def _of_numbered(
    where: str,
    config: adapter_config.AdapterConfig,
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
    settings = {(adapter_config.rank(config, n), adapter_config.alpha(config, n)) for n in present}
    shapes = {tuple(array.shape for array in modules[n].values()) for n in present}
    if len(settings) > 1 or len(shapes) > 1:
        what = f"has experts of different ranks, alphas or sizes: {sorted(settings)}"
        raise errors.ModelError(where, None, what, "merge the adapter into its base in PEFT")
    ((_, alpha),) = settings
    a, b = (
        np.stack([modules[name][tensor] for name in present]) for tensor in ("lora_A", "lora_B")
    )
    return _Factors(a, b, alpha)
