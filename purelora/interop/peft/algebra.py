"""Adapter algebra: what an adapter makes of a weight, and sums of several as one adapter.

All functions are pure and work on `peft.Adapter`s in float32. A sum of updates is exact: the
factors of the summands stand side by side, so the ranks add up; `truncated` brings the rank down to
the nearest adapter of a given one. Only LoRA's product is a linear update of a weight; sums refuse
every other tensor, and whole weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.interop.peft import experts as peft_experts
from purelora.interop.peft.artefact import Adapter
from purelora.lora import kinds

Tensors = Mapping[str, np.ndarray]

_LINEAR = kinds.KINDS["lora"].sets
_LINEAR_KINDS = {tensor for pair in _LINEAR for tensor in pair} | {"base_weight"}


def updated(
    adapter: Adapter,
    module: str,
    tensor: str,
    base: np.ndarray,
    *,
    expert: int | None = None,
) -> np.ndarray:
    """A weight or bias of the base as the adapter makes it.

    Args:
      adapter: an adapter under the base's own names.
      module: Hugging Face name of the module.
      tensor: "weight" or "bias".
      base: the base's values, `[out, in]` (a table `[V, D]`, experts `[E, out, in]`), float32.
      expert: the number of the expert that `base` is of, if it is of one of a module of experts.
    """
    tensors = adapter.modules.get(module, {})
    if expert is not None:
        tensors = {name: array[expert] for name, array in tensors.items()}
    if tensor in tensors:
        return tensors[tensor].astype(np.float32)
    kind, has_adapter = adapter.config.adapter_kind, kinds.is_adapted(tensors)
    if tensor == "bias":
        return kind.updated_bias(base, tensors) if has_adapter else base
    result = base
    if kinds.TOKEN_ROWS.leaves[0] in tensors:
        ids = next(iter(adapter.config.trainable_token_indices.values()))
        result = kinds.TOKEN_ROWS.with_rows(result, tensors, ids)
    if not has_adapter:
        return result
    scaling = np.float32(adapter_config.scaling(adapter.config, module))
    return kind.updated(result, tensors, scaling)


def scaled(adapter: Adapter, factor: float) -> Adapter:
    """`factor` times the update of an adapter, in its own rank.

    Raises:
      ModelError: it holds other tensors than those of LoRA.
    """
    _check_linear([adapter])
    modules = {
        name: {k: array * np.float32(factor) if k in ("lora_B", "lora_embedding_B") else array
               for k, array in tensors.items()}
        for name, tensors in adapter.modules.items()
    }  # fmt: skip
    return dataclasses.replace(adapter, modules=modules, notes=())


def summed(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """The weighted sum of the updates of several adapters of one base; their ranks add up.

    With weights 1, 1 that is their sum, with 1/n their average, with 1 - t, t an interpolation.
    A module that only some have counts as zero in the others. A copy of the base's own weight
    that one of them holds is kept. The sum states a base if all of them do; it notes if only some
    do.

    Raises:
      ModelError: one holds other tensors than those of LoRA, or they belong to different bases, by
        what they state, by their shapes or by copies that differ.
    """
    _check_linear(adapters)
    prints = {a.base_fingerprint for a in adapters}
    if len(prints - {None}) > 1:
        paths = ", ".join(a.path for a in adapters)
        raise errors.ModelError(paths, None, "belong to different bases", "give those of one base")
    if len({adapter.interleaved for adapter in adapters}) > 1:
        paths = ", ".join(a.path for a in adapters)
        what = "hold the rows of experts in different orders, as far as their files say"
        raise errors.ModelError(paths, None, what, "merge them into their base instead")
    having = {
        name: [(a, w) for a, w in zip(adapters, weights, strict=True) if name in a.modules]
        for name in dict.fromkeys(name for adapter in adapters for name in adapter.modules)
    }
    problems = [problem for name in having for problem in _mismatches(name, having[name])]
    if problems:
        raise errors.ModelError.of(errors.first(problems, adapters[0].path))
    modules = {name: _side_by_side(name, pairs) for name, pairs in having.items()}
    result = _of_factors(adapters, modules, None if None in prints else prints.pop())
    if len(prints) < 2:
        return result
    unknown = ", ".join(a.path for a in adapters if a.base_fingerprint is None)
    note = f"states no base, because {unknown} states none: that they are of one is not checked"
    return dataclasses.replace(result, notes=(note,))


def _side_by_side(name: str, having: Sequence[tuple[Adapter, float]]) -> dict[str, np.ndarray]:
    a, b = next(pair for pair in _LINEAR if pair[0] in having[0][0].modules[name])
    lefts, rights = [], []
    for adapter, weight in having:
        tensors = adapter.modules[name]
        factor = np.float32(weight * adapter_config.scaling(adapter.config, name))
        lefts.append(tensors[a].astype(np.float32))
        rights.append(factor * tensors[b].astype(np.float32))
    # Ranks are the last but one dimension of `a`, that of experts if there are any being before it.
    factors = {a: np.concatenate(lefts, axis=-2), b: np.concatenate(rights, axis=-1)}
    copies = [copies_in(adapter.modules[name]) for adapter, _ in having]
    return factors | next(filter(None, copies), {})


def copies_in(tensors: Tensors) -> dict[str, np.ndarray]:
    """The copy of the base's own weight among a module's tensors, if there is one."""
    return {tensor: array for tensor, array in tensors.items() if tensor == "base_weight"}


def _mismatches(name: str, having: Sequence[tuple[Adapter, float]]) -> list[errors.Problem]:
    """How the adapters of one module do not belong to the same weight."""
    remedy, first = "give adapters of one base", having[0][0]
    problems = []
    for other, _ in having[1:]:
        where = f"{other.path}: {name}"
        one, two = (_weight_shape(adapter.modules[name]) for adapter in (first, other))
        if one != two:
            what = f"adapts {_shown(two)}, but in {first.path} it is {_shown(one)}"
            problems.append(errors.Problem(where, None, what, remedy))
    copies = [(a.path, c) for a, _ in having for c in copies_in(a.modules[name]).values()]
    for path, copy in copies[1:]:
        if not problems and not np.array_equal(copy, copies[0][1]):
            what = f"holds a copy of the base's weight that is not that of {copies[0][0]}"
            problems.append(errors.Problem(f"{path}: {name}", None, what, remedy))
    return problems


def _weight_shape(tensors: Tensors) -> tuple[str, list[int]]:
    """What the factors of a module adapt: kind of module, and shape of its weight."""
    a, b = next(pair for pair in _LINEAR if pair[0] in tensors)
    *experts, out_size, _ = tensors[b].shape
    in_size = tensors[a].shape[-1]
    if a == "lora_A":
        return "experts" if experts else "a linear layer", [*experts, out_size, in_size]
    return "an embedding", [in_size, out_size]


def _shown(shape: tuple[str, list[int]]) -> str:
    place, sizes = shape
    return f"{place} of {sizes}"


def truncated(adapter: Adapter, r: int) -> Adapter:
    """The nearest adapter of rank `r` at most, by singular values (Eckart and Young 1936).

    Raises:
      ModelError: it holds other tensors than those of LoRA.
    """
    _check_linear([adapter])
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, tensors in adapter.modules.items():
        a, b = next(pair for pair in _LINEAR if pair[0] in tensors)
        factor = np.float32(adapter_config.scaling(adapter.config, name))
        low = _low_rank(tensors[a], factor * tensors[b].astype(np.float32), r)
        modules[name] = dict(zip((a, b), low, strict=True))
    return _of_factors([adapter], modules, adapter.base_fingerprint)


def _low_rank(a: np.ndarray, b: np.ndarray, r: int) -> tuple[np.ndarray, np.ndarray]:
    """`A [r, in]`, `B [out, r]` nearest to the product `b @ a`, which is never formed.

    Of experts, each by itself.
    """
    if a.ndim == 3:
        pairs = [_low_rank(*one, r) for one in zip(a, b, strict=True)]
        return np.stack([low for low, _ in pairs]), np.stack([low for _, low in pairs])
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    q_a, r_a = np.linalg.qr(a.astype(np.float64).T)
    u, s, vh = np.linalg.svd(r_b @ r_a.T)
    root = np.sqrt(s[:r])
    left = root[:, None] * (vh[:r] @ q_a.T)
    return left.astype(np.float32), ((q_b @ u[:, :r]) * root).astype(np.float32)


def _check_linear(adapters: Sequence[Adapter]) -> None:
    problems = [
        errors.Problem(
            f"{adapter.path}: {name}",
            None,
            f"holds a {tensor}, which is no linear update of a weight",
            "merge the adapters into their base instead",
        )
        for adapter in adapters
        for name, tensors in adapter.modules.items()
        for tensor in tensors
        if tensor not in _LINEAR_KINDS
    ]
    if problems:
        raise errors.ModelError.of(errors.first(problems, adapters[0].path))


def _of_factors(
    like: Sequence[Adapter],
    modules: Mapping[str, dict[str, np.ndarray]],
    fingerprint: str | None,
) -> Adapter:
    """An adapter whose update is `B A` as it stands: every alpha is its rank."""
    ranks = {name: next(iter(tensors.values())).shape[-2] for name, tensors in modules.items()}
    r = max(ranks.values(), key=list(ranks.values()).count)
    parameters = peft_experts.parameters([one.config for one in like], modules)
    others: dict[str, Any] = {name: rank for name, rank in ranks.items() if rank != r}
    config = adapter_config.AdapterConfig(
        r=r,
        lora_alpha=float(r),
        target_modules=tuple(sorted(modules.keys() - parameters.keys())),
        target_parameters=tuple(sorted(set(parameters.values()))),
        rank_pattern=others,
        alpha_pattern={name: float(rank) for name, rank in others.items()},
        base_model_name_or_path=like[0].config.base_model_name_or_path,
    )
    interleaved = like[0].interleaved
    return Adapter(like[0].path, config, modules, fingerprint, interleaved=interleaved)
