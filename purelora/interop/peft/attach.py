"""An adapter on a model: under the model's names, checked against it, as its trained leaves."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from purelora.core import errors, trees
from purelora.core.paths import Path
from purelora.interop.peft import adapter_config, assemble
from purelora.interop.peft import experts as peft_experts
from purelora.interop.peft.artefact import Adapter, place
from purelora.lora import kinds, targets
from purelora.models import causal_lm
from purelora.sharding import host_arrays


class Attached(NamedTuple):
    """An adapter on its model.

    Attributes:
      model: the model with the adapter's targets.
      trainable: its leaves as numpy arrays, for `model.bind`.
      placed: the adapter under the names of this model, with both names of a tied table.
      base_weights: the base's own weights that the adapter holds copies of, by leaf path.
      notes: what a user should be told.
    """

    model: causal_lm.CausalLM
    trainable: trees.Tree
    placed: Adapter
    base_weights: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def check_base(adapter: Adapter, base_fingerprint: str) -> None:
    """Raises ModelError if the adapter says that it was trained on another base."""
    if adapter.base_fingerprint not in (None, base_fingerprint):
        raise errors.ModelError(
            adapter.path,
            adapter.base_fingerprint,
            f"was trained on another base than this one of fingerprint {base_fingerprint[:12]}",
            "use the base that it was trained on",
        )


def check_copies(attached: Attached, base: trees.Tree) -> None:
    """Raises ModelError if the adapter holds other weights of the base than `base` has.

    PEFT puts such copies into the base, so they would be part of what the adapter computes. Weights
    that are quantised here are not compared.
    """
    flat = trees.flatten(base)
    for path, copy in attached.base_weights.items():
        weight = flat[path]
        if isinstance(weight, jax.Array) and not np.array_equal(
            host_arrays.on_host(weight), copy.astype(weight.dtype)
        ):
            what = "holds a copy of this weight that is not that of the base"
            remedy = "use the base that it was trained on"
            raise errors.ModelError(path, None, what, remedy)


def attach(
    adapter: Adapter, model: causal_lm.CausalLM, *, base_fingerprint: str | None
) -> Attached:
    """Puts an adapter on a model.

    Args:
      adapter: an adapter from a folder or a run.
      model: the model, whatever it trains.
      base_fingerprint: that of its base; None if it is not known yet, see `check_base`.

    Raises:
      ModelError: it was trained on another base, a module that it names is not filled, or a tensor
        does not fit; all problems in one error.
    """
    if base_fingerprint is not None:
        check_base(adapter, base_fingerprint)
    names = {n for module in model.modules.values() for n in module.names}
    names |= {Path(n).parent for layer in model.hf_names.values() for n in layer}
    placed = place(adapter, names)
    problems = [*_unfilled(placed, model), *_tied_problems(placed, model)]
    joined = {name for names in targets.JOINED.values() for name in names}
    if adapter.interleaved != model.is_interleaved and any(
        peft_experts.is_of_experts(tensors) and Path(name).name in joined
        for name, tensors in placed.modules.items()
    ):
        what = "was read or trained as the adapter of a model with other files than this base's"
        problems.append(errors.Problem(placed.path, None, what, "use it with its own base"))
    rest = {name: dict(tensors) for name, tensors in placed.modules.items()}
    result = assemble.Leaves(placed.path, {}, problems)
    adapted = assemble.take_adapters(rest, placed.config, model, result)
    token_ids = assemble.take_token_rows(rest, placed.config, model, result)
    copies = assemble.take_copies(rest, model, result)
    full = assemble.take_whole(rest, model, result)
    for name, tensors in rest.items():
        for tensor in tensors:
            result.problem(name, f"has a {tensor}, which this model cannot take", "")
    adaptation = targets.Adaptation(adapted, full, token_ids)
    for clash in kinds.conflicts(adaptation, is_tied=model.is_tied):
        where = f"{placed.path}: {clash.where.removeprefix('lora.')}"
        remedy = "merge the adapter into its base in PEFT"
        problems.append(dataclasses.replace(clash, where=where, remedy=remedy))
    if problems:
        raise errors.ModelError.of(errors.first(problems, placed.path))
    tree = trees.unflatten(result.leaves)
    placed = _with_both_names(placed, model)
    return Attached(model.with_adaptation(adaptation), tree, placed, copies, placed.notes)


def _with_both_names(adapter: Adapter, model: causal_lm.CausalLM) -> Adapter:
    """The adapter with what it makes of a tied table under the head's name too."""
    table, head = (model.modules[path].names[0] for path in (targets.EMBEDDING, targets.HEAD))
    shared = {
        tensor: array
        for tensor, array in adapter.modules.get(table, {}).items()
        if tensor in ("weight", "trainable_tokens")
    }
    if not (model.is_tied and shared):
        return adapter
    both = {head: {**adapter.modules.get(head, {}), **shared}}
    return dataclasses.replace(adapter, modules={**adapter.modules, **both})


