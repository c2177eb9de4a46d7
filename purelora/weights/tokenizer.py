"""Tokenizers: text to token ids with character offsets, from a Hugging Face folder or a GGUF file.

The `tokenizers` library does the work. What it would add by itself is taken away here (a
post-processor's BOS, truncation, padding), so that one rule holds for every model: plain text gets
one BOS if the tokenizer wants one and the text does not begin with it, and never an EOS.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from purelora.core import errors
from purelora.formats import files, gguf_file
from purelora.weights import hf_folder

_AGAIN = "download the file again"

# Token types of GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)


class Encoding(NamedTuple):
    """A text as tokens.

    Attributes:
      ids: token ids, int32 [n].
      offsets: first and one-past-last character of the text that each token covers, int32 [n, 2].
        Tokens that share one character's bytes all cover that character; a BOS covers nothing.
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its chat template. Made by `from_hf`, `from_gguf` or `build`.

    Attributes:
      backend: the tokenizer proper, with no post-processor, truncation or padding.
      bos_id: id of `bos_token`; None when there is none.
      bos_token: text of the token that begins a text.
      eos_token: text of the tokenizer's own end token.
      eos_ids: every id that ends a turn or a text, the tokenizer's own first.
      pad_token: text of the padding token, which only templates see.
      add_bos: whether plain text gets a BOS.
      chat_template: Jinja source; None when the model has no template.
      special_tokens: name to text of the special tokens, for templates.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]
    pad_token: str | None
    add_bos: bool
    chat_template: str | None
    special_tokens: Mapping[str, str]

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Tokenizes `text`; special tokens written in it become single ids.

        Args:
          text: any text.
          add_special_tokens: put a BOS in front if `add_bos` and the text does not begin with it.

        Raises:
          DataError: the text holds half of a surrogate pair.
        """
        try:
            with _backend_errors("tokenizer"):
                encoded = self.backend.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise errors.DataError(
                "text", text, "holds half of a surrogate pair", "remove the \\ud800-\\udfff escape"
            ) from error
        ids = np.array(encoded.ids, np.int32)
        offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        if add_special_tokens and self.add_bos and (not ids.size or ids[0] != self.bos_id):
            ids = np.concatenate([np.array([self.bos_id], np.int32), ids])
            offsets = np.concatenate([np.zeros((1, 2), np.int32), offsets])
        return Encoding(ids, offsets)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """The text of `ids`."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token, for reports.

        Raises:
          DataError: there is no such token.
        """
        text = self.backend.id_to_token(int(token_id))
        if text is None:
            raise errors.DataError(
                "token id", token_id, "is not in the vocabulary", f"there are {self.vocab_size}"
            )
        return text

    def fingerprint(self) -> str:
        """A hash of all that decides how text and chats become ids."""
        rest = [self.bos_id, self.eos_ids, self.add_bos, self.chat_template, self.special_tokens]
        hasher = hashlib.sha256(self.backend.to_str().encode())
        hasher.update(json.dumps(rest, sort_keys=True).encode())
        return hasher.hexdigest()


def build(
    path: str,
    backend: tokenizers.Tokenizer,
    *,
    special_tokens: Mapping[str, str],
    end_ids: Iterable[int],
    add_bos: bool,
    chat_template: str | None,
) -> Tokenizer:
    """A `Tokenizer` around `backend`, whose post-processor, truncation and padding are removed.

    Args:
      path: where it comes from, for messages.
      backend: the tokenizer proper.
      special_tokens: texts of the special tokens; `bos_token`, `eos_token` and `pad_token` count.
      end_ids: further ids that end a turn or text.
      add_bos: whether plain text gets a BOS.
      chat_template: Jinja source, or None.

    Raises:
      ModelError: a special token or an end id is not in the vocabulary, or the BOS is missing.
    """
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    bos_token, eos_token = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    bos_id = _token_id(path, backend, "bos_token", bos_token)
    eos_id = _token_id(path, backend, "eos_token", eos_token)
    if add_bos and bos_id is None:
        raise errors.ModelError(
            f"{path}: add_bos_token", True, "there is no bos_token", "set it to false"
        )
    eos_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *end_ids]))
    for end_id in eos_ids:
        if backend.id_to_token(end_id) is None:
            raise errors.ModelError(
                f"{path}: eos_token_id", end_id, "is not in the vocabulary", "correct it"
            )
    return Tokenizer(
        backend=backend,
        bos_id=bos_id,
        bos_token=bos_token,
        eos_token=eos_token,
        eos_ids=eos_ids,
        pad_token=special_tokens.get("pad_token"),
        add_bos=add_bos,
        chat_template=chat_template,
        special_tokens=dict(special_tokens),
    )


def _token_id(path: str, backend: tokenizers.Tokenizer, key: str, token: str | None) -> int | None:
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise errors.ModelError(
            f"{path}: {key}", token, "is not in the vocabulary", f"correct {key}"
        )
    return token_id


@contextlib.contextmanager
def _backend_errors(path: str) -> Iterator[None]:
    """Turns the errors of the tokenizers library, which are bare `Exception`s, into ours."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise errors.ModelError(
            path, None, f"is not a sound tokenizer ({error})", _AGAIN
        ) from error


