"""The axis of layers: its laws, the table of docs/scan_axis.md, and all that lies in stacks."""

import dataclasses
import functools
import pathlib
import re
import string

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import layer_axis, param_info, train_state, trees
from purelora.core.layer_axis import Pair, SpecError
from purelora.models import stacks as stacks_of
from purelora.ops import quant
from purelora.sharding import specs
from tests.support import families, tiny

SIZES = (2, 3, 5, 7)
LAYERS = 11  # Unlike all SIZES, so that a size tells which dimension it is.
QUICK = settings(max_examples=150, deadline=None)


def of_type(kind, entries):
    return P(*entries) if kind is P else kind(entries)


@st.composite
def pairs(draw, least=0):
    """A spec of any type, short or full, and an array whose sizes tell its dimensions apart."""
    shape = draw(st.permutations(SIZES))[: draw(st.integers(least, len(SIZES)))]
    names = draw(st.permutations(string.ascii_lowercase[: 2 * len(shape)]))
    entries = [draw(st.sampled_from([None, n, (n, n.upper())])) for n in names[: len(shape)]]
    length = draw(st.integers(0, len(shape)))
    kind = draw(st.sampled_from([P, tuple, list]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return Pair(of_type(kind, entries[:length]), array)


@st.composite
def pairs_and_axes(draw, count=1):
    pair = draw(pairs(least=1))
    axes = st.integers(-pair.arrays.ndim, pair.arrays.ndim - 1)
    return pair, *(draw(axes) for _ in range(count))


def padded(pair):
    """The entries of a pair's spec, one a dimension."""
    return [*pair.specs, *[None] * (pair.arrays.ndim - len(pair.specs))]


def check(changed, expected, pair, name=None):
    """The array is the expected one; the entry of each size is what it was; the type is kept."""
    np.testing.assert_array_equal(changed.arrays, expected)
    entry_of = dict(zip(pair.arrays.shape, padded(pair), strict=True)) | {1: name}
    assert list(changed.specs) == [entry_of[size] for size in changed.arrays.shape]
    assert type(changed.specs) is type(pair.specs)


def same(one, other):
    """Whether two Pairs of numpy arrays are equal, spec types included."""
    leaves = [jax.tree.leaves_with_path(p.arrays) for p in (one, other)]
    assert [path for path, _ in leaves[0]] == [path for path, _ in leaves[1]]
    for (_, a), (_, b) in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.specs == other.specs


# Laws.


@given(pairs(), st.data())
@QUICK
def test_add_inserts_one_dimension_in_both(pair, data):
    rank = pair.arrays.ndim + 1
    axis = data.draw(st.integers(-rank, rank - 1))
    added = layer_axis.add_scan_axis(pair, axis, "layers")
    check(added, np.expand_dims(pair.arrays, axis), pair, "layers")
    assert added.specs == layer_axis.add_scan_axis(pair.specs, axis, "layers", rank=rank - 1)
    for way in ("layers", axis, axis % rank):
        back = layer_axis.remove_scan_axis(added, way)
        check(back, pair.arrays, pair)
        assert back.specs == layer_axis.remove_scan_axis(added.specs, way, rank=rank)


@given(pairs_and_axes())
@QUICK
def test_add_undoes_remove(case):
    pair, axis = case
    rank = pair.arrays.ndim
    full = of_type(type(pair.specs), padded(pair))
    entry = full[axis]
    without = layer_axis.remove_scan_axis(pair.specs, axis, rank=rank)
    assert layer_axis.add_scan_axis(without, axis, entry, rank=rank - 1) == full
    for layer in range(pair.arrays.shape[axis]):
        kept = layer_axis.remove_scan_axis(pair, axis, layer=layer)
        check(kept, np.take(pair.arrays, layer, axis), pair)


@given(pairs_and_axes(count=2))
@QUICK
def test_move_takes_value_and_spec_along_and_has_an_inverse(case):
    pair, source, target = case
    moved = layer_axis.move_scan_axis(pair, source, target)
    check(moved, np.moveaxis(pair.arrays, source, target), pair)
    back = layer_axis.move_scan_axis(moved, target, source)
    check(back, pair.arrays, pair)


@given(pairs_and_axes(count=2))
@QUICK
def test_move_is_remove_and_then_add(case):
    pair, source, target = case
    rank = pair.arrays.ndim
    moved = layer_axis.move_scan_axis(pair.specs, source, target, rank=rank)
    without = layer_axis.remove_scan_axis(pair.specs, source, rank=rank)
    entry = padded(pair)[source]
    assert moved == layer_axis.add_scan_axis(without, target, entry, rank=rank - 1)
    layers = layer_axis.unstack(pair, source)
    same(layer_axis.stack(layers, target, entry), layer_axis.move_scan_axis(pair, source, target))


@given(pairs_and_axes(count=2))
@QUICK
def test_negative_positions_are_the_positive_ones(case):
    pair, source, target = case
    rank = pair.arrays.ndim
    moved = layer_axis.move_scan_axis(pair, source, target)
    same(moved, layer_axis.move_scan_axis(pair, source % rank, target % rank))
    name = padded(pair)[source]
    if isinstance(name, str):
        same(moved, layer_axis.move_scan_axis(pair, name, target))


@given(pairs(), st.integers(1, 3), st.data())
@QUICK
def test_stack_and_unstack(pair, count, data):
    axis = data.draw(st.integers(-pair.arrays.ndim - 1, pair.arrays.ndim))
    layers = [
        Pair({"a": [pair.specs], "b": ()}, {"a": [pair.arrays + i], "b": ()}) for i in range(count)
    ]
    stacked = layer_axis.stack(layers, axis, "layers")
    expected = np.stack([layer.arrays["a"][0] for layer in layers], axis)
    np.testing.assert_array_equal(stacked.arrays["a"][0], expected)
    one = layer_axis.add_scan_axis(layers[0], axis, "layers")
    assert stacked.specs == one.specs
    for back in (layer_axis.unstack(stacked, axis), layer_axis.unstack(stacked, "layers")):
        assert len(back) == count
        for layer, again in zip(layers, back, strict=True):
            check(Pair(again.specs["a"][0], again.arrays["a"][0]), layer.arrays["a"][0], pair)


@given(pairs(), st.integers(0, 2), st.integers(0, 2))
@QUICK
def test_nested_stacks_by_name(pair, outer, inner):
    """Two axes added one after the other come off in any order."""
    rank = pair.arrays.ndim
    both = layer_axis.add_scan_axis(pair, min(outer, rank), "layers")
    both = layer_axis.add_scan_axis(both, min(inner, rank + 1), "local")
    for first, second in (("layers", "local"), ("local", "layers")):
        one = layer_axis.remove_scan_axis(both, first)
        assert second in one.specs and first not in one.specs
        check(layer_axis.remove_scan_axis(one, second), pair.arrays, pair)


# Declarations.


@st.composite
def declarations(draw):
    """A declaration of one layer, and the same as a Pair of its axes and an abstract array."""
    rank = draw(st.integers(1, len(SIZES)))
    info = param_info.ParamInfo(
        tuple(draw(st.permutations(SIZES))[:rank]),
        draw(st.sampled_from(["float32", "int8"])),
        tuple(draw(st.sampled_from([None, letter])) for letter in string.ascii_lowercase[:rank]),
        contracting=draw(st.sampled_from([None, *range(-rank, 0)])),
        is_router=draw(st.booleans()),
    )
    return info, Pair(info.axes, info.abstract)


def check_declared(info, pair, layer):
    """The declaration has the shape and axes of the Pair, and all else of the layer."""
    assert (info.axes, info.abstract) == pair
    summed = (layer.contracting, info.contracting)
    assert summed == (None, None) or layer.shape[summed[0]] == info.shape[summed[1]]
    changes = {"shape": layer.shape, "axes": layer.axes, "contracting": layer.contracting}
    assert dataclasses.replace(info, **changes) == layer


@given(declarations(), st.integers(1, 4), st.data())
@QUICK
def test_a_declaration_changes_as_specs_and_arrays_do(case, count, data):
    info, pair = case
    rank = len(info.shape) + 1
    axis, target = (data.draw(st.integers(-rank, rank - 1)) for _ in range(2))
    added = layer_axis.add_scan_axis(info, axis, "layers")
    check_declared(added, layer_axis.add_scan_axis(pair, axis, "layers"), info)
    stacked = layer_axis.stack([info] * count, axis, "layers")
    check_declared(stacked, layer_axis.stack([pair] * count, axis, "layers"), info)
    assert stacked.is_stacked and stacked.shape[axis] == count
    for where in (axis, axis % rank, "layers"):
        assert layer_axis.remove_scan_axis(added, where) == info
        assert layer_axis.unstack(stacked, where) == [info] * count
        assert layer_axis.remove_scan_axis(stacked, where, layer=count - 1) == info
    moved = layer_axis.move_scan_axis(stacked, axis, target)
    as_pair = Pair(stacked.axes, stacked.abstract)
    check_declared(moved, layer_axis.move_scan_axis(as_pair, axis, target), info)
    assert moved == layer_axis.stack([info] * count, target, "layers")
    assert layer_axis.move_scan_axis(moved, target, axis) == stacked
    assert layer_axis.declared_layer(stacked) == layer_axis.declared_layer(info) == info


def test_what_a_matmul_sums_over_is_not_removed():
    info = param_info.ParamInfo((1, 8), "float32", ("embed", "mlp"), contracting=-2)
    with pytest.raises(SpecError, match=r"w\.weight = .*axis 0 is what a matmul sums over"):
        layer_axis.remove_scan_axis({"w": {"weight": info}}, "embed")
    other = dataclasses.replace(info, init="zeros")
    with pytest.raises(SpecError, match="a = .*is declared otherwise in another layer"):
        layer_axis.stack([{"a": info}, {"a": other}])


def of_stacks(m):
    """For each stack of a model: the declarations of one layer, their number and of the stack."""
    for stack in stacks_of.of(m.config):
        one = m.family.layer_infos(stack.cfg, "float32")
        declared = functools.reduce(lambda tree, part: tree[part], stack.path.split("."), m.infos)
        yield one, len(stack.layers), declared


@pytest.mark.parametrize("family", families.CONFIGS)
def test_all_that_is_derived_of_a_stack_is_the_stack_of_one_layers(family):
    """Declarations, their order, quantised layouts in tiles and mesh specs of every family."""
    m = tiny.model(family)
    mesh = tiny.mesh(1, 2)
    for one, count, declared in of_stacks(m):
        layers = [one] * count
        assert layer_axis.stack(layers, name="layers") == declared
        assert list(trees.flatten(declared)) == list(trees.flatten(one))
        assert layer_axis.unstack(declared, "layers") == layers
        layout = {"qtype": "int8", "tile_size": 4, "skip": ()}
        quantised = quant.quantised_infos(one, **layout)
        stacked = layer_axis.stack([quantised] * count, name="layers")
        assert stacked == quant.quantised_infos(declared, **layout)
        for infos, of_stack in ((one, declared), (quantised, stacked)):
            abstract = jax.tree.map(lambda info: info.abstract, infos)
            pair = Pair(specs.spec_tree(infos, mesh), abstract)
            assert layer_axis.stack([pair] * count).specs == specs.spec_tree(of_stack, mesh)


def test_a_layer_put_into_a_stack_is_the_one_taken_out():
    stacked = jnp.arange(24.0).reshape(4, 3, 2)

    @jax.jit
    def changed(number):
        layer = layer_axis.layer_of({"w": stacked}, number)["w"] + 100
        return layer_axis.with_layer(stacked, layer, number)

    for number in range(4):
        expected = np.array(stacked)
        expected[number] += 100
        np.testing.assert_array_equal(changed(number), expected)
        same_layer = layer_axis.layer_of(changed(number), number)
        np.testing.assert_array_equal(same_layer, expected[number])


# The documentation.

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "scan_axis.md"
ROWS = [
    [cell.strip() for cell in re.split(r"\s*\|\s*", line)[1:6]]
    for line in TABLE.read_text("utf-8").splitlines()
    if re.match(r"\| `(add|remove|move)\(", line)
]


def value(cell):
    return eval(cell.strip("`"), {"P": P})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:3]))
