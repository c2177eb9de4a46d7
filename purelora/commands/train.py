"""Fine-tunes a language model: the main command.

    python -m purelora.train --config=configs/qlora.py
    python -m purelora.train --config=configs/qlora.py --config.lora.r=8 --config.workdir=runs/r8
    python -m purelora.train --config=configs/qlora.py --plan

--config=FILE        a config file; configs/base.py documents every key
--config.KEY=VALUE   overrides a key
--plan               prints the resolved configuration and every array, and stops

Exit status: 0 when the run is complete, 2 for an error that the user can fix, 128 + signal when
SIGTERM or SIGINT ended it (after saving).

Of a run of several processes each is started with the same arguments and one of these:
--coordinator_address=HOST:PORT --num_processes=N --process_id=I
                     or the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
                     JAX_PROCESS_ID; HOST is that of process 0, which opens that port
--distributed        JAX finds the others: Slurm, Open MPI, Kubernetes, Cloud TPU
--heartbeat_timeout_seconds=30   a process that is silent for so long ends the run
`python -m purelora.launch` starts them all on one machine.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence

from purelora.commands import entry
from purelora.config import command_line, schema
from purelora.core import train_state
from purelora.multihost import runtime
from purelora.training import compilation, evaluation, log, metrics, run_folder, setup, signals
from purelora.training import plan as plans


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    joining, argv = entry.processes(argv)
    runtime.initialise(joining)
    settings, flags = command_line.parse(argv, flags=("plan",))
    runtime.check_equal("arguments", command_line.describe(schema.as_flat(settings)))
    if "plan" not in flags and runtime.is_main():
        log.check_workdir(settings)
        run_folder.check_adapter_folder(settings)
    cache = compilation.use_cache(settings.compile_cache)
    model, run_plan = setup.open_and_plan(settings, log.say)
    if "plan" in flags:
        log.say(f"{command_line.describe(schema.as_flat(settings))}\n\n{plans.table(run_plan)}\n")
        log.say(run_plan.describe_targets())
        return 0
    log.say(f"compilation cache: {cache or 'off'}")
    run, start = setup.build(model, run_plan, log.say)
    if int(start.step) >= run.total_steps:
        log.say(f"complete: {settings.workdir} is at step {int(start.step)} already")
        written = _by_main(lambda: run_folder.finish_once(run, int(start.step)))
        if written is not None:
            log.say(f"its adapter was missing or of another step: written to {written}")
        return 0
    with (
        signals.catch() as stop,
        log.reporting(run, start) as reporter,
        contextlib.closing(run.checkpoints),
    ):
        if runtime.is_main():
            run_folder.begin(run, int(start.step))
        train(run, start, reporter, stop)
        if not stop.requested:
            written = _by_main(lambda: run_folder.finish(run, run.total_steps))
            reporter.exported(run.total_steps, written)
    return stop.status


def _by_main(write: Callable[[], pathlib.Path | None]) -> pathlib.Path | None:
    """Where the main process alone has written something; None if it has not."""

    def written() -> str | None:
        path = write()
        return None if path is None else str(path)

    found = runtime.from_main("export", written)
    return None if found is None else pathlib.Path(found)


def train(
    run: setup.Run, current: train_state.TrainState, reporter: log.Reporter, stop: signals.Stop
) -> train_state.TrainState:
    """The loop: steps until the last one or until a signal asks to stop; saves at the end.

    The state of the last step is complete on disk when this returns.
    """
    every, first = run.settings, int(current.step)
    saves = Saves(every.checkpoint, first=first + 1)
    if first == 0:
        reporter.evaluated(evaluation.evaluate(run, current, stop))
        reporter.sampled(evaluation.sample(run, current))
    for number in range(first + 1, run.total_steps + 1):
        batch = run.place(run.batch(run.data.train, number - 1))
        current, result = run.train_step(current, run.base, batch)
        reporter.after_step(number, run.data.train.token_count(number - 1), result)
        wished = stop.look(saves.wish())
        is_last, evaluated = stop.requested or number == run.total_steps, None
        if is_last or is_due(number, every.eval_steps):
            reporter.flush()
            evaluated = evaluation.evaluate(run, current, stop)
            reporter.evaluated(evaluated)
        if is_last or saves.are_due(number, wished):
            save(run, number, current, evaluated, reporter)
            saves.done(run, number)
        if is_last:
            break
    run.checkpoints.wait()
    if not stop.requested:
        reporter.sampled(evaluation.sample(run, current))
        reporter.finish(current)
    return current


class Saves:
    """When a run saves, beside its end: see `checkpoint.save_*` in configs/base.py."""

    def __init__(self, settings: schema.CheckpointConfig, *, first: int):
        """Begins at `first`, the first step of this process."""
        self._settings = settings
        self._first = first
        self._made = 0
        self._last_secs = time.monotonic()

    def are_due(self, number: int, wished: int) -> bool:
        """Whether to save after step `number`, if the processes have wished for save `wished`."""
        return (
            is_due(number, self._settings.save_steps)
            or (self._settings.save_first and number == self._first)
            or wished == self._made + 1
        )

    def wish(self) -> int:
        """Number of the save that it is time for, 0 if it is not; the main process's clock counts.

        A wish that comes back when that save has been made is an old one.
        """
        secs = self._settings.save_secs
        is_up = secs is not None and time.monotonic() - self._last_secs >= secs
        return self._made + 1 if is_up and runtime.is_main() else 0

    def done(self, run: setup.Run, number: int) -> None:
        """After a save; the first one is waited for, so that it fails here if it fails."""
        if number == self._first:
            run.checkpoints.wait()
        self._made += 1
        self._last_secs = time.monotonic()


def save(
    run: setup.Run,
    number: int,
    current: train_state.TrainState,
    evaluated: metrics.EvalRecord | None,
    reporter: log.Reporter,
) -> None:
    """Saves step `number`, once all records up to it are on disk."""
    eval_loss = None if evaluated is None else evaluated.loss
    with reporter.saving(number):
        run.checkpoints.save(
            number, current, {**run.meta, "step": number, "eval_loss": eval_loss}, run.extras
        )


def is_due(number: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after step `number`."""
    return every is not None and number % every == 0
