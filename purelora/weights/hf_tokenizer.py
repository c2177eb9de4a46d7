"""The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it."""

import os
from collections.abc import Mapping
from typing import Any

import tokenizers

from purelora.core import errors
from purelora.formats import files
from purelora.weights import hf_folder, tokenizer

_AGAIN = "download the file again"


def open_folder(folder: str) -> tokenizer.Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Raises:
      ModelError: tokenizer.json is missing, or a file is damaged.
    """
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(file):
        raise errors.ModelError(folder, None, "has no tokenizer.json", _other_tokenizer(folder))
    # A vocabulary with a token twice is read as the backend reads it.
    data = files.read_json_object(file, may_repeat=True)
    with tokenizer.backend_errors(file):
        backend = tokenizers.Tokenizer.from_str(files.read_text(file))
    _check_added_ids(file, data, backend)
    settings_file = os.path.join(folder, "tokenizer_config.json")
    settings = files.read_json_object(settings_file) if os.path.lexists(settings_file) else {}
    special = _named_tokens(settings_file, settings)
    map_file = os.path.join(folder, "special_tokens_map.json")
    if os.path.lexists(map_file):
        special = _named_tokens(map_file, files.read_json_object(map_file)) | special
    add_bos = files.typed(settings_file, settings, "add_bos_token", bool)
    if add_bos is None:
        add_bos = _adds_bos(backend, special.get("bos_token"))
    return tokenizer.build(
        file,
        backend,
        special_tokens=special,
        end_ids=hf_folder.generation_eos(folder),
        add_bos=add_bos,
        chat_template=_chat_template(folder, settings_file, settings),
    )


def _check_added_ids(file: str, data: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Checks that the added tokens have the ids that the file gives them.

    The library numbers them anew, in order, after the vocabulary: a hole would shift all of them.
    """
    for entry in data.get("added_tokens") or ():
        token_id = backend.token_to_id(entry["content"])
        if token_id != entry["id"]:
            raise errors.ModelError(
                f"{file}: added_tokens",
                entry["content"],
                f"is listed with id {entry['id']} but gets {token_id}, the next free one",
                "list the added tokens without holes after the vocabulary",
            )


def _other_tokenizer(folder: str) -> str:
    """The remedy when there is no tokenizer.json, by what the folder holds instead."""
    for name in ("tokenizer.model", "vocab.json"):
        if os.path.lexists(os.path.join(folder, name)):
            return (
                f"it holds only {name}: convert it once with transformers, "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    return "download it into the folder"


def _named_tokens(file: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The entries `..._token` of a settings file, each a string or an object with `content`."""
    named: dict[str, str] = {}
    for key, value in settings.items():
        if not key.endswith("_token") or key.startswith("add_") or value is None:
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise errors.ModelError(
                f"{file}: {key}", value, "is neither a string nor an object with 'content'", _AGAIN
            )
        named[key] = text
    return named


def _adds_bos(backend: tokenizers.Tokenizer, bos_token: str | None) -> bool:
    """Whether the post-processor of tokenizer.json puts a BOS in front of a text."""
    if bos_token is None:
        return False
    tokens = backend.encode("a", add_special_tokens=True).tokens
    return tokens[:1] == [bos_token]


def _chat_template(folder: str, file: str, settings: dict[str, Any]) -> str | None:
    """The template: chat_template.jinja wins over tokenizer_config.json's, as in transformers."""
    jinja = os.path.join(folder, "chat_template.jinja")
    if os.path.lexists(jinja):
        return files.read_text(jinja).removeprefix("\ufeff")
    template = files.typed(file, settings, "chat_template", (str, list))
    if not isinstance(template, list):
        return template
    named: dict[str, str] = {}
    for item in template:
        name = item.get("name") if isinstance(item, dict) else None
        text = item.get("template") if isinstance(item, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise errors.ModelError(
                f"{file}: chat_template",
                item,
                "is not an object with 'name' and 'template'",
                _AGAIN,
            )
        named[name] = text
    if "default" not in named:
        raise errors.ModelError(
            f"{file}: chat_template",
            sorted(named),
            "has no 'default'",
            "name one of them 'default'",
        )
    return named["default"]
