"""What a run tells of itself while it goes: records in its folder, progress on the terminal."""

import contextlib
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from purelora.config import schema
from purelora.core import errors, train_state
from purelora.multihost import runtime
from purelora.training import metrics, setup, step

# With nan_policy="skip": so many skipped steps one after the other are no accident.
_MOST_SKIPPED_IN_A_ROW = 10


class _Values(NamedTuple):
    """`step.Metrics` on the host."""

    loss_sum: float
    weight_sum: float
    grad_norm: float
    learning_rate: float
    applied: float
    router: tuple[list[float], list[float]] | tuple[None, None]

    @classmethod
    def of(cls, found: step.Metrics) -> "_Values":
        """The values on the host; waits until the device has computed them."""
        *scalars, losses = found
        router: tuple[Any, Any] = (None, None)
        if losses is not None:
            router = (np.asarray(losses.balance_L).tolist(), np.asarray(losses.z_L).tolist())
        total, weight, norm, rate, applied = (float(np.asarray(value)) for value in scalars)
        return cls(total, weight, norm, rate, applied, router)


class _Pending(NamedTuple):
    """A step whose metrics may still be being computed."""

    step: int
    tokens: int
    metrics: step.Metrics


def say(text: str) -> None:
    """Prints a line before the loop; of several processes the main one does."""
    if runtime.is_main():
        print(text, flush=True)


def check_workdir(settings: schema.Config) -> None:
    """Raises ConfigError, before anything slow begins, if the run could not write to its folder.

    Where a run has been, its lock is taken at once: what is there must not change any more.
    """
    lock = pathlib.Path(settings.workdir) / "lock"
    try:
        if lock.is_file():
            _lock(lock.parent)
        problem = _workdir_problem(pathlib.Path(settings.workdir))
    except (OSError, ValueError) as error:
        problem = f"is no usable path: {error}"
    if problem:
        raise errors.ConfigError("workdir", settings.workdir, problem, "choose another folder")


