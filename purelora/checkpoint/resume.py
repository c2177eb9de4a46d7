"""Where a run goes on: its newest whole checkpoint, by `checkpoint.resume`."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from purelora.checkpoint import retention, store
from purelora.config import schema
from purelora.core import errors, train_state
from purelora.multihost import runtime


def open_checkpoints(settings: schema.Config) -> store.Checkpoints:
    """The checkpoints of the run in `workdir`."""
    keep = settings.checkpoint
    policy = retention.Policy(last=keep.keep_last, every=keep.keep_every, best=keep.keep_best)
    folder = pathlib.Path(settings.workdir) / "checkpoints"
    return store.Checkpoints(folder, policy, in_background=keep.async_save)


def saved_step(
    settings: schema.Config, checkpoints: store.Checkpoints, say: Callable[[str], None]
) -> int | None:
    """The step to continue from, None for a fresh run; says what it passed over, and why.

    Raises:
      CheckpointError: `checkpoint.resume` forbids what there is; a run is there but not one of its
        checkpoints is whole, and only its user can say that it shall begin anew; or what another
        version of purelora left is in the way.
    """
    mode, newest = settings.checkpoint.resume, checkpoints.newest_whole()
    foreign = [passed.problem for passed in newest.passed_over if passed.is_foreign]
    if foreign:
        raise errors.CheckpointError.of(errors.first(foreign, settings.workdir))
    damaged = [passed.problem for passed in newest.passed_over if passed.is_damage]
    if mode == "never" and (newest.step is not None or damaged):
        raise errors.CheckpointError(
            "checkpoint.resume",
            mode,
            f"{settings.workdir} holds a run with a checkpoint at step {checkpoints.steps()[-1]}",
            "choose another workdir, or remove that folder",
        )
    if damaged and (mode == "must" or newest.step is None):
        raise errors.CheckpointError.of(damaged)
    if mode == "must" and newest.step is None:
        raise errors.CheckpointError(
            "checkpoint.resume",
            mode,
            f"there is no checkpoint in {settings.workdir}",
            "set workdir to a run's folder, or checkpoint.resume='auto'",
        )
    for passed in newest.passed_over:
        say(f"passed over {passed.problem}")
    return newest.step


def agreed_step(
    settings: schema.Config, checkpoints: store.Checkpoints, say: Callable[[str], None]
) -> int | None:
    """`saved_step`, that the main process finds for all: it alone reads whole steps to check them.

    Raises:
      CheckpointError: as for `saved_step`, in the main process.
    """

    def find() -> int | None:
        return saved_step(settings, checkpoints, say)

    step: int | None = runtime.from_main("step to resume from", find)
    if step is not None and not runtime.is_main():
        checkpoints.mark_verified(step)
    return step


def restored(
    checkpoints: store.Checkpoints, step: int, like: train_state.TrainState, meta: Mapping[str, Any]
) -> train_state.TrainState:
    """The state of the run's step `step`.

    Args:
      checkpoints: the run's.
      step: from `saved_step`.
      like: the state that the run would begin with, as ShapeDtypeStructs with shardings.
      meta: what the run would store with its checkpoints.

    Raises:
      CheckpointError: the checkpoint belongs to a run with other settings, data or leaves (all that
        differs is named), or to another step.
    """
    checkpoints.check_fits(step, like, meta, schema.RESUMABLE)
    state = checkpoints.restore(step, like)
    if int(state.step) != step:
        what = f"holds the state of step {int(state.step)}"
        remedy = "give the folder its own number back"
        raise errors.CheckpointError(f"checkpoints/{step}", None, what, remedy)
    return state
