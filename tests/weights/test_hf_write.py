"""Whole models written as Hugging Face folders and GGUF files, and read back."""

import errno
import itertools
import json
import os
import weakref

import gguf as gguf_library
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from purelora.core import errors
from purelora.formats import atomic_output, gguf_file, safetensors_file
from purelora.interop import builtin
from purelora.interop.gguf import read as gguf_read
from purelora.interop.gguf import tokenizer_read, tokenizer_write
from purelora.interop.gguf import write as gguf_write
from purelora.weights import hf_folder, hf_tokenizer, hf_write, random_weights, tokenizer
from tests.support import model_files

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
TEXTS = (
    "",
    "the theme, the other",
    "naïve 你好 👩‍🚀",
    " \n\t 1234567 two  ",
    "<|im_start|>hé<|im_end|>",
)


@pytest.fixture
def config():
    return model_files.tiny_config(vocab_size=model_files.GGUF_VOCAB)


@pytest.fixture
def arrays(config):
    return random_weights.drawn(config, seed=3)


@pytest.fixture
def made(tmp_path_factory):
    """A byte-level tokenizer with merges, a BOS and two ends, as read from a GGUF file."""
    return byte_level(tmp_path_factory.mktemp("tokenizer") / "a.gguf")


def byte_level(path, **changes):
    fields = model_files.tokenizer_fields() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eot_token_id": 256,
        "tokenizer.ggml.padding_token_id": 256,
    }
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    model_files.write_gguf(path, fields, {})
    return tokenizer_read.read(gguf_file.open_container(str(path)))


def specs(arrays):
    return {name: safetensors_file.LazyTensor.of(array) for name, array in arrays.items()}


def cast(arrays, dtype):
    return {name: array.astype(dtype) for name, array in arrays.items()}


def one_at_a_time(arrays):
    """Specs that fail if the array before is still in memory, and the order of loading."""
    alive: list[weakref.ref] = []
    order: list[str] = []

    def spec(name, array):
        def load():
            assert not any(ref() is not None for ref in alive), f"{order[-1]} is still held"
            fresh = array.copy()
            alive.append(weakref.ref(fresh))
            order.append(name)
            return fresh

        return safetensors_file.LazyTensor(array.dtype, array.shape, load)

    return {name: spec(name, array) for name, array in arrays.items()}, order


