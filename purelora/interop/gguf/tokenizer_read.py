"""The tokenizer in the metadata of a GGUF file.

The way in which a byte-level BPE vocabulary cuts text is only named there; `_PRE_TOKENIZERS` says
what each name means. Written by hand, since the other converter, of transformers, is no
dependency of purelora.
"""

import dataclasses
from typing import NamedTuple

import tokenizers

from purelora.core import errors
from purelora.formats import gguf_file
from purelora.weights import tokenizer

_AGAIN = "download the file again"
# Token types of GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)

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


def read(container: gguf_file.Container) -> tokenizer.Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

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
    return tokenizer.build(
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
    """Declares special and user-defined tokens, which are matched before text is cut."""
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
    """A byte-level BPE tokenizer, and whether such tokenizers add a BOS by default."""
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
    with tokenizer.backend_errors(container.path):
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
    with tokenizer.backend_errors(container.path):
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
