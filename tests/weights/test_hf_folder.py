"""Hugging Face folders: what is read back, and one clear error for each kind of damage."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from purelora.core import errors
from purelora.formats import source
from purelora.weights import hf_folder, random_weights
from tests.support import model_files

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def arrays():
    return random_weights.drawn(model_files.tiny_config(), seed=3)


@pytest.fixture
def folder(tmp_path, arrays):
    model_files.write_hf(tmp_path, arrays, model_files.tiny_config())
    return tmp_path


@pytest.fixture
def sharded(tmp_path, arrays):
    model_files.write_hf(tmp_path, arrays, model_files.tiny_config(), shards=2)
    return tmp_path


def read_all(weights: source.Source) -> dict[str, source.Tensor]:
    return {name: weights.read(name) for name in weights.shapes()}


def fingerprint(weights: source.Source) -> str:
    return source.fingerprint({name: t.digest for name, t in read_all(weights).items()})


def raw_safetensors(path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_back_what_was_written(tmp_path, arrays, shards, dtype):
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    model_files.write_hf(tmp_path, arrays, model_files.tiny_config(), shards)
    weights = hf_folder.open_folder(str(tmp_path))
    assert weights.config == model_files.tiny_config()
    assert weights.shapes() == {name: array.shape for name, array in arrays.items()}
    for name, tensor in read_all(weights).items():
        assert tensor.array.dtype == dtype
        np.testing.assert_array_equal(tensor.array, arrays[name])


def test_fingerprint_is_of_the_tensors_alone(tmp_path, arrays):
    def of(changed, shards, name):
        (tmp_path / name).mkdir()
        model_files.write_hf(tmp_path / name, changed, model_files.tiny_config(), shards)
        return fingerprint(hf_folder.open_folder(str(tmp_path / name)))

    same = of(arrays, 1, "one")
    assert of(dict(reversed(arrays.items())), 3, "three") == same
    assert fingerprint(source.ArraySource("memory", {}, arrays)) == same
    norm = "model.norm.weight"
    one_value = arrays[norm].copy()
    one_value[5] += 1e-6
    variants = {
        "value": arrays | {norm: one_value},
        "shape": arrays | {norm: arrays[norm].reshape(8, 8)},
        "name": {("x" if name == norm else name): array for name, array in arrays.items()},
        "missing": {name: array for name, array in arrays.items() if name != norm},
    }
    found = {name: of(changed, 1, name) for name, changed in variants.items()}
    assert len({same, *found.values()}) == 1 + len(variants)


def test_fingerprint_is_stable():
    weights = source.ArraySource("memory", {}, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    expected = "7b04abe534f8922d1f6ab777ba5f3f39"
    assert fingerprint(weights)[:32] == expected, (
        "adapters store this hash: a change makes every saved adapter refuse its base"
    )


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json(folder, name, damage, message):
    file = folder / name
    model_files.write_json(file, {"eos_token_id": 2, "model_type": "llama"})
    damage(file)
    with pytest.raises(errors.ModelError, match=re.escape(str(file)) + ".*" + message):
        if name == "config.json":
            hf_folder.open_folder(str(folder))
        else:
            hf_folder.generation_eos(str(folder))


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE)
def test_damaged_index(sharded, damage, message):
    damage(sharded / INDEX)
    with pytest.raises(errors.ModelError, match=message):
        hf_folder.open_folder(str(sharded))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", r"holds only pytorch_model.bin \(pickle\)"),
        ("adapter_config.json", "it holds an adapter: give the folder of its base model"),
        ("model-00001-of-00002.safetensors", f"it holds shards but no {INDEX}"),
        ("README.md", "has no safetensors weights; download model.safetensors"),
    ],
)
def test_no_safetensors_says_what_is_there_instead(tmp_path, name, message):
    model_files.write_json(tmp_path / "config.json", {"model_type": "llama"})
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(errors.ModelError, match=message):
        hf_folder.open_folder(str(tmp_path))


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(errors.ModelError, match="is not a folder"):
        hf_folder.open_folder(str(tmp_path / "absent"))
    with pytest.raises(errors.ModelError, match="has no config.json; give the folder that"):
        hf_folder.open_folder(str(tmp_path))
    (tmp_path / "model.Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(errors.ModelError, match=r"model.path=.*model.Q8_0.gguf"):
        hf_folder.open_folder(str(tmp_path))


def test_quantised_weights_are_refused_by_method(folder):
    config = model_files.tiny_config(quantization_config={"quant_method": "gptq", "bits": 4})
    model_files.write_json(folder / "config.json", config)
    with pytest.raises(errors.ModelError, match="quantization_config = 'gptq'.*unquantised"):
        hf_folder.open_folder(str(folder))


TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
BAD_HEADERS = {
    "empty file": (b"", b"", None),
    "data cut off": ({"a": TENSOR}, b"\0" * 20, None),
    "surplus data": ({"a": TENSOR}, b"\0" * 30, None),
    "span too short": ({"a": TENSOR | {"data_offsets": [0, 20]}}, b"\0" * 24, None),
    "offsets reversed": ({"a": TENSOR | {"data_offsets": [24, 0]}}, b"\0" * 24, None),
    "terabytes": (
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        b"\0" * 24,
        None,
    ),
    "shape overflows": ({"a": TENSOR | {"shape": [2**62, 2**62]}}, b"\0" * 24, None),
    "tensors overlap": ({"a": TENSOR, "b": TENSOR}, b"\0" * 24, None),
    "header of a terabyte": ({"a": TENSOR}, b"\0" * 24, 2**40),
    "header past the end": ({"a": TENSOR}, b"\0" * 24, 5000),
    "header an array": ([1], b"", None),
    "header not UTF-8": (b"\xff\xfe{}", b"", None),
    "header not JSON": (b"{", b"", None),
    "unknown dtype": ({"a": TENSOR | {"dtype": "Q9"}}, b"\0" * 24, None),
    "negative shape": ({"a": TENSOR | {"shape": [-2, -3]}}, b"\0" * 24, None),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_unsound_safetensors(folder, case):
    file = folder / "model.safetensors"
    if case == "empty file":
        file.write_bytes(b"")
    else:
        raw_safetensors(file, *BAD_HEADERS[case])
    message = f"{re.escape(str(file))}: is not a sound safetensors file"
    with pytest.raises(errors.ModelError, match=message):
        hf_folder.open_folder(str(folder))


def test_every_truncation_of_the_weights_is_refused(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for size in [*range(0, 4000, 97), len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(errors.ModelError, match="is not a sound safetensors file"):
            hf_folder.open_folder(str(folder))


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE[-3:])
def test_weights_that_are_no_file(folder, damage, message):
    damage(folder / "model.safetensors")
    with pytest.raises(errors.ModelError, match=message):
        hf_folder.open_folder(str(folder))


def test_no_tensors_at_all(folder):
    raw_safetensors(folder / "model.safetensors", {}, b"")
    with pytest.raises(errors.ModelError, match="holds no tensors"):
        hf_folder.open_folder(str(folder))


@pytest.mark.parametrize(("dtype", "n_bytes"), [("F8_E4M3", 6), ("I64", 48), ("F64", 48)])
def test_other_element_types_are_named(folder, dtype, n_bytes):
    header = {"a.weight": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, n_bytes]}}
    raw_safetensors(folder / "model.safetensors", header, b"\0" * n_bytes)
    weights = hf_folder.open_folder(str(folder))
    with pytest.raises(errors.ModelError, match=f"a.weight = '{dtype}': .*F32, F16, BF16"):
        weights.read("a.weight")


def test_array_source_refuses_other_element_types():
    weights = source.ArraySource("memory", {}, {"a": np.zeros(3, np.int8)})
    with pytest.raises(errors.ModelError, match="memory: a = 'int8'"):
        weights.read("a")


def test_unknown_tensor_names_the_nearest(folder):
    weights = hf_folder.open_folder(str(folder))
    with pytest.raises(errors.ModelError, match="did you mean 'model.norm.weight'"):
        weights.read("model.norms.weight")


def change_index(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    model_files.write_json(folder / INDEX, index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "has no weight_map"),
        (lambda index: index.update(weight_map={}), "has no weight_map"),
        (lambda index: index.update(weight_map=[1]), "weight_map = .1.: is not a JSON object"),
        (
            lambda index: index["weight_map"].update(x="absent.safetensors"),
            "lists absent.safetensors, which is missing",
        ),
        (
            lambda index: index["weight_map"].update(x="../other.safetensors"),
            "x = '../other.safetensors': points outside the model folder",
        ),
        (
            lambda index: index["weight_map"].update(x="/etc/other.safetensors"),
            "points outside the model folder",
        ),
        (
            lambda index: index["weight_map"].update(x=r"..\other.safetensors"),
            "points outside the model folder",
        ),
        (lambda index: index["weight_map"].update(x=3), "x = 3: is not the name of a safet"),
        (lambda index: index["weight_map"].update(x="config.json"), "is not the name of a safet"),
        (
            lambda index: index["weight_map"].update(extra=FIRST),
            f"{FIRST}: lacks tensor 'extra' that .*{INDEX} lists for it",
        ),
        (
            lambda index: index["weight_map"].pop("model.norm.weight"),
            "holds tensor 'model.norm.weight', which the index does not list",
        ),
    ],
)
def test_index_that_does_not_fit(sharded, change, message):
    change_index(sharded, change)
    with pytest.raises(errors.ModelError, match=message):
        hf_folder.open_folder(str(sharded))


def test_tensor_in_two_shards(sharded):
    first = safetensors.numpy.load_file(sharded / FIRST)
    second = safetensors.numpy.load_file(sharded / SECOND)
    name = min(first)
    safetensors.numpy.save_file(second | {name: first[name]}, sharded / SECOND)
    with pytest.raises(errors.ModelError, match=f"{SECOND}: holds tensor '{name}', which the"):
        hf_folder.open_folder(str(sharded))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (2, None, [2]),
        ([128001, 128008, 128009], 128001, [128001, 128008, 128009, 128001]),
        (None, 7, [7]),
        (None, None, []),
    ],
)
def test_generation_eos(tmp_path, generation, config, expected):
    model_files.write_json(tmp_path / "generation_config.json", {"eos_token_id": generation})
    model_files.write_json(tmp_path / "config.json", {"eos_token_id": config})
    assert hf_folder.generation_eos(str(tmp_path)) == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.5, True, -1, {"a": 1}])
def test_generation_eos_of_wrong_type(tmp_path, value):
    model_files.write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(errors.ModelError, match="generation_config.json: eos_token_id = "):
        hf_folder.generation_eos(str(tmp_path))
