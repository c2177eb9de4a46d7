"""Laws of parameter trees, bits counted, and initial values that depend on key and path alone."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from hypothesis import given, settings
from hypothesis import strategies as st

from purelora.core import param_info, trees
from tests.support import tiny

NAMES = st.text("abc_", min_size=1, max_size=3)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    ),
    max_size=4,
)  # fmt: skip


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_unflatten_is_the_inverse_of_flatten(tree):
    flat = trees.flatten(tree)
    assert trees.unflatten(flat) == tree
    assert trees.flatten(trees.unflatten(flat)) == flat
    assert all(path.count(".") < 10 and not isinstance(v, dict) for path, v in flat.items())


@given(TREES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_combine_is_the_inverse_of_a_partition(tree, random):
    flat = trees.flatten(tree)
    left = {p: v for p, v in flat.items() if random.random() < 0.5}
    right = {p: v for p, v in flat.items() if p not in left}
    assert trees.combine(trees.unflatten(left), trees.unflatten(right)) == tree
    assert trees.combine(trees.unflatten(right), trees.unflatten(left)) == tree
    assert trees.combine(tree) == tree == trees.combine(tree, {})


@given(TREES)
@settings(max_examples=30, deadline=None)
def test_map_leaves_keeps_the_paths(tree):
    doubled = trees.map_leaves(lambda a, b: (a, b), tree, tree)
    assert trees.flatten(doubled) == {p: (v, v) for p, v in trees.flatten(tree).items()}


def test_combine_refuses_a_path_in_two_trees():
    with pytest.raises(ValueError, match=r"a\.b is in more than one"):
        trees.combine({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}})


def test_map_leaves_refuses_other_trees():
    with pytest.raises(ValueError, match=r"trees differ at \['a', 'b'\]"):
        trees.map_leaves(max, {"a": 1}, {"b": 1})


def test_a_quantised_weight_is_one_leaf():
    q = qwix.QArray(jnp.ones((4, 2), jnp.int8), jnp.ones((1, 2)), None, jnp.int8)
    tree = {"a": {"w": q}}
    assert trees.flatten(tree) == {"a.w": q}
    assert trees.map_leaves(lambda w: w.qvalue.shape, tree) == {"a": {"w": (4, 2)}}
    assert trees.count(tree) == 10
    assert trees.bytes_by_dtype(tree) == {"int8": 8, "float32": 8}


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("float32", (3, 5), 60), ("bfloat16", (3, 5), 30), ("int8", (3, 5), 15),
     ("float8_e4m3fn", (3, 5), 15), ("float32", (), 4), ("int8", (1 << 20, 1 << 14), 1 << 34)],
)  # fmt: skip
def test_bytes_of_an_array(dtype, shape, size):
    abstract = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert trees.leaf_bytes(abstract) == size
    assert trees.bytes_by_dtype({"a": abstract, "b": abstract}) == {dtype: 2 * size}


def test_bytes_are_listed_largest_first():
    leaves = {n: jax.ShapeDtypeStruct((8,), jnp.dtype(n)) for n in ("int8", "float32", "bfloat16")}
    assert list(trees.bytes_by_dtype(leaves)) == ["float32", "bfloat16", "int8"]


MATRIX = param_info.ParamInfo((3, 64, 32), "float32", ("layers", "embed", "mlp"), contracting=-2)


@pytest.mark.parametrize("init", ["normal", "he_uniform"])
def test_layers_of_a_stack_have_draws_of_their_own(init):
    values = param_info.initial(dataclasses.replace(MATRIX, init=init), key=jax.random.key(0))
    assert values.shape == (3, 64, 32)
    for i in range(3):
        for j in range(i):
            assert not np.isclose(values[i], values[j]).all(axis=-1).any()


def test_every_layer_of_a_model_differs():
    m = tiny.with_lora(tiny.model())
    base = param_info.initial_tree(m.infos, key=jax.random.key(0))
    for path, value in trees.flatten(base | {"adapters": tiny.adapters(m, fresh=True)}).items():
        constant = "norm" in path or path.endswith("lora_b")
        if "layers." in path and not constant:
            assert len({np.asarray(layer).tobytes() for layer in value}) == tiny.LAYERS, path


@pytest.mark.parametrize(
    ("init", "contracting", "spread"),
    [("normal", -2, 1 / 8), ("normal", -1, 1 / 32**0.5), ("he_uniform", -2, (6 / 64 / 3) ** 0.5)],
)
def test_spread_follows_the_fan_in(init, contracting, spread):
    leaf = dataclasses.replace(MATRIX, init=init, contracting=contracting)
    values = param_info.initial(leaf, key=jax.random.key(0))
    np.testing.assert_allclose(values.std(), spread, rtol=0.03)
    np.testing.assert_allclose(values.mean(), 0, atol=0.01)


@pytest.mark.parametrize(("init", "value"), [("zeros", 0), ("ones", 1)])
def test_constant_values(init, value):
    leaf = param_info.ParamInfo((3, 5), "bfloat16", ("layers", None), init=init)
    chex.assert_trees_all_equal(
        param_info.initial(leaf, key=jax.random.key(0)), jnp.full((3, 5), value, jnp.bfloat16)
    )


def test_unknown_init():
    with pytest.raises(ValueError, match="unknown init 'xavier'"):
        param_info.initial(dataclasses.replace(MATRIX, init="xavier"), key=jax.random.key(0))


def test_values_depend_on_path_and_key_alone():
    """Other leaves beside it do not matter; another path or key does."""
    key, leaf = jax.random.key(0), dataclasses.replace(MATRIX, shape=(2, 4, 3))
    both = param_info.initial_tree({"a": {"w": leaf}, "b": {"w": leaf}}, key=key)
    alone = param_info.initial_tree({"b": {"w": leaf}}, key=key)
    np.testing.assert_array_equal(both["b"]["w"], alone["b"]["w"])
    assert not np.array_equal(both["a"]["w"], both["b"]["w"])
    other = param_info.initial_tree({"b": {"w": leaf}}, key=jax.random.key(1))
    assert not np.array_equal(other["b"]["w"], alone["b"]["w"])


def test_path_keys_are_the_same_on_every_run():
    """Golden: Python's own hash changes from run to run, and other processes resume a run."""
    data = jax.random.key_data(
        param_info.path_key(jax.random.key(0), "layers.self_attn.q_proj.lora_a")
    )
    assert data.tolist() == [424781122, 3697040833]


def test_abstract_is_what_initial_gives():
    for leaf in (MATRIX, dataclasses.replace(MATRIX, dtype="bfloat16", init="he_uniform")):
        chex.assert_trees_all_equal_shapes_and_dtypes(
            param_info.initial(leaf, key=jax.random.key(0)), leaf.abstract
        )


def test_shape_and_axes_must_agree():
    with pytest.raises(AssertionError):
        param_info.ParamInfo((2, 3), "float32", ("embed",))
