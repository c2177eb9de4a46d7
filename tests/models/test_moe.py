"""Mixtures of experts: routing, grouped products, losses of the router, experts over a mesh.

The step is compared with `plain`, in which every expert sees every token.
"""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.config import command_line
from purelora.core import errors, layer_axis, trees
from purelora.core.batch import Batch
from purelora.models import layers, moe
from purelora.ops import grouped_matmul, quant
from purelora.sharding import parallel
from purelora.training import planning
from purelora.training.plan import Plan
from tests.support import plain, tiny
from tests.support.tiny import Case

TINY = f"--config={pathlib.Path(__file__).parents[2]}/configs/tiny.py"


# ---- grouped products --------------------------------------------------------------------------

GROUPINGS = {
    "uneven": (37, 5, 4, None),
    "one group has all": (19, 5, 4, 2),
    "no row has a group": (6, 3, 2, 3),
    "fewer rows than groups": (3, 8, 1, None),
    "a tile larger than all groups": (9, 4, 16, None),
}


def _rows(name: str, width: int = 6):
    rows, count, tile, everywhere = GROUPINGS[name]
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, count + 1, rows) if everywhere is None else np.full(rows, everywhere)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(x), count, tile


@pytest.mark.parametrize("name", GROUPINGS)
def test_sorted_rows_come_back_and_tiles_have_one_group(name):
    ids, x, count, tile = _rows(name)
    groups = jax.jit(grouped_matmul.group, static_argnums=(1, 2))(ids, count, tile)
    is_in = (np.asarray(ids) >= 0) & (np.asarray(ids) < count)
    back = grouped_matmul.combine(grouped_matmul.dispatch(x, groups), groups)
    np.testing.assert_array_equal(back, np.where(is_in[:, None], x, 0))
    tiles = np.asarray(groups.sources_R).reshape(-1, groups.tile)
    for number, sources in enumerate(tiles):
        own = sources[sources < len(ids)]
        assert (len(own) > 0) == (number < groups.in_use)
        assert set(np.asarray(ids)[own]) <= {int(groups.groups_N[number])}
    sizes = np.bincount(np.asarray(ids)[is_in], minlength=count)
    np.testing.assert_array_equal(groups.sizes_G, -(-sizes // tile) * tile)


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("contracting", [-2, -1])
@pytest.mark.parametrize("qtype", ["none", "int8", "nf4"])
def test_products_and_gradients_are_those_of_each_row_by_itself(name, contracting, qtype):
    ids, x, count, tile = _rows(name, width=8)
    shape = (count, 8, 12) if contracting == -2 else (count, 12, 8)
    floats = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    weight = tiny.quantised_leaf(floats, contracting, qtype)
    matrices = np.asarray(quant.dequantise(weight))
    matrices = matrices if contracting == -2 else matrices.swapaxes(1, 2)

    def ours(x):
        groups = grouped_matmul.group(ids, count, tile)
        rows = grouped_matmul.dispatch(x, groups)
        y = grouped_matmul.frozen_dot(rows, weight, groups, parallel.whole, contracting)
        return grouped_matmul.combine(y, groups)

    def theirs(x):
        picked = matrices[np.clip(ids, 0, count - 1)]
        is_in = (ids >= 0) & (ids < count)
        return jnp.where(is_in[:, None], jnp.einsum("ak,akn->an", x, picked), 0)

    _assert_same_function(ours, theirs, x)


@pytest.mark.parametrize("name", GROUPINGS)
def test_gradients_of_the_matrices(name):
    ids, x, count, tile = _rows(name)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(count, 6, 5)), jnp.float32)

    def ours(x, weight):
        groups = grouped_matmul.group(ids, count, tile)
        y = grouped_matmul.dot(grouped_matmul.dispatch(x, groups), weight, groups)
        return grouped_matmul.combine(y, groups)

    def theirs(x, weight):
        went = (ids[:, None] == jnp.arange(count)[None]).astype(jnp.float32)
        return jnp.einsum("ag,ak,gkn->an", went, x, weight)

    _assert_same_function(ours, theirs, x, weight)


