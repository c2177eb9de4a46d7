"""Answers of a loaded model as text, in one piece or as it comes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from purelora.inference import loaded_model
from purelora.models import decode
from purelora.weights import tokenizer as tokenizers


class TextStream:
    """The text of tokens that come one by one, in pieces that later tokens do not change."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_ids: Sequence[int]):
        """`end_ids` have no text, whether or not they are special tokens."""
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._ids: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that it completes.

        A character whose bytes are in several tokens is replacement characters until the last one.
        """
        if token not in self._end_ids:
            self._ids.append(token)
        return self._more(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def finish(self) -> str:
        """The text that has not been returned yet, complete or not."""
        return self._more(self.text)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _more(self, text: str) -> str:
        more = text[len(self._given) :]
        self._given += more
        return more


def answer(
    loaded: loaded_model.LoadedModel,
    variant: loaded_model.Variant,
    prompts: Sequence[Sequence[int]],
    options: loaded_model.ModelOptions,
    *,
    first_row: int = 0,
    emit: Callable[[str], None] | None = None,
) -> list["Answer"]:
    """Answers prompts together; `emit` gets the text of the first one as it comes."""
    end_ids = loaded.tokenizer.eos_ids
    streams = [TextStream(loaded.tokenizer, end_ids) for _ in prompts]
    counts, last = np.zeros(len(prompts), int), [-1] * len(prompts)
    steps = decode.stream(
        variant.model,
        variant.trainable,
        variant.base,
        prompts,
        end_ids=end_ids,
        max_new_tokens=options.max_new_tokens,
        dtype=loaded.dtype,
        how=options.sampling,
        seed=options.seed,
        first_row=first_row,
    )
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token is None:
                continue
            piece = streams[row].push(token)
            counts[row], last[row] = counts[row] + 1, token
            if emit and row == 0:
                emit(piece)
    if emit:
        emit(streams[0].finish())
    return [
        Answer(text.text, int(count), token in end_ids)
        for text, count, token in zip(streams, counts, last, strict=True)
    ]


class Answer(NamedTuple):
    """A finished answer.

    Attributes:
      text: without the end token.
      new_tokens: how many tokens were made, the end token included.
      ended: whether it ends by itself rather than at the limit.
    """

    text: str
    new_tokens: int
    ended: bool
