"""A user's own NNX module: qwix puts adapters into it, and the train step trains them."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from jax.sharding import AxisType

from purelora.core import errors, train_state, trees
from purelora.training import nnx_boundary, programs, step
from tests.support import tiny

WIDTH = 8


class Net(nnx.Module):
    """Two residual layers between a tied table's two uses."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(tiny.VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = x_BTD + jax.nn.silu(layer(x_BTD))
        return self.embed.attend(x_BTD)


def adapted(qtype: str | None) -> nnx.Module:
    rule = qwix.LoraRule(module_path="layers/.*", rank=2, alpha=4.0, weight_qtype=qtype)
    tokens = jnp.zeros((1, 4), jnp.int32)
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore", DeprecationWarning)
        provider = qwix.LoraProvider([rule])
        net = Net(nnx.Rngs(0))
        return qwix.apply_lora_to_model(net, provider, tokens, rngs=nnx.Rngs(1))


def loss(module, batch, key):
    del key
    with (
        warnings.catch_warnings(),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        logits = module(batch.tokens).astype(jnp.float32)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(nll * batch.weights)


def trained(parts: nnx_boundary.NnxModel, steps: int = 2):
    """The state after some steps of SGD on four devices, and the losses."""
    mesh = tiny.mesh(data=4)
    tx = optax.identity()
    layout = programs.replicated_layout(mesh, parts.trainable, parts.base, tx)
    train = step.make_train_step(parts.forward, tx, lambda number: jnp.float32(0.5), layout)
    copy = jax.tree.map(jnp.copy, parts.trainable)
    state = train_state.create(copy, tx, key=jax.random.key(0))
    losses = []
    batch = tiny.micro_batches(tiny.flat_batch(), 2)
    for _ in range(steps):
        state, metrics = train(state, parts.base, batch)
        losses.append(float(metrics.loss))
    return state, losses


@pytest.mark.parametrize("qtype", [None, "int8"])
def test_adapters_of_a_users_own_module_train_and_its_base_stays(qtype):
    module = adapted(qtype)
    parts = nnx_boundary.from_nnx(module, loss)
    assert all(".kernel_lora_" in name for name in trees.flatten(parts.trainable))
    before = jax.tree.map(np.asarray, (parts.trainable, parts.base))
    state, losses = trained(parts)
    assert losses[1] < losses[0]
    chex.assert_trees_all_equal(parts.base, before[1])
    again = nnx_boundary.merge(parts.graphdef, state.trainable, parts.base)
    kernel = again.layers[1].kernel_lora_b
    assert type(kernel) is nnx.LoRAParam and np.abs(np.asarray(kernel.get_value())).max() > 0
    for name, leaf in trees.flatten(state.trainable).items():
        if name.ends_with("kernel_lora_b"):
            assert not np.array_equal(leaf, trees.flatten(before[0])[name]), name


def test_the_step_is_the_gradient_of_the_mean_loss():
    """Against plain NNX on one device."""
    module = adapted(None)
    parts = nnx_boundary.from_nnx(module, loss)
    state, _ = trained(parts, steps=1)
    batch = jax.tree.map(jnp.asarray, tiny.flat_batch())

    def mean(adapters):
        module = nnx_boundary.merge(parts.graphdef, adapters, parts.base)
        return loss(module, batch, None) / batch.weights.sum()

    wanted = jax.tree.map(
        lambda p, g: p - 0.5 * g, parts.trainable, jax.grad(mean)(parts.trainable)
    )
    chex.assert_trees_all_close(state.trainable, wanted, rtol=1e-5, atol=1e-6)


def test_all_parameters_train_with_the_filter_param():
    parts = nnx_boundary.from_nnx(Net(nnx.Rngs(0)), loss, trainable=nnx.Param)
    assert parts.base == {}
    _, losses = trained(parts)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_foreign_ambient_mesh_changes_nothing(axis_type):
    parts = nnx_boundary.from_nnx(adapted(None), loss)
    alone, _ = trained(parts, steps=1)
    foreign = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(foreign):
        under = nnx_boundary.from_nnx(nnx_boundary.merge(*parts[:3]), loss)
        state, _ = trained(under, steps=1)
    chex.assert_trees_all_equal(state.trainable, alone.trainable)


def test_random_state_is_refused_by_name():
    class Noisy(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    with pytest.raises(errors.ConfigError, match=r"dropout.*random state is an argument"):
        nnx_boundary.from_nnx(Noisy(nnx.Rngs(0)), loss, trainable=nnx.Param)
