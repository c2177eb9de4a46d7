"""Models that read images too, of which the text model is used: against transformers and peft."""

import json
import pathlib

import jax
import numpy as np
import pytest

from purelora.commands import merge
from purelora.formats import safetensors_file
from purelora.interop import builtin
from tests.support import tiny
from tests.support.reference_models import LENGTH, Made, loaded, their_logits

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
NESTED = {
    "gemma3": _VISION | {"image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"},
    "gemma4 with shared keys": _VISION | {
        "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
        "model_type": "gemma4_vision",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=NESTED)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    text = tiny.hf_config(request.param, vocab_size=259, vocab_size_per_layer_input=259)
    kind = text["model_type"].removesuffix("_text")
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=NESTED[request.param], audio_config=None
    )
    if kind == "gemma3":
        config.mm_tokens_per_image = 4
    theirs = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter += 0.1 * noise if parameter.ndim == 1 else 0.0
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.5 * parameter.shape[-1] ** -0.5)
    theirs.save_pretrained(folder)
    builtin.tiny().tokenizer.backend.save(str(folder / "tokenizer.json"))
    return Made(folder, theirs, *loaded(folder))


def test_logits(made):
    tokens = tiny.tokens(2, LENGTH)
    got = jax.jit(lambda i: made.model.logits({}, made.base, i))(tiny.inputs(tokens))
    np.testing.assert_allclose(got, their_logits(made.theirs, tokens), rtol=0, atol=1e-4)


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    file = safetensors_file.open_file(str(folder / "model.safetensors"))
    return {name: file.read(name).array for name in file.entries}


@pytest.mark.parametrize("targets", ["embed_tokens", "q_proj"])
def test_merged(made, tmp_path, targets):
    """An adapter of peft's own: merged, transformers computes what it does with the adapter.

    With one on the table, the head is untied. What reads images is as it was, bit for bit.
    """
    again = type(made.theirs).from_pretrained(str(made.folder), attn_implementation="eager")
    modules = rf".*language_model.*\.{targets}"
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    theirs = peft.get_peft_model(again, settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    theirs.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    out = tmp_path / "merged"
    given = [f"--adapter={tmp_path / 'adapter'}", f"--model={made.folder}", f"--output={out}"]
    assert merge.main(given) == 0
    merged = type(made.theirs).from_pretrained(str(out), attn_implementation="eager")
    tokens = tiny.tokens(2, LENGTH)
    want = their_logits(theirs, tokens)
    np.testing.assert_allclose(their_logits(merged, tokens), want, rtol=0, atol=1e-4)
    assert np.abs(want - their_logits(made.theirs, tokens)).max() > 1e-2
    before, after = tensors(made.folder), tensors(out)
    beside = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert len(beside) > 10
    for name in beside:
        assert after[name].tobytes() == before[name].tobytes(), name
    assert json.loads((out / "config.json").read_text())["vision_config"]
