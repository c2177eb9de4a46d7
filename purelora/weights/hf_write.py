"""Writes a model as a Hugging Face folder: config.json, sharded safetensors, tokenizer.

Tensors are asked for one at a time, when their turn in a shard has come, so the whole model is
never in memory. The folder appears complete or not at all.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tokenizers

from purelora.formats import atomic_output, files, safetensors_file
from purelora.weights import hf_folder, tokenizer

SHARD_BYTES = 5_000_000_000
# What a folder may hold besides config and weights that a copy of the model needs.
_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")

Tensors = Mapping[str, safetensors_file.LazyTensor]


def write_folder(
    folder: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    companions: Mapping[str, bytes],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a new folder that purelora and transformers load.

    Args:
      folder: where; it must not exist, or be empty.
      config: the keys of config.json; dtype and quantisation are made to fit the tensors.
      tensors: by Hugging Face name, in the order in which they go into the shards.
      companions: contents of further files by name; see `folder_files` and `tokenizer_files`.
      shard_bytes: largest size of a shard; a larger tensor gets one of its own.

    Raises:
      ModelError: the folder is taken, or cannot be written.
      ValueError: there is an output head, and the config says that it is the embedding.
    """
    if config.get("tie_word_embeddings") and "lm_head.weight" in tensors:
        raise ValueError("lm_head.weight would be ignored: config says tie_word_embeddings")
    n_bytes = sum(spec.n_bytes for spec in tensors.values())
    contents = {"config.json": _json(fitting_config(config, tensors)), **companions}
    with atomic_output.new_folder(folder, n_bytes) as partial:
        for name, content in contents.items():
            with open(os.path.join(partial, name), "wb") as file:
                file.write(content)
        _write_shards(partial, tensors, n_bytes, shard_bytes)


def fitting_config(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """A config.json that states the dtype of these tensors, the one with most bytes."""
    sizes: Counter[str] = Counter()
    for spec in tensors.values():
        sizes[spec.dtype.name] += spec.n_bytes
    (dtype, _), *_ = sizes.most_common(1)
    fitted = _with_dtype(config, dtype)
    if not any(key in fitted for key in _DTYPE_KEYS):
        # The older name of the key: every version of transformers understands it.
        fitted["torch_dtype"] = dtype
    return fitted


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config and those nested in it, with another dtype where they state one."""
    fitted = {key: value for key, value in config.items() if key != "quantization_config"}
    for key, value in fitted.items():
        if key in _DTYPE_KEYS:
            fitted[key] = dtype
        elif key.endswith("_config") and isinstance(value, Mapping):
            fitted[key] = _with_dtype(value, dtype)
    return fitted


def _write_shards(partial: str, tensors: Tensors, n_bytes: int, shard_bytes: int) -> None:
    """Writes the weights: one file, or shards with an index."""
    shards = _shards(tensors, shard_bytes)
    metadata = {"format": "pt"}
    if len(shards) == 1:
        safetensors_file.write_file(os.path.join(partial, hf_folder.SINGLE), tensors, metadata)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        shard = {tensor: tensors[tensor] for tensor in names}
        safetensors_file.write_file(os.path.join(partial, name), shard, metadata)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    with open(os.path.join(partial, hf_folder.INDEX), "wb") as file:
        file.write(_json(index))


def _shards(tensors: Tensors, shard_bytes: int) -> list[list[str]]:
    """The names of the tensors in each shard, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + spec.n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.n_bytes
    return shards


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# ---- tokenizers --------------------------------------------------------------------------------


def folder_files(folder: str) -> dict[str, bytes]:
    """The tokenizer's and generation's files of a Hugging Face folder, to be copied.

    Raises:
      ModelError: one of them cannot be read.
    """
    contents = {}
    for name in _COPIED:
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            files.check_readable(path)
            with open(path, "rb") as file:
                contents[name] = file.read()
    return contents


def tokenizer_files(source: tokenizer.Tokenizer) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer, for one that was not read from such a folder."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.add_bos,
        "clean_up_tokenization_spaces": False,
        **source.special_tokens,
    }
    if source.chat_template is not None:
        settings["chat_template"] = source.chat_template
    generation: dict[str, Any] = {"eos_token_id": list(source.eos_ids)} if source.eos_ids else {}
    ids = {"bos_token_id": source.bos_id}
    if source.pad_token is not None:
        ids["pad_token_id"] = source.backend.token_to_id(source.pad_token)
    generation |= {key: value for key, value in ids.items() if value is not None}
    return {
        "tokenizer.json": _with_bos(source).to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(settings),
        "generation_config.json": _json(generation),
    }


def _with_bos(source: tokenizer.Tokenizer) -> tokenizers.Tokenizer:
    """The backend with a post-processor that puts a BOS in front, if the tokenizer wants one."""
    backend = tokenizers.Tokenizer.from_str(source.backend.to_str())
    if source.add_bos and source.bos_token is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[source.bos_token, "$A"],
            pair=[source.bos_token, "$A", source.bos_token, "$B"],
            special_tokens=[(source.bos_token, source.bos_id)],
        )
    return backend