def test_the_documentations_table(row):
    call, spec, given_shape, spec_out, shape_out = row
    name, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", call).groups()
    shape, function = value(given_shape), getattr(layer_axis, f"{name}_scan_axis")
    x, keywords = value(spec), {}
    if isinstance(shape, tuple):
        x = Pair(x, np.zeros(shape))
    else:
        keywords = {"rank": shape}

    def called():
        return eval(f"f(x, {arguments}, **k)", {"f": function, "x": x, "k": keywords})

    if spec_out.startswith("error: "):
        with pytest.raises(SpecError, match=re.escape(spec_out.removeprefix("error: "))):
            called()
        return
    out = called()
    if isinstance(shape, tuple):
        assert out.arrays.shape == value(shape_out)
        out = out.specs
    assert out == value(spec_out) and type(out) is type(value(spec_out))


def test_the_table_was_found():
    assert len(ROWS) > 40 and all(len(row) == 5 for row in ROWS)


# Errors.


def test_all_wrong_leaves_of_a_tree_are_named():
    tree = {"a": P("layers", "embed"), "b": {"c": P("embed"), "d": [P("layers", "layers", "x")]}}
    arrays = {"a": np.ones((1, 4)), "b": {"c": np.ones(4), "d": [np.ones((1, 1, 4))]}}
    with pytest.raises(SpecError) as caught:
        layer_axis.remove_scan_axis(Pair(tree, arrays), "layers")
    assert [problem.where for problem in caught.value.problems] == ["b.c", "b.d.0"]
    assert isinstance(caught.value, ValueError)
    long = Pair({"a": P("x", "y")}, {"a": np.ones(3)})
    for function, arguments in (
        (layer_axis.add_scan_axis, (0, "layers")),
        (layer_axis.remove_scan_axis, ("x",)),
        (layer_axis.move_scan_axis, (0, 0)),
        (layer_axis.unstack, (0,)),
    ):
        with pytest.raises(SpecError, match="a = .*has 2 entries for 1 dimensions"):
            function(long, *arguments)


