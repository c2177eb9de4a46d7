"""Killed runs end as unbroken ones do, and the command that proves it finds it when they do not."""

import collections
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from purelora.analysis import fault_injection, resume_proof
from purelora.checkpoint import store
from purelora.commands import verify
from purelora.core import errors

REPO = pathlib.Path(__file__).parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
# So that evals and saves come often enough to be hit.
OFTEN = ("--config.eval_steps=4", "--config.checkpoint.save_steps=4")


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    """Subprocesses see one device, as a user does."""
    monkeypatch.delenv("XLA_FLAGS")


def _verify(*arguments: str, config: str = TINY) -> int:
    return verify.main([config, *arguments])


def test_a_run_killed_three_times_ends_as_the_unbroken_one(tmp_path, capsys):
    assert _verify("--kills=3", "--seed=1", *OFTEN, f"--workdir={tmp_path / 'proof'}") == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^kill \d of 3: ", out, re.M)) == 3
    assert re.search(r"^state at step 20: 46 leaves, 98,324 bytes compared$", out, re.M)
    assert "records: 26 of steps and evals compared" in out
    assert out.endswith("PASS\n")
    assert (tmp_path / "proof" / "broken" / "checkpoints" / "20").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [OFTEN, ("--config.lora.lora_dropout=0.2", "--config.checkpoint.save_steps=None")],
)
def test_a_run_killed_twenty_times_ends_as_the_unbroken_one(options, capsys):
    assert _verify("--kills=20", "--seed=2", *options) == 0
    told = capsys.readouterr().out
    for phase in ("in step", "at the save", "in the eval", "while restoring", "while loading"):
        assert f": {phase}" in told, told


SABOTAGED = """
from configs import tiny
from purelora.checkpoint import compatibility as checkpoint_fit
from purelora.checkpoint import store as checkpoint
real = checkpoint.Checkpoints.restore

def restore(self, step, like):
    state = real(self, step, like)
    leaf = state.trainable["layers"]["self_attn"]["q_proj"]["lora_a"]
    state.trainable["layers"]["self_attn"]["q_proj"]["lora_a"] = leaf.at[0, 0, 0].add(1.0)
    return state

checkpoint.Checkpoints.restore = restore
get_config = tiny.get_config
"""


def test_a_run_that_does_not_resume_exactly_fails(tmp_path, capsys, monkeypatch):
    """One element of one adapter is off after a restart (by enough for float32 losses to tell)."""
    # The config is read by this process too: what it replaces is put back after the test.
    monkeypatch.setattr(store.Checkpoints, "restore", store.Checkpoints.restore)
    (tmp_path / "sabotaged.py").write_text(SABOTAGED)
    config = f"--config={tmp_path / 'sabotaged.py'}"
    options = ("--kills=1", "--config.steps=4", "--config.checkpoint.save_steps=1")
    assert _verify(*options, "--config.data.eval_fraction=0", config=config) == 1
    out = capsys.readouterr().out
    assert re.search(r"trainable\.layers\.self_attn\.q_proj\.lora_a: differs in \d+ bytes", out)
    assert re.search(r"record _?Record\(kind='train', step=\d", out)
    assert out.endswith("FAIL\n")


@pytest.mark.slow
def test_a_run_that_does_not_resume_at_all_fails(tmp_path, capsys):
    (tmp_path / "other.py").write_text(
        "import time\nfrom configs import tiny\n\ndef get_config():\n    c = tiny.get_config()\n"
        "    c.seed = time.time_ns() % 2**32\n    return c\n"
    )
    config = f"--config={tmp_path / 'other.py'}"
    options = ("--kills=1", "--seed=3", "--config.steps=4", "--config.checkpoint.save_steps=1")
    assert _verify(*options, "--config.data.eval_fraction=0", config=config) == 1
    out = capsys.readouterr().out
    assert "a resumed run ended with status 2: CheckpointError: seed = " in out


