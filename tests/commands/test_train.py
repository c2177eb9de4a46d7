"""The main command end to end on the tiny built-in model: what a user meets."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from purelora.checkpoint import orbax_files, store
from purelora.commands import train
from purelora.config import command_line
from purelora.core import errors
from purelora.data import batches
from purelora.data import load as data_load
from purelora.interop import builtin
from purelora.models import objective
from purelora.training import evaluation, log, metrics, planning, setup, signals
from tests.support.runs import PATIENCE_SECS, TINY, bits, built, records, run, saved_state

# Eight virtual devices: the rows of a micro-batch must split over them.
# Subprocesses see one device, as a user does.
ENV = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run of 10 steps with a checkpoint at 5 and at 10."""
    workdir = tmp_path_factory.mktemp("finished")
    assert run(workdir, "--config.steps=10", "--config.checkpoint.save_steps=5") == 0
    return workdir


def test_a_run_learns_and_records_every_step_once(finished):
    steps = records(finished, "train")
    assert [r["step"] for r in steps] == list(range(1, 11))
    assert all(r["applied"] and r["trained_tokens"] > 0 for r in steps)
    first, last = records(finished, "eval")
    assert (first["step"], last["step"]) == (0, 10)
    assert last["loss"] < first["loss"] - 0.1
    events = [(e["name"], e["step"]) for e in records(finished, "event")]
    saves = [("save", 1), ("save", 5), ("save", 10)]
    assert events == [("start", 0), *saves, ("finish", 10), ("export", 10)]
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["10", "5"]
    assert json.loads((finished / "config.json").read_text())["lora.r"] == 4


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--config.lora.lora_dropout=0.3",),
        ("--config.accum_steps=2", "--config.batch_size=16"),
    ],
)
def test_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path, extra):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    schedule = ("--config.optim.schedule_steps=6", *extra)
    run(whole, "--config.steps=6", *schedule)
    run(broken, "--config.steps=3", *schedule)
    run(broken, "--config.steps=6", *schedule)
    states = [saved_state(w, "--config.steps=6", *schedule) for w in (whole, broken)]
    leaves = [jax.tree.map(bits, state) for state in states]
    chex.assert_trees_all_equal(*leaves)
    losses = [[r["loss"] for r in records(w, "train")] for w in (whole, broken)]
    assert losses[0] == losses[1]
    assert [r["step"] for r in records(broken, "train")] == [1, 2, 3, 4, 5, 6]


def test_a_complete_run_says_so_and_changes_nothing(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert run(finished, "--config.steps=10", "--config.checkpoint.save_steps=5") == 0
    assert "complete" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config.lora.r=8",), r"lora\.r = 8: was 4"),
        (("--config.seed=1",), r"seed = 1: was 0"),
        (("--config.steps=20",), r"optim\.schedule_steps = 20: was 10"),
        (("--config.data.eval_fraction=0.02",), r"data\.eval_fraction"),
        (("--config.data.packing=False",), r"data\.packing"),
        (("--config.checkpoint.resume=never",), r"holds a run with a checkpoint at step 10"),
    ],
)
def test_a_run_is_not_continued_with_other_settings(finished, arguments, message):
    with pytest.raises(errors.CheckpointError, match=message):
        run(finished, "--config.steps=10", *arguments)


def test_resume_must_needs_a_checkpoint(tmp_path):
    with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
        run(tmp_path / "none", "--config.checkpoint.resume=must")


