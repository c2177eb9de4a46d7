"""The weights that a run begins with: read, quantised and placed, with adapters beside them."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from purelora.checkpoint import store
from purelora.config import schema
from purelora.core import errors, param_info, trees
from purelora.formats import source as sources
from purelora.interop import builtin, open_model
from purelora.interop.peft import adapter_sources, artefact, attach
from purelora.lora import weight_init
from purelora.multihost import runtime
from purelora.sharding import host_arrays, specs
from purelora.training import init, nnx_boundary, plan_report
from purelora.training.plan import Plan
from purelora.weights import load as weights_load

Say = Callable[[str], None]


def load_weights(
    model: builtin.Model,
    plan: Plan,
    say: Say,
    split: weight_init.WeightSplit | None = None,
) -> weights_load.Loaded:
    """Reads the weights into their final dtype, quantisation and placement.

    That is the base, and beside it what is trained whole. `split` takes adapters out on the way.
    """
    start = time.perf_counter()
    infos, placed = plan.loaded
    quiet = None if runtime.is_main() else True  # None: quiet unless this is a terminal.
    with tqdm.tqdm(desc="weights", unit="tensor", leave=False, disable=quiet) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        placement = specs.shardings(placed, plan.mesh)
        loaded = _as_saved(model.source, infos, placement) or weights_load.load(
            model.source, plan.model, infos, placement, progress, split
        )
    jax.block_until_ready(loaded.tree)
    left_out = plan.model.left_out(model.source.shapes())
    if left_out:
        say(f"left out: {len(left_out)} tensors that the text model does not use ({left_out[0]})")
    say(
        f"base: {plan_report.describe_base(plan)}, "
        f"read in {time.perf_counter() - start:.1f} s, fingerprint {loaded.fingerprint[:12]}"
    )
    return loaded


def _as_saved(
    source: sources.Source, infos: trees.Tree, placement: trees.Tree
) -> weights_load.Loaded | None:
    """The base that a run saved, if it is in this very layout: quantised codes stay the same."""
    if not isinstance(source, open_model.RunSource) or source.identity is None:
        return None
    leaves = source.in_layout(trees.flatten(infos))
    if leaves is None:
        return None
    return weights_load.Loaded(
        host_arrays.place(trees.unflatten(leaves), placement), source.identity
    )


class Beginning(NamedTuple):
    """What a new run begins with.

    Attributes:
      base: the frozen leaves, placed.
      trainable: the trained leaves, placed.
      initial: the adapters that were taken out of the weights; empty if none were.
      fingerprint: identity of the base before that.
    """

    base: trees.Tree
    trainable: trees.Tree
    initial: trees.Tree
    fingerprint: str


class Base(NamedTuple):
    """What a run that goes on reads beside its state; the attributes are those of `Beginning`."""

    base: trees.Tree
    initial: trees.Tree
    fingerprint: str


def begin_fresh(model: builtin.Model, plan: Plan, say: Say) -> Beginning:
    """The beginning of a new run: weights as read, adapters fresh or from `init_adapter`."""
    warm = _open_warm(plan, model.source.config)
    split = _weight_split(plan, None)
    loaded = load_weights(model, plan, say, split)
    adapters = None
    if warm is not None:
        attach.check_base(warm.adapter, loaded.fingerprint)
        attach.check_copies(warm.attached, loaded.tree)
        notes = "".join(f"; {note}" for note in warm.attached.notes)
        say(f"adapters from {plan.config.init_adapter}{notes}")
        adapters = warm.attached.trainable
    initial = split.tree() if split else {}
    start = init.start_of(plan, loaded.tree, initial=initial, adapters=adapters)
    return Beginning(*through_boundary(plan, *start), initial, loaded.fingerprint)


def base_again(
    checkpoints: store.Checkpoints, step: int, model: builtin.Model, plan: Plan, say: Say
) -> Base:
    """The frozen weights of a run that goes on from `step`; its state is in the checkpoint.

    They come from the checkpoint if that holds them, and from the model otherwise. A run that
    trains all weights has none, and its model is not read.
    """
    settings, meta = plan.config, checkpoints.meta(step)
    if settings.init_adapter is not None:
        say(f"init_adapter is ignored: the run goes on from its own step {step}")
    if not settings.lora.enabled:
        return Base({}, {}, meta["base_fingerprint"])
    is_factored = settings.lora.init_lora_weights in schema.FACTORED_INITS
    saved = checkpoints.leaves(step, "initial") if is_factored else None
    if "base" in checkpoints.extras(step):
        like = jax.tree.map(_abstract, plan.base_infos, specs.shardings(plan.base_specs, plan.mesh))
        base = checkpoints.restore_extra(step, "base", like)
        say(f"base: from the checkpoint, fingerprint {meta['base_fingerprint'][:12]}")
        return Base(base, trees.unflatten(saved or {}), meta["base_fingerprint"])
    split = _weight_split(plan, saved)
    loaded = load_weights(model, plan, say, split)
    base = init.without_full(plan, loaded.tree)
    return Base(base, split.tree() if split else {}, loaded.fingerprint)


def to_nnx(plan: Plan, base: trees.Tree, trainable: trees.Tree) -> nnx_boundary.LanguageModel:
    """The model of a plan as an `nnx.Module`: called with tokens `[B, T]` it gives logits.

    Its adapters are `nnx.LoRAParam`s and all other leaves `nnx.Param`s, with the mesh axes of each
    as `out_sharding` metadata. The arrays are the given ones, on their devices.

    Args:
      plan: the run.
      base: the frozen leaves; empty if all weights are trained.
      trainable: the trained leaves.
    """
    weights, adapters = (base, trainable) if plan.config.lora.enabled else (trainable, {})
    all_specs = trees.combine(plan.base_specs, plan.trainable_specs)
    return nnx_boundary.wrap(weights, adapters, all_specs, plan.model.logits)


def through_boundary(
    plan: Plan, base: trees.Tree, trainable: trees.Tree
) -> tuple[trees.Tree, trees.Tree]:
    """Base and trained leaves into the NNX module, and out of it: the same two trees."""
    adaptation = plan.model.adaptation if plan.config.lora.enabled else None
    chosen = nnx_boundary.trainable_filter(adaptation)
    split = nnx_boundary.split(to_nnx(plan, base, trainable), chosen)
    return split.base, split.trainable


class _Warm(NamedTuple):
    adapter: artefact.Adapter
    attached: attach.Attached


def _open_warm(plan: Plan, base: Mapping[str, Any]) -> _Warm | None:
    """The adapter that `init_adapter` names, checked against what the run trains.

    `base` is the config.json of the model.
    """
    path = plan.config.init_adapter
    if path is None:
        return None
    adapter = adapter_sources.open_adapter(path, base, lora_alpha=plan.config.lora.lora_alpha)
    attached = attach.attach(adapter, plan.model, base_fingerprint=None)
    problems = attach.differences(attached.model.adaptation, plan.model.adaptation, path)
    if problems:
        what = f"does not fit lora.* of this run: {len(problems)} differences"
        head = errors.Problem("init_adapter", path, what, "set lora.* to what it was trained with")
        raise errors.ConfigError.of([head, *errors.first(problems, path)])
    return _Warm(adapter, attached)


def _weight_split(
    plan: Plan, saved: Mapping[str, np.ndarray] | None
) -> weight_init.WeightSplit | None:
    """What takes adapters out of the weights, for initial values that come from these."""
    init = plan.config.lora.init_lora_weights
    if not plan.config.lora.enabled or init not in schema.FACTORED_INITS:
        return None
    return weight_init.WeightSplit(init, plan.model.adaptation.targets, saved)


def _abstract(leaf: param_info.ParamInfo, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding)
