"""The data of a run: files, template, examples, packing and batches put together."""

import datetime
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from purelora.config import schema
from purelora.core import errors
from purelora.data import batches, chat, examples, packing, records, sets
from purelora.data.report import DataReport
from purelora.weights.tokenizer import Tokenizer


class RunData(NamedTuple):
    """What a run trains and evaluates on.

    Attributes:
      train: the training batches.
      evaluation: the evaluation batches, each once and in order; None if there are none.
      template: the chat template; None if the model has none.
      report: what became of the records, for people.
      fingerprint: hash of all tokens and targets, of training and evaluation, in order.
    """

    train: batches.Batches
    evaluation: batches.Batches | None
    template: chat.ChatTemplate | None
    report: str
    fingerprint: str


def load(settings: schema.Config, tokenizer: Tokenizer) -> RunData:
    """Reads, tokenises, splits and packs the data.

    Raises:
      DataError, ConfigError: a file, record or template that cannot be used; nothing to train on.
    """
    template = compile_template(settings, tokenizer)
    encoder = _encoder(settings, tokenizer, template)
    train, report = _examples("data.train", settings.data.train, encoder, settings)
    reports = [f"train: {report}"]
    evaluation: list[examples.Example] = []
    if settings.data.eval is not None:
        evaluation, eval_report = _examples("data.eval", settings.data.eval, encoder, settings)
        reports.append(f"eval: {eval_report}")
    elif settings.data.eval_fraction > 0:
        train, evaluation = examples.split(train, settings.data.eval_fraction, settings.seed)
        reports.append(f"eval: {len(evaluation):,} of the records above held out")
    train_batches = _batches(train, settings, shuffle=settings.data.shuffle)
    reports.append(
        f"{len(train_batches.rows):,} training rows of {settings.max_length} tokens, "
        f"{train_batches.steps_per_epoch:,} steps an epoch"
    )
    return RunData(
        train=train_batches,
        evaluation=_batches(evaluation, settings, shuffle=False) if evaluation else None,
        template=template,
        report="\n".join(reports),
        fingerprint=examples.fingerprint([*train, *evaluation]),
    )


def batches_of(
    rows: Iterable[Mapping[str, Any]], settings: schema.Config, tokenizer: Tokenizer
) -> batches.Batches:
    """Training batches of rows in memory, as `load` makes them of a file.

    Raises:
      DataError, ConfigError: a row that cannot be used; nothing to train on.
    """
    encoder = _encoder(settings, tokenizer, compile_template(settings, tokenizer))
    chosen, _ = examples.build(
        records.of_rows(rows),
        encoder,
        max_length=settings.max_length,
        too_long=settings.data.too_long,
    )
    return _batches(chosen, settings, shuffle=settings.data.shuffle)


def _encoder(
    settings: schema.Config,
    tokenizer: Tokenizer,
    template: chat.ChatTemplate | None,
) -> examples.Encoder:
    return examples.Encoder(
        tokenizer=tokenizer,
        template=template,
        task=settings.task,
        unnested_template=settings.data.unnested_template,
    )


def compile_template(settings: schema.Config, tokenizer: Tokenizer) -> chat.ChatTemplate | None:
    """The chat template of the config's file, or the model's own; None without either."""
    source = tokenizer.chat_template
    if settings.data.chat_template is not None:
        path = pathlib.Path(settings.data.chat_template)
        try:
            source = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise errors.ConfigError(
                "data.chat_template", str(path), f"cannot be read: {error}", "give a Jinja file"
            ) from error
        if not source.strip():
            raise errors.ConfigError(
                "data.chat_template", str(path), "is empty", "give a Jinja file, or leave it out"
            )
    if source is None:
        return None
    day = datetime.date.fromisoformat(settings.data.template_date)
    return chat.compile_template(
        source,
        special_tokens=tokenizer.special_tokens,
        options=settings.data.chat_template_kwargs,
        now=datetime.datetime.combine(day, datetime.time()),
    )


def _examples(
    key: str, name: str, encoder: examples.Encoder, settings: schema.Config
) -> tuple[list[examples.Example], DataReport]:
    return examples.build(
        records.read(sets.resolve(name, key)),
        encoder,
        max_length=settings.max_length,
        too_long=settings.data.too_long,
    )


def _batches(
    chosen: list[examples.Example], settings: schema.Config, *, shuffle: bool
) -> batches.Batches:
    lengths = [len(example.tokens) for example in chosen]
    return batches.Batches(
        examples=chosen,
        rows=packing.plan(lengths, settings.max_length, packing=settings.data.packing),
        batch_size=settings.batch_size,
        accum_steps=settings.accum_steps,
        max_length=settings.max_length,
        seed=settings.seed,
        shuffle=shuffle,
    )