def _unfilled(adapter: Adapter, model: causal_lm.CausalLM) -> list[errors.Problem]:
    """Modules of the model that the config names and the adapter has no tensors for."""
    takes_linear_only = adapter.config.target_modules == targets.ALL_LINEAR
    named = adapter.config.target_parameters
    filled = {n for n, tensors in adapter.modules.items() if kinds.is_adapted(tensors)}
    # Several modules may be one parameter in PEFT; a file's tensors tell which of them it adapts.
    shared = {targets.parameter_name(name) for name in filled}

    def is_named(name: str) -> bool:
        return targets.matches(named, targets.parameter_name(name))

    def is_begun(module: targets.AdaptableModule) -> bool:
        # Names in `target_modules` do not mean experts and routers, which PEFT has no modules of,
        # unless the adapter holds tensors of some.
        return not filled.isdisjoint(module.names)

    return [
        errors.Problem(
            f"{adapter.path}: {name}",
            None,
            "is a target of the adapter, which has no tensors for it",
            "is it whole, and is this its base?",
        )
        for module in model.modules.values()
        for name in module.names
        if not (takes_linear_only and module.kind != "linear" and not is_named(name))
        and not (module.is_parameter and not is_named(name) and not is_begun(module))
        and name not in adapter.modules
        and targets.parameter_name(name) not in shared
        and adapter_config.is_target(adapter.config, name)
    ]


def _tied_problems(adapter: Adapter, model: causal_lm.CausalLM) -> list[errors.Problem]:
    """A tied table that only one of its two sides has a trained copy of."""
    if not model.is_tied:
        return []
    names = [model.modules[path].names[0] for path in (targets.EMBEDDING, targets.HEAD)]
    adapted = "lora_embedding_A" in adapter.modules.get(names[0], {})
    if adapted and adapter.config.ensure_weight_tying:
        what = f"has an adapter that {names[1]} shares (ensure_weight_tying): not supported"
        remedy = "merge the adapter into its base in PEFT"
        return [errors.Problem(f"{adapter.path}: {names[0]}", None, what, remedy)]
    copies = [adapter.modules.get(name, {}).get("weight") for name in names]
    table, head = copies
    if (table is None and head is None) or adapter.config.ensure_weight_tying:
        return []
    if table is not None and head is not None and np.array_equal(table, head):
        return []
    what = f"is trained apart from its twin, but this base ties {names[1]} to {names[0]}"
    return [
        errors.Problem(
            f"{adapter.path}: {name}", None, what, "merge the adapter in PEFT, and untie the model"
        )
        for name, copy in zip(names, copies, strict=True)
        if copy is not None
    ]


def differences(
    read: targets.Adaptation, wanted: targets.Adaptation, path: str
) -> list[errors.Problem]:
    """How the adapter at `path` differs from what a run trains."""
    problems = []
    has, wants = _per_module(read), _per_module(wanted)
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            what = f"has {has.get(name, 'no adapter')}, this run {wants.get(name, 'none')}"
            problems.append(errors.Problem(f"{path}: {name}", None, what, ""))
    for what, one, other in (
        ("whole weights", read.full, wanted.full),
        ("rows of the embedding", read.token_ids, wanted.token_ids),
    ):
        if one != other:
            text = f"trains {list(one) or 'none'}, this run {list(other) or 'none'}"
            problems.append(errors.Problem(f"{path}: {what}", None, text, ""))
    return problems


def _per_module(adaptation: targets.Adaptation) -> dict[str, str]:
    return {
        name: f"r={r}, scaling {scaling:.6g}{kinds.of_target(target).suffix}"
        for target in adaptation.targets.values()
        for name, r, scaling in zip(target.names, target.ranks, target.scalings, strict=True)
    }
