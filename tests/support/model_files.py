"""Writes small model folders and GGUF files, and damages them, for the tests of `purelora.io`."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from purelora.interop import builtin
from purelora.weights import random_weights

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MERGES = (("Ġ", "t"), ("h", "e"))
GGUF_VOCAB = 259 + len(MERGES)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The config of the built-in tiny model, with `changes`; a change to None removes the key."""
    config = dict(builtin.tiny().source.config) | changes
    return {key: value for key, value in config.items() if value is not None}


def write_json(path: str | os.PathLike[str], value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_hf(
    folder: Any, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], shards: int = 1
) -> None:
    """A Hugging Face folder: config.json, weights in `shards` files, and tokenizer.json."""
    write_json(folder / "config.json", config)
    builtin.tiny().tokenizer.backend.save(str(folder / "tokenizer.json"))
    if shards == 1:
        safetensors.numpy.save_file(dict(arrays), folder / "model.safetensors")
        return
    names = sorted(arrays)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        safetensors.numpy.save_file({name: arrays[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def interleave_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows as a llama GGUF stores them: row i and row i + half of each head side by side."""
    size = array.shape[0] // heads
    rows = []
    for head in range(heads):
        for i in range(size // 2):
            rows += [array[head * size + i], array[head * size + size // 2 + i]]
    return np.stack(rows)


def gguf_name(name: str, names: Mapping[str, str] = GGUF_NAMES) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def llama_fields(config: Mapping[str, Any], arch: str = "llama") -> dict[str, Any]:
    """The metadata of a GGUF of llama or alike: ints as uint32, floats as float32, strings."""
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.vocab_size": config["vocab_size"],
    }


def tokenizer_fields() -> dict[str, Any]:
    """The metadata of a byte-level tokenizer with two merges: the tiny one's, and their results."""
    made = builtin.tiny().tokenizer
    tokens = [made.token(i) for i in range(made.vocab_size)] + ["".join(merge) for merge in MERGES]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1] * len(MERGES),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": made.chat_template,
    }


def write_gguf(
    path: Any,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
    arch: str = "llama",
) -> None:
    """A GGUF file: metadata (None is left out) and tensors as (stored array, type name)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_tensors(
    arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, str]]:
    """The tensors of a llama GGUF in float32, with the rows of Q and K reordered."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, array in arrays.items():
        part = name.split(".")[-2]
        stored = interleave_rows(array, heads[part]) if part in heads else array
        tensors[gguf_name(name)] = (stored, "F32")
    return tensors


def write_tiny_gguf(path: Any, **changes: Any) -> dict[str, np.ndarray]:
    """A complete tiny llama GGUF with some metadata changed; returns its Hugging Face arrays.

    Keys of `changes` have `__` for `.`; a value of None leaves the key out.
    """
    config = tiny_config(vocab_size=GGUF_VOCAB)
    arrays = random_weights.drawn(config, seed=1)
    fields = llama_fields(config) | tokenizer_fields()
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    write_gguf(path, fields, llama_tensors(arrays, config))
    return arrays


# Ways to damage a JSON file, and what the error says.
Damage = Callable[[Any], None]


def truncate(path: Any) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Any) -> None:
    path.write_bytes(b"")


def other_encoding(path: Any) -> None:
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16"))


def array(path: Any) -> None:
    path.write_bytes(b"[1, 2]")


def nested(path: Any) -> None:
    path.write_bytes(b'{"a":' + b"[" * 200_000)


def loop(path: Any) -> None:
    path.unlink()
    path.symlink_to(path)


def directory(path: Any) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Any) -> None:
    path.unlink()
    os.mkfifo(path)


JSON_DAMAGE = (
    (truncate, "is not valid JSON .*truncated"),
    (empty, "is empty"),
    (other_encoding, "is not UTF-8 text"),
    (array, "holds a JSON array where an object is expected"),
    (nested, "nested too deeply"),
    (loop, "cannot be read .*symbolic links"),
    (directory, "is not a regular file"),
    (pipe, "is not a regular file"),
)
