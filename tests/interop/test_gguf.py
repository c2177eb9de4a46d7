"""GGUF files: block types, row order, metadata, and one clear error for each kind of damage."""

import dataclasses
import json
import math
import pathlib
import struct

import gguf as gguf_library
import ml_dtypes
import numpy as np
import pytest

from purelora.core import errors
from purelora.formats import gguf_file, source
from purelora.interop import builtin
from purelora.interop.gguf import read as gguf_read
from purelora.interop.gguf import rope_scaling
from purelora.models import causal_lm
from purelora.weights import random_weights
from tests.support import model_files, tiny

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
SMOLLM2 = json.loads((ORACLES / "smollm2_135m.json").read_text(encoding="utf-8"))


# ---- block types, against a scalar decoder written from the layouts in ggml's documentation -----


def half(block: bytes, at: int) -> np.float32:
    return np.float32(np.frombuffer(block[at : at + 2], np.float16)[0])


def nibbles(packed: bytes) -> list[int]:
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def fifth_bits(block: bytes, at: int) -> list[int]:
    (bits,) = struct.unpack("<I", block[at : at + 4])
    return [(bits >> i & 1) << 4 for i in range(32)]


def scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    """The j-th of eight 6-bit scales and minima packed into 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    low, high_scale, high_min = packed[j + 4], packed[j - 4] >> 6, packed[j] >> 6
    return low & 15 | high_scale << 4, low >> 4 | high_min << 4


def decode_simple(block: bytes, kind: str) -> list[np.float32]:
    d = half(block, 0)
    if kind == "Q8_0":
        return [d * np.float32(code) for code in struct.unpack("<32b", block[2:])]
    if kind == "Q4_0":
        return [d * np.float32(code - 8) for code in nibbles(block[2:])]
    if kind == "Q4_1":
        return [d * np.float32(code) + half(block, 2) for code in nibbles(block[4:])]
    if kind == "Q5_0":
        codes = zip(nibbles(block[6:]), fifth_bits(block, 2), strict=True)
        return [d * np.float32((low | high) - 16) for low, high in codes]
    codes = zip(nibbles(block[8:]), fifth_bits(block, 4), strict=True)
    return [d * np.float32(low | high) + half(block, 2) for low, high in codes]


def decode_q45_k(block: bytes, kind: str) -> list[np.float32]:
    high, low = (block[16:48], block[48:]) if kind == "Q5_K" else (bytes(32), block[16:])
    out = []
    for j in range(8):
        scale, minimum = scale_and_min(block[4:16], j)
        for i in range(32):
            byte = low[32 * (j // 2) + i]
            code = (byte >> 4 if j % 2 else byte & 15) | (high[i] >> j & 1) << 4
            out.append(
                half(block, 0) * np.float32(scale) * np.float32(code)
                - half(block, 2) * np.float32(minimum)
            )
    return out


def decode_q6_k(block: bytes) -> list[np.float32]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    out = []
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        byte = low[64 * part + 32 * (quarter % 2) + lane]
        code = byte >> 4 if quarter >= 2 else byte & 15
        code |= (high[32 * part + lane] >> 2 * quarter & 3) << 4
        out.append(half(block, 208) * np.float32(scales[i // 16]) * np.float32(code - 32))
    return out


def decode(data: np.ndarray, kind: str) -> np.ndarray:
    block_size, block_bytes = gguf_library.GGML_QUANT_SIZES[gguf_library.GGMLQuantizationType[kind]]
    rows = []
    for row in data:
        blocks = [row[i : i + block_bytes].tobytes() for i in range(0, row.size, block_bytes)]
        if block_size == 32:
            values = [decode_simple(block, kind) for block in blocks]
        elif kind == "Q6_K":
            values = [decode_q6_k(block) for block in blocks]
        else:
            values = [decode_q45_k(block, kind) for block in blocks]
        rows.append(np.concatenate(values))
    return np.stack(rows)


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Random block bytes whose float16 scales are finite."""
    _, block_bytes = gguf_library.GGML_QUANT_SIZES[gguf_library.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(7)
    data = draw.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    halves = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208]}.get(kind, [0, 2])
    for at in halves:
        scale = draw.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", gguf_file.QUANTISED)
