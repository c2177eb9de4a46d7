"""The frozen base: round trips, agreement with qwix, layouts, and the matmul with its gradient."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix

from purelora.core import errors, param_info, trees
from purelora.ops import quant, quant_codes, quant_matmul
from purelora.sharding import specs
from tests.support import plain, tiny

LAYOUTS = {
    "kernel": param_info.ParamInfo((32, 24), "float32", ("embed", "mlp"), contracting=-2),
    "stack": param_info.ParamInfo(
        (3, 32, 24), "float32", ("layers", "embed", "mlp"), contracting=-2
    ),
    "table": param_info.ParamInfo((24, 32), "float32", ("vocab", "embed"), contracting=-1),
}
QWIX = {"int8": jnp.int8, "int4": jnp.int4, "nf4": "nf4", "fp8": jnp.float8_e4m3fn}
QTYPES = list(QWIX)
PACKED = ["int4", "nf4"]
# A float weight, and every qtype per channel and in tiles.
KINDS = [("float", None), *((qtype, tile) for qtype in QTYPES for tile in (None, 8))]


def layout(name: str, tile: int | None, qtype: str = "int8") -> qwix.QArray:
    """The QArray of infos of one matrix."""
    infos = {"weight": LAYOUTS[name]}
    return quant.quantised_infos(infos, qtype=qtype, tile_size=tile, skip=())["weight"]


def by_qwix(name: str, weight: jax.Array, tile: int | None, qtype: str) -> qwix.QArray:
    """qwix's own quantisation: one code an element, in qwix's dtypes."""
    axis = weight.ndim + LAYOUTS[name].contracting
    other = tuple(i for i in range(weight.ndim) if i != axis)
    tiled = {} if tile is None else {axis: tile}
    return qwix.quantize(weight, QWIX[qtype], channelwise_axes=other, tiled_axes=tiled)


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


def spacing(qtype: str, relative: np.ndarray) -> np.ndarray:
    """Width of the gap between the numbers of a type around `relative` = weight / scale."""
    if qtype in ("int8", "int4"):
        return np.ones_like(relative)
    if qtype == "fp8":  # 3 bits after the first, and below 2^-6 steps of 2^-9.
        return 2.0 ** (np.maximum(np.floor(np.log2(np.abs(relative) + 1e-30)), -6) - 3)
    book = np.asarray(quant_codes.NF4_BOOK)
    return np.diff(book)[np.clip(np.searchsorted(book, relative) - 1, 0, 14)]


@pytest.mark.parametrize("tile", [None, 8, 16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("qtype", QTYPES)
def test_round_trip_error_is_half_the_gap_between_two_codes(qtype, name, tile):
    weight = random(name)
    q = quant.quantise(weight, layout(name, tile, qtype))
    back = quant.dequantise(q)
    assert back.dtype == jnp.float32 and back.shape == weight.shape
    scale = repeated(q.scale, weight.shape)
    relative = np.divide(weight, scale, where=scale != 0, out=np.zeros_like(scale))
    bound = spacing(qtype, relative) * scale * (0.5 + 1e-4)
    assert (np.abs(back - weight) <= bound).all()
    top = {"int8": 127, "int4": 7, "nf4": 1, "fp8": 448}[qtype]
    used = np.divide(back, scale, where=scale != 0, out=np.zeros_like(scale))
    assert used.max() == pytest.approx(top, rel=1e-6)  # The whole range is used.
    np.testing.assert_array_equal(plain.dequantised({"w": q})["w"], back)


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("qtype", QTYPES)
def test_agrees_with_qwix(qtype, name, tile):
    weight = random(name)
    theirs = by_qwix(name, weight, tile, qtype)
    ours = quant.quantise(weight, layout(name, tile, qtype))
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    np.testing.assert_array_equal(quant.dequantise(ours), qwix.dequantize(theirs))
    if qtype == "int8":
        chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("qtype", QTYPES)
def test_a_code_takes_the_bits_of_its_type_in_memory(qtype, name):
    q = quant.quantise(random(name), layout(name, 8, qtype))
    bits = 4 if qtype in PACKED else 8
    assert q.qvalue.nbytes * 8 == LAYOUTS[name].abstract.size * bits
    assert q.qvalue.dtype.itemsize == 1  # XLA pads types of less than a byte as it likes.


def test_every_byte_of_fp8_is_its_float8():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    real = np.isfinite(want)
    q = qwix.QArray(jnp.asarray(codes[real])[:, None], jnp.ones((1, 1)), None, QWIX["fp8"])
    np.testing.assert_array_equal(jax.jit(quant.dequantise)(q)[:, 0], want[real])


@pytest.mark.parametrize("qtype", PACKED)
def test_two_codes_a_byte_are_an_even_row_and_the_odd_row_after_it(qtype):
    """So that any part of the bytes is a part of the rows."""
    weight = random("kernel")
    q = quant.quantise(weight, layout("kernel", 8, qtype))
    for rows in (slice(0, 8), slice(8, 32), slice(24, 32)):
        scales, codes = (slice(rows.start // n, rows.stop // n) for n in (8, 2))
        part = qwix.QArray(q.qvalue[codes], q.scale[scales], None, q.qtype)
        np.testing.assert_array_equal(quant._dequantised_along(part, 0), quant.dequantise(q)[rows])


@pytest.mark.parametrize("qtype", QTYPES)
def test_layers_of_a_stack_are_quantised_apart(qtype):
    weight = random("stack")
    whole = quant.quantise(weight, layout("stack", 8, qtype))
    for i in range(3):
        one = quant.quantise(weight[i], layout("kernel", 8, qtype))
        chex.assert_trees_all_equal(jax.tree.map(lambda a, i=i: a[i], whole), one)


@pytest.mark.parametrize("qtype", QTYPES)
def test_scales_are_float32_for_bfloat16_weights(qtype):
    weight = random("kernel").astype(jnp.bfloat16)
    q = quant.quantise(weight, layout("kernel", None, qtype))
    assert q.scale.dtype == jnp.float32
    same = quant.quantise(weight.astype(jnp.float32), layout("kernel", None, qtype))
    chex.assert_trees_all_equal(q, same)


@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("skip", [(), ("embed_tokens", "mlp"), ("norm",)])
@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8"])
def test_infos_specs_and_arrays_are_one_tree(qtype, tile, skip):
    m = tiny.model(tie_word_embeddings=False, attention_bias=True)
    base, infos = tiny.quantised(m, tiny.weights(m), qtype, tile, skip)
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
    plain_leaves = {
        p for p, i in trees.flatten(infos).items() if isinstance(i, param_info.ParamInfo)
    }
    vectors = {p for p, i in m.flat_infos.items() if not i.is_matrix}
    assert plain_leaves == vectors | skipped
    assert vectors == {
        "norm.weight", "layers.input_layernorm.weight", "layers.post_attention_layernorm.weight"
    }  # fmt: skip


def test_qtype_none_leaves_everything():
    m = tiny.model()
    assert quant.quantised_infos(m.infos, qtype="none", tile_size=None, skip=()) is m.infos


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("qtype", "tile"), KINDS)
@pytest.mark.parametrize("name", ["kernel", "table"])
def test_frozen_dot_and_its_gradient(name, qtype, tile, dtype):
    """Against a float weight and jnp's own matmul and transpose rule."""
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal(LAYOUTS[name].shape), jnp.float32)
    if qtype != "float":
        weight = quant.quantise(weight, layout(name, tile, qtype))
    contracting = LAYOUTS[name].contracting
    full = quant.dequantise(weight)
    kernel = full if contracting == -2 else full.T
    x = jnp.asarray(rng.standard_normal((2, 5, 32)), dtype)
    g = jnp.asarray(rng.standard_normal((2, 5, 24)), dtype)

    got, pull = jax.vjp(lambda x: quant_matmul.frozen_dot(x, weight, quant_whole, contracting), x)
    want, pull_plain = jax.vjp(lambda x: x @ kernel, x.astype(jnp.float32))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    for a, b in ((got, want), (pull(g)[0], pull_plain(g.astype(jnp.float32))[0])):
        assert a.dtype == dtype
        size = np.abs(b).max()
        np.testing.assert_allclose(a.astype(jnp.float32) / size, b / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("qtype", QTYPES)
def test_frozen_dot_in_another_dtype(qtype, tile):
    """The head's logits are float32 whatever its input; the input's gradient keeps its dtype."""
    weight = quant.quantise(random("table"), layout("table", tile, qtype))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 32)), jnp.bfloat16)
    y, pull = jax.vjp(lambda x: quant_matmul.frozen_dot(x, weight, quant_whole, -1, jnp.float32), x)
    exact = x.astype(jnp.float32) @ quant.dequantise(weight).T
    assert (y.dtype, pull(y)[0].dtype) == (jnp.float32, jnp.bfloat16)
    # A tiled weight, and the numbers of nf4, are rounded to the dtype of x.
    tolerance = 1e-6 if tile is None and qtype != "nf4" else 0.01
    np.testing.assert_allclose(y, exact, rtol=0, atol=tolerance * np.abs(exact).max())


