"""The checkpoint contract, as users meet it: resume, warm start, other bases, other meshes."""

import json
import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest

from purelora.commands import export, merge
from purelora.core import errors
from tests.support.runs import bits, records, run, saved_state

TASKS = {"sft": (), "pretrain": ("--config.task=pretrain",)}
SCHEDULE = "--config.optim.schedule_steps=10"


def equal(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal(*[jax.tree.map(bits, tree) for tree in (one, other)])


Runs = tuple[pathlib.Path, tuple[str, ...]]


def _runs(folder: pathlib.Path, task: tuple[str, ...]) -> Runs:
    """(a) 5 steps that save base and adapters, (b) resumed to 10, and the unbroken run of 10."""
    saving = (SCHEDULE, "--config.checkpoint.save_base=True", *task)
    assert run(folder / "broken", "--config.steps=5", *saving) == 0
    assert run(folder / "broken", "--config.steps=10", *saving) == 0
    assert run(folder / "whole", "--config.steps=10", *saving) == 0
    return folder, task


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory) -> Runs:
    return _runs(tmp_path_factory.mktemp("sft"), TASKS["sft"])


@pytest.fixture(scope="module")
def pretrain_runs(tmp_path_factory) -> Runs:
    return _runs(tmp_path_factory.mktemp("pretrain"), TASKS["pretrain"])


@pytest.fixture(params=TASKS)
def runs(request) -> Runs:
    """The runs of each task."""
    found: Runs = request.getfixturevalue(f"{request.param}_runs")
    return found


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


def test_every_mismatch_with_a_saved_base_is_in_one_error(sft_runs):
    folder, task = sft_runs
    changes = ("--config.quant.tile_size=8", "--config.lora.r=2", "--config.optim.b1=0.5")
    with pytest.raises(errors.CheckpointError) as caught:
        run(folder / "whole", "--config.steps=10", SCHEDULE, "--config.checkpoint.save_base=True",
            *task, *changes)  # fmt: skip
    where = {problem.where for problem in caught.value.problems}
    assert {"quant.tile_size", "lora.r", "optim.b1"} <= where
    assert any(name.endswith("q_proj.lora_a") for name in where)


def test_the_same_is_trained_however_a_run_begins(sft_runs, tmp_path):
    """Fresh, resumed, warm from a run and from a PEFT folder train the same number."""
    folder, task = sft_runs
    count = {
        line
        for name in ("whole", "broken")
        for entry in json.loads((folder / name / "run.json").read_text())
        for line in [entry["trained"]]
    }
    for source in (folder / "whole", folder / "whole" / "adapter"):
        warm = tmp_path / source.name
        run(warm, f"--config.init_adapter={source}", "--config.steps=1", *task)
        count |= {entry["trained"] for entry in json.loads((warm / "run.json").read_text())}
    assert len(count) == 1
    assert len(json.loads((folder / "broken" / "run.json").read_text())) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--config.lora.r=8",), r"init_adapter.*does not fit lora"),
        (("--config.lora.lora_alpha=32",), r"has r=4, scaling 2, this run r=4, scaling 8"),
        (("--config.lora.target_modules=q_proj,v_proj",), r"k_proj: has r=4.*this run none"),
        (("--config.model.path={hf}",), "was trained on another base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(sft_runs, tmp_path, changes, message):
    folder, task = sft_runs
    if "model.path" in changes[0]:
        made = tmp_path / "hf"
        merge.main([f"--adapter={folder / 'whole'}", f"--output={made}"])
        changes = (f"--config.model.path={made}",)
    arguments = (f"--config.init_adapter={folder / 'whole'}", "--config.steps=1", *task, *changes)
    with pytest.raises(errors.UserError, match=message):
        run(tmp_path / "new", *arguments)
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_every_feature_at_once_does_not_depend_on_the_mesh(tmp_path, monkeypatch):
    options = (
        "--config.quant.qtype=nf4",
        "--config.quant.tile_size=8",
        "--config.lora.use_dora=True",
        "--config.lora.use_rslora=True",
        "--config.lora.target_modules=q_proj,up_proj,o_proj",
        "--config.lora.rank_pattern={'layers.1.self_attn.q_proj': 2}",
        "--config.lora.modules_to_save=norm",
        "--config.lora.trainable_token_indices=65,66",
        "--config.lora.lora_dropout=0.1",
        "--config.optim.loraplus_lr_ratio=4",
        "--config.steps=4",
    )
    wide = ("--config.mesh.data=2", "--config.mesh.shard_adapters=True")
    assert run(tmp_path / "8", *options, *wide) == 0
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    assert run(tmp_path / "1", *options) == 0
    losses = [[r["loss"] for r in records(tmp_path / n, "train")] for n in ("1", "8")]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    assert len(set(losses[0])) == 4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "lora.alpha_pattern={'q_proj': 4, 'layers.0.self_attn.q_proj': 256}",
            "lora.alpha_pattern={'layers.0.self_attn.q_proj': 256, 'q_proj': 4}",
            "ranks and scalings of layers.self_attn.q_proj",
        ),
        ("quant.qtype=int8", "quant.qtype=nf4", r"quant.qtype = 'nf4': was 'int8'"),
        ("lora.use_dora=False", "lora.init_lora_weights=pissa", r"init_lora_weights = 'pissa'"),
    ],
)
def test_a_run_is_not_continued_with_other_adapters(tmp_path, before, after, message):
    common = ("--config.steps=2", "--config.optim.schedule_steps=4")
    assert run(tmp_path, *common, f"--config.{before}") == 0
    with pytest.raises(errors.CheckpointError, match=message):
        run(tmp_path, "--config.steps=4", common[1], f"--config.{after}")


