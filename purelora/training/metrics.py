"""What a run says of itself: a jsonl file of records, throughput, peak memory and live progress.

`metrics.jsonl` holds one JSON object a line, in the order of events. `kind` says which of these it
is; every record of a kind has all its fields. `step` is the number of steps done (the first step's
record says 1). Numbers that are not finite stand as the strings "nan", "inf" and "-inf", which
`float` reads, so that each line is valid JSON.

    kind    field                   unit
    train   step                    steps done, this one included
            loss                    nats, mean over the step's trained tokens (by weight)
            tokens                  tokens of the step that are not padding
            trained_tokens          tokens of the step that the loss is taken over
            tokens_per_sec          tokens / second; null for a process's first step
            trained_tokens_per_sec  trained tokens / second; null for a process's first step
            flops_per_sec           floating-point operations / second on all devices; null likewise
            learning_rate           -
            grad_norm               global norm of the mean gradient before clipping
            router_aux_loss         load-balancing loss of each layer with experts, without its
                                    coefficient; null for models without
            router_z_loss           router z-loss, likewise
            applied                 true; false if the batch was skipped
            skipped_steps           steps skipped so far
            step_secs               seconds
            peak_memory_bytes       bytes: see `peak_memory_bytes`
            elapsed_secs            seconds since the start of the process's run
    eval    step                    steps done
            loss                    nats, mean over the trained tokens of the eval data
            trained_tokens          tokens of the eval data that the loss is taken over
            eval_secs               seconds
    sample  step                    steps done
            prompt                  text
            text                    generated text, without the prompt
    event   step                    steps done
            name                    one word: start, resume, save (it begins), skip, finish, ...
            detail                  text
"""

import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

import jax
import tqdm

from purelora.core import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One step: see the module's table."""

    kind: ClassVar[str] = "train"
    step: int
    loss: float
    tokens: int
    trained_tokens: int
    tokens_per_sec: float | None
    trained_tokens_per_sec: float | None
    flops_per_sec: float | None
    learning_rate: float
    grad_norm: float
    router_aux_loss: list[float] | None
    router_z_loss: list[float] | None
    applied: bool
    skipped_steps: int
    step_secs: float
    peak_memory_bytes: int
    elapsed_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One pass over the eval data: see the module's table."""

    kind: ClassVar[str] = "eval"
    step: int
    loss: float
    trained_tokens: int
    eval_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One generated text: see the module's table."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Anything else worth knowing afterwards: see the module's table."""

    kind: ClassVar[str] = "event"
    step: int
    name: str
    detail: str


Record = TrainRecord | EvalRecord | SampleRecord | EventRecord


class MetricsLog:
    """The jsonl file of a run, appended to and flushed record by record."""

    def __init__(self, path: Path):
        """Opens `path` for appending; the folder must exist."""
        self._path = path
        self._file = self._open()

    def write(self, record: Record) -> None:
        """Appends one record, of plain Python values."""
        with self._explained():
            self._file.write(_to_json(record) + "\n")

    def sync(self) -> None:
        """Waits until all records are on disk, so that a machine that fails does not lose them."""
        with self._explained():
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drops the records of later steps, which a run resumed from `step` makes anew.

        A last line that a killed run left torn goes too. The file is replaced in one move.

        Raises:
          CheckpointError: a line other than the last is not a record.
        """
        lines = self._path.read_bytes().splitlines()
        steps = [_step_of(line) for line in lines]
        for number, found in enumerate(steps[:-1], start=1):
            if found is None:
                where = f"{self._path}:{number}"
                raise errors.CheckpointError(where, None, "is not a record", "delete the line")
        kept = [
            line + b"\n"
            for line, at in zip(lines, steps, strict=True)
            if at is not None and at <= step
        ]

        self._file.close()
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        self._file = self._open()

    def close(self) -> None:
        """Closes the file; every record is in it already."""
        with contextlib.suppress(OSError):  # A line that a full disk refused is tried once more.
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise errors.CheckpointError(
                str(self._path), None, f"cannot be written: {error}", "free some space"
            ) from error

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8", buffering=1)


def _to_json(record: Record) -> str:
    values = {name: _finite(value) for name, value in dataclasses.asdict(record).items()}
    return json.dumps({"kind": record.kind, **values}, allow_nan=False)


def _finite(value: Any) -> Any:
    """`value`, or a list of such, with "nan", "inf" or "-inf" for floats that JSON cannot hold."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: bytes) -> int | None:
    """The step of a record's line; None if the line is not a record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record["step"] if isinstance(record, dict) and "step" in record else None
    return step if isinstance(step, int) else None


class Rates(NamedTuple):
    """What is done in a second; None where nothing was measured."""

    tokens_per_sec: float | None
    trained_tokens_per_sec: float | None
    flops_per_sec: float | None


