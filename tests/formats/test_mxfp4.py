"""Weights in MXFP4: every code and scale by the format's definition, whole tensors and parts."""

import json
import pathlib
from typing import Any

import chex
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from purelora.core import errors, trees
from purelora.formats import mxfp4, source
from purelora.interop import builtin, merged_model
from purelora.models import causal_lm
from purelora.weights import hf_folder, hf_write
from purelora.weights import load as weights_load
from tests.support import expert_files, tiny

SIZES = {"hidden_size": 32, "intermediate_size": 64}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
PACKED = ("gate_up_proj", "down_proj")


def value(code: int, scale: int) -> float:
    """Sign, two bits of exponent with a bias of 1, one of mantissa; and the scale."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1) ** sign * size * 2.0 ** (scale - 127)


def test_every_code_at_every_scale():
    """Two codes in each byte, at the smallest scales too, and at the largest that are finite."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in (0, 1, 90, 127, 140, 252):
        found = mxfp4.dequantised(codes, np.full(16, scale, np.uint8))
        assert found.dtype == ml_dtypes.bfloat16
        wanted = [value(code, scale) for byte in range(256) for code in (byte % 16, byte // 16)]
        np.testing.assert_array_equal(found.astype(np.float64), wanted)
    assert np.isnan(mxfp4.dequantised(codes, np.full(16, 255, np.uint8)).astype(np.float32)).all()


def packed(arrays: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors with random codes in place of the experts' weights."""
    draw, found = np.random.default_rng(seed), {}
    for name, array in arrays.items():
        if not name.endswith(PACKED):
            found[name] = array
            continue
        experts, n_in, n_out = array.shape
        shape = (experts, n_out, n_in // 32)
        found[f"{name}_blocks"] = draw.integers(0, 256, (*shape, 16), np.uint8)
        found[f"{name}_scales"] = draw.integers(121, 126, shape, np.uint8)
    return found


def unpacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All tensors as floats, one value after the other."""
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name.endswith("_blocks"):
            scales = arrays[name.replace("_blocks", "_scales")]
            codes = np.stack([array % 16, array // 16], axis=-1)
            wide = np.broadcast_to(scales[..., None, None], codes.shape)
            values = np.vectorize(value)(codes.astype(int), wide.astype(int)).reshape(
                *scales.shape[:2], -1
            )
            plain = name.removesuffix("_blocks")
            found[plain] = np.ascontiguousarray(values.swapaxes(1, 2).astype(ml_dtypes.bfloat16))
        elif not name.endswith("_scales"):
            found[name] = array
    return found


def folder(path: pathlib.Path, arrays: dict[str, np.ndarray], **more: Any) -> str:
    path.mkdir()
    config = {**tiny.hf_config("gpt_oss", num_hidden_layers=2, layer_types=None, **SIZES), **more}
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    m = tiny.model("gpt_oss", num_hidden_layers=2, layer_types=None, **SIZES)
    leaves = expert_files.stacks(m, ml_dtypes.bfloat16)
    return packed(expert_files.in_files(leaves, "gpt_oss", "interleaved"))


def test_a_packed_folder_is_the_folder_of_its_values(tensors, tmp_path):
    """Shapes, values, parts, the loaded base and its fingerprint; and what merge writes of it."""
    floats = unpacked(tensors)
    one = hf_folder.open_folder(folder(tmp_path / "packed", tensors, **QUANTISED))
    other = hf_folder.open_folder(folder(tmp_path / "floats", floats))
    assert one.shapes() == other.shapes() == {n: a.shape for n, a in floats.items()}
    for name, array in floats.items():
        np.testing.assert_array_equal(one.read(name).array, array, err_msg=name)
    name = "model.layers.1.mlp.experts.down_proj"
    box = (slice(1, 4), slice(30, 61), slice(3, 9))
    np.testing.assert_array_equal(one.read_part(name, box), floats[name][box])

    loaded = []
    for opened in (one, other):
        m = causal_lm.from_hf(opened.config, "config.json", dtype="float32")
        placed = expert_files.shardings(m, m.infos, tiny.mesh(), None)
        loaded.append(weights_load.load(opened, m, m.infos, placed))
    chex.assert_trees_all_equal(loaded[0].tree, loaded[1].tree)
    assert loaded[0].fingerprint == loaded[1].fingerprint

    form = merged_model.output_form("bfloat16", one.config, is_gguf=False)
    merged = merged_model.MergedModel(one, m, [], merged_model.original_values, form)
    files = hf_write.tokenizer_files(builtin.tiny().tokenizer)
    hf_write.write_folder(
        str(tmp_path / "out"), merged.config(), merged.tensors(), companions=files
    )
    written = hf_folder.open_folder(str(tmp_path / "out"))
    assert "quantization_config" not in written.config and not written.packed
    assert source.identify(written, floats) == source.identify(other, floats)


class Watched(source.ArraySource):
    """Notes the largest part that is read."""

    def read_part(self, name, box):
        part = super().read_part(name, box)
        sizes.append(part.size)
        return part


sizes: list[int] = []


def test_one_expert_is_read_at_a_time(tensors):
    """Of a base whose fingerprint is known, no tensor is ever whole."""
    m = tiny.model("gpt_oss", num_hidden_layers=2, layer_types=None, **SIZES)
    floats = unpacked(tensors)
    placed = expert_files.shardings(m, m.infos, tiny.mesh(), None)
    found = weights_load.load(Watched("memory", {}, floats, "known"), m, m.infos, placed)
    leaf = np.asarray(trees.flatten(found.tree)["layers.mlp.experts.up_proj.weight"])
    wanted = floats["model.layers.1.mlp.experts.gate_up_proj"][3, :, 1::2]
    np.testing.assert_array_equal(leaf[1, 3], wanted.astype(np.float32))
    assert max(sizes) == 32 * 2 * 64


def test_what_is_not_whole_or_of_another_family_is_named(tensors, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    short = {**tensors, f"{name}_scales": tensors[f"{name}_scales"][:, :-1]}
    with pytest.raises(errors.ModelError, match=rf"{name}_blocks: is U8 .* which is not mxfp4"):
        hf_folder.open_folder(folder(tmp_path / "short", short, **QUANTISED))
    gone = {n: array for n, array in tensors.items() if n != f"{name}_scales"}
    opened = hf_folder.open_folder(folder(tmp_path / "gone", gone, **QUANTISED))
    m = causal_lm.from_hf(opened.config, "config.json", dtype="float32")
    placed = expert_files.shardings(m, m.infos, tiny.mesh(), None)
    with pytest.raises(errors.ModelError, match=rf"holds no tensor '{name}'"):
        weights_load.load(opened, m, m.infos, placed)
    other = QUANTISED | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(errors.ModelError, match=r"quantization_config = 'mxfp4': the weights are"):
        hf_folder.open_folder(folder(tmp_path / "llama", tensors, **other))
    awq = {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(errors.ModelError, match=r"quantization_config = 'awq': the weights are"):
        hf_folder.open_folder(folder(tmp_path / "awq", tensors, **awq))
    broken = {**tensors, f"{name}_scales": np.full_like(tensors[f"{name}_scales"], 255)}
    opened = hf_folder.open_folder(folder(tmp_path / "broken", broken, **QUANTISED))
    with pytest.raises(errors.ModelError, match=rf"{name}: holds values that are not finite"):
        weights_load.load(opened, m, m.infos, placed)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
def test_the_values_of_transformers(tensors):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{name}"
        blocks, scales = (tensors[f"{name}_{part}"] for part in ("blocks", "scales"))
        want = theirs.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        got = mxfp4.dequantised(blocks, scales).swapaxes(1, 2)
        np.testing.assert_array_equal(got.astype(np.float32), want.float().numpy())