def test_plan_prints_every_leaf_and_writes_nothing(tmp_path, capsys):
    assert run(tmp_path / "plan", "--plan") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"layers\.self_attn\.q_proj\.weight\.qvalue +2×64×64 +int8 +\(-, fsdp, -\) +1,024 +1\n", out
    )
    assert re.search(
        r"layers\.self_attn\.q_proj\.lora_a +2×64×4 +float32 +\(-, -, -\) +2,048 +8 +yes", out
    )
    assert re.search(r"lora\.r +4\n", out)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config.lora.enabled=False", "--config.quant.qtype=none"),
        ("--config.task=pretrain", "--config.data.shuffle=False"),
        ("--config.scan_layers=False", "--config.remat=full", "--config.quant.tile_size=8"),
        ("--config.mesh.data=2", "--config.mesh.shard_adapters=True", "--config.dtype=bfloat16"),
        ("--config.lora.target_modules=q_proj,v_proj", "--config.data.packing=False"),
        (r"--config.lora.target_modules=.*layers\.1\..*up_proj", "--config.optim.name=sgd"),
    ],
)
def test_every_way_of_training_lowers_the_loss(tmp_path, arguments):
    assert run(tmp_path, "--config.steps=4", *arguments) == 0
    losses = [r["loss"] for r in records(tmp_path, "train")]
    evals = [r["loss"] for r in records(tmp_path, "eval")]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert evals[1] < evals[0]


def test_eval_loss_does_not_depend_on_batching(tmp_path):
    losses = []
    for rows in (8, 16):
        workdir = tmp_path / str(rows)
        run(workdir, "--config.steps=1", f"--config.batch_size={rows}")
        losses.append(records(workdir, "eval")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_samples_before_and_after(tmp_path):
    run(tmp_path, "--config.steps=1", "--config.sample_prompts=['Hi','What is it?']",
        "--config.sample_tokens=5")  # fmt: skip
    samples = records(tmp_path, "sample")
    assert [(s["step"], s["prompt"]) for s in samples] == [
        (0, "Hi"), (0, "What is it?"), (1, "Hi"), (1, "What is it?"),
    ]  # fmt: skip


class _PoisonedBatches(batches.Batches):
    """Batches of which the third has a weight so large that the loss overflows."""

    def batch(self, index, own=None):
        batch = super().batch(index, own)
        if index == 2:
            batch.weights[np.unravel_index(batch.weights.argmax(), batch.weights.shape)] = 1e38
        return batch


def poisoned(run_: setup.Run) -> setup.Run:
    real = run_.data.train
    fields = {field.name: getattr(real, field.name) for field in dataclasses.fields(real)}
    train_batches = _PoisonedBatches(**fields)
    return dataclasses.replace(run_, data=run_.data._replace(train=train_batches))


@pytest.mark.parametrize("policy", ["abort", "skip"])
def test_a_batch_that_is_not_finite(tmp_path, policy):
    run_, start = built(
        tmp_path,
        "--config.steps=5",
        "--config.data.eval_fraction=0",
        f"--config.nan_policy={policy}",
        "--config.checkpoint.save_first=False",
    )
    with signals.catch() as stop, log.reporting(run_, start) as reporter:
        if policy == "abort":
            with pytest.raises(errors.DivergedError, match="step 3: is not finite.*no checkpoint"):
                train.train(poisoned(run_), start, reporter, stop)
            return
        final = train.train(poisoned(run_), start, reporter, stop)
    assert (int(final.step), int(final.updates)) == (5, 4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final.trainable))
    steps = records(tmp_path, "train")
    assert [r["applied"] for r in steps] == [True, True, False, True, True]
    assert steps[-1]["skipped_steps"] == 1
    assert steps[2]["loss"] == "inf"


def saved_steps(workdir: pathlib.Path) -> list[int]:
    return [e["step"] for e in records(workdir, "event") if e["name"] == "save"]


NO_EVAL = "--config.data.eval_fraction=0"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ((), [1, 5]),
        (("--config.checkpoint.save_first=False",), [5]),
        (("--config.checkpoint.save_first=False", "--config.checkpoint.save_secs=1e-9"),
         [1, 2, 3, 4, 5]),
        (("--config.checkpoint.save_first=False", "--config.checkpoint.save_secs=1e9"), [5]),
        (("--config.checkpoint.save_steps=2", "--config.checkpoint.async_save=False"),
         [1, 2, 4, 5]),
    ],
)  # fmt: skip
def test_when_a_run_saves(tmp_path, options, steps):
    run(tmp_path, "--config.steps=5", NO_EVAL, "--config.checkpoint.save_steps=None",
        "--config.checkpoint.keep_last=9", *options)  # fmt: skip
    assert saved_steps(tmp_path) == steps
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == steps


