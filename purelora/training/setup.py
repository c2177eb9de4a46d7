"""From a configuration to everything that the loop needs: the one place where parts meet."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jax.sharding import PartitionSpec as P

import purelora
from purelora.checkpoint import resume, store
from purelora.config import schema
from purelora.core import errors, param_info, train_state, trees
from purelora.core.batch import Batch
from purelora.data import batches as data_batches
from purelora.data import load as data_load
from purelora.formats import source as sources
from purelora.interop import builtin, open_model
from purelora.interop.peft import adapter_sources, artefact, attach, record
from purelora.lora import weight_init
from purelora.models import causal_lm
from purelora.multihost import runtime
from purelora.sharding import host_arrays, specs
from purelora.training import compilation, nnx_boundary, optimisers
from purelora.training import init as starts
from purelora.training import plan as plans
from purelora.training import step as steps
from purelora.weights import load as weights_load

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Everything that the loop reads and never changes.

    Attributes:
      plan: the resolved configuration.
      model: the opened model; its tokenizer serves the samples.
      data: batches and template.
      base: the frozen weights.
      train_step: `(state, base, batch) -> (state, metrics)`, compiled.
      eval_step: `(trainable, base, batch) -> (loss_sum, weight_sum)`, jitted.
      total_steps: the step at which the run ends.
      checkpoints: where the run saves.
      meta: what is stored with each checkpoint and must agree when the run is continued.
      extras: trees that are saved beside the state.
    """

    plan: plans.Plan
    model: builtin.Model
    data: data_load.RunData
    base: trees.Tree
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    total_steps: int
    checkpoints: store.Checkpoints
    meta: Mapping[str, Any]
    extras: Mapping[str, trees.Tree]

    @property
    def settings(self) -> schema.Config:
        return self.plan.config

    def batch(self, batches: data_batches.Batches, index: int) -> Batch:
        """The rows of a batch that this process's devices take, on the host."""
        own = host_arrays.own_indices(self._batch_sharding, batches.shape, dim=1)
        return batches.batch(index, own)

    def place(self, batch: Batch) -> Batch:
        """Puts a batch on the devices, rows split over the mesh.

        Of several processes each gives its own rows: see `batch`.
        """
        make = functools.partial(jax.make_array_from_process_local_data, self._batch_sharding)
        return Batch(*map(make, batch))

    @functools.cached_property
    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        sharding: jax.sharding.NamedSharding = specs.shardings(specs.BATCH_SPEC, self.plan.mesh)
        return sharding


def open_and_plan(
    settings: schema.Config, say: Say, devices: Sequence[jax.Device] | None = None
) -> tuple[builtin.Model, plans.Plan]:
    """Opens the model (fetching it if need be) and resolves the run, without reading weights.

    It runs on `devices`, by default all there are.
    """
    with runtime.main_first("model"):
        model = open_model.open_model(
            settings.model.path,
            hf_folder=settings.model.hf_folder,
            progress=fetch_progress(say),
        )
    used = jax.devices() if devices is None else devices
    plan = plans.make(settings, model.source.config, model.source.path, used)
    return model, plan


def build(model: builtin.Model, plan: plans.Plan, say: Say) -> tuple[Run, train_state.TrainState]:
    """Loads data and weights, makes or restores the state and compiles the step."""
    settings = plan.config
    data = data_load.load(settings, model.tokenizer)
    runtime.check_equal("fingerprint of the data", data.fingerprint)
    say(f"{data.report}\n{plan.describe_targets()}")
    total = settings.steps or (settings.epochs or 0) * data.train.steps_per_epoch
    schedule_steps = settings.optim.schedule_steps or total
    for problem in schema.warmup_problems(settings.optim, schedule_steps):
        raise errors.ConfigError(*problem)
    checkpoints = resume.open_checkpoints(settings)
    saved = resume.agreed_step(settings, checkpoints, say)

    tx = optimisers.transformation(settings.optim, plan.trainable_infos)
    meta_for = functools.partial(_meta, model, plan, data, schedule_steps)
    if saved is None:
        beginning = begin_fresh(model, plan, say)
    else:
        # Before anything slow, and before the base is rebuilt from what would not fit.
        same_base = meta_for(checkpoints.meta(saved)["base_fingerprint"])
        checkpoints.check_fits(saved, _abstract_state(plan, tx), same_base, schema.RESUMABLE)
        beginning = begin_again(checkpoints, saved, model, plan, say)
    meta = meta_for(beginning.fingerprint)
    split = through_boundary(plan, beginning.start)

    layout = layout_of(plan, tx)
    state = fresh_state(plan, layout, tx, split.trainable)
    if saved is not None:
        say(f"resuming from step {saved}")
        state = resume.restored(checkpoints, saved, _abstract(state), meta)
    run = Run(
        plan=plan,
        model=model,
        data=data,
        base=split.base,
        train_step=train_step(plan, layout, tx, schedule_steps),
        eval_step=steps.make_eval_step(_forward(plan), layout),
        total_steps=total,
        checkpoints=checkpoints,
        meta=meta,
        extras=_extras(settings, split.base, beginning.initial),
    )
    return _compiled(run, state, say), state


