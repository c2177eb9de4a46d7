"""From a configuration to everything that the loop needs: the one place where parts meet."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import tqdm
from jax.sharding import PartitionSpec as P

import purelora
from purelora import boundary, checkpoint, compilation, config, errors, info, optim, specs
from purelora import plan as plans
from purelora import state as states
from purelora import step as steps
from purelora import tree as trees
from purelora.data import load as data_load
from purelora.io import builtin
from purelora.io import load as weights
from purelora.models import causal_lm

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
    """

    plan: plans.Plan
    model: builtin.Model
    data: data_load.RunData
    base: trees.Tree
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    total_steps: int
    checkpoints: checkpoint.Checkpoints
    meta: Mapping[str, Any]

    @property
    def settings(self) -> config.Config:
        return self.plan.config

    def place(self, batch: steps.Batch) -> steps.Batch:
        """Puts a batch on the devices, rows split over the mesh."""
        return jax.device_put(batch, specs.shardings(specs.BATCH_SPEC, self.plan.mesh))


def open_and_plan(settings: config.Config, say: Say) -> tuple[builtin.Model, plans.Plan]:
    """Opens the model (fetching it if need be) and resolves the run, without reading weights."""
    model = builtin.open_model(settings.model.path, progress=fetch_progress(say))
    plan = plans.make(settings, model.source.config, model.source.path, jax.devices())
    return model, plan


def build(model: builtin.Model, plan: plans.Plan, say: Say) -> tuple[Run, states.TrainState]:
    """Loads data and weights, makes or restores the state and compiles the step."""
    settings = plan.config
    data = data_load.load(settings, model.tokenizer)
    say(f"{data.report}\n{plan.describe_targets()}")
    total = settings.steps or (settings.epochs or 0) * data.train.steps_per_epoch
    schedule_steps = settings.optim.schedule_steps or total
    for problem in config.warmup_problems(settings.optim, schedule_steps):
        raise errors.ConfigError(*problem)
    checkpoints = checkpoint.Checkpoints(
        pathlib.Path(settings.workdir) / "checkpoints", keep_last=settings.checkpoint.keep_last
    )
    saved = _saved_step(settings, checkpoints, say)

    loaded = load_weights(model, plan, say)
    meta = _meta(plan, loaded, data, schedule_steps)
    if saved is not None:
        checkpoint.check_resumable(checkpoints.meta(saved), meta, config.RESUMABLE)
    split = through_boundary(plan, loaded.tree)

    tx = optim.transformation(settings.optim, optim.decayed_leaves(plan.trainable_infos))
    layout = layout_of(plan, tx)
    state = fresh_state(plan, layout, tx, split.trainable)
    if saved is not None:
        say(f"resuming from step {saved}")
        state = checkpoints.restore(saved, _abstract(state))
        if int(state.step) != saved:
            folder = f"{settings.workdir}/checkpoints/{saved}"
            what = f"holds the state of step {int(state.step)}"
            raise errors.CheckpointError(folder, None, what, "give the folder its own number back")
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


def _saved_step(
    settings: config.Config, checkpoints: checkpoint.Checkpoints, say: Say
) -> int | None:
    """The step to continue from, None for a fresh run; by `checkpoint.resume`."""
    found, mode = checkpoints.steps(), settings.checkpoint.resume
    if checkpoints.incomplete():
        say(f"passed over incomplete checkpoints: {', '.join(checkpoints.incomplete())}")
    if mode == "must" and not found:
        raise errors.CheckpointError(
            "checkpoint.resume",
            mode,
            f"there is no checkpoint in {settings.workdir}",
            "set workdir to a run's folder, or checkpoint.resume='auto'",
        )
    if mode == "never" and found:
        raise errors.CheckpointError(
            "checkpoint.resume",
            mode,
            f"{settings.workdir} holds a run with a checkpoint at step {found[-1]}",
            "choose another workdir, or remove that folder",
        )
    return found[-1] if found else None