def quant_whole(weight):
    return weight


def test_frozen_dot_gives_the_weight_no_gradient():
    weight = random("kernel")
    grad = jax.grad(lambda w: quant_matmul.frozen_dot(jnp.ones((2, 32)), w, quant_whole).sum())(
        weight
    )
    assert not grad.any()


@pytest.mark.parametrize("qtype", QTYPES)
def test_frozen_dot_keeps_the_shard_and_not_what_it_gathers(qtype):
    """The residual is the argument itself, whatever the gather makes of it."""
    shard = quant.quantise(random("kernel"), layout("kernel", None, qtype))

    def doubled(weight):
        return jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), weight)

    y, pull = jax.vjp(lambda x: quant_matmul.frozen_dot(x, shard, doubled), jnp.ones((2, 32)))
    assert y.shape == (2, 48)
    kept = jax.tree.leaves(pull)
    assert max(a.size for a in kept) == shard.qvalue.size
    assert max(a.size for a in kept if a.dtype == jnp.float32) == shard.scale.size
    assert pull(jnp.ones((2, 48)))[0].shape == (2, 32)


@pytest.mark.parametrize(("qtype", "tile"), KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_take_rows_is_indexing_the_dequantised_table(qtype, tile, dtype):
    table = random("table")
    if qtype != "float":
        table = quant.quantise(table, layout("table", tile, qtype))
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


@pytest.mark.parametrize("qtype", PACKED)
@pytest.mark.parametrize(
    ("length", "tile", "message"),
    [
        (24, 3, r"quant.tile_size = 3: x.weight: {} keeps two codes a byte, so the tile size must "
                r"be even and at least 4; use 4"),
        (24, 2, r"quant.tile_size = 2: x.weight: .*; use 4"),
        (18, 9, r"quant.tile_size = 9: x.weight: .*; use 6"),
        (9, 3, r"quant.tile_size = 3: x.weight: .*; use 'int8', or name it in quant.skip"),
        (9, None, r"quant.qtype = '{}': x.weight: {} keeps two codes a byte, so embed = 9 must be "
                  r"even and at least 4; use 'int8'"),
        (2, None, r"quant.qtype = '{}': x.weight: .* embed = 2 must be"),
    ],
)  # fmt: skip
def test_what_cannot_hold_two_codes_a_byte(qtype, length, tile, message):
    for shape, axes, contracting in (
        ((length, 8), ("embed", "mlp"), -2),
        ((8, length), ("vocab", "embed"), -1),
    ):
        leaf = param_info.ParamInfo(shape, "float32", axes, contracting=contracting)
        infos = {"x": {"weight": leaf}}
        with pytest.raises(errors.ConfigError, match=message.format(qtype, qtype)):
            quant.quantised_infos(infos, qtype=qtype, tile_size=tile, skip=())
        quant.quantised_infos(infos, qtype="fp8", tile_size=tile, skip=())
        quant.quantised_infos(infos, qtype=qtype, tile_size=tile, skip=("x",))


def test_all_weights_that_cannot_are_named_in_one_error():
    infos = tiny.model(hidden_size=36, num_attention_heads=2, head_dim=18).infos
    with pytest.raises(errors.ConfigError) as caught:
        quant.quantised_infos(infos, qtype="nf4", tile_size=9, skip=("mlp",))
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_compiled_scan_widens_no_more_than_one_layer(qtype):
    """XLA's CPU backend widens a whole stack of int4 or float8 ahead of a loop."""
    layers, width = 16, 64
    leaf = param_info.ParamInfo(
        (layers, width, width), "float32", ("layers", "embed", "mlp"), contracting=-2
    )
    like = quant.quantised_infos({"w": leaf}, qtype=qtype, tile_size=None, skip=())["w"]
    stack = jax.jit(lambda w: quant.quantise(w, like))(jnp.ones(leaf.shape))

    def scan(x, stack):
        return jax.lax.scan(
            lambda x, w: (quant_matmul.frozen_dot(x, w, quant_whole), None), x, stack
        )[0]

    compiled = jax.jit(scan).lower(jnp.ones((1, width)), stack).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * width * width * 4