def test_what_does_not_belong_together_is_refused():
    spec, array = P("a"), np.ones((1, 2))
    with pytest.raises(SpecError, match="(?s)another structure.*'b'"):
        layer_axis.add_scan_axis(Pair({"b": spec}, {"c": array}), 0)
    weight = qwix.QArray(np.ones((1, 2), np.int8), array, None, "int8")
    other = qwix.QArray(spec, spec, None, "int4")
    with pytest.raises(SpecError, match="another structure"):
        layer_axis.add_scan_axis(Pair(other, weight), 0)
    with pytest.raises(SpecError, match="rank belongs with a bare spec"):
        layer_axis.add_scan_axis(spec, 0)
    with pytest.raises(SpecError, match="rank belongs with a bare spec"):
        layer_axis.add_scan_axis(Pair(spec, array), 0, rank=2)
    with pytest.raises(SpecError, match="c = .*is not a spec"):
        layer_axis.add_scan_axis(Pair({"c": "embed"}, {"c": array}), 0)
    with pytest.raises(SpecError, match="layer 1 is not one of 1"):
        layer_axis.remove_scan_axis(Pair(spec, array), 0, layer=1)


@pytest.mark.parametrize(
    ("layers", "wrong"),
    [
        ([], "holds no layer"),
        ([Pair({"a": P()}, {"a": np.ones(2)}), Pair({"b": P()}, {"b": np.ones(2)})], "structure"),
        ([Pair({"a": P()}, {"a": np.ones(n)}) for n in (2, 3)], r"a = .*shape \(3,\)"),
        ([Pair({"a": P()}, {"a": np.ones(2, t)}) for t in "fd"], "a = .*dtype float64"),
        ([Pair({"a": P(n)}, {"a": np.ones(2)}) for n in "xy"], "a = .*another layer"),
    ],
)
def test_layers_that_differ_are_not_stacked(layers, wrong):
    with pytest.raises(SpecError, match=wrong):
        layer_axis.stack(layers)