@pytest.mark.parametrize("name", GROUPINGS)
def test_adapters_of_the_groups(name):
    ids, x, count, tile = _rows(name)
    rng = np.random.default_rng(2)
    a = jnp.asarray(rng.normal(size=(count, 6, 2)), jnp.float32)
    b = jnp.asarray(rng.normal(size=(count, 2, 5)), jnp.float32)

    def ours(x, a, b):
        groups = grouped_matmul.group(ids, count, tile)
        rows = grouped_matmul.dispatch(x, groups)
        return grouped_matmul.combine(
            grouped_matmul.delta(rows, a, b, jnp.float32(0.5), groups), groups
        )

    def theirs(x, a, b):
        went = (ids[:, None] == jnp.arange(count)[None]).astype(jnp.float32)
        return 0.5 * jnp.einsum("ag,ak,gkr,grn->an", went, x, a, b)

    _assert_same_function(ours, theirs, x, a, b)


@pytest.mark.parametrize("name", GROUPINGS)
def test_values_of_the_groups(name):
    """One for each row and nothing in the padding; and their gradients."""
    ids, x, count, tile = _rows(name)
    values = jnp.asarray(np.random.default_rng(1).normal(size=(count, 6)), jnp.float32)

    def ours(values):
        groups = grouped_matmul.group(ids, count, tile)
        return grouped_matmul.of_groups(values, groups) + grouped_matmul.dispatch(x, groups)

    def theirs(values):
        groups = grouped_matmul.group(ids, count, tile)
        picked = values[jnp.clip(ids, 0, count - 1)]
        return grouped_matmul.dispatch(x + picked, groups)

    _assert_same_function(ours, theirs, values)


def _assert_same_function(ours, theirs, *arguments) -> None:
    """Same values, and same gradients for an arbitrary cotangent."""
    results = []
    for function in (ours, theirs):
        y, pull = jax.vjp(jax.jit(function), *arguments)
        results.append((y, pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)))))
    chex.assert_trees_all_close(*results, atol=2e-5)


def test_the_arithmetic_is_little_more_than_that_of_the_routed_rows():
    """Counted for 16 experts, where `lax.ragged_dot` costs over 16 times as much on a CPU."""
    rows, count, width = 4096, 16, 64
    tile = grouped_matmul.tile_size(rows, count)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, count, rows), jnp.int32)
    groups = grouped_matmul.group(ids, count, tile)
    x = jax.ShapeDtypeStruct((groups.sources_R.shape[0], width), jnp.float32)
    weight = jax.ShapeDtypeStruct((count, width, width), jnp.float32)
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), groups)

    def cost(function) -> float:
        return jax.jit(function).lower(x, weight, like).compile().cost_analysis()["flops"]

    # The analysis counts the body of a loop once.
    once = cost(lambda x, w, g: grouped_matmul.frozen_dot(x, w, g, parallel.whole))
    routed = 2 * rows * width * width
    assert once * int(groups.in_use) < 1.3 * routed
    dense = cost(lambda x, w, g: jax.lax.ragged_dot(x, w, g.sizes_G))
    assert dense > 10 * routed


# ---- the step ----------------------------------------------------------------------------------

AUX = moe.RouterLossWeights(balance=0.3, z=0.02, is_pooled=False)
FOUR = (("num_local_experts", 4),)
OSS = (*FOUR, ("layer_types", None))
CASES = (
    Case(family="mixtral", layers=2, router=AUX),
    Case("int8", 4, family="qwen3_moe", expert=2, fsdp=2, layers=2, router=AUX, sharded=True),
    Case(family="qwen3_moe", lora=False, expert=2, fsdp=2, tensor=2, accum=4, layers=2, router=AUX),
    # Biases of experts and sinks over all axes.
    Case(family="gpt_oss", lora=False, model=OSS, expert=2, tensor=2, layers=1, router=AUX),
)
MORE_CASES = (
    Case(family="qwen3_moe", accum=4, layers=2, router=AUX, remat=True),
    Case("int8", family="mixtral", model=FOUR, expert=4, layers=2, router=AUX, accum=2),
    Case(
        "nf4", family="mixtral", model=FOUR, data=2, expert=2, tensor=2, layers=2, router=AUX,
        scan=False,
    ),
    Case(
        family="mixtral", lora=False, model=FOUR, expert=4, data=2, layers=2, router=AUX, remat=True
    ),
    Case(family="gpt_oss", lora=False, model=OSS, expert=2, tensor=2, layers=2, router=AUX),
    Case("int8", family="gpt_oss", model=OSS, expert=2, fsdp=2, tensor=2, layers=2, accum=2),
    Case(
        family="gpt_oss", lora=False, model=OSS, fsdp=2, tensor=2, layers=2, router=AUX, remat=True,
        rules=("heads:none,kv_heads:none,embed:fsdp,mlp:tensor,experts:fsdp",),
    ),
    Case(family="gpt_oss", model=OSS, layers=2, scan=False, remat=True, router=AUX),
)  # fmt: skip


