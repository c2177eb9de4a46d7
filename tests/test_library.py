"""`import purelora`: its names, and the programs in docs/, run as they stand there."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import purelora
from purelora.core import errors

REPO = pathlib.Path(__file__).parents[1]


def test_every_public_name_is_there_and_no_module_takes_its_place():
    doors = {path.stem for path in (REPO / "purelora").iterdir()}
    for name in purelora.__all__:
        assert getattr(purelora, name) is not None
        assert name not in doors and name in dir(purelora)
    with pytest.raises(AttributeError, match="no attribute 'nonsuch'"):
        _ = purelora.nonsuch


def test_type_checkers_see_the_same_names():
    tree = ast.parse((REPO / "purelora" / "__init__.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: (node.module.removeprefix("purelora."), alias.name)
        for node in block.body
        for alias in node.names
    }
    assert seen == purelora._PUBLIC


@pytest.mark.parametrize("page", ["python.md", "nnx.md"])
def test_the_programs_of_a_page_run(page, tmp_path):
    text = (REPO / "docs" / page).read_text("utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    # qwix 0.1.8 reads a deprecated property of flax, and tells of it.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(REPO)
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    if page == "python.md":
        losses = [
            float(loss) for loss in re.findall(r"step \d+: \d+ tokens, loss (.*)", run.stdout)
        ]
        assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
        assert (tmp_path / "merged" / "by_hand" / "model.safetensors").is_file()
        assert (tmp_path / "adapters" / "by_hand" / "adapter_config.json").is_file()


def planned(devices=None, **changes):
    overrides = {"batch_size": 8, "accum_steps": 1, "max_length": 32, **changes}
    config = purelora.configure("tiny", overrides)
    model = purelora.open_model("tiny")
    return model, purelora.plan_run(config, model, devices)


def cross_entropy(logits, batch):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(nll * batch.weights)


@pytest.mark.parametrize("changes", [{}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}])
def test_a_loss_of_ones_own_is_the_default_one_if_it_computes_the_same(changes):
    rules = ("embed:fsdp", "heads:tensor", "kv_heads:tensor", "mlp:tensor")
    model, plan = planned(**changes, **({"mesh.rules": rules} if changes else {}))
    records = [{"prompt": f"{n} =", "completion": f" {n}"} for n in range(32)]
    batch = next(purelora.feed(purelora.make_batches(plan, model, records), plan.mesh, [1])).batch
    base, trainable, _, _ = purelora.load_weights(plan, model)
    found = [
        np.array(purelora.make_eval(plan, loss)(trainable, base, batch))
        for loss in (None, cross_entropy)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    tx = optax.adam(0.1)
    copies = [jax.tree.map(jnp.copy, trainable) for _ in range(2)]
    states = [
        purelora.make_step(plan, tx, loss)(purelora.init_state(plan, copy, tx), base, batch)[0]
        for loss, copy in zip((None, cross_entropy), copies, strict=True)
    ]
    moved = [
        float(abs(new - old).max())
        for new, old in zip(*map(jax.tree.leaves, (states[0].trainable, trainable)), strict=True)
    ]
    assert max(moved) == pytest.approx(0.1, rel=1e-3)  # Adam's first update.
    for ours, theirs in zip(*(jax.tree.leaves(s.trainable) for s in states), strict=True):
        close = np.isclose(ours, theirs, rtol=1e-3, atol=1e-5)
        assert close.mean() > 0.99  # The sign of a gradient of nearly zero is rounding.


def test_a_loss_of_ones_own_refuses_a_split_vocabulary():
    only = {"mesh.rules": ("vocab:tensor",), "mesh.fsdp": 1, "mesh.tensor": 7}
    _, plan = planned(jax.devices()[:7], **only)
    with pytest.raises(errors.ConfigError, match="logits of the whole vocabulary"):
        purelora.make_step(plan, optax.sgd(0.1), cross_entropy)


def test_overrides_with_wrong_names_or_types_are_refused():
    with pytest.raises(errors.ConfigError, match="lora.rank.*use lora.r"):
        purelora.configure("tiny", {"lora.rank": 8})
    with pytest.raises(errors.ConfigError, match="lora.r.*must be a whole number"):
        purelora.configure("tiny", {"lora.r": "8"})
