"""The frozen base: round trips, agreement with qwix, layouts, and the matmul with its gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
import qwix
import tiny

from purelora import errors, info, quant, specs
from purelora import tree as trees

LAYOUTS = {
    "kernel": info.ParamInfo((32, 24), "float32", ("embed", "mlp"), contracting=-2),
    "stack": info.ParamInfo((3, 32, 24), "float32", ("layers", "embed", "mlp"), contracting=-2),
    "table": info.ParamInfo((24, 32), "float32", ("vocab", "embed"), contracting=-1),
}


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with tiny.quick_compiles():
        yield


def layout(name: str, tile: int | None) -> qwix.QArray:
    """The QArray of infos of one matrix."""
    infos = {"weight": LAYOUTS[name]}
    return quant.quantised_infos(infos, qtype="int8", tile_size=tile, skip=())["weight"]


def random(name: str, seed: int = 0) -> jax.Array:
    """Weights whose channels differ in size by orders of magnitude; one channel is all zero."""
    rng = np.random.default_rng(seed)
    shape = LAYOUTS[name].shape
    size = 10.0 ** rng.uniform(-3, 1, shape)
    weight = (rng.standard_normal(shape) * size).astype(np.float32)
    weight[..., 0] = 0
    return jnp.asarray(weight)


def repeated(scale: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    full = np.asarray(scale)
    for axis, (length, tiles) in enumerate(zip(shape, full.shape, strict=True)):
        full = np.repeat(full, length // tiles, axis)
    return full


@pytest.mark.parametrize("tile", [None, 8, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_error_is_half_a_scale(name, tile):
    weight, like = random(name), layout(name, tile)
    q = quant.quantise(weight, like)
    back = quant.dequantise(q)
    assert back.dtype == jnp.float32
    bound = repeated(q.scale, weight.shape) * (0.5 + 1e-4)
    assert (np.abs(back - weight) <= bound).all()
    assert np.abs(np.asarray(q.qvalue, np.int32)).max() >= 127  # The whole range is used.
    np.testing.assert_array_equal(plain.dequantised({"w": q})["w"], back)


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_agrees_with_qwix(name, tile):
    weight, like = random(name), layout(name, tile)
    axis = weight.ndim + LAYOUTS[name].contracting
    other = tuple(i for i in range(weight.ndim) if i != axis)
    theirs = qwix.quantize(
        weight, jnp.int8, channelwise_axes=other, tiled_axes={} if tile is None else {axis: tile}
    )
    chex.assert_trees_all_equal(quant.quantise(weight, like), theirs)
    np.testing.assert_array_equal(quant.dequantise(theirs), qwix.dequantize(theirs))


def test_layers_of_a_stack_are_quantised_apart():
    weight = random("stack")
    whole = quant.quantise(weight, layout("stack", 8))
    for i in range(3):
        one = quant.quantise(weight[i], layout("kernel", 8))
        chex.assert_trees_all_equal(jax.tree.map(lambda a, i=i: a[i], whole), one)


def test_scales_are_float32_for_bfloat16_weights():
    weight = random("kernel").astype(jnp.bfloat16)
    q = quant.quantise(weight, layout("kernel", None))
    assert (q.scale.dtype, q.qvalue.dtype) == (jnp.float32, jnp.int8)
    same = quant.quantise(weight.astype(jnp.float32), layout("kernel", None))
    chex.assert_trees_all_equal(q, same)


@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("skip", [(), ("embed_tokens", "mlp"), ("norm",)])
def test_infos_specs_and_arrays_are_one_tree(tile, skip):
    m = tiny.model(tie_word_embeddings=False, attention_bias=True)
    base, infos = tiny.quantised(m, tiny.weights(m), "int8", tile, skip)
    assert jax.tree.structure(base) == jax.tree.structure(infos)
    for array, leaf in zip(jax.tree.leaves(base), jax.tree.leaves(infos), strict=True):
        assert (array.shape, array.dtype) == (leaf.shape, leaf.abstract.dtype)
    spec_tree = specs.spec_tree(infos, tiny.mesh(1, 8))
    is_spec = {"is_leaf": lambda s: isinstance(s, specs.P)}
    assert jax.tree.structure(base) == jax.tree.structure(spec_tree, **is_spec)
    for leaf, spec in zip(
        jax.tree.leaves(infos), jax.tree.leaves(spec_tree, **is_spec), strict=True
    ):
        assert len(spec) == len(leaf.shape)
        assert all(n % 8 == 0 for n, axis in zip(leaf.shape, spec, strict=True) if axis == "fsdp")


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        ((), set()),
        (("embed_tokens",), {"embed_tokens.weight"}),
        (("lm_head", "embed_tokens"), {"lm_head.weight", "embed_tokens.weight"}),
        (("mlp",), {f"layers.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}),
        ((r"mlp\.(up|down)_proj",), {"layers.mlp.up_proj.weight", "layers.mlp.down_proj.weight"}),
        (("q_pro", "embed", "proj"), set()),
        ((r"[qk]_proj",), {"layers.self_attn.q_proj.weight", "layers.self_attn.k_proj.weight"}),
    ],
)
def test_skip_patterns_name_whole_parts(skip, skipped):
    m = tiny.model(tie_word_embeddings=False)
    infos = quant.quantised_infos(m.infos, qtype="int8", tile_size=None, skip=skip)
    plain_leaves = {p for p, i in trees.flatten(infos).items() if isinstance(i, info.ParamInfo)}
    vectors = {p for p, i in m.flat_infos.items() if not i.is_matrix}
    assert plain_leaves == vectors | skipped
    assert vectors == {
        "norm.weight", "layers.input_layernorm.weight", "layers.post_attention_layernorm.weight"
    }  # fmt: skip


def test_qtype_none_leaves_everything():
    m = tiny.model()
    assert quant.quantised_infos(m.infos, qtype="none", tile_size=None, skip=()) is m.infos


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["float", "int8", "tiles"])
@pytest.mark.parametrize("name", ["kernel", "table"])
def test_frozen_dot_and_its_gradient(name, kind, dtype):
    """Against a float weight and jnp's own matmul and transpose rule."""
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal(LAYOUTS[name].shape), jnp.float32)
    if kind != "float":
        weight = quant.quantise(weight, layout(name, 8 if kind == "tiles" else None))
    contracting = LAYOUTS[name].contracting
    full = quant.dequantise(weight)
    kernel = full if contracting == -2 else full.T
    x = jnp.asarray(rng.standard_normal((2, 5, 32)), dtype)
    g = jnp.asarray(rng.standard_normal((2, 5, 24)), dtype)

    got, pull = jax.vjp(lambda x: quant.frozen_dot(x, weight, quant_whole, contracting), x)
    want, pull_plain = jax.vjp(lambda x: x @ kernel, x.astype(jnp.float32))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    for a, b in ((got, want), (pull(g)[0], pull_plain(g.astype(jnp.float32))[0])):
        assert a.dtype == dtype
        size = np.abs(b).max()
        np.testing.assert_allclose(a.astype(jnp.float32) / size, b / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tile", [None, 8])
def test_frozen_dot_in_another_dtype(tile):
    """The head's logits are float32 whatever its input; the input's gradient keeps its dtype."""
    weight = quant.quantise(random("table"), layout("table", tile))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 32)), jnp.bfloat16)
    y, pull = jax.vjp(lambda x: quant.frozen_dot(x, weight, quant_whole, -1, jnp.float32), x)
    exact = x.astype(jnp.float32) @ quant.dequantise(weight).T
    assert (y.dtype, pull(y)[0].dtype) == (jnp.float32, jnp.bfloat16)
    tolerance = 1e-6 if tile is None else 0.01  # A tiled weight is rounded to the dtype of x.
    np.testing.assert_allclose(y, exact, rtol=0, atol=tolerance * np.abs(exact).max())


