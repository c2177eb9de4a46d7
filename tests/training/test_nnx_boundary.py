"""The NNX boundary: a real module round trip, and splits that are partitions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import PartitionSpec as P

from purelora.core import errors, param_info, trees
from purelora.core.batch import Inputs
from purelora.interop import builtin
from purelora.lora import targets
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.sharding import rules, specs
from purelora.training import nnx_boundary
from tests.support import tiny


def make(qtype: str = "int8"):
    """The tiny model's trees, their specs, and the model."""
    model = causal_lm.from_hf(builtin.tiny().source.config, "tiny", dtype="float32")
    model = tiny.with_lora(model, r=2)
    base = param_info.initial_tree(model.infos, key=jax.random.key(0))
    base_infos = quant.quantised_infos(model.infos, qtype=qtype, tile_size=None, skip=())
    base = trees.map_leaves(
        lambda w, i: quant.quantise(w, i) if isinstance(i, qwix.QArray) else w, base, base_infos
    )
    adapters = param_info.initial_tree(model.adapter_infos(), key=jax.random.key(1))
    adapters = jax.tree.map(lambda leaf: leaf + 0.01, adapters)
    mesh = specs.make_mesh(1, 8, jax.devices())
    placed = trees.combine(
        specs.spec_tree(base_infos, mesh),
        specs.spec_tree(model.adapter_infos(), mesh, rules.RULES.of_adapters(False)),
    )
    return model, base, adapters, placed


@pytest.mark.parametrize("qtype", ["none", "int8"])
def test_trees_survive_the_round_trip(qtype):
    model, base, adapters, placed = make(qtype)
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    split = nnx_boundary.split(module, nnx_boundary.trainable_filter(targets.Adaptation()))
    chex.assert_trees_all_equal(split.trainable, adapters)
    chex.assert_trees_all_equal(split.base, base)
    again = nnx_boundary.merge(split.graphdef, split.trainable, split.base)
    chex.assert_trees_all_equal(
        nnx_boundary.split(again, nnx.LoRAParam)[1:], (split.trainable, split.base)
    )


def test_the_module_computes_the_models_logits_and_sees_trained_adapters():
    model, base, adapters, placed = make()
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 7)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(7), tokens.shape)
    inputs = Inputs(tokens, positions, jnp.ones_like(tokens))
    np.testing.assert_allclose(
        module(tokens), model.logits(adapters, base, inputs), rtol=1e-6, atol=1e-6
    )
    split = nnx_boundary.split(module, nnx.LoRAParam)
    moved = jax.tree.map(lambda leaf: leaf * 2, split.trainable)
    trained = nnx_boundary.merge(split.graphdef, moved, split.base)
    assert not np.allclose(trained(tokens), module(tokens))


def test_leaves_have_their_kind_and_sharding_metadata():
    model, base, adapters, placed = make()
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    q_proj = module.layers.self_attn.q_proj
    assert type(q_proj.lora_a) is nnx.LoRAParam
    assert type(q_proj.weight) is nnx.Param
    assert isinstance(q_proj.weight.get_value(), qwix.QArray)
    assert q_proj.weight.get_metadata()["out_sharding"] == (None, "fsdp", None)
    assert P(*q_proj.lora_b.get_metadata()["out_sharding"]) == P(None, None, None)


def test_without_lora_every_parameter_is_trained_and_the_base_is_empty():
    model, base, _, placed = make("none")
    module = nnx_boundary.wrap(base, {}, placed, model.logits)
    split = nnx_boundary.split(module, nnx_boundary.trainable_filter(None))
    chex.assert_trees_all_equal(split.trainable, base)
    assert split.base == {}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ((nnx.Param,), "takes adapters and base alike"),
        ((nnx.BatchStat,), "takes no leaf"),
        ((nnx.LoRAParam, nnx.Param), "leaves match both filters"),
        ((nnx.LoRAParam, nnx.BatchStat), "match neither"),
    ],
)
def test_splits_that_are_no_partition_are_refused(filters, message):
    model, base, adapters, placed = make()
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    with pytest.raises(errors.ConfigError, match=message):
        nnx_boundary.split(module, *filters)


def test_leaves_that_are_not_parameters_are_refused_by_name():
    model, base, adapters, placed = make()
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    module.seen = nnx.BatchStat(jnp.zeros(()))
    with pytest.raises(errors.ConfigError, match=r"seen \(BatchStat\)"):
        nnx_boundary.split(module, nnx.LoRAParam)


def test_trees_that_share_a_path_are_refused():
    model, base, _, placed = make()
    with pytest.raises(ValueError, match="more than one"):
        nnx_boundary.wrap(base, base, placed, model.logits)


def test_graphdef_is_static_and_equal_for_repeated_splits():
    model, base, adapters, placed = make()
    module = nnx_boundary.wrap(base, adapters, placed, model.logits)
    first, second = (nnx_boundary.split(module, nnx.LoRAParam).graphdef for _ in range(2))
    assert first == second and hash(first) == hash(second)
