"""Tokenises records: token ids with a mask of the targets, a fingerprint, a split.

What becomes of a record:

    task      record           tokens                        targets
    sft       chat             the rendered template         what the assistant writes
    sft       chat, no         question, answer, EOS         answer and EOS
              template
    sft       text             text, EOS                     all
    pretrain  any              as above                      all

If the tokenizer adds a BOS, each example begins with exactly one, whether or not the template or
the text has it already. An EOS is appended where the text does not already end in an end token.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from purelora.core import errors
from purelora.data import chat
from purelora.data.records import Chat, Record, Text
from purelora.data.report import DataReport, TooLong
from purelora.weights.tokenizer import Tokenizer

Task = Literal["sft", "pretrain"]

# What stands between question and answer when there is no chat template. A `prompt` says itself
# how it ends.
_SEPARATORS: Mapping[str, str] = {"prompt": "", "question": "\n", "instruction": "\n"}


class Example(NamedTuple):
    """One tokenised record.

    Attributes:
      tokens: token ids, int32 [n].
      supervised: whether each token is a target, bool [n]. Never the first: nothing predicts it.
    """

    tokens: np.ndarray
    supervised: np.ndarray


class Split(NamedTuple):
    """Examples to train on and to evaluate on."""

    train: list[Example]
    evaluation: list[Example]


class Built(NamedTuple):
    """The examples of a file, and the report on its records."""

    examples: list[Example]
    report: DataReport


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tokenised record of any length, before `max_length` is applied.

    Attributes:
      example: its tokens and targets.
      last_turn_only: see `DataReport`.
      turns_without_end_token: see `DataReport`.
    """

    example: Example
    last_turn_only: bool = False
    turns_without_end_token: int = 0


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns records into tokens.

    Attributes:
      tokenizer: the model's tokenizer.
      template: its chat template, compiled; None if it has none.
      task: "sft" or "pretrain".
      unnested_template: what to do with chats whose template does not nest, see `chat.render`.
    """

    tokenizer: Tokenizer
    template: chat.ChatTemplate | None
    task: Task
    unnested_template: chat.UnnestedTemplate

    def encode(self, record: Record) -> Encoded:
        """The tokens of one record, all of them."""
        if isinstance(record, Text):
            return Encoded(self._document(record.where, record.text, 0))
        if self.template is None:
            text, answer_start = _plain_pair(record)
            return Encoded(self._document(record.where, text, answer_start))
        if self.task == "pretrain":
            text = self.template.render(
                record.messages, tools=record.tools, add_generation_prompt=False, where=record.where
            )
            ids = self.tokenizer.encode(text, add_special_tokens=True).ids
            return Encoded(_example(ids, np.ones(len(ids), np.bool_)))
        rendered = chat.render(record, self.template, unnested_template=self.unnested_template)
        encoding = self.tokenizer.encode(rendered.text, add_special_tokens=True)
        ends = self.tokenizer.eos_ids
        endless = [s for s in rendered.spans if not chat.ends_in(rendered.text, s, encoding, ends)]
        return Encoded(
            _example(encoding.ids, chat.spans_mask(encoding.offsets, rendered.spans)),
            rendered.last_turn_only,
            len(endless),
        )

    def _document(self, where: str, text: str, target_start: int) -> Example:
        """A text that ends in an EOS; its targets begin at the character `target_start`."""
        encoding = self.tokenizer.encode(text, add_special_tokens=True)
        if self.task == "pretrain":
            target_start = 0
        supervised = encoding.offsets[:, 0] >= target_start
        ids = encoding.ids
        if not ids.size or ids[-1] not in self.tokenizer.eos_ids:
            ids = np.append(ids, np.int32(self._eos_id(where)))
            supervised = np.append(supervised, True)
        return _example(ids, supervised)

    def _eos_id(self, where: str) -> int:
        if self.tokenizer.eos_token is None:
            raise errors.DataError(
                where,
                None,
                "needs an end token, and the tokenizer has no eos_token",
                "name one in the model's tokenizer_config.json",
            )
        return self.tokenizer.eos_ids[0]


def build(
    records: Sequence[Record],
    encoder: Encoder,
    *,
    max_length: int,
    too_long: TooLong,
) -> Built:
    """Tokenises `records` and leaves out those without a target.

    Args:
      records: what `records.read` gave, not empty.
      encoder: how to turn them into tokens.
      max_length: the longest example allowed.
      too_long: what to do with longer ones: "drop" them, "truncate" them or "raise" an error.

    Raises:
      DataError: an example is too long and that is to raise, or none is left.
    """
    encoded = [encoder.encode(record) for record in records]
    is_long = [len(item.example.tokens) > max_length for item in encoded]
    if too_long == "raise" and any(is_long):
        raise _too_long_error(records, encoded, max_length)
    if too_long == "truncate":
        remaining = [Example(*(array[:max_length] for array in item.example)) for item in encoded]
    else:
        fits = [not long for long in is_long]
        remaining = [item.example for item in itertools.compress(encoded, fits)]
    kept = [example for example in remaining if example.supervised.any()]
    report = DataReport(
        records=len(records),
        kept=len(kept),
        too_long=sum(is_long),
        unsupervised=len(remaining) - len(kept),
        last_turn_only=sum(item.last_turn_only for item in encoded),
        turns_without_end_token=sum(item.turns_without_end_token for item in encoded),
        tokens=sum(len(example.tokens) for example in kept),
        supervised_tokens=sum(int(example.supervised.sum()) for example in kept),
        max_length=max_length,
        too_long_policy=too_long,
        shapes=dict(collections.Counter(record.shape for record in records)),
    )
    if not kept:
        raise _nothing_left_error(records[0].where, report)
    return Built(kept, report)


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the tokens and masks of all examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.tokens).to_bytes(8, "little"))
        digest.update(example.tokens.astype("<i4").tobytes())
        digest.update(example.supervised.astype(np.uint8).tobytes())
    return digest.hexdigest()


def split(examples: Sequence[Example], eval_fraction: float, seed: int) -> Split:
    """Takes a random `eval_fraction` of the examples out for evaluation; both keep their order.

    Raises:
      ConfigError: one of the two sides would be empty.
    """
    evaluation_size = round(eval_fraction * len(examples))
    if not 0 < evaluation_size < len(examples):
        side = "evaluation" if evaluation_size <= 0 else "training"
        raise errors.ConfigError(
            "data.eval_fraction",
            eval_fraction,
            f"leaves no example for {side} out of {len(examples)}",
            "choose a fraction that gives both sides at least one",
        )
    generator = np.random.Generator(np.random.Philox(key=seed))
    chosen = np.zeros(len(examples), np.bool_)
    chosen[generator.permutation(len(examples))[:evaluation_size]] = True
    return Split(
        train=list(itertools.compress(examples, ~chosen)),
        evaluation=list(itertools.compress(examples, chosen)),
    )


def _example(tokens: np.ndarray, supervised: np.ndarray) -> Example:
    return Example(tokens, supervised & (np.arange(len(tokens)) > 0))


def _plain_pair(record: Chat) -> tuple[str, int]:
    """Question and answer in one text, and where the answer begins."""
    roles = [message["role"] for message in record.messages]
    if record.shape not in _SEPARATORS or roles != ["user", "assistant"] or record.tools:
        raise errors.DataError(
            record.where,
            roles,
            "needs a chat template, and the tokenizer has none",
            "use prompt + completion rows of strings, or a model that has a chat template",
        )
    question, answer = (message["content"] for message in record.messages)
    start = question + _SEPARATORS[record.shape]
    return start + answer, len(start)


def _too_long_error(
    records: Sequence[Record], encoded: Sequence[Encoded], max_length: int
) -> errors.DataError:
    problems = [
        errors.Problem(
            record.where,
            len(item.example.tokens),
            f"tokens, more than max_length = {max_length}",
            "raise max_length, or set data.too_long to 'drop' or 'truncate'",
        )
        for record, item in zip(records, encoded, strict=True)
        if len(item.example.tokens) > max_length
    ]
    return errors.DataError.of(errors.first(problems, "data.too_long"))


def _nothing_left_error(where: str, report: DataReport) -> errors.DataError:
    reasons = []
    if report.too_long:
        fate = "were cut there" if report.too_long_policy == "truncate" else "were dropped"
        reasons.append(f"{report.too_long} are longer than {report.max_length} tokens and {fate}")
    if report.unsupervised:
        reasons.append(f"{report.unsupervised} have no token to train on")
    return errors.DataError(
        where.rpartition(":")[0],
        None,
        f"none of its {report.records} records is left to train on: " + ", ".join(reasons),
        "raise max_length" if report.too_long else "let assistant messages train",
    )
