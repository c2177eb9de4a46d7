"""The checkpoint contract, as users meet it: resume, warm start, other bases, other meshes."""

import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest
import test_start
import test_train

from purelora import export, merge

run, records, saved_state = test_train.run, test_train.records, test_train.saved_state
TASKS = {"sft": (), "pretrain": ("--config.task=pretrain",)}
SCHEDULE = "--config.optim.schedule_steps=10"


def equal(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal(*[jax.tree.map(test_start.bits, tree) for tree in (one, other)])


@pytest.fixture(scope="module", params=TASKS)
def runs(request, tmp_path_factory) -> tuple[pathlib.Path, tuple[str, ...]]:
    """(a) 5 steps that save base and adapters, (b) resumed to 10, and the unbroken run of 10."""
    folder, task = tmp_path_factory.mktemp(request.param), TASKS[request.param]
    saving = (SCHEDULE, "--config.checkpoint.save_base=True", *task)
    assert run(folder / "broken", "--config.steps=5", *saving) == 0
    assert run(folder / "broken", "--config.steps=10", *saving) == 0
    assert run(folder / "whole", "--config.steps=10", *saving) == 0
    return folder, task


def test_a_b_resumed_is_the_unbroken_run(runs):
    folder, task = runs
    options = ("--config.steps=10", SCHEDULE, "--config.checkpoint.save_base=True", *task)
    equal(*[saved_state(folder / name, *options) for name in ("broken", "whole")])
    one, other = ([r["loss"] for r in records(folder / n, "train")] for n in ("broken", "whole"))
    assert one == other and len(one) == 10
    assert [r["step"] for r in records(folder / "broken", "train")] == list(range(1, 11))


@pytest.mark.parametrize("source", ["run", "step", "peft", "exported"])
def test_c_warm_start_at_step_0_from_the_adapter(runs, tmp_path, source, capsys):
    folder, task = runs
    places = {
        "run": folder / "whole",
        "step": folder / "whole" / "checkpoints" / "10",
        "peft": folder / "whole" / "adapter",
        "exported": tmp_path / "exported",
    }
    if source == "exported":
        arguments = [f"--run={folder / 'whole'}", f"--output={places[source]}"]
        assert export.main(arguments) == 0
    new = tmp_path / "new"
    options = (f"--config.init_adapter={places[source]}", "--config.steps=1", *task)
    assert run(new, *options) == 0
    assert "adapters from" in capsys.readouterr().out
    before = [r["loss"] for r in records(folder / "whole", "eval")]
    at_start = records(new, "eval")[0]
    assert at_start["step"] == 0
    # The eval loss of the adapter that the run began with, not that of a fresh one.
    assert at_start["loss"] == before[-1] != before[0]
    # Only step 0 is warm: optimiser, step and data order are new.
    assert [r["step"] for r in records(new, "train")] == [1]
    # Resuming says that the adapter is not used again.
    capsys.readouterr()
    run(new, *options[:1], "--config.steps=1", *task)
    assert "init_adapter is ignored" in capsys.readouterr().out


def test_d_adapters_on_a_base_that_was_fully_trained(runs, tmp_path):
    folder, task = runs
    full = ("--config.lora.enabled=False", "--config.quant.qtype=none", *task)
    assert run(tmp_path / "full", "--config.steps=3", *full) == 0
    last = records(tmp_path / "full", "eval")[-1]["loss"]
    on_top = (f"--config.model.path={tmp_path / 'full'}", "--config.quant.qtype=none", *task)
    assert run(tmp_path / "lora", "--config.steps=2", *on_top) == 0
    first = records(tmp_path / "lora", "eval")[0]["loss"]
    np.testing.assert_allclose(first, last, rtol=1e-6)
    # And as files that everything reads.
    assert merge.main([f"--model={tmp_path / 'full'}", f"--output={tmp_path / 'hf'}"]) == 0
    as_files = (f"--config.model.path={tmp_path / 'hf'}", "--config.quant.qtype=none", *task)
    assert run(tmp_path / "again", "--config.steps=1", *as_files) == 0
    assert records(tmp_path / "again", "eval")[0]["loss"] == first


def test_the_saved_base_is_a_model_of_the_same_codes(runs, tmp_path):
    folder, task = runs
    options = (
        f"--config.model.path={folder / 'whole'}",
        f"--config.init_adapter={folder / 'whole'}",
        "--config.steps=1",
        *task,
    )
    assert run(tmp_path / "new", *options) == 0
    last = records(folder / "whole", "eval")[-1]["loss"]
    assert records(tmp_path / "new", "eval")[0]["loss"] == last


@pytest.mark.parametrize("changes", [("--config.scan_layers=False",), ("--config.remat=full",)])
def test_e_other_executions_read_the_checkpoints(runs, changes):
    folder, task = runs
    common = (SCHEDULE, "--config.checkpoint.save_base=True", *task)
    state = saved_state(folder / "broken", "--config.steps=12", *common, *changes)
    equal(state, saved_state(folder / "broken", "--config.steps=12", *common))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_f_other_device_counts_read_the_checkpoints(runs, tmp_path, devices, monkeypatch):
    folder, task = runs
    common = (SCHEDULE, "--config.checkpoint.save_base=True", "--config.steps=10", *task)
    wide = saved_state(folder / "broken", *common)
    some = jax.devices()[:devices]
    monkeypatch.setattr(jax, "devices", lambda *_: some)
    narrow = saved_state(folder / "broken", *common)
    assert {d for leaf in jax.tree.leaves(narrow) for d in leaf.devices()} == set(some)
    equal(wide, narrow)
