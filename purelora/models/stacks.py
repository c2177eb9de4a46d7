"""The layers of a model as stacks, and the order in which they are run.

Layers whose parameters have the same shapes are stored in one stack. If all layers of the model
have, its path in the tree is `layers`; else each group of layers is a stack at `layers.<name>`.
Files name a layer by its number in the model, trees by a stack and a position in it.

To scan the layers, their order is written as nested repetitions, so that each repeated part is
compiled once. Here `s` is a layer of one group (such as sliding window) and `f` of another (full):

    layers in order         s s s f s s s f s f      tree paths layers.s, layers.f
    runs                    3 × (3 × s, f)           a body of s and one of f are compiled

The last repetition may be a part of the others: here it has one layer s.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from purelora.models.hf_config import Config, Group

ROOT = "layers"


class Stack(NamedTuple):
    """Layers that are stored together, in arrays with a leading layer axis.

    Attributes:
      path: tree path of the stack.
      layers: for each position in the stack, the number of the layer in the model; ascending.
      cfg: the config of a model that has only these layers.
    """

    path: str
    layers: tuple[int, ...]
    cfg: Config


@functools.lru_cache(maxsize=64)
def of(cfg: Config) -> tuple[Stack, ...]:
    """The stacks of a model, in the order of their first layers."""
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
    """The stack that holds the leaf or module at `path`; None if it is in no layer."""
    return next((s for s in of(cfg) if path.startswith(f"{s.path}.")), None)


def numbers(stacks: Sequence[Stack]) -> list[int]:
    """For each layer of the model, in order, the index in `stacks` of the stack that holds it."""
    of_layer = {layer: n for n, stack in enumerate(stacks) for layer in stack.layers}
    return [of_layer[layer] for layer in sorted(of_layer)]


class Run(NamedTuple):
    """A part of the layers' order that is repeated.

    Attributes:
      times: how often.
      body: what is repeated: one layer of the stack of this index, or runs one after the other.
      last: if the last repetition is only a part of the others: how often each run of `body`, which
        are then of one layer of different stacks, is repeated in it.
    """

    times: int
    body: int | tuple["Run", ...]
    last: tuple[int, ...] | None = None


# A last repetition that is only a part of the others is filled up with padding layers, which are
# skipped. They take memory, if not time: so much more than the layers themselves.
MOST_ROWS = 1.5


def runs(sequence: Sequence[int]) -> tuple[Run, ...]:
    """Writes the order of layers as nested repetitions.

    It goes greedily from the front: of all periods it takes the one whose repetitions reach
    furthest, of several such the shortest. A period of more than one layer is written as runs too.

    Args:
      sequence: the stack of each layer, see `numbers`.
    """
    found, start = [], 0
    while start < len(sequence):
        rest = sequence[start:]
        options = (_repetition(rest, period) for period in range(1, len(rest)))
        best = max(options, key=lambda option: option.reach, default=_ONE)
        body = rest[0] if best.period == 1 else runs(rest[: best.period])
        found.append(Run(best.times, body, best.last))
        start += best.reach
    return tuple(found)


def is_padded(stacks: Sequence[Stack]) -> bool:
    """Whether the stacks of a model get padding layers when they are scanned."""

    def has_padding(run: Run) -> bool:
        parts = () if isinstance(run.body, int) else run.body
        return run.last is not None or any(map(has_padding, parts))

    return any(map(has_padding, runs(numbers(stacks))))


class _Repetition(NamedTuple):
    """The first `period` layers `times` times, of which the last may be a part: `reach` layers."""

    period: int
    times: int
    last: tuple[int, ...] | None
    reach: int


_ONE = _Repetition(period=1, times=1, last=None, reach=1)


def _repetition(sequence: Sequence[int], period: int) -> _Repetition:
    """How far the first `period` layers are repeated; `_ONE` if they are not."""
    first, times = sequence[:period], 1
    while sequence[times * period : (times + 1) * period] == first:
        times += 1
    last = _part_of(first, sequence[times * period :])
    reach = times * period + sum(last)
    if last and (times + 1) * period <= MOST_ROWS * reach:
        return _Repetition(period, times + 1, last, reach)
    return _Repetition(period, times, None, times * period) if times > 1 else _ONE


def _part_of(first: Sequence[int], rest: Sequence[int]) -> tuple[int, ...]:
    """For each stack in `first`, how many layers of it are in the front of `rest`, in this order.

    A part begins as the whole does. If there is none, or a stack comes twice in `first`, it is ().
    """
    blocks = [(stack, len(list(block))) for stack, block in itertools.groupby(first)]
    is_simple = 1 < len(blocks) == len(set(first))
    if not is_simple or list(rest[:1]) != list(first[:1]):
        return ()
    found, start = [], 0
    for stack, most in blocks:
        same = [other == stack for other in rest[start : start + most]]
        found.append([*same, False].index(False))
        start += found[-1]
    return tuple(found)


class Count(NamedTuple):
    """How many layers of a stack are in a run: `real` ones, in `rows` rows."""

    rows: int
    real: int


def counts(run: Run) -> dict[int, Count]:
    """How many layers of each stack are in the run, by the index of the stack."""
    if isinstance(run.body, int):
        return {run.body: Count(run.times, run.times)}
    found: dict[int, Count] = {}
    for n, part in enumerate(run.body):
        for stack, own in counts(part).items():
            real = own.real * run.times
            if run.last is not None:
                real = own.real * (run.times - 1) + run.last[n]
            before = found.get(stack, Count(0, 0))
            found[stack] = Count(before.rows + own.real * run.times, before.real + real)
    return found