def test_dequantises_every_block_type(tmp_path, kind):
    data = random_blocks(kind, rows=3, blocks=2)
    model_files.write_gguf(tmp_path / "a.gguf", {}, {"t": (data, kind)})
    tensor = gguf_file.open_container(str(tmp_path / "a.gguf")).read("t")
    assert tensor.array.dtype == np.float32
    np.testing.assert_allclose(tensor.array, decode(data, kind), rtol=1e-6, atol=1e-6)
    assert tensor.digest == source.digest(kind, tensor.array.shape, data)


@pytest.mark.parametrize(
    ("kind", "error"), [("Q8_0", 0.02), ("Q4_0", 0.4), ("Q4_1", 0.25), ("Q5_0", 0.2), ("Q5_1", 0.1)]
)
def test_quantised_values_are_near_the_original(tmp_path, kind, error):
    original = np.random.default_rng(1).normal(size=(4, 96)).astype(np.float32)
    packed = gguf_library.quants.quantize(original, gguf_library.GGMLQuantizationType[kind])
    model_files.write_gguf(tmp_path / "a.gguf", {}, {"t": (packed, kind)})
    read = gguf_file.open_container(str(tmp_path / "a.gguf")).read("t").array
    assert read.shape == original.shape
    assert np.abs(read - original).max() < error


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_are_read_as_stored(tmp_path, dtype):
    array = np.random.default_rng(2).normal(size=(3, 5)).astype(dtype)
    kind = {value: key for key, value in source.DTYPES.items()}[np.dtype(dtype)]
    stored = array.view(np.uint8) if kind == "BF16" else array
    model_files.write_gguf(tmp_path / "a.gguf", {}, {"t": (stored, kind), "u": (stored, kind)})
    for name in ("t", "u"):
        read = gguf_file.open_container(str(tmp_path / "a.gguf")).read(name).array
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS", "TQ1_0"])
def test_other_tensor_types_are_named(tmp_path, kind):
    data = random_blocks(kind, rows=1, blocks=1)
    model_files.write_gguf(tmp_path / "a.gguf", {}, {"blk.0.x": (data, kind)})
    with pytest.raises(errors.ModelError, match=f"blk.0.x = '{kind}': is a tensor type that is"):
        gguf_file.open_container(str(tmp_path / "a.gguf"))


# ---- names, layout and metadata ----------------------------------------------------------------


def test_reads_back_the_model_that_was_converted(tmp_path):
    arrays = model_files.write_tiny_gguf(tmp_path / "a.gguf")
    weights = gguf_read.open_file(str(tmp_path / "a.gguf"))
    assert weights.shapes() == {name: array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights.read(name).array, array, err_msg=name)
    config = model_files.tiny_config(vocab_size=model_files.GGUF_VOCAB)
    found = {key: weights.config[key] for key in config}
    assert found.pop("rms_norm_eps") == np.float32(config.pop("rms_norm_eps"))
    assert found == config
    assert weights.config["eos_token_id"] == 258


def rotate_pairs(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding of neighbouring pairs, as llama.cpp computes it on the stored order."""
    even, odd = rows[0::2], rows[1::2]
    out = np.empty_like(rows)
    out[0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[1::2] = odd * np.cos(angles) + even * np.sin(angles)
    return out


def rotate_halves(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding of rows half a head apart, as Hugging Face computes it."""
    first, second = np.split(rows, 2)
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ]
    )