def load_weights(model: builtin.Model, plan: plans.Plan, say: Say) -> weights.Loaded:
    """Reads the base into its final dtype, quantisation and placement."""
    infos = plan.base_infos or plan.trainable_infos
    placed = plan.base_specs or plan.trainable_specs
    start = time.perf_counter()
    with tqdm.tqdm(desc="weights", unit="tensor", leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        placement = specs.shardings(placed, plan.mesh)
        loaded = weights.load(model.source, plan.model, infos, placement, progress)
    jax.block_until_ready(loaded.tree)
    say(
        f"base: {plans.bytes_by_dtype(infos)} bytes, "
        f"read in {time.perf_counter() - start:.1f} s, fingerprint {loaded.fingerprint[:12]}"
    )
    return loaded


def through_boundary(plan: plans.Plan, base: trees.Tree) -> boundary.Split:
    """Base and fresh adapters into the NNX module, and out of it as trained and frozen trees."""
    adapters: trees.Tree = {}
    if plan.config.lora.enabled:
        make = functools.partial(info.initial_tree, plan.trainable_infos)
        placed = specs.shardings(plan.trainable_specs, plan.mesh)
        adapters = jax.jit(lambda key: make(key=key), out_shardings=placed)(
            jax.random.key(plan.config.seed)
        )
    placed_specs = trees.combine(plan.base_specs, plan.trainable_specs)
    module = boundary.wrap(base, adapters, placed_specs, plan.model.logits)
    return boundary.split(module, boundary.trainable_filter(plan.config.lora.enabled))


def layout_of(plan: plans.Plan, tx: optax.GradientTransformation) -> steps.Layout:
    """Mesh and specs of a run; moments take the spec of their leaf."""
    abstract = jax.tree.map(lambda leaf: leaf.abstract, plan.trainable_infos)
    state_specs = states.state_specs(plan.trainable_specs, tx, abstract, P())
    return steps.Layout(plan.mesh, plan.trainable_specs, plan.base_specs, state_specs)


def fresh_state(
    plan: plans.Plan,
    layout: steps.Layout,
    tx: optax.GradientTransformation,
    trainable: trees.Tree,
) -> states.TrainState:
    """The state before the first step, placed; `trainable` is donated to it."""

    def create(leaves: trees.Tree, key: jax.Array) -> states.TrainState:
        return states.create(leaves, tx, key=key)

    placed = specs.shardings(layout.state, plan.mesh)
    key = jax.random.fold_in(jax.random.key(plan.config.seed), 1)
    return jax.jit(create, out_shardings=placed, donate_argnums=0)(trainable, key)


def train_step(
    plan: plans.Plan, layout: steps.Layout, tx: optax.GradientTransformation, schedule_steps: int
) -> Any:
    """The jitted step of a run."""
    schedule = optim.schedule(plan.config.optim, schedule_steps)
    return steps.make_train_step(_forward(plan), tx, schedule, layout)


def _forward(plan: plans.Plan) -> steps.Forward:
    rate = plan.config.lora.lora_dropout
    return causal_lm.make_forward(plan.model, plan.execution, plan.gathers, rate)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def _meta(
    plan: plans.Plan, loaded: weights.Loaded, data: data_load.RunData, schedule_steps: int
) -> dict[str, Any]:
    # Without a decay nothing depends on where it would end, and the run may be lengthened.
    decays = plan.config.optim.schedule != "constant"
    resolved = {"optim.schedule_steps": schedule_steps if decays else None}
    # The fingerprint is of the tensors; what config.json makes of them must be the same too.
    sizes = {f"config.json: {k}": v for k, v in dataclasses.asdict(plan.model.config).items()}
    settings = config.as_flat(plan.config) | resolved | sizes
    return {
        "config": settings,
        "base_fingerprint": loaded.fingerprint,
        "data_fingerprint": data.fingerprint,
        "versions": {"purelora": purelora.__version__, "jax": jax.__version__},
    }


def _compiled(run: Run, state: states.TrainState, say: Say) -> Run:
    """Compiles the train step for the one shape that the run has."""
    batch = run.place(run.data.train.batch(0))
    compiled = compilation.compile_now(run.train_step, state, run.base, batch)
    say(f"train step compiled in {compiled}")
    return dataclasses.replace(run, train_step=compiled.call)