def test_a_resumed_run_saves_its_first_step_too(tmp_path):
    constant = ("--config.optim.schedule=constant", NO_EVAL)
    run(tmp_path, "--config.steps=2", *constant)
    run(tmp_path, "--config.steps=5", *constant)
    assert saved_steps(tmp_path) == [1, 2, 3, 5]


def test_time_between_saves_begins_at_the_last_save():
    times = iter([0.0, 9.0, 11.0, 12.0, 21.0, 22.5])
    settings = command_line.parse(
        [TINY, "--config.checkpoint.save_secs=10"], flags=()
    ).config.checkpoint
    settings = dataclasses.replace(settings, save_steps=None, save_first=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(times))
        saves = train.Saves(settings, first=1)
        assert not saves.are_due(1, saves.wish())
        assert saves.are_due(2, saves.wish())
        saves.done(None, 2)
        assert not saves.are_due(3, saves.wish())
        assert saves.are_due(4, saves.wish())


def test_a_wish_that_comes_late_makes_one_save():
    """Of several processes, which know it a step late: it is wished twice before it is made."""
    settings = command_line.parse(
        [TINY, "--config.checkpoint.save_secs=10"], flags=()
    ).config.checkpoint
    settings = dataclasses.replace(settings, save_steps=None, save_first=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        now = 0.0
        saves, wished, due = train.Saves(settings, first=1), 0, []
        for number in range(1, 9):
            now = 4.0 * number
            wish = saves.wish()
            if saves.are_due(number, wished):
                due.append(number)
                saves.done(None, number)
            wished = wish
    # Up at 12 seconds, step 3; again ten seconds after the save at 16.
    assert due == [4, 8]


def test_the_first_save_that_fails_ends_the_run_at_its_first_step(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no such luck")

    monkeypatch.setattr(orbax_files, "check_space", fails)
    with pytest.raises(errors.CheckpointError, match="checkpoints/1: cannot be written .no such"):
        run(tmp_path, "--config.steps=50", NO_EVAL)
    assert [r["step"] for r in records(tmp_path, "train")] == [1]


def test_a_save_that_fails_at_the_end_is_an_error_of_the_run(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no such luck")

    monkeypatch.setattr(orbax_files, "check_space", fails)
    with pytest.raises(errors.CheckpointError, match="checkpoints/2: cannot be written .no such"):
        run(tmp_path, "--config.steps=2", NO_EVAL, "--config.checkpoint.save_first=False")
    assert "finish" not in [e["name"] for e in records(tmp_path, "event")]


def test_records_are_on_disk_before_their_checkpoint(tmp_path, monkeypatch):
    seen = []
    write = store.Checkpoints._write_items

    def spied(self, step, *rest):
        seen.append((step, records(tmp_path, "train")[-1]["step"],
                     records(tmp_path, "eval")[-1]["step"]))  # fmt: skip
        write(self, step, *rest)

    monkeypatch.setattr(store.Checkpoints, "_write_items", spied)
    run(tmp_path, "--config.steps=6", "--config.eval_steps=2", "--config.checkpoint.save_steps=2",
        "--config.log_steps=1", "--config.checkpoint.async_save=False")  # fmt: skip
    assert seen == [(1, 1, 0), (2, 2, 2), (4, 4, 4), (6, 6, 6)]


def test_a_signal_in_the_last_eval_does_not_lose_the_save(tmp_path, monkeypatch):
    run_, start = built(tmp_path, "--config.steps=2", "--config.checkpoint.save_first=False")
    with signals.catch() as stop, log.reporting(run_, start) as reporter:

        def evaluate(run, current, stop):
            if int(current.step) == 2:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(evaluation, "evaluate", evaluate)
        train.train(run_, start, reporter, stop)
    assert stop.status == 128 + signal.SIGTERM
    assert store.find(tmp_path)[1] == 2


def test_the_best_checkpoint_is_kept_with_its_loss(tmp_path, monkeypatch):
    losses = [9.0, 5.0, 3.0, 4.0, float("nan"), 3.5]

    def evaluate(run, current, stop):
        step = int(current.step)
        return metrics.EvalRecord(step=step, loss=losses[step], trained_tokens=1, eval_secs=0.1)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    run(tmp_path, "--config.steps=5", "--config.eval_steps=1", "--config.checkpoint.save_steps=1",
        "--config.checkpoint.keep_last=1", "--config.checkpoint.keep_best=True")  # fmt: skip
    found, last = store.find(tmp_path)
    assert (found.steps(), last) == ([2, 5], 5)
    assert found.meta(2)["eval_loss"] == 3.0


def test_a_checkpoint_with_its_base_is_a_whole_model(tmp_path):
    run(tmp_path, "--config.steps=1", NO_EVAL, "--config.checkpoint.save_base=True")
    run_, _ = built(tmp_path, "--config.steps=1", NO_EVAL)
    found, step = store.find(tmp_path)
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), run_.base
    )
    chex.assert_trees_all_equal(found.restore_extra(step, "base", like), run_.base)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_and_the_run_goes_on(tmp_path, signum):
    arguments = [TINY, f"--config.workdir={tmp_path}", "--config.steps=100000",
                 "--config.log_steps=1", "--config.optim.schedule=constant",
                 "--config.optim.schedule_steps=100", "--config.data.eval_fraction=0"]  # fmt: skip
    command = [sys.executable, "-m", "purelora.train", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV
    ) as p:
        deadline = time.monotonic() + PATIENCE_SECS
        while not (tmp_path / "metrics.jsonl").exists() or not records(tmp_path, "train"):
            assert time.monotonic() < deadline and p.poll() is None
            time.sleep(0.05)
        p.send_signal(signum)
        errors_text = p.communicate(timeout=PATIENCE_SECS)[1]
    assert p.returncode == 128 + signum
    assert "Traceback" not in errors_text
    done = records(tmp_path, "train")[-1]["step"]
    assert (tmp_path / "checkpoints" / str(done)).is_dir()
    more = [a for a in arguments if "config.steps" not in a] + [f"--config.steps={done + 2}"]
    assert (
        subprocess.run([*command[:3], *more], capture_output=True, check=False, env=ENV).returncode
        == 0
    )
    assert [r["step"] for r in records(tmp_path, "train")] == list(range(1, done + 3))


def test_one_compilation_for_a_whole_run(tmp_path, monkeypatch):
    """Train step, eval step and sampler are each traced once; another shape is refused."""
    make = objective.make_forward
    traced = []

    def counted(*arguments, **options):
        forward = make(*arguments, **options)
        traced.append(chex.assert_max_traces(n=1)(forward))
        return traced[-1]

    monkeypatch.setattr(objective, "make_forward", counted)
    chex.clear_trace_counter()
    run_, start = built(tmp_path, "--config.steps=3", "--config.eval_steps=1")
    with signals.catch() as stop, log.reporting(run_, start) as reporter:
        final = train.train(run_, start, reporter, stop)
    assert len(traced) == 2
    batch = run_.data.train.batch(0)
    shorter = type(batch)(*(np.ascontiguousarray(a[..., :32]) for a in batch))
    with pytest.raises(TypeError, match="compiled"):
        run_.train_step(final, run_.base, jax.device_put(shorter))


def test_a_second_start_reads_the_persistent_cache(tmp_path):
    said = []
    for name in ("one", "two"):
        command = [
            sys.executable, "-m", "purelora.train", TINY, f"--config.workdir={tmp_path / name}",
            f"--config.compile_cache={tmp_path / 'cache'}", "--config.steps=1",
        ]  # fmt: skip
        said.append(
            subprocess.run(command, capture_output=True, text=True, check=True, env=ENV).stdout
        )
    assert re.search(r"train step compiled in [\d.]+ s \(compiled\)", said[0])
    assert re.search(r"train step compiled in [\d.]+ s \(cache hit\)", said[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--config.model.path=nonsuch",), errors.ModelError, "nonsuch"),
        (("--config.data.train=wordnet-defs",), errors.DataError, "wordnet-definitions"),
        (("--config.data.train=nonsuch.jsonl",), errors.DataError, "nonsuch.jsonl"),
        (("--config.data.chat_template=nonsuch.jinja",), errors.ConfigError, "nonsuch.jinja"),
        (("--config.lora.target_modules=nonsuch",), errors.ConfigError, "it has q_proj"),
        (("--config.lora.target_modules=q_proj",), errors.ConfigError, r"write \['q_proj'\]"),
        (("--config.quant.tile_size=48",), errors.ConfigError, "quant.tile_size"),
        (("--config.quant.skip=embd",), errors.ConfigError, "quant.skip"),
        (("--config.mesh.fsdp=3",), errors.ConfigError, "8 devices"),
        (("--config.batch_size=12",), errors.ConfigError, "use 16"),
        (("--config.quant.skip=['(?i)EMBED']",), errors.ConfigError, "regular expression"),
        (("--config.lora.exclude_modules=all-linear",), errors.ConfigError, "leave out everything"),
        (
            ("--config.data.eval=wordnet-defs", "--config.data.eval_fraction=0"),
            errors.DataError,
            "data.eval",
        ),
        (
            ("--config.steps=None", "--config.epochs=1", "--config.optim.warmup_steps=9999"),
            errors.ConfigError,
            "warmup_steps = 9999",
        ),
        (("--config.sample_prompts=['']",), errors.ConfigError, "empty prompt"),
        (("--config.data.eval_fraction=0.00001",), errors.ConfigError, "eval_fraction"),
        (("--config.max_length=2", "--config.data.too_long=drop"), errors.DataError, "none"),
    ],
)
def test_what_does_not_fit_the_model_or_data_is_a_clear_error(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_problems_of_mesh_targets_and_tiles_come_together(tmp_path):
    with pytest.raises(errors.ConfigError) as caught:
        run(tmp_path, "--config.batch_size=12", "--config.lora.target_modules=['nonsuch']",
            "--config.quant.tile_size=48")  # fmt: skip
    named = {problem.where for problem in caught.value.problems}
    assert named == {"batch_size", "lora.target_modules", "quant.tile_size"}


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("run", "file", "is a file"),
        ("run/metrics.jsonl", "folder", "metrics.jsonl is not a file"),
        ("run/checkpoints", "file", "checkpoints is not a folder"),
    ],
)
def test_a_workdir_that_cannot_be_written_is_found_at_once(tmp_path, name, make, message):
    blocked = tmp_path / name
    blocked.parent.mkdir(exist_ok=True)
    blocked.mkdir() if make == "folder" else blocked.write_text("")
    with pytest.raises(errors.ConfigError, match=message):
        run(tmp_path / "run", "--config.model.path=nonsuch")