@pytest.mark.parametrize("size", [4, 16, 64])
def test_unpermuted_rows_give_the_same_attention_scores(size):
    draw = np.random.default_rng(4)
    stored_q, stored_k = draw.normal(size=(2, 2 * size, 8))
    x, y = draw.normal(size=(2, 8))
    q_angles, k_angles = draw.uniform(0, 6, size=(2, size // 2))
    q, k = gguf_read.unpermute_rows(stored_q, 2), gguf_read.unpermute_rows(stored_k, 2)
    for head in range(2):
        rows = slice(head * size, (head + 1) * size)
        expected = rotate_pairs(stored_q[rows] @ x, q_angles) @ rotate_pairs(
            stored_k[rows] @ y, k_angles
        )
        score = rotate_halves(q[rows] @ x, q_angles) @ rotate_halves(k[rows] @ y, k_angles)
        np.testing.assert_allclose(score, expected, rtol=1e-9)


def test_biases_of_q_and_k_are_reordered_too(tmp_path):
    config = model_files.tiny_config()
    arrays = random_weights.drawn(config, seed=1)
    bias = np.arange(64, dtype=np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = bias
    arrays["model.layers.0.self_attn.v_proj.bias"] = bias[:32]
    tensors = model_files.llama_tensors(arrays, config)
    model_files.write_gguf(tmp_path / "a.gguf", model_files.llama_fields(config), tensors)
    weights = gguf_read.open_file(str(tmp_path / "a.gguf"))
    for part, expected in (("q", bias), ("v", bias[:32])):
        read = weights.read(f"model.layers.0.self_attn.{part}_proj.bias").array
        np.testing.assert_array_equal(read, expected)
    assert weights.config["attention_bias"] is True
    assert weights.config["mlp_bias"] is False


@pytest.mark.parametrize(
    ("key", "absent"),
    [
        ("llama__embedding_length", "hidden_size"),
        ("llama__feed_forward_length", "intermediate_size"),
        ("llama__block_count", "num_hidden_layers"),
        ("llama__attention__layer_norm_rms_epsilon", "rms_norm_eps"),
        ("llama__rope__freq_base", "rope_theta"),
        ("llama__rope__dimension_count", "head_dim"),
        ("llama__context_length", "max_position_embeddings"),
    ],
)
def test_what_the_file_does_not_say_is_absent(tmp_path, key, absent):
    model_files.write_tiny_gguf(tmp_path / "a.gguf", **{key: None})
    config = gguf_read.open_file(str(tmp_path / "a.gguf")).config
    assert set(model_files.tiny_config()) - set(config) == {absent}


def test_facts_that_the_format_settles(tmp_path):
    changes = {"llama__attention__head_count_kv": 4, "llama__vocab_size": None}
    config = model_files.tiny_config(num_key_value_heads=4, tie_word_embeddings=False)
    arrays = random_weights.drawn(config, seed=1)
    fields = model_files.llama_fields(config)
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    del fields["llama.attention.head_count_kv"]
    tensors = model_files.llama_tensors(arrays, config)
    model_files.write_gguf(tmp_path / "a.gguf", fields, tensors)
    read = gguf_read.open_file(str(tmp_path / "a.gguf"))
    assert read.config["num_key_value_heads"] == 4
    assert read.config["vocab_size"] == 259
    assert read.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(read.read("lm_head.weight").array, arrays["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__attention__head_count": None}, "cannot be ordered with num_attention_heads = N"),
        ({"llama__attention__head_count": 5}, "cannot be ordered with num_attention_heads = 5"),
        ({"llama__attention__head_count": [4, 4]}, r"head_count = \[4, 4\]: is not a int"),
        ({"llama__rope__freq_base": "big"}, "freq_base = 'big': is not a float"),
        ({"llama__rope__dimension_count": 8, "llama__attention__key_length": 16}, "head size 16"),
        ({"llama__attention__value_length": 32}, "value_length = 32: differs from the head size"),
        ({"llama__vocab_size": 300}, "vocab_size = 300: differs from the 261 rows"),
        ({"llama__expert_count": 8}, "expert_count = 8: is a mixture of experts"),
        ({"llama__logit_scale": 0.5}, "settings that are not understood: llama.logit_scale"),
        ({"split__count": 3}, "split.count = 3: is one part of a model split over several"),
        ({"general__alignment": "x"}, "general.alignment = 'x': is not a positive integer"),
        ({"general__alignment": 0}, "general.alignment = 0: is not a positive integer"),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path, changes, message):
    model_files.write_tiny_gguf(tmp_path / "a.gguf", **changes)
    with pytest.raises(errors.ModelError, match=message):
        gguf_read.open_file(str(tmp_path / "a.gguf"))


def test_other_architectures_are_named(tmp_path):
    model_files.write_gguf(tmp_path / "a.gguf", {}, {}, arch="gemma2")
    with pytest.raises(errors.ModelError, match="ture = 'gemma2': is an arch.*known: gemma3, lla"):
        gguf_read.open_file(str(tmp_path / "a.gguf"))


def random_arrays(model) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(model.flat_infos[path].file_shape).astype(np.float32)
        for path, names in model.hf_names.items()
        for name in names
    }


def write_arch(path, arch: str, **changes):
    """A GGUF file of an architecture that orders rows as Hugging Face does; its config, arrays."""
    config = tiny.hf_config(arch, **changes)
    model = causal_lm.from_hf(config, "config.json", dtype="float32")
    arrays = random_arrays(model)
    head_dim = model.config.head_dim
    fields = model_files.llama_fields(config | {"head_dim": head_dim}, arch)
    model_files.write_gguf(
        path,
        fields | {f"{arch}.attention.key_length": head_dim, "tokenizer.ggml.model": "none"},
        {model_files.gguf_name(name): (array, "F32") for name, array in arrays.items()},
        arch=arch,
    )
    return model, arrays


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("qwen2", {}), ("qwen2", {"tie_word_embeddings": False}), ("qwen3", {}),
     ("qwen3", {"attention_bias": True})],
)  # fmt: skip
def test_other_architectures_are_read(tmp_path, arch, changes):
    model, arrays = write_arch(tmp_path / "a.gguf", arch, **changes)
    found = gguf_read.open_file(str(tmp_path / "a.gguf"))
    assert found.shapes() == {name: array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.read(name).array, array, err_msg=name)
    read = causal_lm.from_hf(found.config, "a.gguf", dtype="float32").config
    assert read.rms_norm_eps == np.float32(model.config.rms_norm_eps)
    assert dataclasses.replace(read, rms_norm_eps=model.config.rms_norm_eps) == model.config


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("arch", "changes"), [("qwen2", {}), ("qwen3", {"head_dim": 128})])
def test_transformers_reads_the_same_of_other_architectures(tmp_path, arch, changes):
    """It takes the heads of every Qwen3 for those of 128."""
    transformers = pytest.importorskip("transformers")
    write_arch(tmp_path / "a.gguf", arch, **changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="a.gguf", dtype="float32"
    )
    found = gguf_read.open_file(str(tmp_path / "a.gguf"))
    state = theirs.state_dict()
    for name in found.shapes():
        np.testing.assert_array_equal(found.read(name).array, state[name].numpy(), err_msg=name)
    assert set(state) - set(found.shapes()) <= {"lm_head.weight"}


