"""Writes a model of the llama architecture as a GGUF file.

The inverse of `read`: Hugging Face names and layout become those of llama.cpp, which rotates
neighbouring rows of Q and K. Tensors are asked for one at a time, in the order of the file.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from purelora.core import errors
from purelora.core.paths import Path
from purelora.formats import atomic_output, safetensors_file
from purelora.interop.gguf import architectures, rope_scaling, tokenizer_write

Tensors = Mapping[str, safetensors_file.LazyTensor]
# Element types of matrices, by GGUF's number of the file's type. Everything else is float32.
FILE_TYPES: Mapping[str, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_INSTEAD = "write a safetensors folder instead"
_Q8_0 = gguf.GGMLQuantizationType.Q8_0
# A block of 32 codes, a float16 scale in front of them.
_Q8_0_BYTES = gguf.GGML_QUANT_SIZES[_Q8_0][1]

# What the writer's methods are called for each key of the config.
_SETTINGS: Mapping[str, str] = {
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_hidden_layers": "add_block_count",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "max_position_embeddings": "add_context_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "vocab_size": "add_vocab_size",
}


def write_file(
    path: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    tokenizer_fields: Mapping[str, Any],
    element_type: str,
) -> None:
    """Writes a new GGUF file.

    Args:
      path: where; it must not exist.
      config: the keys of a Hugging Face config.json of a llama.
      tensors: by Hugging Face name, all of them.
      tokenizer_fields: the metadata of the tokenizer, made by `tokenizer_write`.
      element_type: of matrices, one of `FILE_TYPES`.

    Raises:
      ModelError: a setting or a tensor has no place in a llama GGUF, a value is too large for the
        element type, the path is taken, or it cannot be written.
      ValueError: the tensors and `tie_word_embeddings` disagree on the output head.
    """
    if bool(config.get("tie_word_embeddings")) == ("lm_head.weight" in tensors):
        raise ValueError("a llama has an output head of its own, or tie_word_embeddings")
    _check_config(path, config)
    plan = _plan(path, config, tensors, element_type)
    writer = gguf.GGUFWriter(None, "llama")
    _add_settings(writer, config, element_type)
    tokenizer_write.add_fields(writer, tokenizer_fields)
    for item in plan:
        # The type decides, not the dtype that the library asks for.
        shape, n_bytes = item.tensor.shape, item.n_bytes
        writer.add_tensor_info(item.name, shape, np.dtype(np.float32), n_bytes, item.ggml_type)
    with atomic_output.new_file(path, sum(item.n_bytes for item in plan)) as partial:
        try:
            writer.write_header_to_file(pathlib.Path(partial))
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for item in plan:
                writer.write_tensor_data(_stored(path, item))
        finally:
            writer.close()


# ---- tensors -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor of the file: its GGUF name, type and size, its values, and heads to permute by."""

    name: str
    ggml_type: gguf.GGMLQuantizationType
    n_bytes: int
    tensor: safetensors_file.LazyTensor
    heads: int | None = None


def _plan(path: str, config: Mapping[str, Any], tensors: Tensors, element_type: str) -> list[_Item]:
    """What will be written, in order; all tensors without a place in one error."""
    names = _gguf_names(config["num_hidden_layers"])
    arch = architectures.ARCHS["llama"]
    plan, problems = [], []
    for hf_name, tensor in tensors.items():
        stem, ending = Path(hf_name).parent, Path(hf_name).name
        ggml_type = gguf.GGMLQuantizationType[
            element_type.upper() if len(tensor.shape) == 2 else "F32"
        ]
        block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        if stem not in names or ending not in ("weight", "bias"):
            what = "has no place in a llama GGUF"
            problems.append(errors.Problem(f"{path}: {hf_name}", None, what, _INSTEAD))
            continue
        if tensor.shape[-1] % block:
            what = f"has rows that do not divide into blocks of {block}"
            remedy = f"use another element type than {element_type}"
            problems.append(errors.Problem(f"{path}: {hf_name}", tensor.shape, what, remedy))
        n_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        permuted = arch.permuted.get(Path(names[stem]).name)
        heads = config[permuted] if permuted else None
        plan.append(_Item(f"{names[stem]}.{ending}", ggml_type, n_bytes, tensor, heads))
    if problems:
        raise errors.ModelError.of(errors.first(problems, path))
    factors = _rope_factors(config)
    if factors is not None:
        tensor = safetensors_file.LazyTensor.of(factors)
        plan.append(
            _Item(rope_scaling.FACTORS, gguf.GGMLQuantizationType.F32, factors.nbytes, tensor)
        )
    return plan