def test_stacks_that_differ_are_not_taken_apart():
    arrays = {"a": np.ones((3, 2)), "b": np.ones((2, 3))}
    with pytest.raises(SpecError, match="3 in a, 2 in b"):
        layer_axis.unstack(Pair({"a": P(), "b": P()}, arrays), 0)
    with pytest.raises(SpecError, match="no array"):
        layer_axis.unstack(Pair({}, {}), 0)


# What lies in stacks.


def test_a_partition_spec_keeps_what_else_it_says():
    spec = P("x", P.UNCONSTRAINED, unreduced={"y"})
    moved = layer_axis.move_scan_axis(spec, 0, -1, rank=3)
    assert moved == P(P.UNCONSTRAINED, None, "x", unreduced={"y"})


@pytest.mark.parametrize("target", [0, 1, -1])
def test_shards_stay_where_they_are(target):
    """The moved spec places the moved array; no device gets other bytes, nor anything is sent."""
    mesh = tiny.mesh(2, 4)
    pair = Pair(P(None, "fsdp", "data"), jnp.arange(3 * 8 * 4).reshape(3, 8, 4))
    placed = jax.device_put(pair.arrays, NamedSharding(mesh, pair.specs))
    moved = layer_axis.move_scan_axis(pair, 0, target)
    sharding = NamedSharding(mesh, moved.specs)
    jitted = jax.jit(
        lambda a: layer_axis.move_scan_axis(Pair(pair.specs, a), 0, target).arrays,
        in_shardings=placed.sharding,
        out_shardings=sharding,
    )
    whole = jax.device_put(moved.arrays, sharding)
    for array in (whole, jitted(placed)):
        for before, after in zip(placed.addressable_shards, array.addressable_shards, strict=True):
            assert before.device == after.device
            np.testing.assert_array_equal(np.moveaxis(before.data, 0, target), after.data)
    text = jitted.lower(placed).compile().as_text()
    assert not re.search("all-|collective-|reduce-scatter", text)


