"""Every family: the logits of an independent model and of transformers, with all particulars."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.commands import merge
from purelora.core import errors, trees
from purelora.core.batch import Inputs
from purelora.interop.peft import adapter_sources, attach, record, unroll
from purelora.interop.peft import files as peft_files
from purelora.models import causal_lm, hf_config, kv_cache
from tests.support import (
    families,
    loaded_models,
    model_files,
    plain,
    plain_step,
    tiny,
    trained_adapters,
)
from tests.support.tiny import Case


def some(*names: str) -> list[Any]:
    """Families whose parts others have in the quick tests too."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


MIXED = [*some("qwen2 with windows and yarn", "gemma2"), "gemma3",
         *some("gemma4", "gemma4 with shared keys", "gpt_oss")]  # fmt: skip
ONE, ALL = hf_config.SLIDING, hf_config.FULL
LENGTH = 11  # Beyond every window, and enough for the shortest to lie wholly inside.


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2", *some("gemma3")])
def test_logits_of_the_plain_model(name):
    """With adapters on all matrices, the head too."""
    bare = tiny.model(name)
    m = tiny.with_lora(bare, r".*(proj|lm_head)")
    base, adapters = tiny.weights(bare), tiny.adapters(m)
    tokens = tiny.tokens(2, LENGTH)
    got = jax.jit(lambda b, t, i: m.logits(t, b, i))(base, adapters, tiny.inputs(tokens))
    config = tiny.hf_config(name)
    flat = plain.merged(trees.flatten(base), adapters, 2.0)
    want = jax.jit(jax.vmap(lambda t: plain.logits(flat, t, config)))(jnp.asarray(tokens))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def assert_close_in_size(got, wanted):
    """Every element to 3e-4 of the leaf's largest; a missed or doubled sum is off by all of it.

    Gemma 4's scores are not scaled down, and with random weights rounding grows by the layer: it
    reached 1.8e-4 on one processor, where another stays below 1e-4.
    """
    for path, leaf in trees.flatten(wanted).items():
        size = np.abs(leaf).max()
        np.testing.assert_allclose(trees.flatten(got)[path], leaf, rtol=0, atol=3e-4 * size)


