"""Tensor parallelism: every feature gives the numbers of one device, with few collectives."""

import dataclasses

import chex
import jax
import pytest

from configs import tiny as tiny_config
from purelora.analysis import hlo
from purelora.config import from_dict
from purelora.core import errors
from purelora.sharding import rules
from purelora.training import plan_report, planning
from purelora.training.plan import Plan
from tests.support import compiled_steps, plain_step, tiny
from tests.support.tiny import Case

ALL = r".*(proj|lm_head|embed_tokens)"
FEATURES = {
    "dora": (("use_dora", True),),
    "ia3": (("peft_type", "ia3"), ("target_modules", r".*(k|v|o|up|down)_proj")),
    "loha": (("peft_type", "loha"),),
    "embedding": (("target_modules", ALL),),
    "tokens": (("trainable_token_indices", (3, 40, 63)),),
    "whole": (("modules_to_save", ("embed_tokens", "down_proj", "norm")),
              ("target_modules", ("q_proj", "o_proj"))),
    "biases": (("bias", "all"),),
    "some_layers": (("layers_to_transform", (0, 2)), ("use_rslora", True)),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_those_of_one_device(feature):
    """Gradients of all that is trained, from trained values, by one SGD step."""
    batch, head = tiny.flat_batch(), feature == "tokens"
    biased = (("attention_bias", True), ("mlp_bias", True)) if feature in ("biases", "ia3") else ()
    one = Case(head=head, changes=FEATURES[feature], model=biased)
    many = dataclasses.replace(one, data=2, fsdp=2, tensor=2, accum=2, sharded=True)
    wanted, wanted_metrics = plain_step.one_step(one, batch)
    got, metrics = plain_step.one_step(many, batch)
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-5)
    chex.assert_trees_all_close(metrics, wanted_metrics, rtol=2e-5)


