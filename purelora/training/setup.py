"""From a configuration to everything that the loop needs: the one place where parts meet."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import purelora
from purelora.checkpoint import resume, store
from purelora.config import checks, schema
from purelora.core import errors, train_state, trees
from purelora.data import load as data_load
from purelora.interop import builtin, open_model
from purelora.interop.peft import record
from purelora.multihost import runtime
from purelora.training import (
    beginning,
    compilation,
    feed,
    optimisers,
    plan_report,
    planning,
    programs,
    step,
)
from purelora.training.plan import Plan

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

    plan: Plan
    model: builtin.Model
    data: data_load.RunData
    base: trees.Tree
    train_step: step.TrainStep
    eval_step: step.EvalStep
    total_steps: int
    checkpoints: store.Checkpoints
    meta: Mapping[str, Any]
    extras: Mapping[str, trees.Tree]

    @property
    def settings(self) -> schema.Config:
        return self.plan.config


def open_and_plan(
    settings: schema.Config, say: Say, devices: Sequence[jax.Device] | None = None
) -> tuple[builtin.Model, Plan]:
    """Opens the model (fetching it if need be) and resolves the run, without reading weights.

    It runs on `devices`, by default all there are.
    """
    optimisers.check(settings.optim)
    with runtime.main_first("model"):
        model = open_model.open_model(
            settings.model.path,
            hf_folder=settings.model.hf_folder,
            progress=fetch_progress(say),
        )
    used = jax.devices() if devices is None else devices
    plan = planning.make_plan(settings, model.source.config, model.source.path, used)
    return model, plan


def build(model: builtin.Model, plan: Plan, say: Say) -> tuple[Run, train_state.TrainState]:
    """Loads data and weights, makes or restores the state and compiles the step."""
    settings = plan.config
    data = data_load.load(settings, model.tokenizer)
    runtime.check_equal("fingerprint of the data", data.fingerprint)
    say(f"{data.report}\n{plan_report.describe_targets(plan)}")
    total = settings.steps or (settings.epochs or 0) * data.train.steps_per_epoch
    schedule_steps = settings.optim.schedule_steps or total
    for problem in checks.warmup_problems(settings.optim, schedule_steps):
        raise errors.ConfigError(*problem)
    checkpoints = resume.open_checkpoints(settings)
    saved = resume.agreed_step(settings, checkpoints, say)

    tx = optimisers.transformation(settings.optim, plan.trainable_infos)
    layout = programs.layout_of(plan, tx)
    meta_for = functools.partial(meta_of, model, plan, data.fingerprint, schedule_steps)
    begun: beginning.Beginning | beginning.Base
    if saved is None:
        begun = beginning.begin_fresh(model, plan, say)
        state = programs.fresh_state(plan, layout, tx, begun.trainable)
    else:
        like = programs.abstract_state(plan, layout, tx)
        # Before anything slow, and before the base is rebuilt from what would not fit.
        same_base = meta_for(checkpoints.meta(saved)["base_fingerprint"])
        checkpoints.check_fits(saved, like, same_base, schema.RESUMABLE)
        begun = beginning.base_again(checkpoints, saved, model, plan, say)
        say(f"resuming from step {saved}")
        state = resume.restored(checkpoints, saved, like, meta_for(begun.fingerprint))
        base, trainable = beginning.through_boundary(plan, begun.base, state.trainable)
        begun, state = begun._replace(base=base), state._replace(trainable=trainable)
    run = Run(
        plan=plan,
        model=model,
        data=data,
        base=begun.base,
        train_step=programs.train_step(plan, layout, tx, schedule_steps),
        eval_step=step.make_eval_step(programs.forward_of(plan), layout),
        total_steps=total,
        checkpoints=checkpoints,
        meta=meta_for(begun.fingerprint),
        extras=extras_of(settings, begun.base, begun.initial),
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


def extras_of(
    settings: schema.Config, base: trees.Tree, initial: trees.Tree
) -> dict[str, trees.Tree]:
    """What a checkpoint holds beside the state."""
    saves_base = settings.checkpoint.save_base and settings.lora.enabled
    return ({"base": base} if saves_base else {}) | ({"initial": initial} if initial else {})


def meta_of(
    model: builtin.Model,
    plan: Plan,
    data_fingerprint: str,
    schedule_steps: int,
    base_fingerprint: str,
) -> dict[str, Any]:
    """What a checkpoint of the run says beside its arrays."""
    # Without a decay nothing depends on where it would end, and the run may be lengthened.
    decays = plan.config.optim.schedule != "constant"
    resolved = {"optim.schedule_steps": schedule_steps if decays else None}
    # The fingerprint is of the tensors; what config.json makes of them must be the same too.
    sizes = dataclasses.asdict(plan.model.config)
    # Which of several patterns counts depends on their order, which JSON objects do not have.
    scalings = {
        path: [list(target.ranks), list(target.scalings)]
        for path, target in plan.model.adaptation.targets.items()
    }
    lora = plan.config.lora
    path = plan.config.model.path
    adaptation = record.of_model(plan.model, lora, path).to_json() if lora.enabled else None
    return {
        "config": schema.as_flat(plan.config) | resolved,
        "base_fingerprint": base_fingerprint,
        "data_fingerprint": data_fingerprint,
        "versions": {"purelora": purelora.__version__, "jax": jax.__version__},
        "adaptation": adaptation,
        "model_config": dict(model.source.config),
        "model_sizes": sizes,
        "adapter_scalings": scalings,
    }


def _compiled(run: Run, state: train_state.TrainState, say: Say) -> Run:
    """Compiles the train step for the one shape that the run has."""
    batch = feed.first(run.data.train, run.plan.mesh)
    compiled = compilation.compile_now(run.train_step, state, run.base, batch)
    say(f"train step compiled in {compiled}")
    return dataclasses.replace(run, train_step=compiled.call)