# ---- Hugging Face folders ----------------------------------------------------------------------


def from_hf(folder: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it.

    Raises:
      ModelError: tokenizer.json is missing, or a file is damaged.
    """
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(file):
        raise errors.ModelError(folder, None, "has no tokenizer.json", _other_tokenizer(folder))
    # A vocabulary with a token twice is read as the backend reads it.
    data = files.read_json_object(file, may_repeat=True)
    with _backend_errors(file):
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
    return build(
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
        found = backend.token_to_id(entry["content"])
        if found != entry["id"]:
            raise errors.ModelError(
                f"{file}: added_tokens",
                entry["content"],
                f"is listed with id {entry['id']} but gets {found}, the next free one",
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


# ---- GGUF files --------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level BPE vocabulary cuts text before merging.

    Attributes:
      pattern: what to cut out; None for the pattern of GPT-2.
      single_digits: cut every digit off first.
      ignore_merges: take a whole word that is in the vocabulary, whatever the merges say.
      nfc: normalise the text to NFC.
      add_bos: what holds when the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_LLAMA3 = _PreTokenizer(pattern=_LLAMA3_PATTERN, ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(single_digits=True),
    "gpt-2": _PreTokenizer(),
    "default": _PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer(pattern=_QWEN2_PATTERN, nfc=True),
}


class _Vocabulary(NamedTuple):
    """The token list of a GGUF file."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def from_gguf(container: gguf_file.Container) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file.

    Raises:
      ModelError: metadata is missing or damaged, or of a kind that is not known.
    """
    model = container.required("tokenizer.ggml.model", str)
    vocabulary = _vocabulary(container)
    if model == "gpt2":
        backend, add_bos = _byte_level(container, vocabulary)
    elif model == "llama":
        backend, add_bos = _sentencepiece(container, vocabulary), True
    else:
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.model",
            model,
            "is a tokenizer that is not read",
            "known: gpt2, llama; use the model's safetensors folder instead",
        )
    _add_tokens(backend, vocabulary)
    named = {
        f"{short}_token": _named_id(container, key, vocabulary)
        for short, key in (
            ("bos", "bos_token_id"),
            ("eos", "eos_token_id"),
            ("unk", "unknown_token_id"),
            ("pad", "padding_token_id"),
        )
    }
    ends = [_named_id(container, key, vocabulary) for key in ("eot_token_id", "eom_token_id")]
    special = {name: text for name, text in named.items() if text is not None}
    stated = container.field("tokenizer.ggml.add_bos_token", bool)
    if stated is not None:
        add_bos = stated
    elif "bos_token" not in special:
        add_bos = False
    return build(
        container.path,
        backend,
        special_tokens=special,
        end_ids=[vocabulary.ids[text] for text in ends if text is not None],
        add_bos=add_bos,
        chat_template=container.field("tokenizer.chat_template", str),
    )


def _vocabulary(container: gguf_file.Container) -> _Vocabulary:
    tokens = container.required("tokenizer.ggml.tokens", list, str)
    types = container.required("tokenizer.ggml.token_type", list, int)
    if len(types) != len(tokens):
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.token_type",
            len(types),
            f"types for {len(tokens)} tokens",
            _AGAIN,
        )
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.tokens", None, "lists a token twice", _AGAIN
        )
    return _Vocabulary(tokens, types, ids)


def _named_id(container: gguf_file.Container, key: str, vocabulary: _Vocabulary) -> str | None:
    """The text of the special token whose id lies under `key`."""
    token_id = container.field(f"tokenizer.ggml.{key}", int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(vocabulary.tokens):
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.{key}",
            token_id,
            f"is not one of the {len(vocabulary.tokens)} tokens",
            _AGAIN,
        )
    return vocabulary.tokens[token_id]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Declares the tokens that are found in the text before anything else."""
    added = [
        tokenizers.AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    # `add_tokens` keeps each token's own `special`; the ids are those of the vocabulary.
    backend.add_tokens(added)


def _byte_level(
    container: gguf_file.Container, vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether its kind adds a BOS unless told otherwise."""
    name = container.required("tokenizer.ggml.pre", str)
    if name not in _PRE_TOKENIZERS:
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.pre",
            name,
            "is a pre-tokenizer that is not known",
            f"known: {', '.join(_PRE_TOKENIZERS)}; use the model's safetensors folder instead",
        )
    pre = _PRE_TOKENIZERS[name]
    merges = []
    for line in container.required("tokenizer.ggml.merges", list, str):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise errors.ModelError(
                f"{container.path}: tokenizer.ggml.merges", line, "is not two tokens", _AGAIN
            )
        merges.append((left, right))
    with _backend_errors(container.path):
        model = tokenizers.models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = _cutter(pre)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend, pre.add_bos


def _cutter(pre: _PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    cutters = tokenizers.pre_tokenizers
    byte_level = cutters.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    if pre.pattern is not None:
        pattern = tokenizers.Regex(pre.pattern)
        return cutters.Sequence([cutters.Split(pattern, "isolated"), byte_level])
    if pre.single_digits:
        return cutters.Sequence([cutters.Digits(individual_digits=True), byte_level])
    return byte_level


def _sentencepiece(container: gguf_file.Container, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """The BPE with byte fallback that cuts text as a scored sentencepiece vocabulary does."""
    scores = container.required("tokenizer.ggml.scores", list, float)
    if len(scores) != len(vocabulary.tokens):
        raise errors.ModelError(
            f"{container.path}: tokenizer.ggml.scores",
            len(scores),
            f"scores for {len(vocabulary.tokens)} tokens",
            _AGAIN,
        )
    unknown = [i for i, kind in enumerate(vocabulary.types) if kind == _UNKNOWN]
    with _backend_errors(container.path):
        model = tokenizers.models.BPE(
            vocabulary.ids,
            _merges_by_score(vocabulary, scores),
            unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    backend = tokenizers.Tokenizer(model)
    prefix = container.field("tokenizer.ggml.add_space_prefix", bool) is not False
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best score of the result first.

    Sentencepiece joins the neighbours whose join scores best, and of equal ones the leftmost; a
    merge list in the order of the scores does the same. Pairs that make the same piece need ranks
    of their own here: with the longest left part first, runs of one character come out alike too.
    """
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == _NORMAL}
    ranked = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in ids and piece[cut:] in ids:
                ranked.append((scores[i], cut, piece))
    return [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(ranked, reverse=True)]
