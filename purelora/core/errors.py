"""Errors a user can cause: where, the value, what is wrong, and what to do about it.

The commands print these without a traceback and exit with status 2. Anything else that escapes
is a fault of purelora's own.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      where: a config key (`lora.r`), or a file with its line (`train.jsonl:7`).
      value: what was found there; None when nothing was found or it would not help.
      what: what is wrong with it.
      remedy: what to do about it.
    """

    where: str
    value: object
    what: str
    remedy: str

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {_short(self.value)}"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.where}{value}: {self.what}{remedy}"


class UserError(Exception):
    """Base of every error that a user's input can cause. Holds one or more problems."""

    def __init__(self, where: str, value: object, what: str, remedy: str = ""):
        self.problems: tuple[Problem, ...] = (Problem(where, value, what, remedy),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """One error that reports all the `problems` (at least one) together."""
        problems = tuple(problems)
        first = problems[0]
        error = cls(first.where, first.value, first.what, first.remedy)
        error.problems = problems
        error.args = ("\n".join(map(str, problems)),)
        return error


class ConfigError(UserError):
    """A configuration key with a wrong name, type or value, or keys that do not fit together."""


class DataError(UserError):
    """A data file, a record in it or a chat template that cannot be used."""


class ModelError(UserError):
    """A model folder, weights file or tokenizer that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another run."""


class DivergedError(UserError):
    """A loss or gradient that is not finite, with nan_policy='abort'."""


def first(problems: Sequence[Problem], where: str, limit: int = 20) -> list[Problem]:
    """The first `limit` of `problems`, and one more that counts the rest."""
    hidden = len(problems) - limit
    if hidden <= 0:
        return list(problems)
    rest = Problem(where, None, f"has {hidden} more problems", "fix the first ones first")
    return [*problems[:limit], rest]


@contextlib.contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Adds the problems of a ConfigError raised inside to `problems`, and goes on."""
    try:
        yield
    except ConfigError as error:
        problems.extend(error.problems)


def nearest(name: str, known: Sequence[str]) -> str:
    """A remedy that names what `name` was probably meant to be: the nearest of `known`, or all."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(sorted(known))


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