SHAPES = [
    (data, fsdp, devices // data // fsdp)
    for devices in (1, 2, 4, 8)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    if devices % (data * fsdp) == 0
]


@pytest.mark.slow
@pytest.mark.parametrize("is_lora", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mesh_shape(shape, is_lora):
    data, fsdp, tensor = shape
    case = Case("int8" if is_lora else "none", lora=is_lora, data=data, fsdp=fsdp, tensor=tensor)
    case = dataclasses.replace(case, kv_heads=8, accum=2, head=is_lora)
    plain_step.assert_is_reference(case, tiny.flat_batch())


def test_dropout_masks_do_not_depend_on_the_mesh():
    batch = tiny.flat_batch()
    one = Case(dropout=0.3, head=True)
    wanted, _ = plain_step.one_step(one, batch)
    got, _ = plain_step.one_step(dataclasses.replace(one, fsdp=2, tensor=2, accum=2), batch)
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-5)
    plain, _ = plain_step.one_step(dataclasses.replace(one, dropout=0.0), batch)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(plain, wanted, rtol=0, atol=1e-3)


COMPILED = Case("int8", data=2, fsdp=2, tensor=2, accum=2, remat=True)


def test_activations_are_summed_twice_a_block_in_each_direction():
    """Forward, recomputed (only what the backward pass needs) and backward; and at both ends."""
    program = compiled_steps.compiled(COMPILED)
    per_token = tiny.ROWS // COMPILED.accum // 4 * tiny.LENGTH
    summed = program.results("all-reduce", looped=True)
    activations = [shape for _, shape in summed if len(shape) == 3]
    blocks, ends = 2 + 1 + 2, 2  # The embedding's rows, and the gradient of the head's input.
    assert activations == [(per_token // tiny.LENGTH, tiny.LENGTH, 32)] * (blocks + ends)
    # Of the logits: the largest, the sum of the exponentials and the one that is picked.
    tokens = [shape for _, shape in summed if len(shape) != 3]
    assert len(tokens) == 3 and len(set(tokens)) == 1 and len(tokens[0]) == 1


def test_each_adapter_gradient_is_reduced_once_outside_every_loop():
    program = compiled_steps.compiled(COMPILED)
    leaves = jax.tree.leaves(tiny.trainer(COMPILED).trainable)
    # Factors that are split lie in halves.
    local = sorted(leaf.addressable_shards[0].data.shape for leaf in leaves)
    summed = [a for _, a in program.results("all-reduce", looped=False) if a]
    assert sorted(summed) == local
    assert not {a for _, a in program.results("all-reduce", looped=True)} & set(local)
    # Two groups of devices: for whole factors and for halves. The rest are norms and flags.
    found = program.instructions("all-reduce", looped=False)
    assert sum(any(a.shape[:1] == (tiny.LAYERS,) for a in i.result) for i in found) == 2


def test_codes_are_gathered_along_fsdp_alone():
    program = compiled_steps.compiled(COMPILED)
    gathered = program.results("all-gather", looped=True)
    halves = {(32, 16), (32, 8), (16, 32), (32, 24), (24, 32)}
    assert {shape for dtype, shape in gathered if dtype == "s8"} == halves
    assert {shape for dtype, shape in gathered if dtype != "s8"} == {(1, 32)}


def test_what_was_gathered_can_be_kept():
    """Then each weight is gathered once, and the whole base lies on every device."""
    case = compiled_steps.FSDP
    kept = dataclasses.replace(case, keep_gathered=True)
    plain_step.assert_is_reference(kept, tiny.flat_batch())
    kernels = compiled_steps.KERNELS

    def count(case):
        found = compiled_steps.compiled(case).results("all-gather", looped=True)
        return len([shape for dtype, shape in found if dtype == "s8" and shape in kernels])

    assert (count(case), count(compiled_steps.FSDP_REMAT), count(kept)) == (14, 14, 7)
    stacked = {("s8", (tiny.LAYERS, *kernel)) for kernel in kernels}
    assert stacked <= set(hlo.arrays(compiled_steps.compiled(kept).text))


def _plan(
    rules: tuple[str, ...], skip: tuple[str, ...] = ("embed_tokens",), **overrides: str
) -> Plan:
    """Of an int8 base, but for what `skip` names."""
    raw = tiny_config.get_config().to_dict()
    raw["quant"] |= {"skip": skip}
    raw["batch_size"], raw["mesh"] = 8, raw["mesh"] | {"tensor": 2, "rules": rules}
    raw["mesh"]["overrides"] = overrides
    settings = from_dict.parse(raw)
    model = tiny.hf_config(vocab_size=2**14, hidden_size=64)
    return planning.make_plan(settings, model, "config.json", jax.devices())


def test_a_large_weight_is_whole_on_every_device_only_if_asked_for():
    """4 MB of embeddings beside 0.1 MB of other weights."""
    rest = ("heads:tensor", "kv_heads:tensor", "mlp:tensor")
    message = "leave embed_tokens.weight whole on each of 8 devices: 4,194,304 bytes; add a rule"
    with pytest.raises(errors.ConfigError, match=message + " for vocab or embed"):
        _plan(rest)
    _plan((*rest, "vocab:fsdp"))
    asked = _plan(rest, embed_tokens="vocab:none")
    assert "embed_tokens.weight" in {
        row.path for row in plan_report.array_rows(asked) if row.is_replicated
    }
    whole = "98.4% on every one alike"
    assert whole in plan_report.table(asked), plan_report.table(asked)


def test_an_override_asks_for_a_whole_quantised_weight_too():
    rest = ("heads:tensor", "kv_heads:tensor", "mlp:tensor")
    with pytest.raises(errors.ConfigError, match="leave embed_tokens.weight.qvalue whole"):
        _plan(rest, ())
    _plan(rest, (), embed_tokens="vocab:none")


def test_devices_along_tensor_that_would_all_do_the_same_are_an_error():
    with pytest.raises(errors.ConfigError, match="mesh.tensor = 2: splits nothing: by mesh.rules"):
        _plan(("embed:fsdp", "vocab:none"))


def test_the_rules_of_the_config_are_those_of_the_code():
    raw = tiny_config.get_config().to_dict()["mesh"]
    assert rules.parse_rules(raw["rules"], raw["overrides"]) == rules.RULES
