"""The layers of a model as groups of stacks, and the order in which these are run.

Layers whose parameters have the same shapes are one stack: at `layers` if all of the model's are,
else each group at `layers.<name>`. Files name layers by their number in the model; trees know
stacks and positions in them.

    groups of the layers    s s s f s s s f s        tree paths layers.s, layers.f
    runs                    2 × (3 × s, f), s        two bodies of s and one of f are compiled
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from purelora.models.reading import Config, Group

ROOT = "layers"


class Stack(NamedTuple):
    """Layers that are stored together.

    Attributes:
      path: tree path of the stack.
      layers: their numbers in the model, ascending; the position in the stack is that in here.
      cfg: the config of a model of these layers alone.
    """

    path: str
    layers: tuple[int, ...]
    cfg: Config


@functools.lru_cache(maxsize=64)
def of(cfg: Config) -> tuple[Stack, ...]:
    """The stacks of a model, by the first layer of each."""
    groups = cfg.groups or (Group("", tuple(range(cfg.num_hidden_layers))),)
    found = []
    for group in sorted(groups, key=lambda group: group.layers[0]):
        own = dataclasses.replace(
            cfg,
            num_hidden_layers=len(group.layers),
            layer_kinds=tuple(cfg.layer_kinds[i] for i in group.layers),
            groups=(),
            **dict(group.changes),
        )
        path = ROOT if len(groups) == 1 else f"{ROOT}.{group.name}"
        found.append(Stack(path, group.layers, own))
    return tuple(found)


def holding(cfg: Config, path: str) -> Stack | None:
    """The stack that the leaf or module at `path` is in; None for what is not in a layer."""
    return next((s for s in of(cfg) if path.startswith(f"{s.path}.")), None)


def numbers(stacks: Sequence[Stack]) -> list[int]:
    """Which of `stacks` each layer of the model is in."""
    of_layer = {layer: n for n, stack in enumerate(stacks) for layer in stack.layers}
    return [of_layer[layer] for layer in sorted(of_layer)]


class Run(NamedTuple):
    """Layers one after the other, `times` times: one of a stack, or a sequence of runs."""

    times: int
    body: int | tuple["Run", ...]


def runs(sequence: Sequence[int]) -> tuple[Run, ...]:
    """A sequence of stacks by what repeats in it.

    From each place on, the shortest period of those that get furthest is taken, and the layers of
    the period are runs themselves.
    """
    found, start = [], 0
    while start < len(sequence):
        rest = sequence[start:]
        period = max(range(1, len(rest) // 2 + 1), key=lambda p: _reach(rest, p), default=1)
        count = max(1, _reach(rest, period) // period)
        period = period if count > 1 else 1
        body = rest[0] if period == 1 else runs(rest[:period])
        found.append(Run(count, body))
        start += count * period
    return tuple(found)


def _reach(sequence: Sequence[int], period: int) -> int:
    """How much of the beginning of a sequence is whole repetitions of its first `period`; 0 if
    there is but one."""
    first, count = sequence[:period], 1
    while sequence[count * period : (count + 1) * period] == first:
        count += 1
    return count * period if count > 1 else 0


def counts(run: Run) -> dict[int, int]:
    """How many layers of each stack one repetition of `run` has."""
    if isinstance(run.body, int):
        return {run.body: 1}
    found: dict[int, int] = {}
    for part in run.body:
        for stack, count in counts(part).items():
            found[stack] = found.get(stack, 0) + part.times * count
    return found
