"""Adapters on experts: what takes them, their shapes and values, and what they compute."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from purelora.config import checks, command_line, schema
from purelora.core import errors, trees
from purelora.lora import adapters as lora
from purelora.models import blocks, stacks
from purelora.training import plan_report, planning
from tests.support import families, tiny
from tests.support.expert_adapters import EXPERTS, lora_masked

MIXTURES = ("mixtral", "qwen3_moe")


def taken(family: str, word: str) -> dict[str, list[str]]:
    """The modules that a word takes, and their names."""
    m = tiny.with_lora(tiny.model(family), word)
    return {path: list(target.names) for path, target in m.adaptation.targets.items()}


@pytest.mark.parametrize("family", families.CONFIGS)
def test_no_layer_is_left_out_of_a_word(family):
    """Every layer weight with two dimensions or more, except routers, can get an adapter."""
    m = tiny.model(family)
    wanted = {
        path.removesuffix(".weight"): [
            path.removesuffix(".weight").replace(stack.path, f"model.layers.{i}", 1)
            for i in stack.layers
        ]
        for stack in stacks.of(m.config)
        for path, leaf in m.flat_infos.items()
        if path.startswith(f"{stack.path}.") and len(leaf.shape) > 2
        and not path.endswith((".gate.weight", ".router.proj.weight", ".router.weight", ".bias"))
    }  # fmt: skip
    # What Gemma 4 has beside attention and MLP, in the layers and before them.
    own = {path for path in wanted if "per_layer" in path}
    before = {path: [f"model.{path}"] for path in ["per_layer_model_projection"] if own}
    assert taken(family, "all-linear") == wanted | before
    attention, mlp = taken(family, "attention"), taken(family, "mlp")
    assert attention == {path: names for path, names in wanted.items() if "self_attn" in path}
    assert attention | mlp == {path: wanted[path] for path in wanted.keys() - own}
    assert not attention.keys() & mlp.keys()
    if m.config.experts is not None:
        assert taken(family, "experts") == {p: n for p, n in wanted.items() if ".experts." in p}
    else:
        with pytest.raises(errors.ConfigError, match="'experts': matches no linear module"):
            taken(family, "experts")


def test_experts_by_name_by_parameter_and_by_layer():
    m = tiny.model("qwen3_moe")

    def found(**settings):
        adapted = m.adapted(tiny.lora_config(**{"target_modules": ()} | settings))
        return {name for t in adapted.adaptation.targets.values() for name in t.names}

    def experts(*matrices, layers=range(3)):
        return {f"model.layers.{i}.mlp.experts.{n}_proj" for i in layers for n in matrices}

    routers = {f"model.layers.{i}.mlp.gate" for i in range(3)}
    assert found(target_modules=("gate_proj",)) == experts("gate")
    assert found(target_modules=("gate",)) == routers
    assert found(target_modules=r".*\.1\.mlp\..*") == experts("gate", "up", "down", layers=[1]) | {
        "model.layers.1.mlp.gate"
    }
    assert found(target_modules="experts", layers_to_transform=(2,)) == experts(
        "gate", "up", "down", layers=[2]
    )
    joined = ("mlp.experts.gate_up_proj", "gate.weight")
    assert found(target_parameters=joined) == experts("gate", "up") | routers
    assert found(target_parameters=joined[:1], exclude_modules=("up_proj",)) == experts("gate")
    one = "model.layers.1.mlp.experts.down_proj"
    some = {"target_parameters": (one, "gate.weight"), "layers_to_transform": (0,)}
    assert found(**some) == {one, "model.layers.0.mlp.gate"}
    with pytest.raises(errors.ConfigError, match=r"target_parameters = 'gate_up': matches no para"):
        found(target_parameters=("gate_up",))
    with pytest.raises(errors.ConfigError, match=r"target_modules = \(\): is empty"):
        settings = command_line.parse(["--config=configs/tiny.py"], flags=()).config
        empty = dataclasses.replace(settings.lora, target_modules=())
        raise errors.ConfigError.of(checks.check(dataclasses.replace(settings, lora=empty)))


def test_shapes_axes_draws_and_counts():
    m = tiny.with_lora(tiny.model("qwen3_moe"), "all-linear", r=4, rank_pattern={"up_proj": 2},
                      alpha_pattern={"up_proj": 4.0})  # fmt: skip
    infos = trees.flatten(m.adapter_infos())
    a, b = (infos[f"layers.mlp.experts.down_proj.lora_{one}"] for one in "ab")
    assert a.shape == (3, 6, 20, 4) and a.axes == ("layers", "experts", "mlp", "rank")
    assert b.shape == (3, 6, 4, 32) and b.axes == ("layers", "experts", "rank", "embed")
    # 6 experts of 32 × 20; attention of 4 and 2 heads of 16.
    experts = 3 * 6 * (4 * 2 + 2) * (32 + 20)
    attention = 3 * 4 * sum(32 + n for n in (64, 32, 32, 64))
    assert lora.count(m.adapter_infos(), m.adaptation.targets) == experts + attention
    fresh = trees.flatten(tiny.adapters(m, fresh=True))
    drawn = np.asarray(fresh["layers.mlp.experts.down_proj.lora_a"]).reshape(18, -1)
    assert len(np.unique(drawn, axis=0)) == 18
    assert abs(drawn.std() - (6 / 20 / 3) ** 0.5) < 0.03
    assert not np.asarray(fresh["layers.mlp.experts.down_proj.lora_b"]).any()


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_are_what_they_add_to_the_weights(family):
    """Some layers, with ranks and alphas by layer, and a router: the sum of the two, by hand."""
    bare = tiny.model(family)
    m = tiny.with_lora(
        bare,
        ("gate", "gate_proj", "up_proj", "down_proj"),
        layers_to_transform=(0, 2),
        rank_pattern={"layers.2.mlp.experts.down_proj": 2, "layers.0.mlp.gate": 3},
        alpha_pattern={r"layers.0.mlp.experts.(gate|up)_proj": 20.0},
    )
    base, adapters = tiny.weights(bare), tiny.adapters(m, fresh=True)
    infos = m.adapter_infos()
    adapters = tiny.noisy(adapters)
    adapters = lora_masked(adapters, m)
    assert trees.flatten(infos).keys() == trees.flatten(adapters).keys()
    merged = {path: np.array(leaf) for path, leaf in trees.flatten(base).items()}
    flat = {path: np.asarray(leaf) for path, leaf in trees.flatten(adapters).items()}
    for path in (*EXPERTS, "layers.mlp.gate"):
        for position, layer in enumerate((0, 2)):
            alpha = 20.0 if layer == 0 and path in EXPERTS[:2] else 8.0
            r = {(2, EXPERTS[2]): 2, (0, "layers.mlp.gate"): 3}.get((layer, path), 4)
            a, b = (flat[f"{path}.lora_{one}"][position] for one in "ab")
            merged[f"{path}.weight"][layer] += alpha / r * a[..., :r] @ b[..., :r, :]
    inputs = tiny.inputs(tiny.tokens(2, 10))
    run = jax.jit(lambda m, t, b: m.logits(t, b, inputs), static_argnums=0)
    want = run(bare, {}, trees.unflatten(merged))
    np.testing.assert_allclose(run(m, adapters, base), want, rtol=0, atol=2e-5)
    assert np.abs(want - run(bare, {}, base)).max() > 0.05
    fresh = tiny.adapters(m, fresh=True)
    np.testing.assert_array_equal(run(m, fresh, base), run(bare, {}, base))


def test_padding_of_ranks_begins_at_zero():
    m = tiny.with_lora(
        tiny.model("mixtral"), ("down_proj",), rank_pattern={"layers.1.mlp.experts.down_proj": 2}
    )
    initial = lora.initial(m.adapter_infos(), m.adaptation.targets, key=jax.random.key(0))
    a = np.asarray(trees.flatten(initial)[f"{EXPERTS[2]}.lora_a"])
    assert not a[1, ..., 2:].any() and a[1, ..., :2].any() and a[0].all() and a[2].all()


def test_what_experts_do_not_go_with_is_one_error():
    m = tiny.model("mixtral")
    wrong = {"use_dora": True, "lora_dropout": 0.1, "init_lora_weights": "pissa"}
    for chosen in ("all-linear", ("gate",)):
        with pytest.raises(errors.ConfigError) as caught:
            m.adapted(tiny.lora_config(target_modules=chosen, **wrong))
        text = str(caught.value)
        assert all(f"lora.{key} = " in text for key in wrong), text
        assert "does not go with adapters on experts and routers (model.layers.0.mlp" in text
    m.adapted(tiny.lora_config(target_modules="attention", **wrong))
    saved = {"target_modules": "attention", "modules_to_save": ("experts",)}
    with pytest.raises(errors.ConfigError, match="experts.gate_proj whole, which no adapter holds"):
        m.adapted(tiny.lora_config(**saved))
    whole = m.adapted(tiny.lora_config(**saved | {"modules_to_save": ("gate",)}))
    assert whole.adaptation.full == ("layers.mlp.gate.weight",)
    differing = {"target_modules": "experts", "alpha_pattern": {"layers.1.*up_proj": 32.0}}
    with pytest.raises(errors.ConfigError, match=r"'2 and 8': are the scalings of model.layers.1"):
        m.adapted(tiny.lora_config(**differing))


def described(quant: schema.QuantConfig, **changes) -> str:
    settings = command_line.parse(["--config=configs/tiny.py"], flags=()).config
    lora_settings = dataclasses.replace(settings.lora, **changes)
    settings = dataclasses.replace(settings, quant=quant, lora=lora_settings)
    made = planning.make_plan(settings, tiny.hf_config("mixtral"), "config.json", jax.devices()[:1])
    return f"{plan_report.describe_targets(made)}\n{plan_report.describe_base(made)}"


NO_QUANT = schema.QuantConfig("none", None, ())


def test_the_report_says_what_is_adapted_and_what_is_frozen():
    found = described(NO_QUANT, target_modules="all-linear")
    assert "v_proj in 3 layers" in found and "experts.down_proj in 3 layers" in found
    assert "gate (router) frozen" in found
    named = described(NO_QUANT, target_modules=("gate", "down_proj"))
    assert "gate in 3 layers, experts.down_proj" in named and "frozen" not in named
    assert "frozen" not in described(NO_QUANT, modules_to_save=("gate",))


def test_experts_are_quantised_and_the_router_is_not():
    found = described(schema.QuantConfig("int8", None, ("embed_tokens",)))
    sizes = {path: math.prod(leaf.shape) for path, leaf in tiny.model("mixtral").flat_infos.items()}
    codes = sum(n for path, n in sizes.items() if "_proj" in path)
    assert f"int8 {codes:,}" in found
    assert found.endswith("bytes (embed_tokens, gate (router) not quantised)")
    assert described(schema.QuantConfig("int8", None, ())).endswith("(gate (router) not quantised)")
    assert described(NO_QUANT).endswith(" bytes")


def test_matrices_that_would_be_missed_are_an_error(monkeypatch):
    """As if experts were declared so that nothing takes them for matrices."""
    int8 = schema.QuantConfig("int8", None, ("embed_tokens",))
    asked = dataclasses.replace(int8, skip=("embed_tokens", "experts"))
    assert "experts" not in described(int8, target_modules="attention").rpartition("(")[2]
    assert "gate_proj" in described(asked, target_modules="attention")

    declared = blocks.experts_infos

    def missed(*args):
        flat = trees.flatten(declared(*args))
        vectors = {path: dataclasses.replace(leaf, contracting=None)
                   for path, leaf in flat.items() if leaf.shape[-1] == 48}  # fmt: skip
        return trees.unflatten({**flat, **vectors})

    monkeypatch.setattr(blocks, "experts_infos", missed)
    message = (
        r"qtype = 'int8': quantises 41.2% of the layers' matrices; "
        r"layers.mlp.experts.gate_proj, layers.mlp.experts.up_proj would stay as they are"
    )
    with pytest.raises(errors.ConfigError, match=message):
        described(int8, target_modules="attention")
    assert described(asked, target_modules="attention")
    assert described(NO_QUANT, target_modules="attention")