def expected(case: Case, batch: Batch):
    """Sums of the losses, and the gradient of what is differentiated."""
    trainer = tiny.trainer(case)
    base = jax.tree.map(jnp.asarray, plain.dequantised(jax.device_get(trainer.base)))
    config = tiny.hf_config(
        case.family, num_hidden_layers=case.layers, **case.heads, **dict(case.model)
    )
    is_token = batch.segment_ids > 0
    per_row = batch.weights.sum() / is_token.any(axis=1).sum()

    def total(trainable):
        weights = plain.merged(base, trainable, 2.0) if case.lora else trees.flatten(trainable)
        xent = plain.loss_sum(weights, batch.tokens, batch.targets, batch.weights, config)
        balance_L, z_L = plain.router_losses(weights, batch.tokens, is_token, config)
        rows = case.router.balance * balance_L.mean() + case.router.z * z_L.mean()
        return xent + np.float32(per_row) * rows, (xent, balance_L, z_L)

    (_, losses), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(
        jax.device_get(trainer.trainable)
    )
    return losses, jax.tree.map(lambda g: g / np.float32(batch.weights.sum()), grads)


SLOW_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES]


@pytest.mark.parametrize("case", [*CASES, *SLOW_CASES], ids=str)
def test_step_is_the_plain_gradient(case):
    """Rows of all lengths, one without tokens, some without weight, in uneven micro-batches."""
    batch = tiny.flat_batch()
    (xent, balance_L, z_L), grads = expected(case, batch)
    trainer = tiny.trainer(case)
    before = jax.device_get(trainer.trainable)
    new, metrics = trainer.step(
        trainer.new_state(), trainer.base, tiny.micro_batches(batch, case.accum)
    )
    after = jax.device_get(new.trainable)
    got = jax.tree.map(lambda a, b: (a - b) / tiny.LEARNING_RATE, before, after)
    chex.assert_trees_all_close(got, grads, rtol=0, atol=2e-5)
    np.testing.assert_allclose(metrics.loss_sum, xent, rtol=1e-5)
    rows = np.float32((batch.segment_ids > 0).any(axis=1).sum())
    np.testing.assert_allclose(metrics.router.balance_L, balance_L / rows, rtol=1e-5)
    np.testing.assert_allclose(metrics.router.z_L, z_L / rows, rtol=1e-5)
    assert metrics.router.balance_L.shape == (case.layers,)


# ---- routing -----------------------------------------------------------------------------------

SILU = functools.partial(layers.gated, activation=jax.nn.silu)


@pytest.fixture(scope="module")
def routed():
    """A layer's experts, activations of rows with padding, and where their tokens go."""
    m = tiny.model("mixtral", num_hidden_layers=1)
    bound = layer_axis.layer_of(m.bind(tiny.weights(m), {})["layers"], 0)["mlp"]
    x_BTD = jnp.asarray(np.random.default_rng(3).normal(size=(2, 9, 32)), jnp.float32)
    is_token_BT = jnp.arange(9)[None] < jnp.asarray([[9], [4]])
    return m.config.experts, bound, x_BTD, is_token_BT