@pytest.mark.parametrize("name", MIXED)
def test_scan_and_remat_change_nothing(name):
    """Where layers differ, the scan chooses by their number; values and gradients of the loss."""
    bare = tiny.model(name)
    m = tiny.with_lora(bare)
    base, adapters = tiny.weights(bare), tiny.adapters(m)
    inputs = tiny.inputs(tiny.tokens(2, LENGTH))

    def loss(adapters, scan, remat):
        bound = m.bind(base, adapters)
        x, _ = m.hidden(bound, inputs, dtype=jnp.float32, scan_layers=scan, remat=remat)
        return jnp.mean(jnp.sin(x) + 1)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    want, grads = run(adapters, False, False)
    for scan, remat in ((True, False), (True, True)):
        got, other = run(adapters, scan, remat)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        if name.startswith("gemma4"):
            assert_close_in_size(other, grads)
        else:
            chex.assert_trees_all_close(other, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_is_of_tokens_of_the_own_document(name):
    """Packed rows give what each document gives alone, also beyond the window."""
    m = tiny.model(name)
    base = tiny.weights(m)
    tokens = tiny.tokens(1, LENGTH)[0]
    start = 3
    row = np.concatenate([[9, 9, 9], tokens, [0]])
    place = np.concatenate([np.arange(start), np.arange(LENGTH), [0]])
    segments = np.array([1] * start + [2] * LENGTH + [0])
    packed = Inputs(*(jnp.asarray(a, jnp.int32)[None] for a in (row, place, segments)))
    run = jax.jit(lambda i: m.logits({}, base, i))
    got = run(packed)[0, start : start + LENGTH]
    np.testing.assert_allclose(got, run(tiny.inputs(tokens[None]))[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_what_lies_outside_of_the_window_is_not_seen(name):
    """One layer: the first token reaches the last one of the window, and no further."""
    m = tiny.model(name, num_hidden_layers=1)
    base, tokens = tiny.weights(m), tiny.tokens(1, LENGTH)
    window = m.config.kinds[0].window
    assert window < LENGTH
    run = jax.jit(lambda i: m.logits({}, base, i))
    changed = tokens.copy()
    changed[0, 0] = (tokens[0, 0] + 1) % tiny.VOCAB
    moved = np.abs(run(tiny.inputs(tokens)) - run(tiny.inputs(changed)))[0].max(axis=-1)
    assert (moved[:window] > 1e-4).all() and (moved[window:] == 0).all()


@pytest.mark.parametrize(
    "name",
    [*some("mistral", "qwen2", "gemma4"), "qwen3", "gemma2", "gemma3", "gemma4 with shared keys",
     *some("gpt_oss")],
)  # fmt: skip
def test_cache_is_the_whole_sequence(name):
    """Prefill and token by token, in rows of different lengths."""
    m = tiny.model(name)
    base, tokens = tiny.weights(m), jnp.asarray(tiny.tokens(2, LENGTH))
    bound = m.bind(base, {})
    inputs = tiny.inputs(tokens)
    want = np.asarray(
        jax.jit(lambda b: m.hidden(b, inputs, dtype=jnp.float32, scan_layers=True, remat=False)[0])(
            bound
        )
    )
    run = jax.jit(
        lambda b, t, p, c: kv_cache.hidden(m.family, m.config, b, t, p, c, dtype=jnp.float32)
    )
    place = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    got, cache = run(
        bound, tokens[:, :6], place[:, :6], kv_cache.empty(m.config, 2, 16, jnp.float32)
    )
    np.testing.assert_allclose(got, want[:, :6], rtol=0, atol=1e-5)
    starts = np.array([6, 4])  # Row 1 was only 4 long.
    for offset in range(5):
        at = (starts + offset)[:, None]
        got, cache = run(bound, jnp.take_along_axis(tokens, at, axis=1), jnp.asarray(at), cache)
        wanted = want[np.arange(2), starts + offset]
        np.testing.assert_allclose(got[:, 0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [*some("mistral", "qwen2", "qwen3", "gemma2"), "gemma3"])
def test_a_step_on_a_mesh_is_the_plain_gradient(name):
    """Loss and gradients of adapters, over tensor and fsdp, from a quantised base."""
    depth = 3 if name == "gemma3" else 2
    case = Case("int8", head=True, family=name, layers=depth, fsdp=2, tensor=2, accum=2)
    plain_step.assert_is_reference(case, tiny.flat_batch())


@pytest.mark.parametrize("name", [*some("gemma4"), "gemma4 with shared keys"])
def test_groups_of_layers_train_alike_on_a_mesh(name):
    """Shared keys and values, and per-layer inputs, split over tensor and fsdp."""
    changes = {"num_global_key_value_heads": 2, "hidden_size_per_layer_input": 8}
    changes |= {"vocab_size_per_layer_input": 64}
    depth = tiny.model(name).config.num_hidden_layers
    one = Case("int8", family=name, layers=depth, model=tuple(changes.items()))
    wanted, _ = plain_step.one_step(one, tiny.flat_batch())
    got, _ = plain_step.one_step(dataclasses.replace(one, tensor=2, fsdp=2), tiny.flat_batch())
    assert_close_in_size(got, wanted)


def test_norms_of_heads_train_alike_on_a_mesh():
    """Every device has some of the heads, which all share the norms' weights."""
    whole = (("modules_to_save", ("q_norm", "k_norm")), ("target_modules", ("q_proj",)))
    one = Case(family="qwen3", layers=1, changes=whole)
    wanted, _ = plain_step.one_step(one, tiny.flat_batch())
    got, _ = plain_step.one_step(dataclasses.replace(one, tensor=2), tiny.flat_batch())
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-5)


def gradient_jaxpr(**changes):
    """The gradient of a scanned Gemma 3."""
    m = tiny.with_lora(tiny.model("gemma3", **changes))
    shapes = jax.eval_shape(lambda: (tiny.adapters(m), tiny.weights(m)))
    inputs = tiny.inputs(tiny.tokens(1, LENGTH))

    def loss(adapters, base):
        how = {"dtype": jnp.float32, "scan_layers": True, "remat": False}
        return m.hidden(m.bind(base, adapters), inputs, **how)[0].sum()

    return jax.make_jaxpr(jax.grad(loss))(*shapes)


def test_what_is_compiled_does_not_grow_with_depth():
    """The layers of all kinds share one body, whatever the number of layers is left over."""
    sizes = [str(gradient_jaxpr(num_hidden_layers=depth)).count(" = ") for depth in (5, 17)]
    assert sizes[0] == sizes[1]


def test_layers_of_two_kinds_save_what_those_of_one_do():
    """No weights, and nothing for each kind."""

    def saved(**changes):
        eqns = gradient_jaxpr(**changes).jaxpr.eqns
        forward = next(eqn for eqn in eqns if eqn.primitive.name == "scan")
        return sorted(str(var.aval) for var in forward.outvars)

    alike = {"sliding_window_pattern": None, "layer_types": [ALL] * 4}
    assert saved() == saved(**alike)
    assert len(saved()) < 20


PROJECTIONS = tuple(f"self_attn.{n}_proj.weight" for n in "qkvo")
LLAMA = (*PROJECTIONS, *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
         "input_layernorm.weight", "post_attention_layernorm.weight")  # fmt: skip
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
AROUND = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
LAYER = {
    "mistral": LLAMA,
    "qwen2": (*LLAMA, *(f"self_attn.{n}_proj.bias" for n in "qkv")),
    "qwen3": (*LLAMA, *QK_NORMS),
    "gemma2": (*LLAMA, *AROUND),
    "gemma3": (*LLAMA, *AROUND, *QK_NORMS),
    "gpt_oss": (
        *PROJECTIONS, *(f"self_attn.{n}_proj.bias" for n in "qkvo"), "self_attn.sinks",
        "mlp.router.weight", "mlp.router.bias", *LLAMA[-2:],
        *(f"mlp.experts.{n}_proj.{kind}" for n in ("gate", "up", "down")
          for kind in ("weight", "bias")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYER)
def test_names_in_files(name):
    m = tiny.model(name)
    found = {n for names in m.hf_names.values() for n in names}
    depth = m.config.num_hidden_layers
    wanted = {f"model.layers.{i}.{leaf}" for i in range(depth) for leaf in LAYER[name]}
    head = set() if m.is_tied else {"lm_head.weight"}
    assert found == wanted | head | {"model.embed_tokens.weight", "model.norm.weight"}
    assert m.is_tied == (name not in ("mistral", "gpt_oss"))


@pytest.mark.parametrize(
    "name",
    [*some("mistral", "qwen2", "qwen3", "gemma2", "mixtral", "qwen3_moe", "gemma4"), "gemma3",
     *some("gemma4 with shared keys", "gemma4 with experts", "gpt_oss")],
)  # fmt: skip
def test_folders_in_and_out(name, tmp_path, capsys):
    """A base and an adapter from files; the adapter again bit for bit; merged, what it computes."""
    config = tiny.hf_config(name, vocab_size=259)
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = 259
    plain_model = causal_lm.from_hf(config, "config.json", dtype="float32")
    arrays, draw = {}, np.random.default_rng(0)
    for tensor, shape in plain_model.layout.shapes.items():
        arrays[tensor] = draw.normal(0, 0.2, shape).astype(np.float32)
    (tmp_path / "base").mkdir()
    model_files.write_hf(tmp_path / "base", arrays, config)
    settings = tiny.lora_config(target_modules="all-linear", rank_pattern={"k_proj": 2})
    m = plain_model.adapted(settings)
    leaves = trained_adapters.trained(m, {})
    known = record.of_model(m, settings, str(tmp_path / "base"))
    adapter = unroll.unrolled(leaves, known, path="run", base_fingerprint=None)
    peft_files.write(str(tmp_path / "adapter"), adapter)
    model, base = loaded_models.loaded(str(tmp_path / "base"))
    read = adapter_sources.open_adapter(str(tmp_path / "adapter"))
    found = attach.attach(read, model, base_fingerprint=None)
    chex.assert_trees_all_equal(trees.flatten(found.trainable), leaves)

    out = tmp_path / "merged"
    assert merge.main([f"--adapter={tmp_path / 'adapter'}", f"--output={out}"]) == 0
    capsys.readouterr()
    want = loaded_models.logits(found.model, found.trainable, base)
    merged, weights = loaded_models.loaded(str(out))
    assert merged.config == model.config
    np.testing.assert_allclose(loaded_models.logits(merged, {}, weights), want, rtol=0, atol=1e-4)
    assert np.abs(want - loaded_models.logits(model, {}, base)).max() > 1e-2


# ---- fields ------------------------------------------------------------------------------------

WINDOWS = [
    ("mistral", {}, [5] * 3),
    ("qwen2", {}, [None] * 3),
    ("qwen2 with windows and yarn", {}, [None, 3, 3]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": [ONE, ALL, ALL]},
     [7, None, None]),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, [3] * 3),
    ("gemma2", {}, [4, None, 4]),
    ("gemma2", {"layer_types": [ALL, ALL, ONE]}, [None, None, 4]),
    ("gemma3", {"num_hidden_layers": 8}, [4, 4, None, 4, 4, None, 4, 4]),
    ("gpt_oss", {"num_hidden_layers": 3, "layer_types": None}, [4, None, 4]),
    ("gpt_oss", {"layer_types": [ALL, ALL, ONE, ALL]}, [None, None, 4, None]),
    ("gemma3", {"sliding_window_pattern": None, "layer_types": [ALL] * 4}, [None] * 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "windows"), WINDOWS)
def test_windows_of_the_layers(name, changes, windows):
    assert [kind.window for kind in tiny.model(name, **changes).config.layer_kinds] == windows


def test_null_is_no_window():
    config = tiny.hf_config("mistral") | {"sliding_window": None}
    found = causal_lm.from_hf(config, "config.json", dtype="float32").config
    assert found.kinds[0].window is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": None}, "sliding_window: is missing"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0: is not a size"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = .*: is not supported"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None},
         "max_window_layers: is missing"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None},
         "sliding_window: is missing"),
        ("qwen2", {"hidden_size": 34},
         "num_attention_heads = 4: does not divide hidden_size = 34, and there is no head_dim"),
        ("qwen2", {"hidden_size": 36}, "num_attention_heads = 4: makes heads of 9; rotary"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide .*= 4"),
        ("qwen3", {"head_dim": None}, "head_dim: is missing"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window = False: does"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types = .*: is not a list of 3"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
         r"layer_types = \['chunked_attention'\]: are not among sliding_attention"),
        ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
         "rope_type = 'dynamic': is not supported"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping: is missing"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0: is not a"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar: is missing"),
        ("gemma2", {"sliding_window": None}, "sliding_window: is missing"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation = 'relu': is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"sliding_window_pattern": None}, "sliding_window_pattern: is missing"),
        ("gemma3", {"rope_local_base_freq": None}, "rope_local_base_freq: is missing"),
        ("gemma3", {"rope_theta": None}, "rope_theta: is missing"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
         "rope_parameters: sliding_attention: is missing"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6},
                                        "sliding_attention": {"rope_type": "default"}}},
         "rope_parameters: sliding_attention: rope_theta: is missing"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit: is missing"),
        ("gpt_oss", {"swiglu_alpha": 0}, "swiglu_alpha = 0: is not a number > 0"),
        ("gpt_oss", {"rope_scaling": None}, "rope_scaling: is missing"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: is missing"),
        ("gpt_oss", {"attention_bias": None}, "attention_bias: is missing"),
        ("gpt_oss", {"head_dim": None}, "head_dim: is missing"),
        ("gpt_oss", {"num_local_experts": None}, "num_local_experts: is missing"),
        ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6: is more than"),
        ("gpt_oss", {"num_key_value_heads": 4}, "num_key_value_heads = 4: does not divide .*= 6"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu': is not supported"),
        ("gemma3", {"architectures": ["Gemma3nForConditionalGeneration"]},
         "architectures = .*ConditionalGeneration.*known: LlamaForCausalLM, MistralForCausalLM"),
    ],
)  # fmt: skip
def test_wrong_field_is_named(name, changes, message):
    with pytest.raises(errors.ModelError, match=f"config.json: {message}"):
        tiny.model(name, **changes)


@pytest.mark.parametrize("name", families.CONFIGS)
def test_every_size_must_be_there(name):
    fields = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "vocab_size", "rms_norm_eps"]  # fmt: skip
    own = {"llama": [], "gemma4": ["rope_parameters", "global_head_dim", "sliding_window"]}
    for field in [*fields, *own.get(name.split()[0], ["num_key_value_heads", "rope_theta"])]:
        with pytest.raises(errors.ModelError, match=f"config.json: {field}: is missing"):
            tiny.model(name, **{field: None})


def test_newer_files_nest_the_rotations():
    old = tiny.model("gemma3").config
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    changes = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"))
    assert tiny.model("gemma3", rope_parameters=nested, **changes).config == old