def assert_holds(weights, arrays):
    assert weights.shapes() == {name: array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        found = weights.read(name).array
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes(), name


def failing(error):
    def load():
        raise error

    return safetensors_file.LazyTensor(np.dtype(np.float32), (2, 3), load)


# ---- safetensors files -------------------------------------------------------------------------


def test_mixed_types_and_shapes_are_read_back(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {
        f"{name} {i}": draw.normal(size=(3, i, 5)).astype(dtype)[:, :, ::2]
        for name, dtype in DTYPES.items()
        for i in range(3)
    }
    arrays["a number"] = np.float16(3).reshape(())
    arrays["every other"] = draw.normal(size=9).astype(np.float32)[::2]
    path = str(tmp_path / "a.safetensors")
    safetensors_file.write_file(path, specs(arrays), {"é": "ü"})
    found = safetensors_file.open_file(path)
    assert found.metadata == {"é": "ü"}
    assert set(found.entries) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.read(name).array, array, err_msg=name)
        assert found.entries[name].start % array.itemsize == 0


def test_a_tensor_must_be_as_announced(tmp_path):
    for dtype, shape in ((np.float16, (2, 3)), (np.float32, (3, 2))):
        spec = safetensors_file.LazyTensor(
            np.dtype(dtype), shape, lambda: np.zeros((2, 3), np.float32)
        )
        with pytest.raises(ValueError, match="a: float32.2, 3. was announced as"):
            safetensors_file.write_file(str(tmp_path / "a"), {"a": spec}, {})


# ---- Hugging Face folders ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 50_000, 10**9])
def test_folder_is_read_back(tmp_path, arrays, config, dtype, shard_bytes):
    arrays = cast(arrays, DTYPES[dtype])
    folder = tmp_path / "a"
    hf_write.write_folder(
        str(folder), config, specs(arrays), companions={}, shard_bytes=shard_bytes
    )
    assert_holds(hf_folder.open_folder(str(folder)), arrays)
    shards = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    sizes = []
    for name in shards:
        entries = safetensors_file.open_file(str(folder / name)).entries.values()
        sizes.append(sum(entry.n_bytes for entry in entries))
        assert sizes[-1] <= shard_bytes or len(entries) == 1
    largest = max(array.nbytes for array in arrays.values())
    assert all(sum(pair) > shard_bytes for pair in itertools.pairwise(sizes)), "too many shards"
    assert max(sizes) <= max(shard_bytes, largest)
    if shard_bytes == 10**9:
        assert shards == ["model.safetensors"]
        return
    count = len(shards)
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert list(index["weight_map"]) == list(arrays)
    assert sorted(index["weight_map"].values()) == list(index["weight_map"].values())


def test_one_tensor_is_in_memory(tmp_path, arrays, config):
    lazy, order = one_at_a_time(arrays)
    hf_write.write_folder(str(tmp_path / "a"), config, lazy, companions={}, shard_bytes=30_000)
    assert sorted(order) == sorted(arrays)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        (
            {
                "dtype": "float16",
                "text_config": {"torch_dtype": "float16", "a": 1},
                "b": {"dtype": 2},
            },
            {
                "dtype": "bfloat16",
                "text_config": {"torch_dtype": "bfloat16", "a": 1},
                "b": {"dtype": 2},
            },
        ),
        (
            {
                "quantization_config": {"quant_method": "gptq"},
                "x_config": {"quantization_config": 3},
            },
            {"x_config": {}, "torch_dtype": "bfloat16"},
        ),
    ],
)
def test_config_fits_the_tensors(stated, expected):
    tensors = specs(
        {"a": np.zeros((9, 9), ml_dtypes.bfloat16), "b": np.zeros(9, "f"), "c": np.zeros(9, "f")}
    )
    assert hf_write.fitting_config(stated, tensors) == expected


def test_head_of_a_tied_model_is_refused(tmp_path, arrays, config):
    tensors = specs(arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]})
    with pytest.raises(ValueError, match="lm_head.weight would be ignored"):
        hf_write.write_folder(str(tmp_path / "a"), config, tensors, companions={})
    assert os.listdir(tmp_path) == []


ERRORS = [
    (
        OSError(errno.ENOSPC, "No space left on device"),
        errors.ModelError,
        "cannot be written .No sp",
    ),
    (OSError("24 requested and 0 written"), errors.ModelError, "cannot be written .24 requested"),
    (errors.ModelError("base", None, "is damaged", ""), errors.ModelError, "base: is damaged"),
    (KeyboardInterrupt(), KeyboardInterrupt, None),
]


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_an_error_on_the_way_leaves_nothing(tmp_path, arrays, config, error, kind, message):
    tensors = specs(arrays) | {"zzz": failing(error)}
    with pytest.raises(kind, match=message):
        hf_write.write_folder(
            str(tmp_path / "a"), config, tensors, companions={}, shard_bytes=30_000
        )
    assert os.listdir(tmp_path) == []


def test_too_small_a_disk_is_told_before_the_work(tmp_path, arrays, config, monkeypatch):
    usage = atomic_output.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic_output.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    tensors = specs(arrays) | {"zzz": failing(AssertionError("was asked for"))}
    with pytest.raises(errors.ModelError, match="a: needs .* bytes, and its disk has 1,000 left"):
        hf_write.write_folder(str(tmp_path / "a"), config, tensors, companions={})
    assert os.listdir(tmp_path) == []


