"""The metrics file, throughput, peak memory and progress."""

import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from purelora.core import errors
from purelora.training import metrics


def _train(step: int, **changes: Any) -> metrics.TrainRecord:
    record = metrics.TrainRecord(
        step=step,
        loss=2.5,
        tokens=1000,
        trained_tokens=400,
        tokens_per_sec=2000.0,
        trained_tokens_per_sec=800.0,
        flops_per_sec=4e12,
        learning_rate=1e-4,
        grad_norm=1.25,
        router_aux_loss=None,
        router_z_loss=None,
        applied=True,
        skipped_steps=0,
        step_secs=0.5,
        peak_memory_bytes=3 * 2**30,
        elapsed_secs=10.0 * step,
    )
    return dataclasses.replace(record, **changes)


RECORDS = [
    _train(1),
    _train(1, router_aux_loss=[2.0, 2.5], router_z_loss=[0.1, 0.2]),
    metrics.EvalRecord(step=1, loss=2.0, trained_tokens=50, eval_secs=0.1),
    metrics.SampleRecord(step=1, prompt="a", text='line\nbreak "quoted" \u2028 \ud800 é'),
    metrics.EventRecord(step=1, name="start", detail="fresh"),
]


def _strict(text: str) -> Any:
    """Parses JSON, without the NaN and Infinity that Python's parser accepts beyond it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [_strict(line) for line in text.split("\n")[:-1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[metrics.MetricsLog]:
    opened = metrics.MetricsLog(path)
    yield opened
    opened.close()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_a_record_is_one_line_with_every_field(
    log: metrics.MetricsLog, path: Path, record: metrics.Record
) -> None:
    log.write(record)
    # Read while the log is open: each line is on disk at once.
    assert _read(path) == [{"kind": record.kind, **dataclasses.asdict(record)}]


def test_the_written_schema_is_the_one_in_use() -> None:
    rows = re.findall(r"^    (\w+)? +(\w+)  +\S", metrics.__doc__ or "", flags=re.MULTILINE)
    written: dict[str, list[str]] = {}
    current = ""
    for kind, field in rows[1:]:
        current = kind or current
        written.setdefault(current, []).append(field)
    assert written == {
        record.kind: [field.name for field in dataclasses.fields(record)] for record in RECORDS
    }


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_numbers_that_are_not_finite_are_strings_that_float_reads(
    log: metrics.MetricsLog, path: Path, value: float, text: str
) -> None:
    log.write(_train(1, loss=value, tokens_per_sec=None))
    [record] = _read(path)
    assert record["loss"] == text and record["tokens_per_sec"] is None
    assert str(float(record["loss"])) == str(value)


def test_device_values_are_refused(log: metrics.MetricsLog, path: Path) -> None:
    with pytest.raises(TypeError):
        log.write(_train(1, loss=jax.numpy.float32(1)))
    assert _read(path) == []


@pytest.mark.parametrize("torn", ["", '{"kind": "train", "step": 1', "\0\0\0"])
def test_truncation_leaves_each_step_once(path: Path, torn: str) -> None:
    log = metrics.MetricsLog(path)
    for step in range(1, 6):
        log.write(_train(step))
        log.write(dataclasses.replace(RECORDS[2], step=step))
    log.close()
    with path.open("a") as file:
        file.write(torn)

    log = metrics.MetricsLog(path)
    log.truncate_after(3)
    for step in range(4, 7):
        log.write(_train(step, loss=9.0))
    log.close()
    found = [(record["kind"], record["step"]) for record in _read(path)]
    once = [("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3)]
    assert found == [*once, ("train", 4), ("train", 5), ("train", 6)]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_whole_last_line_without_its_end_is_kept(path: Path) -> None:
    log = metrics.MetricsLog(path)
    log.write(_train(1))
    log.write(_train(2))
    log.close()
    path.write_bytes(path.read_bytes()[:-1])
    log = metrics.MetricsLog(path)
    log.truncate_after(2)
    log.write(_train(3))
    log.close()
    assert [record["step"] for record in _read(path)] == [1, 2, 3]


def test_truncating_an_empty_file_is_harmless(log: metrics.MetricsLog, path: Path) -> None:
    log.truncate_after(3)
    log.write(_train(1))
    assert [record["step"] for record in _read(path)] == [1]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"kind": "train"}', '{"step": "1"}'])
def test_a_foreign_line_is_named_and_nothing_is_lost(path: Path, line: str) -> None:
    log = metrics.MetricsLog(path)
    log.write(_train(1))
    with path.open("a") as file:
        file.write(line + "\n")
    log.write(_train(2))
    before = path.read_bytes()
    with pytest.raises(errors.CheckpointError, match=r"metrics\.jsonl:2: is not a record; delete"):
        log.truncate_after(1)
    log.close()
    assert path.read_bytes() == before


def test_throughput_leaves_out_the_step_that_compiles() -> None:
    throughput = metrics.Throughput()
    nothing = metrics.Rates(None, None, None)
    assert throughput.mean() == nothing
    first = throughput.add(tokens=100, trained_tokens=40, flops=1e3, secs=60.0)
    assert first == nothing and throughput.mean() == nothing
    second = throughput.add(tokens=100, trained_tokens=40, flops=1e3, secs=0.5)
    assert second == metrics.Rates(200.0, 80.0, 2e3)
    throughput.add(tokens=200, trained_tokens=20, flops=3e3, secs=1.5)
    # 300 tokens in 2 seconds: sums divided once, not a mean of the two rates.
    assert throughput.mean() == metrics.Rates(150.0, 30.0, 2e3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for its own count")
def test_peak_memory_is_of_the_process_on_cpu() -> None:
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert 0.9 * int(kib) * 1024 < metrics.peak_memory_bytes() < 2 * int(kib) * 1024


class _Device:
    def __init__(self, stats: dict[str, int] | None):
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_peak_memory_is_of_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = [{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, None, {"bytes_in_use": 9}]
    monkeypatch.setattr(jax, "local_devices", lambda: [_Device(s) for s in stats])
    assert metrics.peak_memory_bytes() == 7


@pytest.mark.parametrize(
    ("kinds", "peak"),
    [
        (["NVIDIA H200"] * 2, 2 * 989e12),
        (["TPU v5 lite"], 197e12),
        (["TPU v5"], 459e12),
        (["cpu"], None),
        (["NVIDIA H200", "NVIDIA H200 NVL"], None),
    ],
)
def test_peak_flops_are_known_or_none(kinds: list[str], peak: float | None) -> None:
    assert metrics.peak_flops_per_sec(kinds) == peak


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _progress(stream: io.StringIO, **changes: Any) -> metrics.Progress:
    options: dict[str, Any] = {"done_steps": 0, "log_steps": 5, "peak_flops_per_sec": None}
    return metrics.Progress(12, stream=stream, **{**options, **changes})


def test_plain_lines_every_log_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = _progress(stream)
    for step in range(1, 13):
        progress.update(_train(step))
        if step == 6:
            progress.write("a sample")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "step 5/12", "a sample", "step 10/12", "step 12/12",
    ]  # fmt: skip
    assert lines[0] == (
        "step 5/12 | loss 2.5000 | 2.00k tok/s | 800 trained tok/s | 4.00TFLOP/s | lr 1.00e-04"
        " | grad norm 1.25 | peak 3.00GiB | 01:10 left"
    )
    assert "\r" not in stream.getvalue()


def test_plain_line_of_a_first_step_and_of_skipped_steps() -> None:
    stream = io.StringIO()
    rates = {"tokens_per_sec": None, "trained_tokens_per_sec": None, "flops_per_sec": None}
    progress = _progress(stream, log_steps=1)
    progress.update(_train(1, loss=math.nan, applied=False, skipped_steps=1, **rates))
    assert stream.getvalue() == (
        "step 1/12 | loss nan | lr 1.00e-04 | grad norm 1.25 | peak 3.00GiB | skipped 1\n"
    )


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    stream = io.StringIO()
    _progress(stream, log_steps=1, peak_flops_per_sec=16e12).update(_train(1))
    assert "4.00TFLOP/s | MFU 25.0%" in stream.getvalue()


def test_the_bar_continues_where_the_run_does() -> None:
    stream = _Terminal()
    progress = _progress(stream, done_steps=6, peak_flops_per_sec=16e12)
    progress.update(_train(7))
    progress.write("a sample")
    progress.close()
    text = stream.getvalue()
    assert "6/12 [" in text and "7/12 [" in text and "13/12" not in text
    assert "loss 2.5000" in text and "MFU 25.0%" in text and "a sample\n" in text
