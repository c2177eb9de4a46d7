"""What the settings of `lora.*` train beside targets: ranks, whole modules, rows, biases."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.config import checks, command_line, schema
from purelora.core import errors, param_info, trees
from purelora.interop import builtin
from purelora.lora import adapters, targets, weight_init
from purelora.lora.kinds import dora
from purelora.sharding import parallel
from purelora.training import optimisers, plan_report, planning
from tests.support import tiny


def adaptation(*, biases: bool = False, tied: bool = True, **settings: Any) -> targets.Adaptation:
    model = tiny.model(attention_bias=biases, mlp_bias=biases, tie_word_embeddings=tied)
    return model.adapted(tiny.lora_config(**settings)).adaptation


def per_module(found: targets.Adaptation) -> dict[str, tuple[int, float]]:
    return {
        name.removeprefix("model.layers."): (r, scaling)
        for target in found.targets.values()
        for name, r, scaling in zip(target.names, target.ranks, target.scalings, strict=True)
    }


def test_patterns_give_each_module_its_own_rank_and_scaling():
    """r=8, alpha=16, k_proj of rank 4, v_proj of alpha 32: scalings 2, 4, 4."""
    found = per_module(
        adaptation(
            r=8,
            lora_alpha=16.0,
            target_modules=("q_proj", "k_proj", "v_proj"),
            rank_pattern={"k_proj": 4, r"layers\.1\.self_attn\.q_proj": 2},
            alpha_pattern={"v_proj": 32.0},
        )
    )
    assert found["0.self_attn.q_proj"] == (8, 2.0)
    assert found["1.self_attn.q_proj"] == (2, 8.0)
    assert found["2.self_attn.k_proj"] == (4, 4.0)
    assert found["0.self_attn.v_proj"] == (8, 4.0)


def test_the_first_key_that_matches_counts_and_only_from_a_dot_on():
    found = per_module(
        adaptation(target_modules=("q_proj",), rank_pattern={"1.self_attn.q_proj": 3, "q_proj": 5})
    )
    assert [found[f"{i}.self_attn.q_proj"][0] for i in range(3)] == [5, 3, 5]
    with pytest.raises(errors.ConfigError, match=r"rank_pattern = 'roj': matches no adapted"):
        adaptation(rank_pattern={"roj": 3})


def test_rslora_scales_by_the_root_of_the_rank():
    """r=16, alpha=16 is 4, and not 1."""
    found = adaptation(r=16, lora_alpha=16.0, use_rslora=True, rank_pattern={"k_proj": 4})
    scalings = per_module(found)
    assert scalings["0.self_attn.q_proj"] == (16, 4.0)
    assert scalings["0.self_attn.k_proj"] == (4, 8.0)


@pytest.mark.parametrize("chosen", ["all-linear", ("q_proj", "up_proj")])
def test_layers_to_transform(chosen):
    found = adaptation(target_modules=chosen, layers_to_transform=(0, 2))
    assert {t.layers for t in found.targets.values()} == {(0, 2)}
    named = adaptation(
        target_modules=("v_proj", "model.layers.1.self_attn.q_proj"), layers_to_transform=(2,)
    )
    assert set(per_module(named)) == {"2.self_attn.v_proj", "1.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layers_to_transform": (7,)},
            r"layers_to_transform = \(7,\): are layers in which no.*layers 0 to 2",
        ),
        ({"layers_to_transform": (1, 7)}, r"layers_to_transform = 7: no module of that layer"),
        ({"alpha_pattern": {"q": 1.0}}, r"alpha_pattern = 'q': matches no adapted module"),
        ({"rank_pattern": {"lm_head": 2}}, r"rank_pattern = 'lm_head': matches no adapted"),
        ({"modules_to_save": ("head",)}, r"modules_to_save = 'head': names no module.*lm_head"),
        (
            {"modules_to_save": ("layers.1.mlp.up_proj",)},
            r"modules_to_save = 'layers.1.mlp.up_proj': names some of the layers",
        ),
        ({"bias": "all"}, r"bias = 'all': no module of this model has a bias"),
        ({"trainable_token_indices": (3, 64)}, r"trainable_token_indices = 64.*has 64 rows"),
        (
            {"trainable_token_indices": (3,), "modules_to_save": ("lm_head",)},
            r"trainable_token_indices = \(3,\): are rows of a table",
        ),
        (
            {"trainable_token_indices": (3,), "target_modules": ("embed_tokens",)},
            r"trainable_token_indices = \(3,\): does not go with adapters on the embedding",
        ),
        (
            {"modules_to_save": ("embed_tokens",), "target_modules": ("lm_head",)},
            r"modules_to_save = 'embed_tokens': trains the tied table, which lm_head",
        ),
        (
            {"use_dora": True, "target_modules": ("embed_tokens",)},
            r"use_dora = True: does not go with adapters on the embedding",
        ),
        (
            {"target_modules": ("q_proj",), "modules_to_save": ("self_attn",)},
            "matches no linear module that is not excluded",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        adaptation(**settings)


def test_biases_of_some_layers_only_are_refused():
    with pytest.raises(errors.ConfigError, match=r"has 3 layers, of which 1 are adapted"):
        adaptation(biases=True, bias="lora_only", target_modules=r".*\.1\..*q_proj")


def test_whole_modules_and_biases():
    found = adaptation(
        biases=True,
        modules_to_save=("norm", "mlp"),
        bias="lora_only",
        target_modules=("q_proj", "up_proj"),
    )
    assert set(found.targets) == {"layers.self_attn.q_proj"}
    assert set(found.full) == {
        "norm.weight",
        "layers.self_attn.q_proj.bias",
        *(f"layers.mlp.{n}_proj.{k}" for n in ("up", "gate", "down") for k in ("weight", "bias")),
    }


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_goes_by_both_names(name, tied):
    full = adaptation(tied=tied, modules_to_save=(name,)).full
    assert full == ("embed_tokens.weight" if tied else f"{name}.weight",)


def test_count_leaves_out_padding_and_padding_begins_at_zero():
    m = tiny.with_lora(tiny.model(), ("q_proj",), rank_pattern={"layers.1.self_attn.q_proj": 1})
    infos = m.adapter_infos()
    assert adapters.count(infos, m.adaptation.targets) == (4 + 1 + 4) * (32 + 32)
    a = adapters.initial(infos, m.adaptation.targets, key=jax.random.key(0))
    a = np.asarray(trees.flatten(a)["layers.self_attn.q_proj.lora_a"])
    assert not a[1, :, 1:].any() and a[1, :, 0].all() and a[0].all()


def test_gaussian_has_the_deviation_of_each_layers_rank():
    m = tiny.with_lora(tiny.model(), ("down_proj",), r=64, rank_pattern={"2.mlp.down_proj": 16})
    infos = m.adapter_infos("gaussian")
    a = adapters.initial(infos, m.adaptation.targets, key=jax.random.key(0))
    a = np.asarray(trees.flatten(a)["layers.mlp.down_proj.lora_a"])
    np.testing.assert_allclose(a[0].std(), 1 / 64, rtol=0.1)
    np.testing.assert_allclose(a[2, :, :16].std(), 1 / 16, rtol=0.1)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_factors_and_the_rest_are_the_weight(init):
    """PiSSA takes the largest singular values, OLoRA the first columns of Q."""
    weight = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    factors = (
        weight_init.svd_factors(weight, 3, 2.0)
        if init == "pissa"
        else weight_init.qr_factors(weight, 3)
    )
    rest = weight_init.residual(weight, factors, 2.0)
    a, b = map(np.asarray, factors)
    np.testing.assert_allclose(rest + 2 * (a @ b), weight, rtol=0, atol=1e-5)
    if init == "pissa":
        u, s, vh = np.linalg.svd(weight)
        np.testing.assert_allclose(2 * (a @ b), (u[:, :3] * s[:3]) @ vh[:3], rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(rest, 2), s[3], rtol=1e-5)
    else:
        q, r = np.linalg.qr(weight.T)
        np.testing.assert_allclose(a @ b, (q[:, :3] @ r[:3]).T, rtol=0, atol=1e-5)


def test_loraplus_multiplies_the_rate_of_lora_b_and_of_vectors():
    cfg = tiny.optim_config("sgd")
    m = tiny.with_lora(tiny.model(), ("q_proj",), use_dora=True, modules_to_save=("norm",))
    infos = m.adapter_infos()
    ones = trees.map_leaves(lambda leaf: jnp.ones(leaf.shape), infos)
    plus = optimisers.transformation(
        cfg.__class__(**{**vars(cfg), "loraplus_lr_ratio": 16.0, "name": "sgd"}), infos
    )
    updates, _ = plus.update(ones, plus.init(ones), ones)
    found = {path: float(leaf.mean()) for path, leaf in trees.flatten(updates).items()}
    assert found == {
        "layers.self_attn.q_proj.lora_a": 1.0,
        "layers.self_attn.q_proj.lora_b": 16.0,
        "layers.self_attn.q_proj.lora_magnitude": 16.0,
        "norm.weight": 16.0,
    }


def test_dora_factor_gives_each_column_its_magnitude():
    """Also for a weight that lies the other way round, and without a gradient of the norm."""
    rng = np.random.default_rng(0)
    w, a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((6, 4), (6, 2), (2, 4)))
    magnitude = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    adapter = (a, b, jnp.float32(0.5))
    total = parallel.WHOLE.reduce_from
    factor = dora.dora_factor(w, -2, adapter, magnitude, total)
    direction = np.asarray(w + 0.5 * a @ b)
    np.testing.assert_allclose(
        np.linalg.norm(direction * np.asarray(factor), axis=0), magnitude, rtol=1e-6
    )
    chex.assert_trees_all_close(
        dora.dora_factor(w.T, -1, adapter, magnitude, total), factor, rtol=1e-6
    )
    grad = jax.grad(lambda a: dora.dora_factor(w, -2, (a, b, adapter[2]), magnitude, total).sum())(
        a
    )
    assert not np.asarray(grad).any()


def test_adapter_infos_follow_the_weights_axes():
    m = tiny.with_lora(tiny.model(), ("embed_tokens", "q_proj"), trainable_token_indices=())
    flat: dict[str, param_info.ParamInfo] = trees.flatten(m.adapter_infos())
    assert flat["embed_tokens.lora_a"].axes == ("vocab", "rank")
    assert flat["embed_tokens.lora_b"].axes == ("rank", "embed")


def test_the_reported_share_counts_parameters_and_not_codes():
    settings = command_line.parse(["--config=configs/tiny.py"], flags=()).config
    shares = set()
    for qtype in ("none", "int8", "nf4"):
        changed = dataclasses.replace(settings, quant=schema.QuantConfig(qtype, None, ()))
        made = planning.make_plan(changed, builtin.tiny().source.config, "tiny", jax.devices()[:1])
        shares.add(plan_report.describe_targets(made).rpartition(": ")[2])
    total = trees.count(jax.tree.map(lambda leaf: leaf.abstract, made.model.infos)) + 8192
    assert shares == {f"8,192 of {total:,} parameters trained ({8192 / total:.3%})"}


def test_a_pattern_is_checked_as_it_is_used():
    changes = {"rank_pattern": {"(?i)Q_PROJ": 2}}
    settings = command_line.parse(["--config=configs/tiny.py"], flags=()).config
    lora_settings = dataclasses.replace(settings.lora, **changes)
    found = checks.check(dataclasses.replace(settings, lora=lora_settings))
    assert [(p.where, p.value) for p in found] == [("lora.rank_pattern", "(?i)Q_PROJ")]
