"""The train step: the same gradients on every mesh and with any accumulation; a frozen base.

Gradients are read off one SGD step (Adam would hide a wrong scale) and compared with `jax.grad`
through `plain`, an independent model on one device.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from purelora.core import param_info, train_state, trees
from purelora.core.batch import Batch
from purelora.models import layers
from purelora.models import loss as loss_lib
from purelora.training import optimisers
from purelora.training import step as steps
from tests.support import tiny
from tests.support.plain_step import assert_is_reference, expected, one_step
from tests.support.tiny import Case

ONE = Case()
UNROLLED = Case(accum=4, scan=False, remat=True)
DATA_8 = Case(data=8, accum=4)
SHARDED = Case(data=2, fsdp=4, sharded=True)
INT8_FSDP_8 = Case("int8", fsdp=8, remat=True, head=True)
TILED = Case("int8", 4, data=2, fsdp=4, accum=4, sharded=True, head=True)
TILED_UNROLLED = Case("int8", 4, data=2, fsdp=2, scan=False, remat=True)
INT4_FSDP_8 = Case("int4", fsdp=8, remat=True, head=True)
INT4_TILED = Case("int4", 4, fsdp=4, accum=2)
NF4_TILED = Case("nf4", 8, data=2, fsdp=4, accum=4, sharded=True, head=True)
NF4_UNROLLED = Case("nf4", fsdp=2, scan=False)
FP8 = Case("fp8", data=2, fsdp=2, remat=True, head=True)
FP8_TILED = Case("fp8", 8)
FULL = Case(lora=False)
FULL_FSDP_8 = Case(lora=False, fsdp=8, accum=4, remat=True)
FULL_UNROLLED = Case(lora=False, fsdp=2, scan=False)
LORA_CASES = (ONE, UNROLLED, DATA_8, SHARDED, INT8_FSDP_8, TILED, TILED_UNROLLED)
OTHER_QTYPES = (INT4_FSDP_8, INT4_TILED, NF4_TILED, NF4_UNROLLED, FP8, FP8_TILED)
TENSOR_2 = Case(tensor=2, accum=2)
TENSOR_8 = Case("int8", tensor=8, kv_heads=8, remat=True, head=True)
TENSOR_FSDP = Case("int8", 4, fsdp=2, tensor=4, kv_heads=4, accum=4, head=True, sharded=True)
TENSOR_ALL = Case("nf4", data=2, fsdp=2, tensor=2, scan=False, head=True)
FULL_TENSOR = Case(lora=False, fsdp=2, tensor=2, accum=4, remat=True)
FULL_TENSOR_8 = Case(lora=False, tensor=8, kv_heads=8)
OTHER_RULES = Case("int8", data=2, fsdp=2, tensor=2, sharded=True, rules=(
    "heads:tensor", "kv_heads:tensor", "mlp:fsdp", "vocab:fsdp", "embed:data", "rank:fsdp",
))  # fmt: skip
TENSOR_CASES = (
    TENSOR_2, TENSOR_8, TENSOR_FSDP, TENSOR_ALL, FULL_TENSOR, FULL_TENSOR_8, OTHER_RULES,
)  # fmt: skip
CASES = (*LORA_CASES, *OTHER_QTYPES, FULL, FULL_FSDP_8, FULL_UNROLLED, *TENSOR_CASES)
# What these have others have too, with more besides.
SLOW = FULL, FULL_TENSOR_8, TENSOR_2, INT4_TILED, NF4_UNROLLED
ADAM = (
    Case("int8", data=2, fsdp=4, accum=4, sharded=True, optimiser="adamw"),
    Case(scan=False, optimiser="adamw"),
)


def ids(case: Case) -> str:
    return str(case)


def with_weights(weights: np.ndarray) -> Batch:
    """Rows of LENGTH tokens each, with these weights."""
    full = np.ones_like(weights, np.int32)
    return Batch(
        tiny.tokens(len(weights)),
        tiny.tokens(len(weights), seed=6),
        weights.astype(np.float32),
        full,
        np.cumsum(full, axis=1, dtype=np.int32) - 1,
    )


def supervised(*counts: int) -> np.ndarray:
    """ROWS rows of weights: `counts` supervised tokens in the first rows, none in the others."""
    padded = np.zeros(tiny.ROWS, int)
    padded[: len(counts)] = counts
    return (np.arange(tiny.LENGTH)[None] < padded[:, None]).astype(np.float32)


@pytest.mark.parametrize("case", tiny.with_slow(CASES, SLOW), ids=ids)
def test_step_is_the_plain_gradient(case):
    assert_is_reference(case, tiny.flat_batch())


@pytest.mark.parametrize("case", [SHARDED, INT8_FSDP_8, DATA_8, FULL_FSDP_8], ids=ids)
def test_unequal_rows_and_devices_do_not_bend_the_mean(case):
    """One long record and many with one token; most devices have a few tokens."""
    assert_is_reference(case, with_weights(supervised(12, *[1] * 31)))
    assert_is_reference(case, with_weights(supervised(3, 12, 7, 1)))


@pytest.mark.parametrize("case", [UNROLLED, TILED, FULL_FSDP_8], ids=ids)
def test_order_of_records_does_not_matter(case):
    """However the records fall into micro-batches and onto devices."""
    batch = tiny.flat_batch()
    order = np.random.default_rng(0).permutation(tiny.ROWS)
    got, metrics = one_step(case, batch)
    shuffled, other = one_step(case, Batch(*(a[order] for a in batch)))
    chex.assert_trees_all_close(got, shuffled, rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics.loss_sum, other.loss_sum, rtol=1e-6)


@pytest.mark.parametrize("case", [ONE, TILED, FULL_UNROLLED], ids=ids)
def test_rows_without_weight_change_nothing(case):
    batch = tiny.flat_batch()
    empty = batch.weights.sum(axis=1) == 0
    assert empty.sum() >= 4
    other = batch._replace(
        tokens=np.where(empty[:, None], tiny.tokens(tiny.ROWS, seed=1), batch.tokens),
        segment_ids=np.where(empty[:, None], 1, batch.segment_ids),
    )
    got, metrics = one_step(case, batch)
    same, other_metrics = one_step(case, other)
    chex.assert_trees_all_equal(got, same)
    assert metrics.loss_sum == other_metrics.loss_sum


@pytest.mark.parametrize("case", [UNROLLED, DATA_8, TILED, FULL_FSDP_8], ids=ids)
def test_short_last_window(case):
    """A window with fewer micro-batches equals one batch of the rows it has."""
    assert_is_reference(case, with_weights(supervised(*[7] * (tiny.ROWS // 2))))


@pytest.mark.parametrize("case", [ONE, TILED, FULL_FSDP_8], ids=ids)
def test_eval_is_the_loss_of_the_step(case):
    """Every way through the model gives one loss."""
    trainer, batch = tiny.trainer(case), tiny.flat_batch()
    rows = tiny.micro_batches(batch, case.accum)
    loss, weight = trainer.eval(trainer.trainable, trainer.base, rows)
    np.testing.assert_allclose(loss, expected(case, batch)[0], rtol=1e-5)
    np.testing.assert_allclose(weight, batch.weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("case", LORA_CASES, ids=ids)
def test_first_and_second_gradient(case):
    """lora_b learns first, then both, in every layer; nothing cuts the path to an adapter."""
    fresh, batch = tiny.adapters(tiny.trainer(case).model, fresh=True), tiny.flat_batch()
    grads, _ = one_step(case, batch, fresh)
    for path, grad in trees.flatten(grads).items():
        if path.endswith("lora_a"):
            assert not grad.any(), path
        else:
            assert layers_without_gradient(path, grad) == [], path
    moved = jax.tree.map(lambda a, g: a - g, jax.device_get(fresh), grads)
    second, _ = one_step(case, batch, moved)
    for path, grad in trees.flatten(second).items():
        assert layers_without_gradient(path, grad) == [], path


def layers_without_gradient(path: str, grad: np.ndarray) -> list[int]:
    stack = grad if path.startswith("layers.") else grad[None]
    return [i for i, layer in enumerate(stack) if not layer.any()]


@pytest.mark.parametrize(
    "case",
    [*ADAM, Case("nf4", 8, fsdp=4, optimiser="adamw"), Case("fp8", fsdp=2, optimiser="adamw")],
    ids=ids,
)
def test_base_is_frozen_and_all_adapters_move(case):
    """Weight decay and Adam reach the adapters and nothing else; one compilation."""
    trainer = tiny.trainer(case)
    base_before, before = jax.device_get((trainer.base, trainer.trainable))
    current, rows = trainer.new_state(), tiny.micro_batches(tiny.flat_batch(), case.accum)
    shardings = jax.tree.map(lambda a: a.sharding, current)
    traces = []
    for _ in range(3):
        current, _ = trainer.step(current, trainer.base, rows)
        traces.append(len(trainer.traces))

    chex.assert_trees_all_equal(jax.device_get(trainer.base), base_before)
    for path, leaf in trees.flatten(current.trainable).items():
        old = trees.flatten(before)[path]
        assert leaf.dtype == jnp.float32
        assert layers_without_gradient(path, np.asarray(leaf) - old) == [], path
    moments = [a for a in jax.tree.leaves(current.opt_state) if a.ndim > 0]
    counters = [a for a in jax.tree.leaves(current.opt_state) if a.ndim == 0]
    assert trees.count(moments) == 2 * trees.count(current.trainable)
    assert len(counters) <= 2
    assert (current.step, current.updates) == (3, 3)
    same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), current, shardings)
    assert all(jax.tree.leaves(same))
    assert traces[0] == traces[-1] > 0


@pytest.mark.parametrize("case", ADAM, ids=ids)
def test_state_lies_where_the_layout_says(case):
    """Moments lie beside their leaf; no spec is longer or shorter than its array."""
    trainer = tiny.trainer(case)
    current = trainer.new_state()
    adam = next(s for s in current.opt_state if hasattr(s, "mu"))
    for moments in (adam.mu, adam.nu):
        chex.assert_trees_all_equal_shapes_and_dtypes(moments, current.trainable)
        jax.tree.map(
            lambda m, p: chex.assert_equal(m.sharding, p.sharding), moments, current.trainable
        )
    for leaf in jax.tree.leaves((current.trainable, trainer.base)):
        assert len(leaf.sharding.spec) == leaf.ndim
    shard = current.trainable["layers"]["self_attn"]["q_proj"]["lora_a"].addressable_shards[0]
    assert shard.data.shape[1] == 32 // (case.fsdp if case.sharded else 1)


@pytest.mark.parametrize("case", ADAM, ids=ids)
def test_bad_batches_change_nothing_but_the_step(case):
    trainer = tiny.trainer(case)
    good = tiny.micro_batches(tiny.flat_batch(), case.accum)
    empty = good._replace(weights=np.zeros_like(good.weights))
    norm = {"weight": jnp.full_like(trainer.base["norm"]["weight"], jnp.nan)}
    broken = trainer.base | {"norm": norm}

    current, metrics = trainer.step(trainer.new_state(), trainer.base, good)
    kept, rates = jax.device_get(current), [float(metrics.learning_rate)]
    for base, rows in ((trainer.base, empty), (broken, good), (broken, empty)):
        current, metrics = trainer.step(current, base, rows)
        rates.append(float(metrics.learning_rate))
        assert metrics.applied == 0
        chex.assert_trees_all_equal(current.trainable, kept.trainable)
        chex.assert_trees_all_equal(current.opt_state, kept.opt_state)
    assert (current.step, current.updates) == (4, 1)

    current, metrics = trainer.step(current, trainer.base, good)
    rates.append(float(metrics.learning_rate))
    assert metrics.applied == 1 and (current.step, current.updates) == (5, 2)
    chex.assert_tree_all_finite((current.trainable, current.opt_state))
    # Two steps of warm-up, then linear from step 2 to step 10: the schedule counts skipped batches.
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.01, 0.00875, 0.0075], rtol=1e-6)


def test_updates_follow_the_schedule_of_steps():
    """The rate multiplies the update, and is that of `step`, whatever `updates` is."""
    tx = optax.identity()
    leaves, grads = {"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}
    old = train_state.create(leaves, tx, key=jax.random.key(0))._replace(step=jnp.int32(4))
    sums = steps.Sums(loss_lib.Losses(jnp.float32(1), None), jnp.float32(2), jnp.float32(1), grads)
    new, metrics = steps.update(old, sums, tx=tx, schedule=lambda s: s.astype(jnp.float32) * 0.1)
    np.testing.assert_allclose(new.trainable["w"], 1 - 0.4 * np.arange(3) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics.grad_norm, 5**0.5 / 2, rtol=1e-6)
    assert metrics.learning_rate == jnp.float32(4) * 0.1
    assert (new.step, new.updates) == (5, 1)


@pytest.mark.parametrize(
    ("loss", "weight", "grad"),
    [(1.0, 1.0, np.inf), (1.0, 1.0, np.nan), (np.nan, 1.0, 1.0), (np.inf, 1.0, 1.0),
     (0.0, 0.0, 0.0), (0.0, np.nan, 1.0)],
)  # fmt: skip
def test_update_refuses(loss, weight, grad):
    tx = optax.trace(0.9)
    old = train_state.create({"w": jnp.ones(2)}, tx, key=jax.random.key(0))
    grads = {"w": jnp.array([1.0, grad], jnp.float32)}
    sums = steps.Sums(
        loss_lib.Losses(jnp.float32(loss), None), jnp.float32(weight), jnp.float32(1), grads
    )
    new, metrics = steps.update(old, sums, tx=tx, schedule=lambda _: jnp.float32(1))
    chex.assert_trees_all_equal((new.trainable, new.opt_state), (old.trainable, old.opt_state))
    assert (new.step, new.updates, metrics.applied) == (1, 0, 0)


def test_bfloat16_activations_train_float32_adapters():
    """The gradient is the float32 one but for rounding, and updates stay in float32."""
    case = Case("int8", fsdp=2, dtype="bfloat16")
    batch = tiny.flat_batch()
    grads, metrics = one_step(case, batch)
    loss, exact = expected(Case("int8", fsdp=2), batch)
    np.testing.assert_allclose(metrics.loss_sum, loss, rtol=0.01)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (grads, exact))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.998
    assert a.dtype == np.float32


DROPOUT = (
    Case(dropout=0.5, head=True),
    Case(dropout=0.5, head=True, data=2, fsdp=4, accum=4, sharded=True),
)


def test_dropout_masks_do_not_depend_on_mesh_or_accumulation():
    batch = tiny.flat_batch()
    one, many = (one_step(case, batch)[0] for case in DROPOUT)
    chex.assert_trees_all_close(one, many, rtol=0, atol=1e-5)


def test_dropout_differs_by_step_and_not_by_call():
    batch = tiny.flat_batch()
    first, again, later = (one_step(DROPOUT[0], batch, start=s)[0] for s in (0, 0, 1))
    without = expected(DROPOUT[0], batch)[1]
    chex.assert_trees_all_equal(first, again)
    for path, grad in trees.flatten(first).items():
        assert not np.allclose(grad, trees.flatten(later)[path], atol=1e-3), path
        assert not np.allclose(grad, trees.flatten(without)[path], atol=1e-3), path


def test_dropout_is_off_in_eval():
    trainer, rows = tiny.trainer(DROPOUT[0]), tiny.micro_batches(tiny.flat_batch(), 1)
    loss, _ = trainer.eval(trainer.trainable, trainer.base, rows)
    np.testing.assert_allclose(loss, expected(DROPOUT[0], tiny.flat_batch())[0], rtol=1e-5)


def test_dropout_differs_by_layer():
    """With equal layers, an adapter in layer 0 or in layer 1 differs by nothing but its mask."""
    plain_model = tiny.model(num_hidden_layers=2)
    base = tiny.weights(plain_model)
    for part, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        base["layers"][part][name]["weight"] *= 0  # Layers without their adapter add nothing.
    base["layers"] = jax.tree.map(lambda a: jnp.stack([a[0], a[0]]), base["layers"])

    def hidden(layer: int, rate: float) -> jax.Array:
        m = tiny.with_lora(plain_model, [f"layers.{layer}.self_attn.o_proj"])
        dropout = layers.Dropout(jax.random.key(3), jnp.arange(2), rate)
        return m.hidden(
            m.bind(base, tiny.adapters(m)), tiny.inputs(tiny.tokens(2)),
            dtype=jnp.float32, scan_layers=True, remat=False, dropout=dropout,
        )[0]  # fmt: skip

    chex.assert_trees_all_close(hidden(0, 0.0), hidden(1, 0.0), atol=1e-6)
    assert not np.allclose(hidden(0, 0.5), hidden(1, 0.5), atol=1e-2)


def test_dropout_masks_differ_by_module_and_row_and_keep_the_mean():
    x = jnp.ones((4, 8, 64))
    dropout = layers.Dropout(jax.random.key(0), jnp.arange(4), 0.25)
    attn = tiny.model().bind(tiny.weights(tiny.model()), {})["layers"]["self_attn"]
    a, b = dropout(x, attn["q_proj"]), dropout(x, attn["k_proj"])
    assert not np.array_equal(a, b)
    assert not np.array_equal(a[0], a[1])
    np.testing.assert_allclose(np.unique(a), [0, 1 / 0.75], rtol=1e-6)
    np.testing.assert_allclose(a.mean(), 1, atol=0.05)
    moved = layers.Dropout(jax.random.key(0), jnp.arange(2, 6), 0.25)
    np.testing.assert_array_equal(moved(x, attn["q_proj"])[0], a[2])


@pytest.mark.parametrize(
    ("schedule", "step_number", "rate"),
    [("constant", 0, 0.25), ("constant", 3, 1.0), ("constant", 90, 1.0),
     ("linear", 4, 1.0), ("linear", 12, 0.55), ("linear", 20, 0.1), ("linear", 99, 0.1),
     ("cosine", 4, 1.0), ("cosine", 12, 0.55), ("cosine", 20, 0.1), ("cosine", 8, None)],
)  # fmt: skip
def test_schedules(schedule, step_number, rate):
    """Four steps of warm-up, then down to a tenth at step 20."""
    changes = {"schedule": schedule, "warmup_steps": 4, "min_lr_ratio": 0.1, "learning_rate": 1.0}
    cfg = dataclasses.replace(tiny.optim_config("sgd"), **changes)
    if rate is None:
        rate = 0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2
    got = optimisers.schedule(cfg, 20)(jnp.int32(step_number))
    np.testing.assert_allclose(got, rate, rtol=1e-6)


def test_no_warmup_starts_at_the_full_rate():
    cfg = dataclasses.replace(tiny.optim_config("sgd"), schedule="linear", learning_rate=0.5)
    assert optimisers.schedule(cfg, 10)(jnp.int32(0)) == 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_is_optax_sgd(momentum):
    """Decay is decoupled, applies to matrices and adapters, and comes after the momentum."""
    changes = {"momentum": momentum, "weight_decay": 0.1, "clip_norm": 0.5}
    cfg = dataclasses.replace(tiny.optim_config("sgd"), **changes)
    leaves = {"m": jnp.array([1.0, 2.0]), "norm": jnp.array([3.0])}
    infos = {
        "m": param_info.ParamInfo((2,), "float32", (None,), contracting=-1),
        "norm": param_info.ParamInfo((1,), "float32", (None,)),
    }
    tx = optimisers.transformation(cfg, infos)
    opt_state, grads = tx.init(leaves), {"m": jnp.array([3.0, 0.0]), "norm": jnp.array([4.0])}
    traced = 0.0
    for _ in range(2):
        updates, opt_state = tx.update(grads, opt_state, leaves)
        traced = traced * momentum + 0.5 / 5.0
        np.testing.assert_allclose(updates["m"], [3 * traced + 0.1, 0.2], rtol=1e-6)
        np.testing.assert_allclose(updates["norm"], [4 * traced], rtol=1e-6)