def test_yarn_with_factors_of_its_own_is_refused(tmp_path):
    changes = {"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 1.0}
    changes = {f"llama__{key}": value for key, value in changes.items()}
    model_files.write_tiny_gguf(tmp_path / "a.gguf", **changes)
    with pytest.raises(errors.ModelError, match="llama.rope.scaling.attn_factor = 1.0: is not"):
        gguf_read.open_file(str(tmp_path / "a.gguf"))


def test_unknown_tensors_are_listed(tmp_path):
    config = model_files.tiny_config()
    tensors = model_files.llama_tensors(random_weights.drawn(config, seed=1), config)
    extra = (np.zeros(4, np.float32), "F32")
    tensors |= {"blk.0.attn_q_norm.weight": extra, "rope_short.weight": extra}
    model_files.write_gguf(tmp_path / "a.gguf", model_files.llama_fields(config), tensors)
    message = "no place for: blk.0.attn_q_norm.weight, rope_short.weight"
    with pytest.raises(errors.ModelError, match=message):
        gguf_read.open_file(str(tmp_path / "a.gguf"))


# ---- rotary scaling ----------------------------------------------------------------------------


def published_llama3_factors(
    theta: float, size: int, factor: float, low: float, high: float, context: int
) -> list[float]:
    """What Llama 3.1 divides each frequency by, one at a time as its authors published it."""
    divisors = []
    for i in range(0, size, 2):
        frequency = 1.0 / theta ** (i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            scaled = frequency
        elif wavelength > context / low:
            scaled = frequency / factor
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled = (1 - smooth) * frequency / factor + smooth * frequency
        divisors.append(frequency / scaled)
    return divisors


def open_scaled(path, factors, **changes):
    config = model_files.tiny_config(
        head_dim=64, num_attention_heads=1, num_key_value_heads=1, rope_theta=500000.0
    )
    tensors = model_files.llama_tensors(random_weights.drawn(config, seed=1), config)
    if factors is not None:
        tensors["rope_freqs.weight"] = (np.array(factors, np.float32), "F32")
    fields = model_files.llama_fields(config)
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    model_files.write_gguf(path, fields, tensors)
    return gguf_read.open_file(str(path)).config


@pytest.mark.parametrize(
    ("factor", "low", "high", "context"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 2.0, 8.0, 4096), (4.0, 1.0, 6.0, 2048)],
)
def test_llama3_scaling_is_found_again(tmp_path, factor, low, high, context):
    factors = published_llama3_factors(500000.0, 64, factor, low, high, context)
    assert 1.0 in factors and max(factors) == pytest.approx(factor)
    scaling = open_scaled(tmp_path / "a.gguf", factors)["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    found = published_llama3_factors(
        500000.0,
        64,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(found, factors, rtol=2e-4)
    if (low, high) == (1.0, 4.0):
        assert scaling["factor"] == factor
        assert scaling["high_freq_factor"] == 4.0
        assert scaling["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 8, 32),
        np.full(32, 2.0),
        np.array(published_llama3_factors(10000.0, 64, 8.0, 1.0, 4.0, 8192)),
        np.array(published_llama3_factors(500000.0, 32, 8.0, 1.0, 4.0, 8192)),
        np.array(published_llama3_factors(500000.0, 64, 8.0, 1.0, 4.0, 8192)) * 1.01,
    ],
    ids=["ramp", "constant", "other theta", "other head size", "scaled"],
)
def test_other_frequency_factors_are_refused(tmp_path, factors):
    with pytest.raises(errors.ModelError, match="rope_freqs.weight: holds frequency factors that"):
        open_scaled(tmp_path / "a.gguf", factors)


def test_other_rotary_settings(tmp_path):
    path = tmp_path / "a.gguf"
    assert "rope_scaling" not in open_scaled(path, None)
    assert "rope_scaling" not in open_scaled(path, np.ones(32))
    assert "rope_scaling" not in open_scaled(path, None, llama__rope__scaling__type="none")
    linear = {"rope_type": "linear", "factor": 4.0}
    config = open_scaled(
        path, None, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0
    )
    assert config["rope_scaling"] == linear
    assert open_scaled(path, None, llama__rope__scale_linear=4.0)["rope_scaling"] == linear
    with pytest.raises(errors.ModelError, match=r"comes on top of llama.rope.scaling"):
        open_scaled(path, np.ones(32), llama__rope__scaling__type="linear")


@pytest.mark.reference
def test_llama3_factors_equal_transformers():
    import transformers
    from transformers import modeling_rope_utils

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=scaling
    )
    frequencies, _ = modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    ours = rope_scaling.llama3_factors(
        2 * np.pi / plain, factor=8.0, low=1.0, high=4.0, context=8192
    )
    np.testing.assert_allclose(plain / ours, frequencies.numpy(), rtol=1e-6)