def test_existing_folder_stays(tmp_path, arrays, config):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_bytes(b"")
    with pytest.raises(errors.ModelError, match="a: exists, and nothing is overwritten"):
        hf_write.write_folder(str(tmp_path / "a"), config, specs(arrays), companions={})
    assert os.listdir(tmp_path / "a") == ["mine"]


def test_files_are_copied(tmp_path, arrays, config, made):
    first, second = tmp_path / "first", tmp_path / "second"
    companions = hf_write.tokenizer_files(made) | {"chat_template.jinja": b"{{ messages }}"}
    hf_write.write_folder(str(first), config, specs(arrays), companions=companions)
    (first / "README.md").write_bytes(b"not copied")
    found = hf_write.folder_files(str(first))
    assert found == companions
    hf_write.write_folder(str(second), config, specs(arrays), companions=found)
    for name in companions:
        assert (second / name).read_bytes() == (first / name).read_bytes()
    model_files.pipe(first / "tokenizer.json")
    with pytest.raises(errors.ModelError, match="tokenizer.json: is not a regular file"):
        hf_write.folder_files(str(first))


@pytest.mark.parametrize("name", ["byte-level", "tiny", "no bos", "nothing"])
def test_tokenizer_is_the_same_after_reading_it_back(tmp_path, arrays, config, name, made):
    bare = dict.fromkeys(("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id"))
    given = {
        "byte-level": made,
        "tiny": builtin.tiny().tokenizer,
        "no bos": byte_level(tmp_path / "b.gguf", add_bos_token=False),
        "nothing": byte_level(tmp_path / "c.gguf", add_bos_token=False, **bare),
    }[name]
    folder = str(tmp_path / "a")
    companions = hf_write.tokenizer_files(given)
    hf_write.write_folder(folder, config, specs(arrays), companions=companions)
    found = hf_tokenizer.open_folder(folder)
    assert found.fingerprint() == given.fingerprint()
    assert found.pad_token == given.pad_token
    backend = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    for text in TEXTS[:-1]:
        wanted = given.encode(text, add_special_tokens=True).ids.tolist()
        assert backend.encode(text).ids == wanted


# ---- GGUF files --------------------------------------------------------------------------------


def write_gguf(path, config, tensors, element_type="f32", fields=None):
    fields = model_files.tokenizer_fields() if fields is None else fields
    gguf_write.write_file(
        str(path), config, tensors, tokenizer_fields=fields, element_type=element_type
    )
    return gguf_read.open_file(str(path))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_in_float32_is_read_back(tmp_path, config, dtype, tied):
    config |= {"tie_word_embeddings": tied}
    arrays = cast(random_weights.drawn(config, seed=4), DTYPES[dtype])
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays))
    assert_holds(found, cast(arrays, np.float32))
    read = {key: found.config[key] for key in config}
    assert read.pop("rms_norm_eps") == np.float32(config.pop("rms_norm_eps"))
    assert read == config
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_gguf_rows_lie_as_llama_cpp_has_them(tmp_path, config, arrays):
    """Against the loop of `model_files`, which does not share the reader's code."""
    write_gguf(tmp_path / "a.gguf", config, specs(arrays))
    container = gguf_file.open_container(str(tmp_path / "a.gguf"))
    for name, (stored, kind) in model_files.llama_tensors(arrays, config).items():
        assert container.tensors[name].dtype == kind
        np.testing.assert_array_equal(container.read(name).array, stored, err_msg=name)


def test_gguf_biases_are_permuted_too(tmp_path, config, arrays):
    q_bias = "model.layers.0.self_attn.q_proj.bias"
    arrays[q_bias] = np.arange(64, dtype=np.float32)
    arrays["model.layers.1.mlp.up_proj.bias"] = np.arange(128, dtype=np.float32)
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays), "f16")
    for name in (q_bias, "model.layers.1.mlp.up_proj.bias"):
        np.testing.assert_array_equal(found.read(name).array, arrays[name])
    stored = found.container.read("blk.0.attn_q.bias").array
    np.testing.assert_array_equal(stored, model_files.interleave_rows(arrays[q_bias], 4))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_gguf_rounds_matrices_only(tmp_path, config, arrays, kind):
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays), kind)
    wanted = {
        name: array.astype(DTYPES[kind.upper()]) if array.ndim == 2 else array
        for name, array in arrays.items()
    }
    assert_holds(found, wanted)
    assert found.container.fields["general.file_type"] == {"f16": 1, "bf16": 32}[kind]