def test_a_run_that_does_not_even_end_unbroken_is_the_users_to_fix(tmp_path):
    with pytest.raises(errors.ConfigError, match="status 2: DataError: nonsuch.jsonl.*make this"):
        _verify("--config.data.train=nonsuch.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kills=0",), "--kills = 0: must be at least 1"),
        (("--kill=3",), "--kill: .*did you mean --kills"),
        (("--config.lora.rr=3",), "lora.rr"),
        ((f"--workdir={REPO}",), "--workdir = .*: is not an empty folder"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(errors.ConfigError, match=message):
        _verify(*arguments)


def test_values_may_follow_their_arguments():
    found = verify._sorted(["--kills", "3", "--config", "a.py", "--config.lora.r", "8", "--seed=1"])
    assert found == (["--config", "a.py", "--config.lora.r", "8"], ["--kills", "3", "--seed=1"])


def test_leaves_that_differ_are_named_with_the_largest_difference():
    a = {"w": np.ones((2, 3), np.float32), "n": np.int32(3), "z": np.zeros(2, np.float32)}
    a["q"] = np.ones(4, ml_dtypes.uint4)
    assert not resume_proof.differences(a, {name: leaf.copy() for name, leaf in a.items()})
    w = a["w"].copy()
    w[1, 2] += 0.25
    b = {
        **a,
        "w": w,
        "n": np.int32(5),
        "z": -a["z"],
        "new": a["w"],
        "q": np.zeros(4, ml_dtypes.uint4),
    }
    assert resume_proof.differences(a, b) == [
        "n: differs in 1 bytes, by up to 2",
        "new: only in one of the checkpoints",
        "q: differs in 4 bytes, by up to 1",
        "w: differs in 1 bytes, by up to 0.25",
        "z: differs in 2 bytes, by up to 0",
    ]
    b = {**a, "w": a["w"].astype(np.float64), "n": np.zeros(1, np.int32)}
    assert resume_proof.differences(a, b) == [
        "n: int32[1] instead of int32[]",
        "w: float64[2, 3] instead of float32[2, 3]",
    ]


def _written(workdir: pathlib.Path, *lines: dict) -> pathlib.Path:
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def test_records_that_are_missing_doubled_or_different_are_named(tmp_path, capsys):
    def step(number: int, loss: float = 1.0) -> dict:
        return {"kind": "train", "step": number, "loss": loss, "grad_norm": 2.0,
                "learning_rate": 0.1, "step_secs": number}  # fmt: skip

    proof = resume_proof.ResumeProof(
        None, [], tmp_path, kills=3, seed=0, evaluates=lambda step, is_last: False
    )
    _written(tmp_path / "unbroken", step(1), step(2), step(3))
    for broken, message in (
        ([step(1), step(2), step(3)], None),
        ([step(1), step(3)], "not each of 1 to 3 once: \\[1, 3\\]"),
        ([step(1), step(2), step(2), step(3)], "not each of 1 to 3 once"),
        ([step(1), step(2, 1.5), step(3)], "loss=1.5.* instead of .*loss=1.0"),
    ):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        _written(tmp_path / "broken", *broken)
        problems = "\n".join(proof._record_problems(3))
        assert re.search(message, problems) if message else not problems


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("base: int8 73,728 bytes, read in 0.2 s", ("compile", 0)),
        ("start at step 0: 20 steps in all", ("eval", 0)),
        ("resume at step 4: 20 steps in all", ("step", 5)),
        ("eval at step 0: loss 5.5", ("step", 1)),
        ("step 3/20 | loss 5.5", ("step", 4)),
        ("step 4/20 | loss 5.5", ("eval", 4)),
        ("step 19/20 | loss 5.5", ("step", 20)),
        ("step 20/20 | loss 5.5", ("eval", 20)),
        ("save at step 4: runs/x/checkpoints/4", ("save", 4)),
        ("finish at step 20: 20 updates", ("end", 20)),
        ("train step compiled in 5 s", None),
        ("steps 3", None),
    ],
)
def test_lines_begin_phases(line, phase):
    found = fault_injection.phase_after(
        line, evaluates=lambda step, is_last: step % 4 == 0 or is_last
    )
    assert found == (None if phase is None else fault_injection.Phase(*phase))