def fetch_progress(say: Say) -> Callable[[str, int, int], None]:
    """Reports a download at every tenth of it."""
    tenths: set[tuple[str, int]] = set()

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        tenth = (what, done_bytes * 10 // max(total_bytes, 1))
        if tenth not in tenths:
            tenths.add(tenth)
            say(f"{what}: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")

    return report


def load_weights(
    model: builtin.Model,
    plan: plans.Plan,
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
        f"base: {plan.describe_base()}, "
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
    """What a run begins with.

    Attributes:
      start: its base and its trained leaves.
      initial: the adapters that were taken out of the weights; empty if none were.
      fingerprint: identity of the base before that.
    """

    start: starts.Start
    initial: trees.Tree
    fingerprint: str


def begin_fresh(model: builtin.Model, plan: plans.Plan, say: Say) -> Beginning:
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
    start = starts.start_of(plan, loaded.tree, initial=initial, adapters=adapters)
    return Beginning(start, initial, loaded.fingerprint)


def begin_again(
    checkpoints: store.Checkpoints, step: int, model: builtin.Model, plan: plans.Plan, say: Say
) -> Beginning:
    """The beginning of a run that goes on from `step`; its trained leaves are still to be restored.

    The base comes from the checkpoint if that holds one, and from the model otherwise.
    """
    settings, meta = plan.config, checkpoints.meta(step)
    if settings.init_adapter is not None:
        say(f"init_adapter is ignored: the run goes on from its own step {step}")
    is_factored = settings.lora.init_lora_weights in schema.FACTORED_INITS
    saved = checkpoints.leaves(step, "initial") if is_factored else None
    if "base" in checkpoints.extras(step):
        placed = specs.shardings(plan.base_specs, plan.mesh)
        like = jax.tree.map(_abstract_leaf, plan.base_infos, placed)
        base = checkpoints.restore_extra(step, "base", like)
        say(f"base: from the checkpoint, fingerprint {meta['base_fingerprint'][:12]}")
        start = starts.to_be_restored(plan, base)
        return Beginning(start, trees.unflatten(saved or {}), meta["base_fingerprint"])
    split = _weight_split(plan, saved)
    loaded = load_weights(model, plan, say, split)
    initial = split.tree() if split else {}
    return Beginning(starts.to_be_restored(plan, loaded.tree), initial, loaded.fingerprint)


class _Warm(NamedTuple):
    adapter: artefact.Adapter
    attached: attach.Attached


def _open_warm(plan: plans.Plan, base: Mapping[str, Any]) -> _Warm | None:
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
    plan: plans.Plan, saved: Mapping[str, np.ndarray] | None
) -> weight_init.WeightSplit | None:
    """What takes adapters out of the weights, for initial values that come from these."""
    init = plan.config.lora.init_lora_weights
    if not plan.config.lora.enabled or init not in schema.FACTORED_INITS:
        return None
    return weight_init.WeightSplit(init, plan.model.adaptation.targets, saved)


def _abstract_leaf(
    leaf: param_info.ParamInfo, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding)


def _extras(
    settings: schema.Config, base: trees.Tree, initial: trees.Tree
) -> dict[str, trees.Tree]:
    """What a checkpoint holds beside the state."""
    saves_base = settings.checkpoint.save_base and settings.lora.enabled
    return ({"base": base} if saves_base else {}) | ({"initial": initial} if initial else {})


def through_boundary(plan: plans.Plan, start: starts.Start) -> nnx_boundary.Split:
    """Base and adapters into the NNX module, and out of it as trained and frozen trees."""
    lora = plan.config.lora
    base, adapters = (start.base, start.trainable) if lora.enabled else (start.trainable, {})
    placed_specs = trees.combine(plan.base_specs, plan.trainable_specs)
    module = nnx_boundary.wrap(base, adapters, placed_specs, plan.model.logits)
    trainable = nnx_boundary.trainable_filter(lora.enabled, plan.model.adaptation.full)
    return nnx_boundary.split(module, trainable)


def layout_of(plan: plans.Plan, tx: optax.GradientTransformation) -> steps.Layout:
    """Mesh and specs of a run; moments take the spec of their leaf."""
    abstract = jax.tree.map(lambda leaf: leaf.abstract, plan.trainable_infos)
    state_specs = train_state.state_specs(plan.trainable_specs, tx, abstract, P())
    return steps.Layout(plan.mesh, plan.trainable_specs, plan.base_specs, state_specs)


def fresh_state(
    plan: plans.Plan,
    layout: steps.Layout,
    tx: optax.GradientTransformation,
    trainable: trees.Tree,
) -> train_state.TrainState:
    """The state before the first step, placed; `trainable` is donated to it."""

    def create(leaves: trees.Tree, key: jax.Array) -> train_state.TrainState:
        return train_state.create(leaves, tx, key=key)

    placed = specs.shardings(layout.state, plan.mesh)
    key = jax.random.fold_in(jax.random.key(plan.config.seed), 1)
    return jax.jit(create, out_shardings=placed, donate_argnums=0)(trainable, key)


def train_step(
    plan: plans.Plan, layout: steps.Layout, tx: optax.GradientTransformation, schedule_steps: int
) -> Any:
    """The jitted step of a run."""
    schedule = optimisers.schedule(plan.config.optim, schedule_steps)
    return steps.make_train_step(_forward(plan), tx, schedule, layout)


def _forward(plan: plans.Plan) -> steps.Forward:
    return causal_lm.make_forward(plan.model, plan.execution, plan.shards, **plan.loss_options)


def _abstract_state(plan: plans.Plan, tx: optax.GradientTransformation) -> Any:
    """Shapes and dtypes of the state, placed nowhere."""
    create = functools.partial(train_state.create, tx=tx, key=jax.random.key(0))
    return jax.eval_shape(create, jax.tree.map(lambda leaf: leaf.abstract, plan.trainable_infos))


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def _meta(
    model: builtin.Model,
    plan: plans.Plan,
    data: data_load.RunData,
    schedule_steps: int,
    base_fingerprint: str,
) -> dict[str, Any]:
    """What a checkpoint of the run says beside its arrays."""
    # Without a decay nothing depends on where it would end, and the run may be lengthened.
    decays = plan.config.optim.schedule != "constant"
    resolved = {"optim.schedule_steps": schedule_steps if decays else None}
    # The fingerprint is of the tensors; what config.json makes of them must be the same too.
    sizes = {f"config.json: {k}": v for k, v in dataclasses.asdict(plan.model.config).items()}
    # Which of several patterns counts depends on their order, which JSON objects do not have.
    ranks = {
        f"lora: ranks and scalings of {path}": [list(target.ranks), list(target.scalings)]
        for path, target in plan.model.adaptation.targets.items()
    }
    settings = schema.as_flat(plan.config) | resolved | sizes | ranks
    lora = plan.config.lora
    path = plan.config.model.path
    adaptation = record.of_model(plan.model, lora, path).to_json() if lora.enabled else None
    return {
        "config": settings,
        "base_fingerprint": base_fingerprint,
        "data_fingerprint": data.fingerprint,
        "versions": {"purelora": purelora.__version__, "jax": jax.__version__},
        "adaptation": adaptation,
        "model_config": dict(model.source.config),
    }


def _compiled(run: Run, state: train_state.TrainState, say: Say) -> Run:
    """Compiles the train step for the one shape that the run has."""
    batch = run.place(run.batch(run.data.train, 0))
    compiled = compilation.compile_now(run.train_step, state, run.base, batch)
    say(f"train step compiled in {compiled}")
    return dataclasses.replace(run, train_step=compiled.call)