def test_gguf_q8_0(tmp_path, config, arrays):
    """Codes and float16 scales by the format's definition, computed here block by block."""
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays), "q8_0")
    assert found.container.fields["general.file_type"] == 7
    assert found.container.fields["general.quantization_version"] == 2
    for name, array in arrays.items():
        read = found.read(name).array
        if array.ndim == 1:
            np.testing.assert_array_equal(read, array)
            continue
        assert found.container.tensors[found.names[name]].dtype == "Q8_0"
        blocks = array.reshape(-1, 32)
        scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        codes = np.round(blocks / np.where(scales == 0, 1, scales))
        expected = (codes * scales.astype(np.float16).astype(np.float32)).reshape(array.shape)
        np.testing.assert_allclose(read, expected, rtol=0, atol=1e-6 + scales.max() / 1000)


def test_gguf_one_tensor_is_in_memory(tmp_path, config, arrays):
    lazy, order = one_at_a_time(arrays)
    write_gguf(tmp_path / "a.gguf", config, lazy, "f16")
    assert order == list(arrays)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_gguf_rope_scaling(tmp_path, config, name, spelling):
    config |= {"rope_theta": 500000.0, "head_dim": 64, "hidden_size": 256}
    arrays = random_weights.drawn(config, seed=0)
    if spelling == "rope_parameters":
        config[spelling] = SCALINGS[name] | {"rope_theta": config.pop("rope_theta")}
    else:
        config[spelling] = SCALINGS[name]
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays))
    assert found.config["rope_scaling"] == SCALINGS[name]
    assert found.config["rope_theta"] == 500000.0
    assert ("rope_freqs.weight" in found.container.tensors) == (name == "llama3")


def test_gguf_head_dim_follows_from_the_sizes(tmp_path, config, arrays):
    del config["head_dim"]
    assert write_gguf(tmp_path / "a.gguf", config, specs(arrays)).config["head_dim"] == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen2"},
            "model_type = 'qwen2': has no place in a llama GGUF; write a saf",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type = 'yarn'"),
        ({"rms_norm_eps": None, "vocab_size": None}, "config lacks rms_norm_eps, vocab_size"),
    ],
)
def test_gguf_settings_without_a_place(tmp_path, config, arrays, changes, message):
    with pytest.raises(errors.ModelError, match=message):
        write_gguf(tmp_path / "a.gguf", config | changes, specs(arrays))
    assert os.listdir(tmp_path) == []


def test_gguf_tensors_without_a_place(tmp_path, config, arrays):
    extra = {
        "model.layers.0.self_attn.q_norm.weight": np.zeros(16, np.float32),
        "model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
        "model.layers.0.mlp.up_proj.scale": np.zeros(16, np.float32),
    }
    with pytest.raises(errors.ModelError) as caught:
        write_gguf(tmp_path / "a.gguf", config, specs(arrays | extra))
    assert all(name in str(caught.value) for name in extra)
    assert len(caught.value.problems) == 3


