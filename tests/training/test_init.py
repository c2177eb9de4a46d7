"""How adapters begin: fresh, or out of the weights; and that resuming rebuilds it."""

import dataclasses
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest

from purelora.checkpoint import store
from purelora.commands import export
from purelora.core import errors
from purelora.interop.peft import files as peft_files
from purelora.training import adapter_export
from tests.support import tiny
from tests.support.runs import bits, records, run, saved_state

FEATURES = {
    "pissa": (
        "--config.lora.init_lora_weights=pissa",
        "--config.lora.rank_pattern={'k_proj': 2}",
    ),
    "olora": (
        "--config.lora.init_lora_weights=olora",
        "--config.lora.target_modules=q_proj,up_proj",
        "--config.quant.qtype=none",
    ),
    "loftq": ("--config.lora.init_lora_weights=loftq", "--config.lora.use_rslora=True"),
    "dora": (
        "--config.lora.use_dora=True",
        "--config.lora.target_modules=q_proj,lm_head",
        "--config.lora.lora_dropout=0.2",
        "--config.checkpoint.save_base=True",
    ),
    "patterns": (
        "--config.lora.rank_pattern={'layers.1.self_attn.q_proj': 7, 'v_proj': 1}",
        "--config.lora.alpha_pattern={'up_proj': 3}",
        "--config.lora.init_lora_weights=gaussian",
        "--config.lora.modules_to_save=norm,embed_tokens",
        "--config.optim.loraplus_lr_ratio=4",
    ),
    "tokens": (
        "--config.lora.trainable_token_indices=65,66",
        "--config.lora.target_modules=v_proj,lm_head",
    ),
    "ia3": (
        "--config.lora.peft_type=ia3",
        "--config.lora.target_modules=k_proj,v_proj,down_proj",
        "--config.optim.learning_rate=0.1",
    ),
    "loha": (
        "--config.lora.peft_type=loha",
        "--config.lora.rank_pattern={'layers.1.self_attn.q_proj': 7}",
    ),
    "embedding": (
        "--config.lora.target_modules=embed_tokens,q_proj",
        "--config.checkpoint.save_base=True",
        "--config.quant.qtype=int4",
    ),
}


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch):
    """Compiles in half the time; meshes are the subject of other tests."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)


# What is made of the weights is resumed alike in all three ways of making it.
SLOW = "olora", "loftq"


@pytest.mark.parametrize("name", tiny.with_slow(FEATURES, SLOW))
def test_resumed_run_equals_the_unbroken_one(tmp_path: pathlib.Path, name: str):
    options = (*FEATURES[name], "--config.optim.schedule_steps=4")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, "--config.steps=4", *options)
    run(broken, "--config.steps=2", *options)
    run(broken, "--config.steps=4", *options)
    one, other = ([r["loss"] for r in records(w, "train")] for w in (whole, broken))
    assert one == other
    assert len(one) == 4 and one[-1] < one[0]
    states = [saved_state(w, "--config.steps=4", *options) for w in (whole, broken)]
    chex.assert_trees_all_equal(*[jax.tree.map(bits, state) for state in states])


@pytest.mark.parametrize("name", tiny.with_slow(["pissa", "loftq", "olora", "patterns"], SLOW))
def test_export_is_checked(tmp_path: pathlib.Path, name: str, capsys):
    """Also where the written adapter is for another base than the run's."""
    options = (*FEATURES[name], "--config.checkpoint.save_base=True")
    run(tmp_path / "run", "--config.steps=2", *options)
    arguments = [f"--run={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]
    assert export.main(arguments) == 0
    assert "read back: largest difference of a" in capsys.readouterr().out
    read = peft_files.read(str(tmp_path / "out"))
    doubled = 2 if name != "patterns" else 1
    assert read.config.r == 4 * doubled
    # Whatever is wrong with the folder shows.
    name, kinds = next((n, k) for n, k in read.modules.items() if "lora_B" in k)
    broken = {**read.modules, name: {**kinds, "lora_B": kinds["lora_B"] + 1}}
    shutil.rmtree(tmp_path / "out")
    peft_files.write(str(tmp_path / "out"), dataclasses.replace(read, modules=broken))
    found = store.find(tmp_path / "run")
    with pytest.raises(errors.ModelError, match="does not compute what the run does"):
        adapter_export.check(str(tmp_path / "run"), *found, str(tmp_path / "out"))


def test_loftq_of_what_is_not_quantised_is_refused(tmp_path: pathlib.Path):
    options = ("--config.lora.init_lora_weights=loftq", "--config.quant.skip=embed_tokens,q_proj")
    with pytest.raises(errors.ConfigError, match=r"layers\.self_attn\.q_proj, which quant.skip"):
        run(tmp_path, "--config.steps=2", *options)


@pytest.mark.parametrize("init", ["pissa", "olora", "loftq"])
def test_adapters_out_of_weights_leave_the_model_what_it_is(tmp_path: pathlib.Path, init: str):
    """Base and initial adapter together are the original weights, but for the quantisation."""
    plain, options = tmp_path / "plain", f"--config.lora.init_lora_weights={init}"
    run(plain, "--config.steps=1", "--config.quant.qtype=none")
    quantised = () if init == "loftq" else ("--config.quant.qtype=none",)
    run(tmp_path / init, "--config.steps=1", options, *quantised)
    losses = [records(w, "eval")[0]["loss"] for w in (plain, tmp_path / init)]
    np.testing.assert_allclose(*losses, rtol=1e-3 if init == "loftq" else 1e-5)