# ---- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    model_files.write_tiny_gguf(path)
    return path.read_bytes()


def test_every_truncation_is_refused(tmp_path, tiny_bytes):
    path = tmp_path / "a.gguf"
    for size in [0, 1, 3, 4, *range(5, 12000, 211), len(tiny_bytes) - 32]:
        path.write_bytes(tiny_bytes[:size])
        with pytest.raises(errors.ModelError, match="is empty|not a GGUF file|truncated"):
            gguf_read.open_file(str(path))


def test_changed_header_bytes_never_end_otherwise_than_in_a_model_error(tmp_path, tiny_bytes):
    path = tmp_path / "a.gguf"
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        data = bytearray(tiny_bytes)
        for at in draw.integers(0, 9000, 3):
            data[at] = draw.choice([0, 1, 0x7F, 0xFF])
        path.write_bytes(data)
        try:
            builtin.open_model(str(path))
        except errors.ModelError:
            refused += 1
    assert refused > 100


def header(version: int = 3, tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor_info(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text("t") + dims + struct.pack("<IQ", kind, offset)


FIELD = text("k") + struct.pack("<I", 4) + struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(40), "does not start with 'GGUF'"),
        (header(version=1), "version = 1: is an unknown GGUF version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (header(fields=2**62), "ends inside its header"),
        (header(tensors=2**62), "ends inside its header"),
        (header(fields=1, rest=struct.pack("<Q", 2**60)), "ends inside its header"),
        (header(fields=1, rest=text("k") + struct.pack("<I", 99)), "of unknown type 99"),
        (
            header(fields=1, rest=text("k") + struct.pack("<IIQ", 9, 0, 2**60)),
            "ends inside its header",
        ),
        (
            header(fields=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**60)),
            "ends inside its header",
        ),
        (header(fields=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 1)), "of unknown type 9"),
        (header(fields=1, rest=struct.pack("<Q", 2) + b"\xff\xfe"), "text that is not UTF-8"),
        (header(fields=2, rest=FIELD + FIELD), "holds metadata 'k' twice"),
        (header(tensors=2, rest=2 * tensor_info((4,)) + bytes(99)), "holds tensor 't' twice"),
        (header(tensors=1, rest=tensor_info((1,) * 5)), "t = 5: is not a possible number of dim"),
        (header(tensors=1, rest=tensor_info(())), "t = 0: is not a possible number of dim"),
        (header(tensors=1, rest=tensor_info((2**40, 2**20))), "past the end of the file"),
        (header(tensors=1, rest=tensor_info((4,), offset=2**50)), "past the end of the file"),
        (header(tensors=1, rest=tensor_info((33,), kind=8)), r"t = \(33,\): has a shape that Q8_0"),
        (header(tensors=1, rest=tensor_info((4, 0)) + bytes(99)), "has a shape that F32 cannot"),
        (header(tensors=1, rest=tensor_info((4,), kind=77)), "t = 'type 77': is a tensor type"),
        (header(tensors=1, rest=tensor_info((4,), kind=28)), "t = 'F64': is a tensor type"),
        (header(), "has no metadata 'general.architecture'"),
    ],
)
def test_damaged_headers(tmp_path, data, message):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(errors.ModelError, match=message):
        gguf_read.open_file(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE[-3:])