def test_gguf_blocks_must_divide_rows(tmp_path, config):
    config |= {"intermediate_size": 72}
    arrays = random_weights.drawn(config, seed=0)
    with pytest.raises(errors.ModelError, match="down_proj.*blocks of 32; use another element"):
        write_gguf(tmp_path / "a.gguf", config, specs(arrays), "q8_0")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("f16", 65520), ("f16", np.nan), ("q8_0", 1e8), ("q8_0", np.nan), ("f32", np.inf)],
)
def test_gguf_values_too_large_are_named(tmp_path, config, arrays, kind, value):
    arrays["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    with pytest.raises(errors.ModelError, match="blk.1.attn_k.weight: holds NaN, infinity or"):
        write_gguf(tmp_path / "a.gguf", config, specs(arrays), kind)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_gguf_error_on_the_way_leaves_nothing(tmp_path, config, arrays, error, kind, message):
    tensors = specs(arrays) | {"lm_head.weight": failing(error)}
    with pytest.raises(kind, match=message):
        write_gguf(tmp_path / "a.gguf", config | {"tie_word_embeddings": False}, tensors)
    assert os.listdir(tmp_path) == []


def test_gguf_existing_file_stays(tmp_path, config, arrays):
    (tmp_path / "a.gguf").write_bytes(b"mine")
    with pytest.raises(errors.ModelError, match="a.gguf: exists, and nothing is overwritten"):
        write_gguf(tmp_path / "a.gguf", config, specs(arrays))
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_head_and_tying_must_agree(tmp_path, config, tied):
    arrays = random_weights.drawn(config | {"tie_word_embeddings": not tied}, seed=0)
    with pytest.raises(ValueError, match="output head of its own, or tie_word_embeddings"):
        write_gguf(tmp_path / "a.gguf", config | {"tie_word_embeddings": tied}, specs(arrays))


@pytest.mark.parametrize("kind", gguf_write.FILE_TYPES)
def test_the_gguf_library_reads_the_file(tmp_path, config, arrays, kind):
    """Its own reader, which checks alignment and sizes by itself."""
    write_gguf(tmp_path / "a.gguf", config, specs(arrays), kind)
    reader = gguf_library.GGUFReader(tmp_path / "a.gguf")
    assert len(reader.tensors) == len(arrays)
    for tensor in reader.tensors:
        assert tensor.data_offset % 32 == 0


# ---- tokenizers in GGUF files ------------------------------------------------------------------


def test_gguf_tokenizer_is_copied(tmp_path, config, arrays):
    first = write_gguf(tmp_path / "a.gguf", config, specs(arrays))
    fields = tokenizer_write.copied_fields(first.container)
    assert fields == model_files.tokenizer_fields()
    second = write_gguf(tmp_path / "b.gguf", config, specs(arrays), "f16", fields)
    assert tokenizer_write.copied_fields(second.container) == fields


def test_gguf_scores_are_copied(tmp_path, config, arrays):
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [2, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.5, -2.0, -0.5],
        "tokenizer.ggml.add_space_prefix": False,
    }
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays), fields=fields)
    assert tokenizer_write.copied_fields(found.container) == fields


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("through_folder", [True, False])
def test_gguf_tokenizer_is_made(tmp_path, config, arrays, pre, through_folder):
    given = byte_level(tmp_path / "given.gguf", pre=pre)
    if through_folder:
        companions = hf_write.tokenizer_files(given)
        hf_write.write_folder(str(tmp_path / "hf"), config, specs(arrays), companions=companions)
        given = hf_tokenizer.open_folder(str(tmp_path / "hf"))
    fields = tokenizer_write.fields_of("a.gguf", given, model_files.GGUF_VOCAB)
    assert fields["tokenizer.ggml.pre"] == pre
    found = tokenizer_read.read(
        write_gguf(tmp_path / "a.gguf", config, specs(arrays), fields=fields).container
    )
    assert found.fingerprint() == given.fingerprint()
    assert found.pad_token == given.pad_token


def test_gguf_vocabulary_is_filled_up_to_the_rows(tmp_path, config, arrays, made):
    fields = tokenizer_write.fields_of("a.gguf", made, 264)
    assert fields["tokenizer.ggml.tokens"][259:] == ["Ġt", "he", "[PAD261]", "[PAD262]", "[PAD263]"]
    assert fields["tokenizer.ggml.token_type"][255:] == [1, 3, 3, 3, 1, 1, 5, 5, 5]


