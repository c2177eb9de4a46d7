"""Writes a tokenizer as metadata of a GGUF file.

Copied where the base came from a GGUF file; otherwise built from a byte-level BPE tokenizer. GGUF
has only a name for the way in which such a tokenizer cuts text, so a tokenizer that cuts in no
way that `tokenizer_read` knows cannot be written.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import tokenizers

from purelora.core import errors
from purelora.formats import gguf_file
from purelora.interop.gguf import tokenizer_read
from purelora.weights import tokenizer

_PREFIX = "tokenizer."
_INSTEAD = "write a safetensors folder instead"
# Of names that stand for one and the same way of cutting, the one that llama.cpp itself writes.
_CUTTERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")
_TYPES = gguf.TokenType
_VALUES = gguf.GGUFValueType


def copied_fields(container: gguf_file.Container) -> dict[str, Any]:
    """The metadata of the tokenizer of a GGUF file, to be written into another."""
    return {key: value for key, value in container.fields.items() if key.startswith(_PREFIX)}


def fields_of(path: str, written: tokenizer.Tokenizer, rows: int) -> dict[str, Any]:
    """The metadata of a byte-level BPE tokenizer.

    Args:
      path: what will be written, for messages.
      written: the tokenizer.
      rows: rows of the embedding; ids without a token get unused ones, as llama.cpp needs.

    Raises:
      ModelError: the tokenizer is of another kind, or does something that GGUF cannot say.
    """
    data = json.loads(written.backend.to_str())
    _check_kind(path, data)
    tokens, types = _vocabulary(written.backend, data, rows)
    fields = {
        "model": "gpt2",
        "pre": _cutter_name(path, data),
        "tokens": tokens,
        "token_type": types,
        "merges": [_merge(item) for item in data["model"]["merges"]],
        "add_bos_token": written.add_bos,
        **_special_ids(path, written),
    }
    named = {f"{_PREFIX}ggml.{key}": value for key, value in fields.items()}
    if written.chat_template is not None:
        named[f"{_PREFIX}chat_template"] = written.chat_template
    return named


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Adds metadata: ids as uint32, other numbers, strings and lists as their own types."""
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_key_value(key, value, _VALUES.UINT32 if value >= 0 else _VALUES.INT32)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _check_kind(path: str, data: Mapping[str, Any]) -> None:
    """Raises ModelError for a tokenizer that is no byte-level BPE, or cannot be said in GGUF."""
    model = data["model"]
    decoder = (data["decoder"] or {}).get("type")
    problems = []
    if model["type"] != "BPE" or model.get("byte_fallback") or decoder != "ByteLevel":
        kind = f"{model['type']} with decoder {decoder}"
        what = "is a tokenizer that is not written to GGUF: only byte-level BPE is"
        problems.append(errors.Problem(f"{path}: tokenizer", kind, what, _INSTEAD))
    elif not model["merges"]:
        what = "has no merges, which GGUF cannot say"
        problems.append(errors.Problem(f"{path}: tokenizer", None, what, _INSTEAD))
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            what = f"has a {key}, which GGUF cannot say"
            problems.append(errors.Problem(f"{path}: tokenizer", model[key], what, _INSTEAD))
    for token in data["added_tokens"]:
        flags = [key for key in ("lstrip", "rstrip", "single_word") if token[key]]
        if flags:
            what = f"is a token with {' and '.join(flags)}, which GGUF cannot say"
            where = f"{path}: tokenizer"
            problems.append(errors.Problem(where, token["content"], what, _INSTEAD))
    if problems:
        raise errors.ModelError.of(errors.first(problems, path))


def _vocabulary(
    backend: tokenizers.Tokenizer, data: Mapping[str, Any], rows: int
) -> tuple[list[str], list[int]]:
    """Text and type of the token of every id below `rows`."""
    added = {
        token["id"]: _TYPES.CONTROL if token["special"] else _TYPES.USER_DEFINED
        for token in data["added_tokens"]
    }
    tokens, types = [], []
    for token_id in range(rows):
        token = backend.id_to_token(token_id)
        kind = _TYPES.UNUSED if token is None else added.get(token_id, _TYPES.NORMAL)
        tokens.append(f"[PAD{token_id}]" if token is None else token)
        types.append(int(kind))
    return tokens, types


def _merge(item: str | Sequence[str]) -> str:
    """One merge as its two tokens with a space between; the library writes either form."""
    return item if isinstance(item, str) else " ".join(item)


def _special_ids(path: str, written: tokenizer.Tokenizer) -> dict[str, int]:
    """The ids of the special tokens, and of further tokens that end a turn or text."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids: dict[str, int] = {}
    for short, name in keys.items():
        token = written.special_tokens.get(f"{short}_token")
        token_id = None if token is None else written.backend.token_to_id(token)
        if token_id is not None:
            ids[f"{name}_token_id"] = token_id
    more = [token_id for token_id in written.eos_ids if token_id != ids.get("eos_token_id")]
    slots = ["eot_token_id", "eom_token_id"]
    if "eos_token_id" not in ids:
        slots.insert(0, "eos_token_id")
    if len(more) > len(slots):
        what = f"are {len(written.eos_ids)} ids that end a text, and GGUF has no place for so many"
        raise errors.ModelError(f"{path}: eos_token_id", written.eos_ids, what, _INSTEAD)
    return ids | dict(zip(slots, more, strict=False))


def _cutter_name(path: str, data: Mapping[str, Any]) -> str:
    """GGUF's name for the way in which a tokenizer cuts text."""
    wanted = _cutting(data)
    for name in _CUTTERS:
        if _cutting(_sample(name)) == wanted:
            return name
    what = "cuts text in a way that GGUF has no known name for"
    remedy = f"known: {', '.join(_CUTTERS)}; {_INSTEAD}"
    raise errors.ModelError(f"{path}: tokenizer", data["pre_tokenizer"], what, remedy)


def _cutting(data: Mapping[str, Any]) -> list[Any]:
    """What decides how a tokenizer cuts, without what concerns offsets only."""
    pre = data["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    kept = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]
    return [data["normalizer"], kept, data["model"].get("ignore_merges", False)]


def _sample(name: str) -> dict[str, Any]:
    """The smallest tokenizer that is read from a GGUF file with this name."""
    fields = {"model": "gpt2", "pre": name, "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1],
              "merges": ["a b"]}  # fmt: skip
    named = {f"{_PREFIX}ggml.{key}": value for key, value in fields.items()}
    sample = tokenizer_read.read(gguf_file.Container("sample", named, {}))
    return json.loads(sample.backend.to_str())