class Throughput:
    """Rates of a run, leaving out its first step, whose time is spent compiling."""

    def __init__(self) -> None:
        self._steps = 0
        self._totals = (0.0, 0.0, 0.0)
        self._secs = 0.0

    def add(self, *, tokens: int, trained_tokens: int, flops: float, secs: float) -> Rates:
        """Counts one step and gives its rates: all None for the first."""
        self._steps += 1
        if self._steps == 1:
            return Rates(None, None, None)
        before, trained, done = self._totals
        self._totals = (before + tokens, trained + trained_tokens, done + flops)
        self._secs += secs
        return Rates(tokens / secs, trained_tokens / secs, flops / secs)

    def mean(self) -> Rates:
        """Rates over all steps but the first."""
        if self._steps < 2:
            return Rates(None, None, None)
        return Rates(*(total / self._secs for total in self._totals))


def peak_memory_bytes() -> int:
    """The most memory used so far, in bytes.

    Where the backend counts device memory: the peak of the local device with the highest, as the
    fullest device is the one to fail. Elsewhere, as on CPU: the peak resident set of the process.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return int(max(peaks))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Peak dense bf16 FLOP/s of one device by jax's `device_kind`, from the makers' data sheets.
_PEAK_FLOPS_PER_SEC = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


def peak_flops_per_sec(device_kinds: Sequence[str]) -> float | None:
    """Peak dense bf16 FLOP/s of devices of these kinds together; None if one is not known."""
    if not all(kind in _PEAK_FLOPS_PER_SEC for kind in device_kinds):
        return None
    return sum(_PEAK_FLOPS_PER_SEC[kind] for kind in device_kinds)


def _mean_router_aux(record: TrainRecord) -> float:
    """The load-balancing loss, a mean over the layers with experts."""
    losses = record.router_aux_loss or [math.nan]
    return sum(losses) / len(losses)


# A short bar, so that a terminal's width leaves room for what comes after it.
_BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {n}/{total} [{elapsed}<{remaining}]{postfix}"


class Progress:
    """How far a run is: a live bar on a terminal, a plain line every `log_steps` elsewhere."""

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int,
        log_steps: int,
        peak_flops_per_sec: float | None,
        stream: TextIO | None = None,
    ):
        """Starts at `done_steps` of `total_steps`.

        Args:
          total_steps: steps of the whole run.
          done_steps: steps done before, by the run that is continued.
          log_steps: steps from one plain line to the next.
          peak_flops_per_sec: peak of all devices together, for the MFU; None to leave that out.
          stream: where to write; stderr if None.
        """
        self._stream = sys.stderr if stream is None else stream
        self._total_steps = total_steps
        self._log_steps = log_steps
        self._peak_flops_per_sec = peak_flops_per_sec
        self._first: TrainRecord | None = None
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=done_steps,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=_BAR_FORMAT,
            )

    def update(self, record: TrainRecord) -> None:
        """Shows a step."""
        if self._first is None:
            self._first = record
        if self._bar is not None:
            self._bar.set_postfix_str(self._summary(record), refresh=False)
            self._bar.update(record.step - self._bar.n)
        elif record.step % self._log_steps == 0 or record.step == self._total_steps:
            head = f"step {record.step}/{self._total_steps}"
            self.write(f"{head} | {self._summary(record)}{self._remaining(self._first, record)}")

    def write(self, text: str) -> None:
        """Writes whole lines, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _summary(self, record: TrainRecord) -> str:
        si = tqdm.tqdm.format_sizeof
        parts = [f"loss {record.loss:.4f}"]
        if record.tokens_per_sec is not None:
            parts.append(si(record.tokens_per_sec, " tok/s"))
        if record.trained_tokens_per_sec is not None:
            parts.append(si(record.trained_tokens_per_sec, " trained tok/s"))
        if record.flops_per_sec is not None:
            parts.append(si(record.flops_per_sec, "FLOP/s"))
            if self._peak_flops_per_sec is not None:
                parts.append(f"MFU {record.flops_per_sec / self._peak_flops_per_sec:.1%}")
        parts += [
            f"lr {record.learning_rate:.2e}",
            f"grad norm {record.grad_norm:.3g}",
            *(
                []
                if record.router_aux_loss is None
                else [f"router aux {_mean_router_aux(record):.4f}"]
            ),
            f"peak {si(record.peak_memory_bytes, 'iB', 1024)}",
        ]
        if record.skipped_steps:
            parts.append(f"skipped {record.skipped_steps}")
        return " | ".join(parts)

    def _remaining(self, first: TrainRecord, record: TrainRecord) -> str:
        """Time left at the pace since the first step, which compiled and does not count."""
        if record.step == first.step:
            return ""
        pace = (record.elapsed_secs - first.elapsed_secs) / (record.step - first.step)
        left = tqdm.tqdm.format_interval(pace * (self._total_steps - record.step))
        return f" | {left} left"
