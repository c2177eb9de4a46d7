"""Tokenizers: text to token ids with character offsets, and back.

The `tokenizers` library does the work. What it would add by itself is taken away here (a
post-processor's BOS, truncation, padding), so that one rule holds for every model: plain text gets
one BOS if the tokenizer wants one and the text does not begin with it, and never an EOS.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from purelora.core import errors

_AGAIN = "download the file again"


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
    """A tokenizer with its chat template. Made by `build`.

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
            with backend_errors("tokenizer"):
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
def backend_errors(path: str) -> Iterator[None]:
    """Turns the errors of the tokenizers library, which are bare `Exception`s, into ModelErrors."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise errors.ModelError(
            path, None, f"is not a sound tokenizer ({error})", _AGAIN
        ) from error
