"""How a key of the configuration is declared: once, as a dataclass field with all that it says.

    r: int = key(16, "Rank of the adapters.", limits=between(1, 2**16), also=("lora.rank",))

The annotation is its type. Everything else is read off the declaration: the checks of single
values, the document `configs/base.py`, the answers to what other programs call it, and which keys
may change when a run is resumed.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from purelora.core.paths import Path

LARGEST = 2**31 - 1  # Steps are counted in int32.


@dataclasses.dataclass(frozen=True)
class Limits:
    """The numbers that a key takes. NaN is in none of them.

    Attributes:
      words: how a message says it, after "must be".
      least, most: the smallest and the largest number.
      above, below: bounds that are themselves left out.
      in_float32: compare what the compiled step sees: 1e-50 becomes 0, and 1 - 1e-12 becomes 1.
    """

    words: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    in_float32: bool = False

    def hold(self, value: float) -> bool:
        """Whether `value` is one of the numbers."""
        number = as_float32(value) if self.in_float32 else value
        return self.least <= number <= self.most and self.above < number < self.below

    @property
    def brief(self) -> str:
        """The words, without an upper bound that nobody reaches."""
        return f"at least {self.least}" if self.most == LARGEST else self.words


def as_float32(value: float) -> float:
    """The float32 that the compiled step makes of a number."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def between(least: float, most: float) -> Limits:
    """Numbers from `least` to `most`, both of them taken."""
    return Limits(f"from {least} to {most}", least=least, most=most)


COUNT = between(1, LARGEST)
FRACTION = Limits("at least 0 and below 1", least=0, below=1, in_float32=True)
POSITIVE = Limits("a float32 above 0", above=0, in_float32=True)


@dataclasses.dataclass(frozen=True)
class Key:
    """What a declaration says beside type and default.

    Attributes:
      meaning: its comment in `configs/base.py`.
      unit: what a number counts: "steps", "tokens", "seconds".
      limits: the numbers it may be; None for keys that are no numbers.
      refusal: what is wrong with a number outside, where "must be ..." would not say why.
      remedy: what to do about a number outside, or about an empty string.
      is_filled: a string that must not be empty.
      is_resumable: it may change when a run is resumed.
      is_later: checkpoints that lack it were written before it was added, and mean its default.
      other_names: keys of other programs (MaxText, PEFT, TRL, Axolotl) that mean the same.
    """

    meaning: str
    unit: str
    limits: Limits | None
    refusal: str
    remedy: str
    is_filled: bool
    is_resumable: bool
    is_later: bool
    other_names: tuple[str, ...]


def key(
    default: object,
    meaning: str,
    *,
    unit: str = "",
    limits: Limits | None = None,
    refusal: str = "",
    remedy: str = "",
    filled: bool = False,
    resumable: bool = False,
    later: bool = False,
    also: tuple[str, ...] = (),
) -> Any:
    """Declares a key; see `Key` for the arguments."""
    about = Key(meaning, unit, limits, refusal, remedy, filled, resumable, later, also)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"key": about})
    return dataclasses.field(default=default, metadata={"key": about})


def section(keys: type) -> Any:
    """Declares a section of keys, itself a dataclass of declarations."""
    return dataclasses.field(default_factory=keys)


class Declaration(NamedTuple):
    """A key with its place: `path` is its dotted name, `annotation` its type."""

    path: Path
    annotation: Any
    default: Any
    key: Key


def declarations(keys: type, parent: str = "") -> Iterator[Declaration]:
    """All keys of a dataclass of declarations and of its sections, in their order."""
    annotations = typing.get_type_hints(keys)
    for field in dataclasses.fields(keys):
        annotation, path = annotations[field.name], Path(parent) / field.name
        if dataclasses.is_dataclass(annotation):
            yield from declarations(typing.cast(type, annotation), path)
            continue
        is_fixed = field.default_factory is dataclasses.MISSING
        default = field.default if is_fixed else typing.cast(Any, field.default_factory)()
        yield Declaration(path, annotation, default, field.metadata["key"])
