"""Runs of several processes on the loopback: the run of one process, and what ends or continues it.

What runs here are real processes, with eight CPU devices in all, as in the tests of one process.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence

import numpy as np
import pytest
import safetensors.numpy

from purelora.checkpoint import store
from purelora.commands import entry, launch, train
from purelora.core import errors
from purelora.formats import source
from purelora.interop import builtin
from purelora.models import causal_lm
from purelora.multihost import failure_detection, runtime
from purelora.weights import random_weights
from tests.support import expert_files, tiny
from tests.support.runs import PATIENCE_SECS, REPO, TINY, records

DEVICES = 8
STEPS = 12
# Sharded adapters and moments, both batch axes, two micro-batches, a saved base, evals and samples.
OPTIONS = (
    "--config.batch_size=16",
    "--config.accum_steps=2",
    "--config.max_length=48",
    "--config.mesh.data=2",
    "--config.mesh.shard_adapters=True",
    "--config.lora.lora_dropout=0.1",
    "--config.data.eval_fraction=0.01",
    "--config.eval_steps=8",
    "--config.sample_prompts=('Hi',)",
    "--config.sample_tokens=4",
    "--config.optim.schedule_steps=12",
    "--config.checkpoint.save_steps=4",
    "--config.checkpoint.save_base=True",
    "--config.checkpoint.keep_last=9",
)
# A reduction over processes adds in another order than one within a process.
LOSS_RTOL, LEAF_ATOL = 2e-6, 5e-6


class Launched:
    """A run of several processes, whose output is read as it comes."""

    def __init__(self, processes: int, cache: pathlib.Path, workdir: pathlib.Path, *options: str):
        command = [
            sys.executable, "-m", "purelora.launch", f"--processes={processes}",
            f"--devices_per_process={DEVICES // processes}", "--heartbeat_timeout_seconds=600",
            "--", TINY, f"--config.workdir={workdir}", f"--config.compile_cache={cache}",
            *OPTIONS, *options,
        ]  # fmt: skip
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPO,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str) -> None:
        with self._changed:
            seen = self._changed.wait_for(
                lambda: any(text in line for line in self.lines), PATIENCE_SECS
            )
        assert seen, self.output

    def pid(self, index: int) -> int:
        found = re.search(rf"process {index}: pid (\d+)", self.output)
        assert found
        return int(found[1])

    def end(self) -> int:
        """Waits for the end and returns the exit status."""
        try:
            return self._process.wait(PATIENCE_SECS)
        finally:
            self._process.terminate()
            self._process.wait(PATIENCE_SECS)
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> pathlib.Path:
    """The run of one process."""
    workdir = tmp_path_factory.mktemp("single")
    arguments = [TINY, f"--config.workdir={workdir}", *OPTIONS, f"--config.steps={STEPS}"]
    assert train.main(arguments) == 0
    return workdir


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache) -> tuple[pathlib.Path, Launched]:
    """The same run of two processes."""
    workdir = tmp_path_factory.mktemp("unbroken")
    launched = Launched(2, cache, workdir, f"--config.steps={STEPS}")
    assert launched.end() == 0, launched.output
    return workdir, launched


def _leaves(workdir: pathlib.Path, item: str = "state") -> dict[str, np.ndarray]:
    found, step = store.find(workdir)
    return found.leaves(step, item)


def _assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """But for the order of sums."""
    for kind in ("train", "eval"):
        pairs = list(zip(records(one, kind), records(other, kind), strict=True))
        for a, b in pairs:
            assert a["step"] == b["step"]
            np.testing.assert_allclose(a["loss"], b["loss"], rtol=LOSS_RTOL)
            assert a["trained_tokens"] == b["trained_tokens"]
            assert a.get("tokens") == b.get("tokens")
    assert [r["text"] for r in records(one, "sample")] == [
        r["text"] for r in records(other, "sample")
    ]
    wanted, found = _leaves(one), _leaves(other)
    assert wanted.keys() == found.keys()
    for name, leaf in wanted.items():
        if leaf.dtype.kind == "f":
            np.testing.assert_allclose(found[name], leaf, rtol=0, atol=LEAF_ATOL, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_two_processes_train_as_one(single, unbroken):
    workdir, _ = unbroken
    _assert_same_run(single, workdir)
    metas = [found.meta(step) for found, step in map(store.find, (single, workdir))]
    for name in ("base_fingerprint", "data_fingerprint"):
        assert metas[0][name] == metas[1][name]
    # Codes and scales are the very same bits: what was read in parts is what was read whole.
    base = [_leaves(run, "base") for run in (single, workdir)]
    assert base[0].keys() == base[1].keys()
    for name, leaf in base[0].items():
        assert leaf.tobytes() == base[1][name].tobytes(), name
    adapters = [
        safetensors.numpy.load_file(run / "adapter" / "adapter_model.safetensors")
        for run in (single, workdir)
    ]
    for name, leaf in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name], leaf, rtol=0, atol=LEAF_ATOL, err_msg=name)


def test_only_the_main_process_tells(unbroken):
    workdir, launched = unbroken
    assert not [line for line in launched.lines if line.startswith("[process 1]")]
    assert "heartbeat_timeout_seconds=600" in launched.lines[0]
    for text in ("fingerprint", "start at step 0", "save at step 12", "finish at step 12"):
        assert launched.output.count(text) == 1, text
    assert "process 0 ended with status 0" in launched.output
    assert [r["step"] for r in records(workdir, "train")] == list(range(1, STEPS + 1))
    (story,) = json.loads((workdir / "run.json").read_text())
    assert story["processes"] == 2 and len(story["devices"]) == DEVICES


def test_a_save_is_one_checkpoint(unbroken):
    workdir, _ = unbroken
    folder = workdir / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["1", "12", "4", "8"]
    listed = json.loads((folder / "12" / "manifest.json").read_text())["files"]
    for item in ("state", "base"):
        for index in range(2):
            assert f"{item}/ocdbt.process_{index}/manifest.ocdbt" in listed


def _process(
    program: str, options: launch.Options, index: int, port: int, *arguments: str
) -> subprocess.Popen[str]:
    """A process that does what a program of tests/support says."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.programs.{program}", *arguments],
        env=launch.environment(os.environ, options, index, port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )


