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
from purelora.training import (
    compilation,
    evaluation,
    feed,
    log,
    metrics,
    plan_report,
    run_folder,
    setup,
    signals,
)


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
        log.say(
            f"{command_line.describe(schema.as_flat(settings))}\n\n{plan_report.table(run_plan)}\n"
        )
        log.say(plan_report.describe_targets(run_plan))
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
            reporter.log_export(run.total_steps, written)
    return stop.status


def _by_main(write: Callable[[], pathlib.Path | None]) -> pathlib.Path | None:
    """Where the main process alone has written something; None if it has not."""

    def as_text() -> str | None:
        path = write()
        return None if path is None else str(path)

    text = runtime.from_main("export", as_text)
    return None if text is None else pathlib.Path(text)


def train(
    run: setup.Run, current: train_state.TrainState, reporter: log.Reporter, stop: signals.Stop
) -> train_state.TrainState:
    """The loop: steps until the last one or until a signal asks to stop; saves at the end.

    The state of the last step is complete on disk when this returns.
    """
    settings, done = run.settings, int(current.step)
    saves = Saves(settings.checkpoint, first=done + 1)
    if done == 0:
        reporter.log_eval(evaluation.evaluate(run, current, stop))
        reporter.log_samples(evaluation.sample(run, current))
    steps = range(done + 1, run.total_steps + 1)
    for number, batch, tokens in feed.feed(run.data.train, run.plan.mesh, steps):
        current, result = run.train_step(current, run.base, batch)
        reporter.log_step(number, tokens, result)
        wish = stop.poll(saves.wish())
        is_last, record = stop.requested or number == run.total_steps, None
        if is_last or is_due(number, settings.eval_steps):
            reporter.flush()
            record = evaluation.evaluate(run, current, stop)
            reporter.log_eval(record)
        if is_last or saves.are_due(number, wish):
            save(run, number, current, record, reporter)
            saves.done(run, number)
        if is_last:
            break
    run.checkpoints.wait()
    if not stop.requested:
        reporter.log_samples(evaluation.sample(run, current))
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

    def are_due(self, number: int, wish: int) -> bool:
        """Whether to save after step `number`, if the processes wish for save `wish`."""
        return (
            is_due(number, self._settings.save_steps)
            or (self._settings.save_first and number == self._first)
            or wish == self._made + 1
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
    record: metrics.EvalRecord | None,
    reporter: log.Reporter,
) -> None:
    """Saves step `number`, once all records up to it are on disk."""
    eval_loss = None if record is None else record.loss
    with reporter.saving(number):
        run.checkpoints.save(
            number, current, {**run.meta, "step": number, "eval_loss": eval_loss}, run.extras
        )


def is_due(number: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after step `number`."""
    return every is not None and number % every == 0
