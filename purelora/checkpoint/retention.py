"""Which checkpoints of a run are kept: the newest, one every so often, and the best."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a save leaves.

    Attributes:
      last: how many of the newest steps, at least 1.
      every: steps that are multiples of it stay for ever; None: none does.
      best: keep the step with the lowest eval loss too.
    """

    last: int
    every: int | None
    best: bool


def kept(policy: Policy, eval_losses: Mapping[int, float | None], saved: int) -> set[int]:
    """The steps to keep after a save.

    Args:
      policy: what to keep.
      eval_losses: of every step in the folder its eval loss, None where there is none.
      saved: the step just saved, which is always kept and counts as one of the newest.
    """
    others = sorted(step for step in eval_losses if step != saved)
    keep = {saved, *others[max(0, len(others) - (policy.last - 1)) :]}
    if policy.every is not None:
        keep |= {step for step in eval_losses if step % policy.every == 0}
    evaluated = [
        (loss, step)
        for step, loss in eval_losses.items()
        if loss is not None and math.isfinite(loss)
    ]
    if policy.best and evaluated:
        keep.add(min(evaluated)[1])
    return keep