def _gguf_names(n_layers: int) -> dict[str, str]:
    """GGUF's name for the module of every tensor that a llama can have."""
    arch = architectures.ARCHS["llama"]
    names = {hf_name: name for name, hf_name in arch.top.items()}
    for layer in range(n_layers):
        for name, hf_name in arch.layer.items():
            names[f"model.layers.{layer}.{hf_name}"] = f"blk.{layer}.{name}"
    return names


def permute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to interleaved order; undone by `read.unpermute_rows`."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def rounded(array: np.ndarray, element_type: str) -> np.ndarray:
    """The values that a file of this element type gives back for a float32 array."""
    if array.ndim != 2 or element_type == "f32":
        return array
    if element_type == "q8_0":
        stored = gguf.quants.quantize(array, _Q8_0)
        values: np.ndarray = gguf.quants.dequantize(stored, _Q8_0)
        return values
    return array.astype(_FLOATS[element_type.upper()]).astype(np.float32)


def _stored(path: str, item: _Item) -> np.ndarray:
    """The values of a tensor as they lie in the file."""
    array = item.tensor.load()
    assert array.shape == item.tensor.shape, (item.name, array.shape)
    if item.heads is not None:
        array = permute_rows(array, item.heads)
    with np.errstate(over="ignore", invalid="ignore"):
        if item.ggml_type == _Q8_0:
            stored = gguf.quants.quantize(array.astype(np.float32), _Q8_0)
            floats = stored.reshape(-1, _Q8_0_BYTES)[:, :2].copy().view(np.float16)
        else:
            stored = floats = np.ascontiguousarray(array, _FLOATS[item.ggml_type.name])
    if not np.isfinite(floats).all():
        what = f"holds NaN, infinity or values too large for {item.ggml_type.name}"
        raise errors.ModelError(f"{path}: {item.name}", None, what, "try bf16 or f32")
    return stored


_FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


# ---- settings ----------------------------------------------------------------------------------


def _add_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any], element_type: str) -> None:
    """Adds the metadata of the architecture."""
    for key, method in _SETTINGS.items():
        getattr(writer, method)(config[key])
    head_dim = _head_dim(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_file_type(FILE_TYPES[element_type])
    if element_type == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _check_config(path: str, config: Mapping[str, Any]) -> None:
    """Raises for a model that is no llama, or with settings that llama.cpp's llama has not."""
    rope_type = _rope(config)["rope_type"]
    allowed = {
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "rope_scaling: rope_type": ("default", "linear", "llama3"),
    }
    settings = {**config, "rope_scaling: rope_type": rope_type}
    problems = [
        errors.Problem(
            f"{path}: {key}", settings.get(key), "has no place in a llama GGUF", _INSTEAD
        )
        for key, values in allowed.items()
        if settings.get(key) not in values
    ]
    missing = [key for key in _SETTINGS if config.get(key) is None]
    if missing:
        what = f"the model's config lacks {', '.join(missing)}"
        problems.append(errors.Problem(path, None, what, "complete its config.json"))
    if problems:
        raise errors.ModelError.of(problems)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and scaling of the rotary embedding, whichever of both spellings the config has."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", config.get("rope_theta"))
    return {**stated, "rope_type": kind, "rope_theta": theta}


def _rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """The divisors of the rotary frequencies that stand for a llama3 scaling in GGUF."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    head_dim = _head_dim(config)
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    factors = rope_scaling.llama3_factors(
        wavelengths,
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        context=rope["original_max_position_embeddings"],
    )
    return factors.astype(np.float32)
