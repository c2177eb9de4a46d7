"""Files of models that read images too: nested configs, two spellings of names, what is left."""

import json
import math

import chex
import jax
import numpy as np
import pytest

from purelora.commands import merge
from purelora.config import command_line
from purelora.core import errors, trees
from purelora.formats import safetensors_file
from purelora.interop import builtin
from purelora.interop.peft import files as peft_files
from purelora.interop.peft import record, unroll
from purelora.models import causal_lm
from purelora.training import beginning, planning
from tests.support import loaded_models, model_files, tiny

VISION = {"model.vision_tower.layers.0.self_attn.k_proj.weight": (4, 3),
          "model.multi_modal_projector.norm.weight": (5,)}  # fmt: skip


def nested(**changes):
    """A config.json of Gemma 3 with images; changes are to its text model."""
    text = tiny.hf_config("gemma3", vocab_size=259, num_hidden_layers=2, **changes)
    del text["architectures"]
    return {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
            "vision_config": {"hidden_size": 3}}  # fmt: skip


def older(name):
    """The name in files of the first version of the format."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    return name.removeprefix("model.")


def folder(path, hf_config, rename=str, beside=None):
    """A folder of random weights, with tensors beside those of the text model."""
    path.mkdir()
    model = causal_lm.from_hf(hf_config, "config.json", dtype="float32")
    draw, shapes = np.random.default_rng(0), {**model.layout.shapes, **(beside or {})}
    arrays = {
        rename(name): draw.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    model_files.write_hf(path, arrays, hf_config)
    return arrays


def test_both_spellings_are_the_same_model(tmp_path):
    folder(tmp_path / "new", nested(), beside=VISION)
    folder(tmp_path / "old", nested(), older, beside=VISION)
    m, new = loaded_models.loaded(str(tmp_path / "new"))
    _, old = loaded_models.loaded(str(tmp_path / "old"))
    chex.assert_trees_all_equal(new, old)
    assert m.modules["layers.self_attn.q_proj"].names[1] == (
        "model.language_model.layers.1.self_attn.q_proj"
    )
    assert m.left_out([*VISION, *map(older, VISION)]) == [*VISION, *map(older, VISION)]
    assert not m.left_out(m.layout.shapes)


@pytest.mark.parametrize("module", ["q_proj", "lm_head"])
def test_merged_keeps_names_and_all_that_is_beside(module, tmp_path, capsys):
    arrays = folder(tmp_path / "base", nested(), older, beside=VISION)
    plain = causal_lm.from_hf(nested(), "config.json", dtype="float32")
    settings = tiny.lora_config(target_modules=(module,))
    m = plain.adapted(settings)
    leaves = {path: np.asarray(leaf) for path, leaf in trees.flatten(tiny.adapters(m)).items()}
    known = record.of_model(m, settings, str(tmp_path / "base"))
    made = unroll.unrolled(leaves, known, path="run", base_fingerprint=None)
    peft_files.write(str(tmp_path / "adapter"), made)
    out = tmp_path / "merged"
    assert merge.main([f"--adapter={tmp_path / 'adapter'}", f"--output={out}"]) == 0
    assert "2 tensors beside the text model are kept" in capsys.readouterr().out

    file = safetensors_file.open_file(str(out / "model.safetensors"))
    head = {"language_model.lm_head.weight"} if module == "lm_head" else set()
    assert file.entries.keys() == arrays.keys() | head
    for name in map(older, VISION):
        assert file.read(name).array.tobytes() == arrays[name].tobytes()
    merged, weights = loaded_models.loaded(str(out))
    assert merged.is_tied == (not head)
    own = json.loads((out / "config.json").read_text())["text_config"]
    assert own.get("tie_word_embeddings", True) == (not head)
    _, base = loaded_models.loaded(str(tmp_path / "base"))
    want = loaded_models.logits(m, trees.unflatten(leaves), base)
    np.testing.assert_allclose(loaded_models.logits(merged, {}, weights), want, rtol=0, atol=1e-4)


def test_what_is_left_out_is_said(tmp_path):
    folder(tmp_path / "base", nested(), beside=VISION)
    said = []
    settings = command_line.parse(["--config=configs/tiny.py"], flags=()).config
    opened = builtin.open_model(str(tmp_path / "base"))
    made = planning.make_plan(settings, opened.source.config, "config.json", jax.devices()[:1])
    beginning.load_weights(opened, made, said.append, None)
    assert said[0].startswith("left out: 2 tensors that the text model does not use (model.")


def test_a_model_of_text_alone_has_no_images(tmp_path):
    folder(tmp_path / "base", tiny.hf_config("gemma3", vocab_size=259), beside=VISION)
    with pytest.raises(errors.ModelError, match=r"holds a tensor 'model.vision_tower"):
        loaded_models.loaded(str(tmp_path / "base"))


def test_shared_keys_may_lie_in_the_file(tmp_path):
    """Those that no layer uses; a layer that does must have its own."""
    name = "gemma4 with shared keys"
    hf_config = tiny.hf_config(name, vocab_size=259, vocab_size_per_layer_input=259)
    unused = {f"model.layers.5.self_attn.{n}.weight": (3,) for n in ("k_proj", "v_norm", "k_norm")}
    folder(tmp_path / "base", hf_config, beside=unused)
    m, _ = loaded_models.loaded(str(tmp_path / "base"))
    assert m.left_out(unused) == list(unused)
    folder(
        tmp_path / "less", hf_config, lambda n: n.replace("s.2.self_attn.k_p", "s.5.self_attn.k_p")
    )
    with pytest.raises(errors.ModelError, match=r"no tensor 'model.layers.2.self_attn.k_proj"):
        loaded_models.loaded(str(tmp_path / "less"))


def test_what_published_files_leave_out():
    """The first published config.json of Gemma 3 4B leaves out what transformers adds."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    found = causal_lm.from_hf(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text},
        "x",
        dtype="float32",
    ).config
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (8, 4, 256)
    assert (found.vocab_size, found.attention_scale) == (262_208, 256**-0.5)
    assert found.tie_word_embeddings and found.embedding_scale == math.sqrt(2560)
    assert [kind.window for kind in found.layer_kinds[:7]] == [1024] * 5 + [None, 1024]
    assert found.layer_kinds[5].rope.inv_freq[0] == 1 / 8
    assert found.layer_kinds[0].rope.inv_freq[0] == 1


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (nested() | {"text_config": None}, "config.json: text_config: is missing"),
        (nested() | {"text_config": 3}, "config.json: text_config = 3: is not an object"),
        (nested(head_dim=13), "config.json: text_config: head_dim = 13: is odd"),
        (nested(hidden_size=None), "config.json: text_config: hidden_size: is missing"),
    ],
)
def test_wrong_nested_config_is_named(hf_config, message):
    with pytest.raises(errors.ModelError, match=message):
        causal_lm.from_hf(hf_config, "config.json", dtype="float32")
