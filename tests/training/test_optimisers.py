"""Optimisers and schedules by name, and optimisers of the user's own through `optim.factory`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from purelora.config import command_line
from purelora.core import errors, param_info, train_state
from purelora.training import optimisers
from tests.support import tiny
from tests.support.runs import TINY, bits, built, run, saved_leaves, saved_state

INFOS = {"m": param_info.ParamInfo((16, 8), "float32", (None, None), contracting=-2)}
HERE = "tests.support.factories"


def test_a_new_optimiser_and_a_new_schedule_are_a_line_in_a_table(monkeypatch):
    with_lion = {**optimisers.OPTIMISERS, "lion": lambda cfg: optax.scale_by_lion(b1=cfg.b1)}
    monkeypatch.setattr(optimisers, "OPTIMISERS", with_lion)
    with_root = {**optimisers.SCHEDULES, "root": lambda done: jnp.sqrt(1 - done)}
    monkeypatch.setattr(optimisers, "SCHEDULES", with_root)
    arguments = ["--config.optim.name=lion", "--config.optim.schedule=root"]
    cfg = command_line.parse([TINY, *arguments], flags=()).config.optim
    tx = optimisers.transformation(dataclasses.replace(cfg, clip_norm=None), INFOS)
    leaves = {"m": jnp.ones((16, 8))}
    updates, _ = tx.update({"m": jnp.full((16, 8), -3.0)}, tx.init(leaves), leaves)
    np.testing.assert_array_equal(updates["m"], -1.0)
    rate = optimisers.schedule(cfg, 4)(jnp.int32(3))
    np.testing.assert_allclose(rate, cfg.learning_rate * (0.1 + 0.9 * 0.5), rtol=1e-6)


def test_unknown_names_come_together():
    cfg = dataclasses.replace(tiny.optim_config("sgd"), name="adam", schedule="cosin")
    with pytest.raises(errors.ConfigError) as caught:
        optimisers.check(cfg)
    assert [str(p) for p in caught.value.problems] == [
        "optim.name = 'adam': must be one of 'adamw', 'sgd'",
        "optim.schedule = 'cosin': must be one of 'constant', 'linear', 'cosine'",
    ]


def test_a_wrong_name_is_refused_before_the_model_is_opened(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"optim\.name = 'adam': must be one of 'adamw'"):
        built(tmp_path / "run", "--config.optim.name=adam", "--config.model.path=nowhere")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module:lion", "there is no module 'no_such_module'; put it into the config's"),
        (f"{HERE}s:lion", f"there is no module '{HERE}s'"),
        (f"{HERE}:lions", f"{HERE} has no function 'lions'; did you mean 'lion'?"),
        (f"{HERE}:NO_FUNCTION", f"{HERE} has no function 'NO_FUNCTION'; known"),
        ("lion", "is not of the form module:function; for example mine:lion"),
    ],
)
def test_a_factory_that_is_not_there(factory, message):
    with pytest.raises(errors.ConfigError) as caught:
        command_line.parse([TINY, f"--config.optim.factory={factory}"], flags=())
    assert f"optim.factory = {factory!r}: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "returns a NoneType and no optax.GradientTransformation; return one"),
        ("failing", "fails with AttributeError: 'OptimConfig' object has no attribute 'beta'"),
        ("lion", "turns the gradient round, as optax's complete optimisers do"),
    ],
)
def test_a_factory_that_makes_no_optimiser_of_ours(function, message):
    cfg = dataclasses.replace(tiny.optim_config("adamw"), factory=f"{HERE}:{function}")
    with pytest.raises(errors.ConfigError) as caught:
        optimisers.transformation(cfg, INFOS)
    assert str(caught.value).startswith(f"optim.factory = {cfg.factory!r}: {message}")


def test_a_factory_takes_the_place_of_the_name():
    arguments = [f"--config.optim.factory={HERE}:plain_lion", "--config.optim.name=sgd"]
    with pytest.raises(errors.ConfigError, match="optim.name = 'sgd': has no effect with optim.fa"):
        command_line.parse([TINY, *arguments], flags=())


@pytest.mark.parametrize("folder", ["beside the config", "current"])
def test_where_the_module_of_a_factory_is_looked_for(tmp_path, monkeypatch, folder):
    """The module's name is its own for each case: Python imports a module once."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    name = f"optimiser_{folder.split()[0]}"
    config = tmp_path / "configs" / "mine.py"
    config.write_text(
        "from configs import base\n\n\ndef get_config():\n    c = base.get_config()\n"
        f"    c.steps, c.model.path, c.optim.factory = 1, 'tiny', '{name}:create'\n    return c\n"
    )
    place = config.parent if folder != "current" else tmp_path / "elsewhere"
    (place / f"{name}.py").write_text(
        "import optax\n\n\ndef create(cfg):\n    return optax.scale_by_lion(cfg.b1)\n"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    cfg = command_line.parse([f"--config={config}"], flags=()).config.optim
    state = optimisers.transformation(cfg, INFOS).init({"m": jnp.ones((16, 8))})
    assert any(isinstance(part, optax.ScaleByLionState) for part in state)


def test_state_of_another_shape_than_its_leaf_is_replicated():
    leaves = {"m": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9)
    specs = train_state.state_specs({"m": P("fsdp", None)}, tx, leaves, P())
    by_name = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs.opt_state)
    }
    shapes = jax.tree.leaves(jax.eval_shape(tx.init, leaves))
    for (name, spec), leaf in zip(by_name.items(), shapes, strict=True):
        assert spec == (P("fsdp", None) if leaf.shape == (16, 8) else P()), name
    assert {leaf.shape for leaf in shapes} >= {(16,), (8,), (16, 8), ()}


def test_a_resumed_run_with_a_factory_equals_the_unbroken_one(tmp_path):
    """On a mesh of eight; what is of no leaf, or has another shape, is saved and restored too."""
    common = (
        "--config.optim.schedule_steps=4",
        "--config.mesh.fsdp=8",
        "--config.mesh.shard_adapters=True",
    )
    options = (f"--config.optim.factory={HERE}:mixed", *common)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(unbroken, "--config.steps=4", *options)
    run(broken, "--config.steps=2", *options)
    run(broken, "--config.steps=4", *options)
    chex.assert_trees_all_equal(*[saved_leaves(w, 4) for w in (unbroken, broken)])
    state = saved_state(broken, "--config.steps=4", *options).opt_state
    means = jax.tree.leaves(
        [part.ema for part in _parts(state) if isinstance(part, optax.EmaState)]
    )
    assert means and all(np.any(bits(leaf)) for leaf in means)
    assert any(not leaf.sharding.is_fully_replicated for leaf in means)
    sums = [part.v_row for part in _parts(state) if isinstance(part, optax.FactoredState)]
    assert any(leaf.ndim == 2 for leaf in jax.tree.leaves(sums))
    assert any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state))

    other = (f"--config.optim.factory={HERE}:plain_lion", *common)
    message = rf"optim\.factory = '{HERE}:plain_lion': was '{HERE}:mixed' when this run was started"
    with pytest.raises(errors.CheckpointError, match=message):
        run(broken, "--config.steps=6", *other)


def _parts(state):
    """The states of all transformations in a chain of chains."""
    return [p for part in state for p in (_parts(part) if type(part) is tuple else [part])]