def test_export_for_another_model_is_refused(sft_runs, tmp_path):
    """Also where the run has its base with it and would not need the model."""
    folder, _ = sft_runs
    other = tmp_path / "other"
    assert merge.main([f"--adapter={folder / 'whole'}", f"--output={other}"]) == 0
    arguments = [f"--run={folder / 'whole'}", f"--output={tmp_path / 'out'}", f"--model={other}"]
    with pytest.raises(errors.ModelError, match="was trained on another base"):
        export.main(arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_folder_of_the_users_is_not_replaced_by_the_adapter(tmp_path, kind):
    place = tmp_path / "run" / "adapter"
    place.parent.mkdir()
    if kind == "folder":
        place.mkdir()
        (place / "precious.txt").write_text("mine")
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path)
    with pytest.raises(errors.ConfigError, match="which no run of purelora wrote"):
        run(tmp_path / "run", "--config.steps=1")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["adapter"]
    if kind == "folder":
        assert (place / "precious.txt").read_text() == "mine"


def test_a_run_does_not_replace_the_adapter_that_it_starts_from(sft_runs):
    folder, task = sft_runs
    source = folder / "whole" / "adapter"
    arguments = (f"--config.init_adapter={source}", "--config.steps=12", *task)
    with pytest.raises(errors.ConfigError, match="which the run would replace"):
        run(folder / "whole", *arguments)
    assert (source / "adapter_config.json").exists()


@pytest.mark.parametrize("shuffle", ["True", "False"])
def test_a_run_resumed_in_a_later_epoch_reads_the_rows_of_that_epoch(
    tmp_path, monkeypatch, shuffle
):
    """10 records, 2 a step, 3 epochs, stopped at step 7 of 15."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    rows = [{"prompt": f"say {i}", "completion": "x" * (i + 1)} for i in range(10)]
    data = tmp_path / "ten.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"--config.data.train={data}",
        "--config.data.packing=False",
        "--config.data.eval_fraction=0",
        f"--config.data.shuffle={shuffle}",
        "--config.batch_size=2",
        "--config.accum_steps=2",
        "--config.lora.lora_dropout=0.1",
        "--config.optim.schedule_steps=15",
    )
    assert run(tmp_path / "whole", "--config.steps=15", *options) == 0
    assert run(tmp_path / "broken", "--config.steps=7", *options) == 0
    assert run(tmp_path / "broken", "--config.steps=15", *options) == 0
    kept = ("step", "loss", "trained_tokens", "learning_rate")
    whole, broken = (
        [[r[key] for key in kept] for r in records(tmp_path / name, "train")]
        for name in ("whole", "broken")
    )
    assert whole == broken
    # Every epoch trains every record once.
    tokens = [row[2] for row in whole]
    assert len({sum(tokens[i : i + 5]) for i in (0, 5, 10)}) == 1
