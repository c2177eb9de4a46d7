"""One step of training beside the gradients of the independent model `plain`."""

import functools

import chex
import jax
import numpy as np
import optax

from purelora.core import trees
from purelora.core.batch import Batch
from tests.support import plain, tiny
from tests.support.tiny import Case

SCALING = 2.0


@functools.cache
def plain_gradients(is_lora: bool, kv_heads: int, family: str, depth: int):
    """`(trainable, base, batch) -> (loss, gradient)` sums of the independent model."""

    def loss_sum(trainable, base, batch: Batch) -> jax.Array:
        weights = plain.merged(base, trainable, SCALING) if is_lora else trees.flatten(trainable)
        heads = Case(kv_heads=kv_heads).heads
        config = tiny.hf_config(family, num_hidden_layers=depth, **heads)
        return plain.loss_sum(weights, batch.tokens, batch.targets, batch.weights, config)

    return jax.jit(jax.value_and_grad(loss_sum))


def expected(case: Case, batch: Batch):
    """Loss sum and mean gradient of a flat batch."""
    trainer = tiny.trainer(case)
    base = plain.dequantised(jax.device_get(trainer.base))
    gradients = plain_gradients(case.lora, case.kv_heads, case.family, case.layers)
    loss, grads = gradients(jax.device_get(trainer.trainable), base, batch)
    return loss, jax.tree.map(lambda g: g / np.float32(batch.weights.sum()), grads)


def one_step(case: Case, batch: Batch, trainable=None, start: int = 0):
    """Gradient and metrics of one SGD step on a flat batch."""
    trainer = tiny.trainer(case)
    before = jax.device_get(trainer.trainable if trainable is None else trainable)
    new, metrics = trainer.step(
        trainer.new_state(trainable, start), trainer.base, tiny.micro_batches(batch, case.accum)
    )
    after = jax.device_get(new.trainable)
    return jax.tree.map(lambda a, b: (a - b) / tiny.LEARNING_RATE, before, after), metrics


def assert_is_reference(case: Case, batch: Batch) -> None:
    loss, grads = expected(case, batch)
    got, metrics = one_step(case, batch)
    chex.assert_trees_all_close(got, grads, rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics.loss_sum, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.weight_sum, batch.weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree_utils.tree_norm(grads), rtol=1e-5)
    assert metrics.applied == 1