def quant_whole(weight):
    return weight


def test_frozen_dot_gives_the_weight_no_gradient():
    weight = random("kernel")
    grad = jax.grad(lambda w: quant.frozen_dot(jnp.ones((2, 32)), w, quant_whole).sum())(weight)
    assert not grad.any()


def test_frozen_dot_keeps_the_shard_and_not_what_it_gathers():
    """The residual is the argument itself, whatever the gather makes of it."""
    shard = quant.quantise(random("kernel"), layout("kernel", None))

    def doubled(weight):
        return jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), weight)

    y, pull = jax.vjp(lambda x: quant.frozen_dot(x, shard, doubled), jnp.ones((2, 32)))
    assert y.shape == (2, 48)
    kept = {a.shape for a in jax.tree.leaves(pull)}
    assert shard.qvalue.shape in kept and (32, 48) not in kept
    assert pull(jnp.ones((2, 48)))[0].shape == (2, 32)


@pytest.mark.parametrize("kind", ["float", "int8", "tiles"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_take_rows_is_indexing_the_dequantised_table(kind, dtype):
    table = random("table")
    if kind != "float":
        table = quant.quantise(table, layout("table", 8 if kind == "tiles" else None))
    rows = jnp.array([[3, 0, 23], [7, 7, 1]])
    got = quant.take_rows(table, rows, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, quant.dequantise(table)[rows].astype(dtype))


@pytest.mark.parametrize(
    ("length", "tile", "ways", "best"),
    [(128, 32, 8, 16), (576, 64, 8, 72), (96, 64, 1, 48), (40, 64, 1, 40), (64, 24, 4, 16)],
)
def test_proposed_tile_divides_and_spreads(length, tile, ways, best):
    assert f"use {best} ({length // best} tiles)" in specs.tile_remedy(length, tile, ways)
    assert length % best == 0 and (length // best) % ways == 0


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (20, r"quant.tile_size = 20: layers.*q_proj.weight: does not divide embed = 32; use 16"),
        (32, r"layers.mlp.down_proj.weight: does not divide mlp = 48; use 24 \(2 tiles\)"),
    ],
)
def test_tile_that_does_not_divide(tile, message):
    with pytest.raises(errors.ConfigError, match=message):
        specs.check_tiles(tiny.model().infos, tile, ())


def test_tile_only_concerns_what_is_quantised():
    specs.check_tiles(tiny.model().infos, 32, ("down_proj",))