def test_padding_goes_nowhere_and_counts_nowhere(routed):
    cfg, bound, x_BTD, is_token_BT = routed
    whole = jnp.ones_like(is_token_BT)
    routing, sums = moe.route(x_BTD, bound["gate"], is_token_BT, cfg, None)
    everywhere, _ = moe.route(x_BTD, bound["gate"], whole, cfg, None)
    assert (np.asarray(routing.ids_BTK)[~is_token_BT] == cfg.count).all()
    np.testing.assert_array_equal(
        np.asarray(routing.ids_BTK)[is_token_BT], np.asarray(everywhere.ids_BTK)[is_token_BT]
    )
    np.testing.assert_array_equal(sums.counts_BE.sum(axis=1), [18, 8])
    np.testing.assert_allclose(sums.probs_BE.sum(axis=1), [9, 4], rtol=1e-6)
    out = moe.experts(x_BTD, bound["experts"], routing, SILU, cfg)
    np.testing.assert_array_equal(np.asarray(out)[~is_token_BT], 0)
    # What stands in the padding cannot matter.
    other = jnp.where(is_token_BT[..., None], x_BTD, 7.0)
    again, same_sums = moe.route(other, bound["gate"], is_token_BT, cfg, None)
    chex.assert_trees_all_equal((routing.ids_BTK, sums), (again.ids_BTK, same_sums))


def test_no_token_is_dropped_when_all_go_to_one_expert(routed):
    """A router that prefers the same two experts for every token."""
    cfg, bound, x_BTD, _ = routed
    ids = jnp.broadcast_to(jnp.asarray([3, 1], jnp.int32), (2, 9, 2))
    routing = moe.Routing(ids, jnp.full((2, 9, 2), 0.5))
    out = moe.experts(x_BTD, bound["experts"], routing, SILU, cfg)
    for e, own in ((1, 0.5), (3, 0.5)):
        gate, up, down = (bound["experts"][f"{n}_proj"].weight[e] for n in ("gate", "up", "down"))
        out = out - own * ((jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down)
    np.testing.assert_allclose(out, 0, atol=1e-5)


def test_balance_is_least_when_all_experts_are_used_alike():
    """For each row: K if routing is even, and E if all tokens choose one expert for certain."""
    even = moe.RouterSums(jnp.full((2, 3, 4), 5.0), jnp.full((2, 3, 4), 2.5), jnp.ones((2, 3)))
    ten = jnp.ones((3, 10), bool)
    found = moe.losses(even, ten, is_pooled=False)
    np.testing.assert_allclose(found.balance_L, [2 * 3, 2 * 3])
    np.testing.assert_allclose(found.z_L, [0.1 * 3, 0.1 * 3], rtol=1e-6)
    pooled = moe.losses(even, ten, is_pooled=True)
    np.testing.assert_allclose(pooled.balance_L, [2 * 3])
    one = jnp.zeros((2, 3, 4)).at[..., 0].set(10.0)
    skewed = moe.losses(moe.RouterSums(one, one, jnp.ones((2, 3))), ten, is_pooled=False)
    np.testing.assert_allclose(skewed.balance_L, [4 * 3, 4 * 3])


# ---- planning ----------------------------------------------------------------------------------


def planned(family: str, **options) -> Plan:
    flags = [f"--config.{name}={value}" for name, value in ({"batch_size": 16} | options).items()]
    settings = command_line.parse([TINY, "--config.workdir=runs/x", *flags], flags=()).config
    return planning.make_plan(settings, tiny.hf_config(family), "config.json", jax.devices())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh.expert": 2}, r"mesh\.expert = 2: splits nothing.*set it to 1"),
        ({"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef = 0\.1: this model has no experts"),
        ({"router_z_loss_coef": 0.1}, r"router_z_loss_coef = 0\.1: this model has no experts"),
        ({"router_aux": "transformers"}, r"router_aux = 'transformers': has no effect without"),
        ({"router_aux_loss_coef": -1.0}, r"router_aux_loss_coef = -1\.0: must be at least 0"),
    ],
)
def test_what_a_dense_model_does_not_have_is_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        planned("llama", **options)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(errors.ConfigError, match=r"experts = 5 does not divide over 2 devices"):
        planned("mixtral", **{"mesh.expert": 2})