@pytest.fixture(scope="module")
def stacks():
    """Logical specs and weights of the layers of a tiny model, quantised in tiles, adapted."""
    model = tiny.with_lora(tiny.model())
    base, infos = tiny.quantised(model, tiny.weights(model), "int8", tile=16)
    infos = trees.combine(infos["layers"], model.adapter_infos()["layers"])
    arrays = trees.combine(base["layers"], tiny.adapters(model)["layers"])
    axes = jax.tree.map(
        lambda i: i.axes, infos, is_leaf=lambda i: isinstance(i, param_info.ParamInfo)
    )
    return Pair(axes, jax.device_get(arrays)), infos


def test_stacks_of_a_quantised_and_adapted_model(stacks):
    stacked, infos = stacks
    layers = layer_axis.unstack(stacked, "layers")
    assert len(layers) == tiny.LAYERS
    for number, layer in enumerate(layers):
        flat, axes = trees.flatten(layer.arrays), trees.flatten(layer.specs)
        for path, whole in trees.flatten(stacked.arrays).items():
            one = quant.dequantise(flat[path])
            np.testing.assert_array_equal(one, quant.dequantise(whole)[number])
            declared = trees.flatten(infos)[path]
            is_quantised = isinstance(declared, qwix.QArray)
            for part in ("qvalue", "scale") if is_quantised else ("",):
                pick = (lambda x, part=part: getattr(x, part)) if part else (lambda x: x)
                assert pick(axes[path]) == pick(declared).axes[1:]
    same(layer_axis.stack(layers, 0, "layers"), stacked)
    maxtext = layer_axis.move_scan_axis(stacked, "layers", 1)
    assert maxtext.arrays["self_attn"]["q_proj"]["weight"].scale.shape[1] == tiny.LAYERS
    same(layer_axis.stack(layers, 1, "layers"), maxtext)
    same(layer_axis.move_scan_axis(maxtext, "layers", 0), stacked)


def test_specs_of_one_layer_for_the_body_of_a_scan(stacks):
    stacked, infos = stacks
    abstract = jax.eval_shape(lambda: stacked.arrays)
    body = layer_axis.remove_scan_axis(Pair(stacked.specs, abstract), "layers", layer=0)
    same_specs = layer_axis.unstack(stacked, 0)[0].specs
    assert body.specs == same_specs
    sliced = jax.eval_shape(lambda t: jax.tree.map(lambda a: a[0], t), abstract)
    assert body.arrays == sliced
    again = layer_axis.stack([body] * tiny.LAYERS, 0, "layers")
    assert again == Pair(stacked.specs, abstract)


@pytest.mark.parametrize(
    ("scale_shape", "scale_spec"),
    [
        ((3, 1, 8), P("layers", None, "mlp")),
        ((3, 4, 8), P("layers", "embed", "mlp")),
        ((1, 1, 8), P(None, None, "mlp")),
    ],
)
def test_one_spec_of_a_quantised_weight_fits_codes_and_scales(scale_shape, scale_spec):
    weight = qwix.QArray(np.zeros((3, 16, 8), np.int8), np.zeros(scale_shape, np.float32))
    pair = Pair({"w": P("layers", "embed", "mlp")}, {"w": weight})
    same_place = layer_axis.move_scan_axis(pair, 0, 0).specs["w"]
    assert (same_place.qvalue, same_place.scale) == (P("layers", "embed", "mlp"), scale_spec)
    moved = layer_axis.move_scan_axis(pair, 0, 1)
    assert moved.specs["w"].scale == P(scale_spec[1], scale_spec[0], scale_spec[2])
    assert moved.arrays["w"].scale.shape == tuple(scale_shape[i] for i in (1, 0, 2))
    assert moved.arrays["w"].qtype == weight.qtype
    if scale_shape[0] == 1:
        with pytest.raises(SpecError, match=r"w\.scale = .*has no axis 'layers'"):
            layer_axis.unstack(pair, "layers")


