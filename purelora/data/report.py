"""What became of the records of a data file: counts for people and for the run's record."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

TooLong = Literal["drop", "truncate", "raise"]


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What became of the records of a file.

    Attributes:
      records: all records.
      kept: those that became examples.
      too_long: those longer than `max_length`, dropped or truncated as `too_long_policy` says.
      unsupervised: those left out because no token of theirs is a target (after truncation).
      last_turn_only: chats trained on their last turn only, because the template does not nest.
      turns_without_end_token: trained turns that do not end in an end token of the model.
      tokens: tokens of all examples.
      supervised_tokens: targets among them.
      max_length: the longest example allowed.
      too_long_policy: "drop", "truncate" or "raise".
      shapes: number of records by row shape.
    """

    records: int
    kept: int
    too_long: int
    unsupervised: int
    last_turn_only: int
    turns_without_end_token: int
    tokens: int
    supervised_tokens: int
    max_length: int
    too_long_policy: TooLong
    shapes: Mapping[str, int]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {count:,}" for name, count in self.shapes.items())
        lines = [
            f"{self.records:,} records ({shapes}), {self.kept:,} kept; "
            f"{self.tokens:,} tokens, {self.supervised_tokens:,} of them targets"
        ]
        fate = "truncated" if self.too_long_policy == "truncate" else "dropped"
        notes = (
            (self.too_long, f"longer than {self.max_length} tokens: {fate}"),
            (self.unsupervised, "without a target: left out"),
            (self.last_turn_only, "trained on the last turn only (data.unnested_template)"),
            (
                self.turns_without_end_token,
                "trained turns end in no end token of the model: it may not learn to stop",
            ),
        )
        return "\n".join(lines + [f"{count:,} {note}" for count, note in notes if count])
