"""Meshes, rules and specs: full rank, never trimmed to fit, and gathers that make weights whole."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax.sharding import PartitionSpec as P

from purelora.core import errors, param_info, trees
from purelora.ops import quant
from purelora.sharding import collectives, specs
from purelora.sharding import rules as rules_lib
from tests.support import tiny


def spec(shape, axes, mesh, rules=rules_lib.RULES) -> P:
    leaf = param_info.ParamInfo(shape, "float32", axes, contracting=-2 if len(shape) > 1 else None)
    return specs.spec_tree({"w": leaf}, mesh, rules)["w"]


@pytest.mark.parametrize(
    ("shape", "axes", "sizes", "expected"),
    [
        ((3, 32, 48), ("layers", "embed", "mlp"), (1, 8), P(None, "fsdp", None)),
        ((3, 48, 32), ("layers", "mlp", "embed"), (2, 4), P(None, None, "fsdp")),
        ((64, 32), ("vocab", "embed"), (4, 2), P(None, "fsdp")),
        ((64, 32), ("vocab", "embed"), (1, 2, 4), P("tensor", "fsdp")),
        ((3, 32, 48), ("layers", "embed", "heads"), (2, 1, 4), P(None, None, "tensor")),
        ((3, 48, 32), ("layers", "mlp", "embed"), (1, 2, 2), P(None, "tensor", "fsdp")),
        ((3, 32, 48), ("layers", "embed", "mlp"), (8, 1), P(None, None, None)),
        ((3, 32), ("layers", None), (1, 8), P(None, None)),
        ((32, 32), ("embed", "embed"), (1, 8), P("fsdp", None)),  # A mesh axis is used once.
        ((), (), (1, 8), P()),
    ],
)
def test_rules(shape, axes, sizes, expected):
    got = spec(shape, axes, tiny.mesh(*sizes))
    assert got == expected and len(got) == len(shape)


def test_first_rule_wins():
    rules = rules_lib.Rules((("embed", "data"), ("embed", "fsdp"), ("mlp", "fsdp")))
    assert spec((4, 8), ("embed", "mlp"), tiny.mesh(2, 4), rules) == P("data", "fsdp")


def test_rule_whose_mesh_axis_is_used_gives_way_to_the_next():
    """The order is that of the rules, not that of the dimensions."""
    rules = rules_lib.Rules((("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "data")))
    assert spec((4, 8), ("embed", "mlp"), tiny.mesh(2, 4), rules) == P("data", "fsdp")
    whole = rules_lib.Rules((("mlp", None), *rules.table))
    assert spec((4, 8), ("embed", "mlp"), tiny.mesh(2, 4), whole) == P("fsdp", None)


def test_overrides_come_first_in_the_modules_they_name():
    own = (("head", (("vocab", "fsdp"), ("embed", None))),)
    rules = rules_lib.Rules((("embed", "fsdp"),), own)
    infos = {
        path: param_info.ParamInfo((8, 8), "float32", ("vocab", "embed"), contracting=-1)
        for path in ("head.weight", "a.head.weight", "ahead.weight", "head.up.weight")
    }
    found = specs.spec_tree(trees.unflatten(infos), tiny.mesh(1, 8), rules)
    in_head, elsewhere = P("fsdp", None), P(None, "fsdp")
    assert trees.flatten(found) == {
        "head.weight": in_head, "a.head.weight": in_head, "ahead.weight": elsewhere,
        "head.up.weight": elsewhere,
    }  # fmt: skip


def test_rules_are_read_from_text():
    read = rules_lib.parse_rules(
        ["embed:fsdp", "mlp:none,heads: tensor"], {"lm_head": "vocab:tensor, embed:none"}
    )
    assert read.table == (("embed", "fsdp"), ("mlp", None), ("heads", "tensor"))
    assert read.overrides == (("lm_head", (("vocab", "tensor"), ("embed", None))),)


def test_an_override_that_names_no_module_is_an_error():
    read = rules_lib.parse_rules([], {"lm_head": "vocab:none", "q": "heads:none"})
    axes = {"vocab", "heads", "embed"}
    modules = {"embed_tokens": axes, "layers.self_attn.q_proj": axes}
    with pytest.raises(errors.ConfigError) as caught:
        read.check_overrides(modules)
    assert [p.value for p in caught.value.problems] == ["lm_head", "q"]
    read.check_overrides({**modules, "lm_head": axes, "layers.q": axes})


def test_an_override_for_an_axis_that_its_modules_have_not_is_an_error():
    read = rules_lib.parse_rules([], {"norm": "vocab:none, embed:none", "q_proj": "rank:fsdp"})
    modules = {"layers.norm": ("layers", "embed"), "q_proj": ("embed", "heads")}
    message = r"mesh.overrides\['norm'\] = 'vocab': is no axis of these modules; they have embed"
    with pytest.raises(errors.ConfigError, match=message) as caught:
        read.check_overrides(modules)
    assert len(caught.value.problems) == 1


GIVE_WAY = ["embed:fsdp", "heads:fsdp", "heads:tensor", "mlp:data", "mlp:tensor"]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("axes", "wanted"),
    [(("embed", "heads"), "heads"), (("mlp", "embed"), None), (("vocab", "embed"), None)],
)
def test_all_arrays_of_a_module_are_split_over_tensor_as_its_weight(axes, wanted, sharded):
    """By itself a scale, bias or adapter might follow a rule that gave way in the weight."""
    own = {"vocab": "vocab:fsdp, embed:none"}
    rules = rules_lib.parse_rules([*GIVE_WAY, "vocab:tensor"], own).settled({axes[0]: axes}, {})
    for leaf in (axes, *((axis,) for axis in axes), *(("rank", axis) for axis in axes)):
        declared = {axes[0]: {"leaf": param_info.ParamInfo((8,) * len(leaf), "float32", leaf)}}
        used = rules if leaf == axes else rules.of_adapters(sharded)
        found = specs.spec_tree(declared, tiny.mesh(2, 2, 2), used)[axes[0]]["leaf"]
        split = [axis for axis, to in zip(leaf, found, strict=True) if to == "tensor"]
        assert split == ([wanted] if wanted in leaf else []), (leaf, found)


def test_a_tied_head_is_split_as_the_embedding_is():
    rules = rules_lib.parse_rules(["vocab:tensor"], {"embed_tokens": "vocab:none"})
    axes = {"lm_head": ("vocab", "embed"), "embed_tokens": ("vocab", "embed")}
    for tied, wanted in (({"lm_head": "embed_tokens"}, {}), ({}, {1: "tensor"})):
        table = rules.settled(axes, tied).of("lm_head.lora_b")
        assert rules_lib.chosen(table, ("rank", "vocab")) == wanted


def test_all_bad_rules_are_in_one_error():
    bad = ["embed", "embed:fdsp", "hedas:tensor", "layers:fsdp", "embed:tensor"]
    with pytest.raises(errors.ConfigError) as caught:
        overrides = {"lm_head": "vocab", "(": "vocab:fsdp", "(?i)LM_HEAD": "vocab:fsdp"}
        rules_lib.parse_rules(bad, overrides)
    assert [p.value for p in caught.value.problems] == [*bad, "vocab", "(", "(?i)LM_HEAD"]
    assert "mesh.overrides['lm_head'] = 'vocab': is not a rule" in str(caught.value)
    assert "embed:tensor': cannot be followed: tensor splits the maths along heads" in str(
        caught.value
    )


def test_heads_are_never_cut():
    """9 heads of 64 columns are 576, which 8 divides; storage may be cut so, a matmul may not."""
    m = tiny.model(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(errors.ConfigError) as caught:
        specs.spec_tree(m.infos, tiny.mesh(1, 1, 8), rules_lib.RULES, m.axis_counts)
    named = {p.what.partition(".weight")[0]: p.what for p in caught.value.problems}
    assert set(named) == {f"layers.self_attn.{name}_proj" for name in "qkvo"}
    assert named["layers.self_attn.o_proj"].endswith("9 heads do not divide over 8 devices")
    assert named["layers.self_attn.k_proj"].endswith("3 kv_heads do not divide over 8 devices")
    storage = rules_lib.parse_rules(["heads:fsdp"], {})
    specs.spec_tree(m.infos, tiny.mesh(1, 8, 1), storage, m.axis_counts)
    proposed = ["embed:fsdp", "heads:none", "kv_heads:none", "mlp:tensor", "vocab:tensor"]
    rules = rules_lib.parse_rules(proposed, {})
    specs.spec_tree(m.infos, tiny.mesh(1, 1, 8), rules, m.axis_counts)


@pytest.mark.parametrize(
    ("rules", "overrides", "split"),
    [
        (["heads:tensor"], {}, "q_proj"),
        (["mlp:tensor"], {"gate_proj": "mlp:none"}, "up_proj"),
    ],
)
def test_modules_of_one_computation_are_split_alike(rules, overrides, split):
    m = tiny.model()
    found = specs.spec_tree(m.infos, tiny.mesh(1, 1, 2), rules_lib.parse_rules(rules, overrides))
    with pytest.raises(errors.ConfigError, match=rf"split .*{split}.* over tensor, but not "):
        collectives.shards(found, m.flat_infos)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (8, 1)])
def test_every_spec_has_full_rank_and_leaves_layers_whole(sharded, sizes):
    """Adapters take the spec of their own axes, 3 layers on 8 devices."""
    m = tiny.with_lora(tiny.model())
    rules = rules_lib.RULES.of_adapters(sharded)
    for infos, used in ((m.infos, rules_lib.RULES), (m.adapter_infos(), rules)):
        is_sharded = sharded or infos is m.infos
        found = trees.flatten(specs.spec_tree(infos, tiny.mesh(*sizes), used))
        for path, leaf in trees.flatten(infos).items():
            expected = [
                "fsdp" if axis == "embed" and is_sharded and sizes[1] > 1 else None
                for axis in leaf.axes
            ]
            assert found[path] == P(*expected), path
            assert leaf.axes[0] != "layers" or found[path][0] is None


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ({"w": ((36, 8), ("embed", "mlp"))},
         r"mesh.fsdp = 8: w: embed = 36 does not divide over 8 devices; .*1, 2, 3, 4, 6, 9"),
        ({"layers": {"q": ((3, 8, 20), ("layers", "heads", "embed"))}},
         r"mesh.fsdp = 8: layers.q: embed = 20 does not divide"),
    ],
)  # fmt: skip
def test_dimension_that_does_not_divide(infos, message):
    infos = trees.map_leaves(
        lambda s: param_info.ParamInfo(s[0], "float32", s[1], contracting=-2), infos
    )
    with pytest.raises(errors.ConfigError, match=message):
        specs.spec_tree(infos, tiny.mesh(1, 8))


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("length", "tile", "message"),
    [
        (128, 32, "gives 4 tiles along embed = 128, {}; use 16 (8 tiles), or one scale per"),
        (576, 64, "gives 9 tiles along embed = 576, {}; use 72 (8 tiles)"),
        (32, 16, "gives 2 tiles along embed = 32, {}; use 4 (8 tiles)"),
    ],
)
def test_tile_count_that_does_not_divide(length, tile, message, qtype):
    """The tile that is proposed works."""
    infos = {"w": param_info.ParamInfo((length, 8), "float32", ("embed", "mlp"), contracting=-2)}

    def tree(tile_size):
        laid_out = quant.quantised_infos(infos, qtype=qtype, tile_size=tile_size, skip=())
        return specs.spec_tree(laid_out, tiny.mesh(1, 8))

    text = message.format("not divisible by mesh.fsdp = 8")
    with pytest.raises(errors.ConfigError, match=re.escape(f"quant.tile_size = {tile}: w: {text}")):
        tree(tile)
    proposed = int(message.partition("use ")[2].split()[0])
    assert tree(proposed)["w"].scale == P("fsdp", None)


def test_all_that_does_not_divide_is_in_one_error():
    m = tiny.model(hidden_size=36, head_dim=8)
    with pytest.raises(errors.ConfigError) as caught:
        specs.spec_tree(m.infos, tiny.mesh(1, 8))
    named = {p.what.partition(":")[0] for p in caught.value.problems}
    assert named == {p for p, leaf in m.flat_infos.items() if "embed" in leaf.axes}


def test_scale_specs_follow_the_scale():
    """A dimension of one scale is not sharded; tile counts and output channels are as the codes."""
    infos = {
        "up": param_info.ParamInfo(
            (3, 64, 48), "float32", ("layers", "embed", "mlp"), contracting=-2
        ),
        "down": param_info.ParamInfo(
            (3, 48, 64), "float32", ("layers", "mlp", "embed"), contracting=-2
        ),
        "table": param_info.ParamInfo((40, 64), "float32", ("vocab", "embed"), contracting=-1),
    }

    def scales(tile):
        laid_out = quant.quantised_infos(infos, qtype="int8", tile_size=tile, skip=())
        found = specs.spec_tree(laid_out, tiny.mesh(2, 4))
        assert {k: v.qvalue for k, v in found.items()} == specs.spec_tree(infos, tiny.mesh(2, 4))
        return {k: v.scale for k, v in found.items()}

    whole = P(None, None, "fsdp")
    assert scales(None) == {"up": P(None, None, None), "down": whole, "table": P(None, None)}
    assert scales(8) == {"up": P(None, "fsdp", None), "down": whole, "table": P(None, "fsdp")}


@pytest.mark.parametrize(
    ("data", "fsdp", "shape"),
    [(1, None, (1, 8, 1, 1)), (2, None, (2, 4, 1, 1)), (8, 1, (8, 1, 1, 1)), (2, 4, (2, 4, 1, 1))],
)
def test_mesh_sizes(data, fsdp, shape):
    mesh = specs.make_mesh(data, fsdp, jax.devices())
    assert mesh.axis_names == ("data", "fsdp", "expert", "tensor")
    assert mesh.devices.shape == shape
    assert list(mesh.devices.flat) == jax.devices()
    assert specs.row_ways(mesh) == 8


def test_neighbours_share_a_matmul():
    mesh = specs.make_mesh(2, None, jax.devices(), tensor=2)
    assert mesh.devices.shape == (2, 2, 1, 2) and specs.row_ways(mesh) == 4
    assert list(mesh.devices[0, 0, 0]) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("data", "fsdp", "message"),
    [
        (3, None, r"mesh.data = 3: does not divide the 8 devices; .*1, 2, 4, 8"),
        (
            2,
            2,
            r"mesh.tensor = '2 × 2 × 1 × 1': is 4, but there are 8 devices; leave mesh.fsdp",
        ),
        (16, 1, r"is 16, but there are 8 devices"),
    ],
)
def test_mesh_that_does_not_fit(data, fsdp, message):
    with pytest.raises(errors.ConfigError, match=message):
        specs.make_mesh(data, fsdp, jax.devices())


@pytest.mark.parametrize("tile", ["float", None, 4])
def test_gathers_make_weights_whole(tile):
    """On every device, of whole stacks and of one layer of them."""
    m, mesh = tiny.model(num_hidden_layers=2), tiny.mesh(2, 4)
    base, infos = tiny.weights(m), m.infos
    if tile != "float":
        base, infos = tiny.quantised(m, base, "int8", tile)
    layout = specs.spec_tree(infos, mesh)
    gathers = collectives.shards(layout, m.flat_infos).gathers
    assert set(gathers) == {p for p, leaf in m.flat_infos.items() if "embed" in leaf.axes}

    def gathered(tree):
        whole = trees.flatten(tree)
        whole |= {path: gather(whole[path]) for path, gather in gathers.items()}
        layer = {
            path: gather(jax.tree.map(lambda a: a[1], trees.flatten(tree)[path]))
            for path, gather in gathers.items()
            if path.startswith("layers.")
        }
        return jax.tree.map(lambda a: a[None], (whole, layer))

    run = jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=(layout,),
        out_specs=P(specs.BATCH_AXES),  # The copies of all devices, stacked.
        check_vma=False,
    )
    whole, layer = jax.device_get(jax.jit(run)(jax.device_put(base, specs.shardings(layout, mesh))))
    flat = trees.flatten(jax.device_get(base))
    for device in range(8):
        for path, copies in whole.items():
            one = jax.tree.map(lambda a, d=device: a[d], copies)
            chex.assert_trees_all_equal(one, flat[path])
        for path, copies in layer.items():
            one = jax.tree.map(lambda a, d=device: a[d], copies)
            chex.assert_trees_all_equal(one, jax.tree.map(lambda a: a[1], flat[path]))


def test_gather_hashes_by_value():
    """Gathers are static arguments: equal ones must not compile twice."""
    layout = {"w": P(None, "fsdp"), "q": qwix.QArray(P("fsdp"), P(None), None, jnp.int8)}
    first, second = (collectives.shards(tree, {}).gathers for tree in (layout, dict(layout)))
    assert first == second and hash(first["q"]) == hash(second["q"])
    assert first["q"].dims == (((-1, "fsdp"),), ())


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (8, 1)])
def test_row_numbers_cover_the_micro_batch(sizes):
    mesh = tiny.mesh(*sizes)

    def local(rows):
        count = rows.shape[0]
        total = jnp.full(count, collectives.rows_of_micro_batch(count))
        return collectives.first_row(count) + jnp.arange(count), collectives.varying(total)

    run = collectives.shard_step(local, mesh, P(specs.BATCH_AXES), P(specs.BATCH_AXES))
    numbers, total = jax.jit(run)(jnp.zeros(16))
    np.testing.assert_array_equal(numbers, np.arange(16))
    np.testing.assert_array_equal(total, np.full(16, 16))


def test_gradient_paths():
    """Cast and summed over exactly the batch axes that a spec lacks; only adapters are gathered."""
    whole = P(None, None, None)
    trained = {
        "q": {"lora_a": P(None, "fsdp", None), "lora_b": whole},
        "w": {"weight": P(None, "fsdp", None)},
        "down": {"lora_a": P(None, "tensor", None), "lora_b": whole},
        "table": {"trainable_tokens": P(None, None)},
        "norm": {"weight": P(None)},
        "experts": {"lora_a": P(None, "expert", "fsdp", None)},
    }
    paths = collectives.gradient_paths(trained, {"table": {"weight": P("tensor", "fsdp")}})
    # The whole factor of a split module, and rows of a split table, get parts of their gradient.
    assert paths["down"]["lora_b"] == collectives.GradientPath(
        ("data", "fsdp", "expert", "tensor"), ()
    )
    assert paths["down"]["lora_a"] == collectives.GradientPath(("data", "fsdp", "expert"), ())
    assert paths["table"]["trainable_tokens"].cast == ("data", "fsdp", "expert", "tensor")
    assert paths["norm"]["weight"] == collectives.GradientPath(("data", "fsdp", "expert"), ())
    assert paths["q"]["lora_a"] == collectives.GradientPath(("data", "expert"), ((-2, "fsdp"),))
    assert paths["q"]["lora_b"] == collectives.GradientPath(("data", "fsdp", "expert"), ())
    # Those of the experts that are here are nobody else's, and are not gathered.
    assert paths["experts"]["lora_a"] == collectives.GradientPath(("data",), ((-2, "fsdp"),))
    assert paths["w"]["weight"] == collectives.GradientPath(("data", "expert"), ())


def test_packed_codes_that_do_not_divide_are_said_in_the_weights_own_size():
    infos = {"w": param_info.ParamInfo((24, 8), "float32", ("embed", "mlp"), contracting=-2)}
    laid_out = quant.quantised_infos(infos, qtype="int4", tile_size=None, skip=())
    with pytest.raises(errors.ConfigError, match="embed = 24, two codes a byte, does not divide"):
        specs.spec_tree(laid_out, tiny.mesh(1, 8))
    specs.spec_tree(laid_out, tiny.mesh(2, 4))