def _marks() -> list[fault_injection.Mark]:
    names = [("start", 0), ("compile", 0), ("eval", 0), ("step", 1), ("save", 1), ("step", 2),
             ("eval", 2), ("save", 2), ("end", 2)]  # fmt: skip
    return [
        fault_injection.Mark(fault_injection.Phase(*name), 10.0 * i) for i, name in enumerate(names)
    ]


def test_moments_cover_all_phases_and_only_those_to_come():
    for seed in range(20):
        moments = fault_injection.Moments(_marks(), save_secs=2.0, saves_first=False, seed=seed)
        drawn = [moments.draw(i, resumes_from=None, last_step=2) for i in range(10)]
        counted = collections.Counter(moment.phase.name for moment in drawn)
        assert counted == {"step": 2, "save": 2, "eval": 2, "compile": 2, "start": 2}
        assert drawn[0].phase.name not in ("compile", "start")
        for moment in drawn:
            assert 0 <= moment.delay_secs <= (2 if moment.phase.name == "save" else 10)
            assert moment.phase != fault_injection.Phase("save", 2)
        later = [moments.draw(i, resumes_from=1, last_step=2).phase for i in range(10)]
        assert all(phase.step == 2 or phase.name in ("compile", "start") for phase in later)


def test_the_save_of_the_first_step_after_a_restart_can_be_hit():
    moments = fault_injection.Moments(_marks(), save_secs=2.0, saves_first=True, seed=0)
    drawn = [moments.draw(i, resumes_from=7, last_step=9).phase for i in range(5)]
    assert drawn.count(fault_injection.Phase("save", 8)) >= 1


def test_a_faster_start_shortens_the_time_to_kill_in():
    moments = fault_injection.Moments(_marks(), save_secs=2.0, saves_first=False, seed=0)
    fast = [
        fault_injection.Mark(fault_injection.Phase("start", 0), 0.0),
        fault_injection.Mark(fault_injection.Phase("compile", 0), 1.0),
    ]
    moments.observe(fast)
    drawn = [moments.draw(4, resumes_from=None, last_step=2) for _ in range(20)]
    assert all(m.phase.name == "start" and m.delay_secs <= 1 for m in drawn)


LINES = ("base: x", "start at step 0: 2 steps", "step 1/2 | x", "save at step 1: x",
         "step 2/2 | x", "save at step 2: x")  # fmt: skip
# Says its arguments, a line each, and then nothing more until it is killed.
TALKS = "import signal, sys; print(*sys.argv[1:], sep='\\n', flush=True); signal.pause()"


def talking(lines: Sequence[str]) -> fault_injection.Child:
    return fault_injection.Child([sys.executable, "-c", TALKS, *lines], lambda step, is_last: False)


@pytest.mark.parametrize(
    ("phase", "lines"),
    [(("start", 0), 0), (("compile", 0), 1), (("step", 2), 3), (("save", 1), 4)],
)
def test_a_child_is_killed_in_the_phase_that_was_drawn(phase, lines):
    """It comes no further than into that phase, so that it does not matter who is faster."""
    with talking(LINES[:lines]) as child:
        moment = fault_injection.Moment(fault_injection.Phase(*phase), 0.0)
        assert child.run(moment, last_save=2) is None
    assert child.marks[-1].phase == fault_injection.Phase(*phase)


def test_a_child_is_killed_at_its_last_save_at_the_latest():
    with talking(LINES) as child:
        moment = fault_injection.Moment(fault_injection.Phase("eval", 2), 0.0)
        assert child.run(moment, last_save=2) is None
    assert child.marks[-1].phase == fault_injection.Phase("save", 2)


def test_a_child_without_a_last_save_is_not_killed_at_one():
    said = "print('save at step 0: x', flush=True)"
    child = fault_injection.Child([sys.executable, "-c", said], lambda step, is_last: False)
    with child:
        assert (
            child.run(fault_injection.Moment(fault_injection.Phase("eval", 2), 0.0), last_save=None)
            == 0
        )


def test_the_status_and_the_last_words_of_a_child():
    child = fault_injection.Child(
        [sys.executable, "-c", "print('why'); raise SystemExit(3)"], lambda *_: False
    )
    with child:
        assert child.run(None, last_save=None) == 3
    assert child.output == ["why"]