def test_path_that_is_no_file(tmp_path, damage, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x")
    damage(path)
    with pytest.raises(errors.ModelError, match=message):
        gguf_read.open_file(str(path))


def test_unknown_tensor_names_the_nearest(tmp_path):
    model_files.write_tiny_gguf(tmp_path / "a.gguf")
    with pytest.raises(errors.ModelError, match="did you mean 'model.norm.weight'"):
        gguf_read.open_file(str(tmp_path / "a.gguf")).read("model.norms.weight")


# ---- a real model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return builtin.open_model("smollm2-135m").source


@pytest.mark.download
def test_smollm2_shapes_and_config(smollm2):
    shapes = smollm2.shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008
    assert len(shapes) == 272
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
        "model_type",
    ):
        assert smollm2.config[key] == SMOLLM2["arch"][key], key
    assert smollm2.config["rope_theta"] == SMOLLM2["arch"]["rope_parameters"]["rope_theta"]


@pytest.mark.download
def test_smollm2_weights_are_sane(smollm2):
    def std(name):
        return smollm2.read(f"model.{name}.weight").array.std()

    assert std("embed_tokens") == pytest.approx(0.1356, abs=1e-3)
    assert std("layers.0.self_attn.q_proj") == pytest.approx(0.284, abs=1e-3)
    assert std("layers.0.self_attn.v_proj") == pytest.approx(0.047, abs=1e-3)
    assert std("layers.15.mlp.down_proj") == pytest.approx(0.186, abs=1e-3)


@pytest.mark.download
@pytest.mark.reference
def test_smollm2_weights_equal_transformers(smollm2):
    import transformers

    folder, file = str(pathlib.Path(smollm2.path).parent), pathlib.Path(smollm2.path).name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    theirs = model.state_dict()
    for name in smollm2.shapes():
        np.testing.assert_array_equal(
            smollm2.read(name).array, theirs[name].float().numpy(), err_msg=name
        )