def test_a_stack_of_one_layer_keeps_its_name_in_the_scales():
    weight = qwix.QArray(np.zeros((1, 16, 8), np.int8), np.zeros((1, 1, 8), np.float32))
    (layer,) = layer_axis.unstack(Pair(P("layers", "embed", "mlp"), weight), "layers")
    assert (layer.specs.qvalue, layer.specs.scale) == (P("embed", "mlp"), P(None, "mlp"))


def test_moments_of_adam_move_with_their_weights():
    weights = {
        "layers": {"w": jax.ShapeDtypeStruct((3, 8, 4), jnp.float32)},
        "head": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    }
    spec_tree = {"layers": {"w": P(None, "fsdp", None)}, "head": P("fsdp", None)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def in_layers(path):
        return "layers" in path.split(".")

    def state_of(pair):
        shapes = jax.eval_shape(tx.init, pair.arrays)
        return Pair(train_state.state_specs(pair.specs, tx, pair.arrays, P()).opt_state, shapes)

    pair = Pair(spec_tree, weights)
    moved_weights = layer_axis.move_scan_axis(pair, 0, 1, where=in_layers)
    moved_state = layer_axis.move_scan_axis(state_of(pair), 0, 1, where=in_layers)
    assert moved_weights.specs["layers"]["w"] == P("fsdp", None, None)
    assert moved_weights.specs["head"] == P("fsdp", None)
    assert moved_state == state_of(moved_weights)
    with pytest.raises(SpecError, match=r"count = P\(\): axis 1 is out of range"):
        layer_axis.move_scan_axis(state_of(pair), 0, 1)


def test_nnx_models_stacked_along_another_axis():
    """Moving the axis is what `nnx.vmap` does with another `out_axes`."""

    def layers_along(axis):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(out_axes=axis, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make(rngs):
            kernel_init = nnx.with_partitioning(
                nnx.initializers.normal(), ("embed", "mlp"), eager_sharding=False
            )
            return nnx.Linear(8, 4, use_bias=False, kernel_init=kernel_init, rngs=rngs)

        found = nnx.state(make(nnx.Rngs(0)))
        return Pair(*(nnx.to_pure_dict(t) for t in (nnx.get_partition_spec(found), found)))

    first, second = layers_along(0), layers_along(1)
    assert first.specs["kernel"] == P("layers", "embed", "mlp")
    same(layer_axis.move_scan_axis(first, "layers", 1), second)
    same(layer_axis.move_scan_axis(second, "layers", 0), first)


def test_random_keys_are_arrays_too(key):
    keys = jax.random.split(key, (3, 2))
    moved = layer_axis.move_scan_axis(Pair(P("layers"), keys), 0, 1)
    assert moved.specs == P(None, "layers")
    assert (jax.random.key_data(moved.arrays) == jax.random.key_data(keys).swapaxes(0, 1)).all()
    layers = layer_axis.unstack(moved, "layers")
    again = layer_axis.stack(layers, -1, "layers").arrays
    assert (jax.random.key_data(again) == jax.random.key_data(moved.arrays)).all()


def test_placed_weights_of_a_mesh():
    """Codes and scales of mesh specs place their layers: specs that `specs` made, unstacked."""
    mesh = tiny.mesh(1, 2)
    model = tiny.model()
    base, infos = tiny.quantised(model, tiny.weights(model), "int8", tile=16)
    pair = Pair(specs.spec_tree(infos, mesh)["layers"], base["layers"])
    for layer in layer_axis.unstack(pair, 0):
        jax.device_put(layer.arrays, specs.shardings(layer.specs, mesh))
    q_proj = layer.specs["self_attn"]["q_proj"]["weight"]
    assert "fsdp" in q_proj.qvalue and "fsdp" in q_proj.scale