def _workdir_problem(workdir: pathlib.Path) -> str | None:
    existing = next(p for p in (workdir, *workdir.absolute().parents) if p.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written to"
    log, checkpoints = workdir / "metrics.jsonl", workdir / "checkpoints"
    if log.is_symlink() or (log.exists() and not log.is_file()):
        return "its metrics.jsonl is not a file"
    if checkpoints.is_symlink() or (checkpoints.exists() and not checkpoints.is_dir()):
        return "its checkpoints is not a folder"
    return None


class Log(Protocol):
    """Where records go."""

    def write(self, record: Any) -> None:
        """Adds a record."""

    def sync(self) -> None:
        """Puts all records on disk for good."""

    def close(self) -> None:
        """No record comes any more."""


class Progress(Protocol):
    """Where a user sees them."""

    def update(self, record: Any) -> None:
        """Shows a step."""

    def write(self, text: str) -> None:
        """Shows a line."""

    def close(self) -> None:
        """Leaves what is shown."""


class _Nowhere:
    """The log and the progress of all processes but the main one."""

    def write(self, record: Any) -> None:
        """Nothing."""

    def update(self, record: Any) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Reporter:
    """Writes the run's records and shows its progress; holds no part of the training state.

    Of several processes the main one does. The others see the same numbers, as they must end with
    it when these are not finite.
    """

    def __init__(self, run: setup.Run, start: train_state.TrainState):
        first = int(start.step)
        self._run = run
        self._workdir = pathlib.Path(run.settings.workdir)
        self._log: Log = _Nowhere()
        self._progress: Progress = _Nowhere()
        if runtime.is_main():
            self._log = _open_log(self._workdir, run.settings, first)
            self._progress = metrics.Progress(
                run.total_steps,
                done_steps=first,
                log_steps=run.settings.log_steps,
                peak_flops_per_sec=metrics.peak_flops_per_sec(run.plan.device_kinds),
            )
        self._skipped = first - int(start.updates)
        self._skipped_in_a_row = 0
        self._throughput = metrics.Throughput()
        self._pending: _Pending | None = None
        self._started = self._last = time.perf_counter()
        name = "resume" if first else "start"
        self.log_event(first, name, f"{run.total_steps} steps in all")

    def log_step(self, number: int, tokens: int, result: step.Metrics) -> None:
        """Records the step before this one, so that the host never waits for the present one.

        `tokens` are those of the whole batch, without padding.
        """
        self.flush()
        self._pending = _Pending(number, tokens, result)

    def flush(self) -> None:
        """Waits for the pending step and records it.

        Raises:
          DivergedError: it was not finite, and `nan_policy` is "abort".
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = _Values.of(pending.metrics)
        now = time.perf_counter()
        secs, self._last = now - self._last, now
        self._skipped += int(not values.applied)
        self._skipped_in_a_row = 0 if values.applied else self._skipped_in_a_row + 1
        record = self._record(pending, values, secs)
        is_last = pending.step == self._run.total_steps
        if is_last or pending.step % self._run.settings.log_steps == 0 or not values.applied:
            self._log.write(record)
        self._progress.update(record)
        if not values.applied:
            self._report_skip(pending.step, values)

    def log_eval(self, record: metrics.EvalRecord | None) -> None:
        """Records an evaluation, if there was one."""
        if record is not None:
            self._log.write(record)
            self._progress.write(f"eval at step {record.step}: loss {record.loss:.4f}")
        self._last = time.perf_counter()

    def log_samples(self, records: list[metrics.SampleRecord]) -> None:
        """Records samples."""
        for record in records:
            self._log.write(record)
            self._progress.write(f"sample at step {record.step}: {record.prompt}\n  {record.text}")
        self._last = time.perf_counter()

    def log_event(self, number: int, name: str, detail: str) -> None:
        """Records anything else."""
        self._log.write(metrics.EventRecord(step=number, name=name, detail=detail))
        self._progress.write(f"{name} at step {number}: {detail}")
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def saving(self, number: int) -> Iterator[None]:
        """Around the save of a step: puts the records up to it on disk before it can be complete.

        So a run that goes on from it has them all. The time of the save is not that of a step.
        """
        self.flush()
        self.log_event(number, "save", f"{self._run.settings.workdir}/checkpoints/{number}")
        self._log.sync()
        yield
        self._last = time.perf_counter()

    def log_export(self, number: int, folder: pathlib.Path | None) -> None:
        """Records where the adapter was written, if there is one."""
        if folder is not None:
            self.log_event(number, "export", str(folder))

    def finish(self, current: train_state.TrainState) -> None:
        """Records the end of the run with its mean rates."""
        rates = [f"{rate:.0f}" for rate in self._throughput.mean() if rate is not None][:2]
        mean = f", mean {rates[0]} tok/s, {rates[1]} trained tok/s" if rates else ""
        secs = time.perf_counter() - self._started
        detail = f"{int(current.updates)} updates in {secs:.0f} s{mean}"
        self.log_event(int(current.step), "finish", detail)

    def close(self) -> None:
        """Closes the log and leaves the progress as it stands."""
        self._progress.close()
        self._log.close()

    def _record(self, pending: _Pending, values: _Values, secs: float) -> metrics.TrainRecord:
        trained = int(values.weight_sum) if np.isfinite(values.weight_sum) else 0
        rates = self._throughput.add(
            tokens=pending.tokens,
            trained_tokens=trained,
            flops=pending.tokens * self._run.plan.flops_per_token,
            secs=secs,
        )
        balance, z = values.router
        return metrics.TrainRecord(
            step=pending.step,
            loss=values.loss_sum / values.weight_sum if values.weight_sum else float("nan"),
            tokens=pending.tokens,
            trained_tokens=trained,
            **rates._asdict(),
            learning_rate=values.learning_rate,
            grad_norm=values.grad_norm,
            router_aux_loss=balance,
            router_z_loss=z,
            applied=bool(values.applied),
            skipped_steps=self._skipped,
            step_secs=secs,
            peak_memory_bytes=metrics.peak_memory_bytes(),
            elapsed_secs=time.perf_counter() - self._started,
        )

    def _report_skip(self, number: int, values: _Values) -> None:
        """Says why an update was not made; ends the run where that is the policy."""
        if not values.weight_sum:
            self.log_event(number, "skip", "no token of the batch has weight")
            return
        detail = f"loss sum {values.loss_sum}, gradient norm {values.grad_norm}, or the update"
        self.log_event(number, "skip", f"not finite: {detail}")
        hopeless = self._skipped_in_a_row >= _MOST_SKIPPED_IN_A_ROW
        if hopeless or self._run.settings.nan_policy == "abort":
            self._run.checkpoints.wait()
            saved = self._run.checkpoints.steps()
            last = f"the same command continues from step {saved[-1]}" if saved else (
                "no checkpoint was saved: set checkpoint.save_steps"
            )  # fmt: skip
            raise errors.DivergedError(
                f"step {number}",
                None,
                f"is not finite: {detail}",
                f"{self._skipped_in_a_row} in a row; look at optim.learning_rate, optim.eps and "
                f"optim.b2, or set nan_policy='skip' to leave single batches out; {last}",
            )


@contextlib.contextmanager
def reporting(run: setup.Run, start: train_state.TrainState) -> Iterator[Reporter]:
    """A Reporter for the time of the loop."""
    reporter = Reporter(run, start)
    try:
        yield reporter
    finally:
        reporter.close()


def _lock(workdir: pathlib.Path) -> None:
    """Takes the folder for this process until it ends; two runs would mix their records."""
    lock = os.open(workdir / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise errors.ConfigError(
            "workdir", str(workdir), "another run is writing to it", "choose another folder"
        ) from error


def _open_log(workdir: pathlib.Path, settings: schema.Config, first: int) -> metrics.MetricsLog:
    """The run's metrics.jsonl, with its records up to step `first`; also writes config.json.

    The records of an earlier run that left no checkpoint are kept as metrics.jsonl.old.
    """
    path = workdir / "metrics.jsonl"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _lock(workdir)
        text = json.dumps(schema.as_flat(settings), indent=1)
        (workdir / "config.json").write_text(text + "\n", encoding="utf-8")
        if not first and path.exists():
            path.replace(path.with_name("metrics.jsonl.old"))
        log = metrics.MetricsLog(path)
    except OSError as error:
        raise errors.ConfigError(
            "workdir", settings.workdir, f"cannot be written: {error}", "choose another folder"
        ) from error
    if first:
        log.truncate_after(first)
    return log