def rebuilt(given, change):
    """A tokenizer after a change to its tokenizer.json."""
    data = json.loads(given.backend.to_str())
    change(data)
    return tokenizer.build(
        "a",
        tokenizers.Tokenizer.from_str(json.dumps(data)),
        special_tokens={},
        end_ids=[],
        add_bos=False,
        chat_template=None,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["model"].update(byte_fallback=True),
            "'BPE with decoder ByteLevel': is a",
        ),
        (lambda data: data.update(decoder=None), "'BPE with decoder None': is a tokenizer that"),
        (
            lambda data: data.update(
                model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
            ),
            "'WordLevel with decoder ByteLevel'.*write a safetensors folder instead",
        ),
        (lambda data: data["model"].update(merges=[]), "has no merges"),
        (lambda data: data["model"].update(dropout=0.5), "has a dropout"),
        (lambda data: data["added_tokens"][0].update(rstrip=True), "token with rstrip"),
        (lambda data: data["model"].update(ignore_merges=True), "no known name for; known: smollm"),
        (lambda data: data.update(normalizer={"type": "NFC"}), "no known name for"),
        (lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "no known name for"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_written(made, change, message):
    with pytest.raises(errors.ModelError, match=f"a.gguf: tokenizer = .*{message}|{message}"):
        tokenizer_write.fields_of("a.gguf", rebuilt(made, change), model_files.GGUF_VOCAB)


def test_gguf_has_no_place_for_four_ends(made, tmp_path):
    backend = tokenizers.Tokenizer.from_str(made.backend.to_str())
    for count in (3, 4):
        given = tokenizer.build(
            "a", backend, special_tokens={}, end_ids=range(count), add_bos=False, chat_template=None
        )
        if count == 3:
            fields = tokenizer_write.fields_of("a", given, 261)
            assert [fields[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")] == [
                0, 1, 2,
            ]  # fmt: skip
        else:
            with pytest.raises(errors.ModelError, match="are 4 ids that end a text"):
                tokenizer_write.fields_of("a", given, 261)


# ---- transformers ------------------------------------------------------------------------------


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def llama(config, arrays):
    """transformers' Llama with these weights, set by hand."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    return model


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [30_000, 10**9])
def test_transformers_loads_the_folder(tmp_path, config, made, tied, shard_bytes):
    import transformers

    config |= {"tie_word_embeddings": tied}
    arrays = random_weights.drawn(config, seed=5)
    folder = str(tmp_path / "a")
    companions = hf_write.tokenizer_files(made)
    hf_write.write_folder(
        folder, config, specs(arrays), companions=companions, shard_bytes=shard_bytes
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = [3, 200, 17, 4, 4, 100]
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(llama(config, arrays), ids))
    assert model.generation_config.eos_token_id == list(made.eos_ids)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:-1]:
        wanted = made.encode(text, add_special_tokens=True).ids.tolist()
        assert theirs.encode(text) == wanted
        assert theirs.decode(theirs.encode(text, add_special_tokens=False)) == text
    messages = [{"role": "user", "content": "hé"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nhé<|im_end|>\n"
    )


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", gguf_write.FILE_TYPES)
def test_transformers_loads_the_gguf_file(tmp_path, config, made, kind):
    """An independent reader: the model it makes equals one with the rounded weights."""
    import transformers

    config |= {"tie_word_embeddings": False}
    arrays = random_weights.drawn(config, seed=5)
    fields = tokenizer_write.fields_of("a", made, config["vocab_size"])
    found = write_gguf(tmp_path / "a.gguf", config, specs(arrays), kind, fields)
    rounded = {name: found.read(name).array.astype(np.float32) for name in arrays}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="a.gguf", dtype="float32"
    )
    ids = [3, 200, 17, 4, 4, 100]
    np.testing.assert_allclose(
        logits_of(model, ids), logits_of(llama(config, rounded), ids), rtol=0, atol=1e-5
    )
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    assert theirs.encode("the theme", add_special_tokens=False) == (
        made.encode("the theme", add_special_tokens=False).ids.tolist()
    )