def _started(processes: int, program: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """All processes of a run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = launch.Options(processes, DEVICES // processes)
    return [_process(program, options, index, port, *arguments) for index in range(processes)]


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and errors of each; none outlives the test."""
    try:
        texts = [process.communicate(timeout=PATIENCE_SECS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, texts, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A model of 50 MB, most of it in matrices whose columns are sharded."""
    config = {
        **builtin.tiny().source.config,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(random_weights.drawn(config, seed=0), path / "model.safetensors")
    _add_experts(path)
    return path


def _add_experts(path: pathlib.Path) -> None:
    """Adds to the folder a mixture of experts of 25 MB, in both layouts, and its leaves."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    config = tiny.hf_config("qwen3_moe", num_experts=8, **sizes)
    leaves = expert_files.stacks(causal_lm.from_hf(config, "", dtype="float32"))
    np.savez(path / "experts.npz", **leaves)
    for layout in ("own", "fused"):
        (path / layout).mkdir()
        (path / layout / "config.json").write_text(json.dumps(config))
        arrays = expert_files.in_files(leaves, "qwen3_moe", layout)
        safetensors.numpy.save_file(arrays, path / layout / "model.safetensors")


def _said(processes: int, folder: pathlib.Path, run: pathlib.Path) -> list[dict]:
    ended = _ended(_started(processes, "own_shards", str(folder), str(run)))
    assert [status for status, _ in ended] == [0] * processes, ended
    return [json.loads((run / f"share.{index}").read_text()) for index in range(processes)]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_reads_and_writes_its_own_parts(unbroken, folder, tmp_path, processes):
    run = shutil.copytree(unbroken[0], tmp_path / "run")
    found = _said(processes, folder, run)
    on_disk = (folder / "model.safetensors").stat().st_size
    # Its shards, and its share of the tensors to hash.
    most = on_disk * 2 / processes * 0.9 + 2e6
    for said in found:
        assert on_disk / processes < said["load"]["read"] < most, (said, on_disk)
    for layout in ("own", "fused"):
        on_disk = (folder / layout / "model.safetensors").stat().st_size
        for said in found:
            assert on_disk / processes < said[layout]["read"] < on_disk * 0.85, (said, on_disk)
    # In all processes the fingerprint that one alone would find.
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    alone = source.identify(source.ArraySource("", {}, arrays), arrays)
    assert {said["fingerprint"] for said in found} == {alone}
    # No row twice, and all of them.
    rows = [row for said in found for row in said["rows"]]
    assert sorted(rows) == list(range(32)) and {len(s["rows"]) for s in found} == {32 // processes}
    state_bytes = 2 * 64 * 64 * 512 * 4
    for said in found:
        assert 0.9 < said["save"]["written"] / (state_bytes / processes) < 1.3, said
        assert 0.9 < said["restore 1"]["read"] / (state_bytes / processes) < 1.3, said


def _tail(workdir: pathlib.Path, first: int) -> list[tuple]:
    return [(r["step"], r["loss"]) for r in records(workdir, "train") if r["step"] >= first]


def test_a_killed_process_and_a_signal_to_one_of_them(unbroken, cache, tmp_path):
    """SIGKILL, then SIGTERM to process 1, then to the end: the same bits as the unbroken run."""
    workdir, options = tmp_path / "run", (f"--config.steps={STEPS}",)
    killed = Launched(2, cache, workdir, *options)
    killed.wait_for("step 5/")
    os.kill(killed.pid(1), signal.SIGKILL)
    assert killed.end() not in (0, 2)
    assert "process 1 of 2 has gone without a word" in killed.output
    assert "the same command continues the run" in killed.output
    assert "process 1 was killed by SIGKILL" in killed.output
    assert "Traceback" not in killed.output and "stack trace" not in killed.output

    stopped = Launched(2, cache, workdir, *options)
    stopped.wait_for("step 5/")
    os.kill(stopped.pid(1), signal.SIGTERM)
    assert stopped.end() == 128 + signal.SIGTERM, stopped.output
    assert stopped.output.count("ended with status 143") == 2
    # The save of step 4 may not have been complete when the first run was killed.
    assert re.search(r"resuming from step [14]$", stopped.output, re.M), stopped.output
    assert "finish" not in stopped.output
    last = Launched(2, cache, workdir, *options)
    assert last.end() == 0, last.output
    assert _tail(workdir, 1) == _tail(unbroken[0], 1)
    wanted, found = _leaves(unbroken[0]), _leaves(workdir)
    assert {n: a.tobytes() for n, a in wanted.items()} == {n: a.tobytes() for n, a in found.items()}


ADDRESS = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def test_arguments_and_the_environment_say_the_same():
    flags = ["--coordinator_address=a:1", "--num_processes", "2", "--config=x", "--process-id=1"]
    options, rest = entry.processes(flags)
    assert rest == ["--config=x"] and options.is_one_of_several
    assert options.completed({}) == options
    assert entry.processes([])[0].completed(ADDRESS) == options
    assert entry.processes(["--process_id=0"])[0].completed(ADDRESS).process_id == 0
    alone = entry.processes(["--heartbeat_timeout_seconds=9"])[0].completed({})
    assert not alone.is_one_of_several
    assert entry.processes(["--distributed"])[0].completed({}).is_one_of_several


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--num_processes=2"], {}, "--coordinator_address, --process_id: must be given too"),
        ([], {"JAX_PROCESS_ID": "1"}, "or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        ([], {**ADDRESS, "JAX_PROCESS_ID": "2"}, "--process_id = 2: must be from 0"),
        ([], {**ADDRESS, "JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID = 'one': is not a whole"),
        ([], {**ADDRESS, "JAX_NUM_PROCESSES": "0"}, "--num_processes = 0: must be at least 1"),
        (["--coordinator_address=a"], ADDRESS, "'a': is no host with a port"),
        (["--coordinator_address=a:0"], ADDRESS, "'a:0': is no host with a port"),
        (["--coordinator_address=a:65536"], ADDRESS, "'a:65536': is no host with a port"),
        (["--coordinator_address=:1"], ADDRESS, "':1': is no host with a port"),
        (["--heartbeat_timeout_seconds=1"], ADDRESS, "must be at least 5"),
    ],
)
def test_arguments_that_do_not_go_together(flags, environment, message):
    with pytest.raises(errors.ConfigError) as caught:
        entry.processes(flags)[0].completed(environment)
    assert message in str(caught.value)


def test_each_process_gets_devices_of_its_own():
    outer = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8", "HOME": "/h"}
    found = launch.environment(outer, launch.Options(4, 2), 3, 77)
    assert found["XLA_FLAGS"] == "--xla_a=1" and found["HOME"] == "/h"
    assert (found["JAX_NUM_CPU_DEVICES"], found["JAX_LOCAL_DEVICE_IDS"]) == ("2", "6,7")
    assert found["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:77"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("4", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes=2"], "--: is not followed by anything"),
        (["--processes=0", "--", "--plan"], "--processes = 0: must be at least 1"),
        (["--", "--plan"], "--processes: is missing"),
    ],
)
def test_what_the_launcher_refuses(arguments, message):
    with pytest.raises(errors.ConfigError) as caught:
        launch.main(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "where"), [("user", "all"), ("user", "1"), ("user", "0"), ("fault", "1")]
)
def test_an_error_is_told_once_and_ends_all(kind, where):
    ended = _ended(_started(2, "fails_in_one_process", kind, where))
    status = 2 if kind == "user" else 1
    assert [found for found, _ in ended] == [status] * 2, ended
    told = "DataError: file.jsonl:3: cannot be used; mend it" if kind == "user" else "ZeroDivision"
    assert told in ended[0][1] and told not in ended[1][1], ended
    assert ("Traceback" in ended[0][1]) == (kind == "fault")


def test_a_setting_that_is_wrong_ends_the_launched_run(cache, tmp_path):
    launched = Launched(2, cache, tmp_path / "run", "--config.mesh.data=3")
    assert launched.end() == 2
    told = [line for line in launched.lines if "Error: " in line]
    assert len(told) == 1 and told[0].startswith("ConfigError: mesh.data"), launched.output


def test_a_process_that_waits_for_others_says_so_and_ends():
    """Process 0, and process 1 of another run, at the same time."""
    waiting = []
    for index in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        waiting.append(_process("waits_for_others", launch.Options(2), index, port))
    told = [
        ["process 0 waits for all others to come to", "not all have come in 6 seconds"],
        ["waits for process 0 at", "process 0 has not answered for 6 seconds"],
    ]
    for (status, text), parts in zip(_ended(waiting), told, strict=True):
        assert status == 2 and "trace" not in text, text
        assert all(part in text for part in parts), text


def test_of_texts_that_differ_the_line_is_told(monkeypatch):
    texts = ["lora.r 8\nseed 0", "lora.r 8\nseed 1"]
    monkeypatch.setattr(runtime, "gathered", lambda name, text: texts)
    with pytest.raises(errors.ConfigError, match="is 'seed 1' in process 1 and 'seed 0' in proc"):
        runtime.check_equal("arguments", texts[0])
    with pytest.raises(errors.ConfigError, match="is None in process 0 and 'more' in process 0"):
        runtime.check_equal("arguments", f"{texts[0]}\nmore")


def test_votes_are_known_one_exchange_late():
    votes = runtime.Votes(2)
    given = [(3, 1), (0, 2), (0, 0)]
    assert [votes.exchange(own) for own in given] == [(0, 0), *given[:2]]


def test_a_process_that_does_not_connect(monkeypatch):
    monkeypatch.setattr(failure_detection, "_CONNECT_SECS", 0.1)
    client = types.SimpleNamespace(key_value_set=lambda key, value: None)
    with pytest.raises(errors.ConfigError, match="does not let all of the 2 processes connect"):
        failure_detection.join(client, 0, 2, host="127.0.0.1", wait_msecs=1)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_to_the_same_end(single, unbroken, cache, tmp_path):
    """Steps 1 to 4 by two processes, to 8 by four, to 12 by one on another mesh."""
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    for step in ("8", "12"):
        shutil.rmtree(workdir / "checkpoints" / step)
    wide = Launched(4, cache, workdir, "--config.steps=8")
    assert wide.end() == 0 and "resuming from step 4" in wide.output, wide.output
    steps = ("--config.steps=12", "--config.mesh.data=4")
    assert train.main([TINY, f"--config.workdir={workdir}", *OPTIONS, *steps]) == 0
    wanted, found = ([r["loss"] for r in records(run, "train")] for run in (single, workdir))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for name, leaf in _leaves(single).items():
        np.testing.assert_allclose(_leaves(workdir)[name], leaf, rtol=0, atol=1e-4, err_msg=name)