def test_records_of_a_run_without_checkpoint_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "step": 3}\n')
    run(tmp_path, "--config.steps=1", "--config.data.eval_fraction=0")
    assert (tmp_path / "metrics.jsonl.old").read_text() == '{"kind": "event", "step": 3}\n'
    assert [r["step"] for r in records(tmp_path, "train")] == [1]


def test_a_constant_schedule_may_be_lengthened_and_the_last_step_is_recorded(tmp_path):
    constant = ("--config.optim.schedule=constant", "--config.data.eval_fraction=0")
    run(tmp_path, "--config.steps=2", *constant)
    assert run(tmp_path, "--config.steps=4", "--config.log_steps=3", *constant) == 0
    assert [r["step"] for r in records(tmp_path, "train")] == [1, 2, 3, 4]


def test_a_prompt_is_tokenised_as_the_training_data_is(tmp_path):
    run_, _ = built(tmp_path, "--config.data.eval_fraction=0")
    tokenizer = dataclasses.replace(run_.model.tokenizer, add_bos=True, bos_id=256)
    run_ = dataclasses.replace(run_, model=dataclasses.replace(run_.model, tokenizer=tokenizer))
    plain = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False).ids
    ids = evaluation.prompt_ids(run_.settings, tokenizer, run_.data.template, "Hi")
    assert ids[: len(plain) + 1] == [256, *plain]


def test_a_changed_config_json_is_noticed_on_resume(finished, monkeypatch):
    real = planning.make_plan

    def other_eps(settings, hf_config, where, devices):
        return real(settings, {**hf_config, "rms_norm_eps": 0.1}, where, devices)

    monkeypatch.setattr(planning, "make_plan", other_eps)
    with pytest.raises(errors.CheckpointError, match=r"config\.json: rms_norm_eps = 0\.1"):
        run(finished, "--config.steps=10", "--config.checkpoint.save_steps=5")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    holder = (
        "import pathlib, sys, time; from purelora.training import log; "
        "log._lock(pathlib.Path(sys.argv[1])); print('locked', flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV) as other:
        try:
            assert other.stdout.readline() == b"locked\n"
            with pytest.raises(errors.ConfigError, match="another run is writing"):
                run(tmp_path, "--config.steps=1", "--config.data.eval_fraction=0")
            with pytest.raises(errors.ConfigError, match="another run is writing"):
                run(tmp_path, "--config.model.path=nonsuch")  # Before anything is loaded.
        finally:
            other.kill()


def test_skipping_for_ever_is_an_error(tmp_path):
    """A rate at which every update overflows: the state stays good, and the run does not go on."""
    with pytest.raises(errors.DivergedError, match="10 in a row"):
        run(tmp_path, "--config.steps=50", "--config.nan_policy=skip", "--config.optim.name=sgd",
            "--config.optim.learning_rate=3e38", "--config.optim.clip_norm=None",
            "--config.optim.schedule=constant", "--config.data.eval_fraction=0")  # fmt: skip
    assert records(tmp_path, "train")[-1]["skipped_steps"] >= 10


def test_incomplete_checkpoints_are_named_and_a_renamed_one_refused(tmp_path, capsys):
    options = ("--config.optim.schedule=constant", "--config.data.eval_fraction=0")
    run(tmp_path, "--config.steps=2", *options)
    (tmp_path / "checkpoints" / "7").mkdir()
    run(tmp_path, "--config.steps=3", *options)
    passed_over = f"passed over {tmp_path / 'checkpoints' / '7'}: is not a complete checkpoint"
    assert passed_over in capsys.readouterr().out
    assert not (tmp_path / "checkpoints" / "7").exists()  # As promised, by the save of step 3.
    (tmp_path / "checkpoints" / "3").rename(tmp_path / "checkpoints" / "9")
    with pytest.raises(errors.CheckpointError, match="holds the state of step 3"):
        run(tmp_path, "--config.steps=12", *options)


def test_a_byte_order_mark_in_a_template_is_no_text(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("\ufeff{{ messages[0].content }}", encoding="utf-8")
    settings = command_line.parse(
        [TINY, f"--config.data.chat_template={template}"], flags=()
    ).config
    compiled = data_load.compile_template(settings, builtin.tiny().tokenizer)
    messages = [{"role": "user", "content": "x"}]
    text = compiled.render(messages, tools=None, add_generation_prompt=False, where="here")
    assert text == "x"


def test_options_reach_the_chat_template(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ ' thinks' if enable_thinking else '' }}")
    chosen = f"--config.data.chat_template={template}"
    for given, wanted in (("True", "x thinks"), ("False", "x")):
        option = f"--config.data.chat_template_kwargs={{'enable_thinking': {given}}}"
        settings = command_line.parse([TINY, chosen, option], flags=()).config
        compiled = data_load.compile_template(settings, builtin.tiny().tokenizer)
        messages = [{"role": "user", "content": "x"}]
        text = compiled.render(messages, tools=None, add_generation_prompt=False, where="here")
        assert text == wanted
