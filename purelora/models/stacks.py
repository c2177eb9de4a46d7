"""The layers of a model as stacks, and the order in which they are run.

Layers whose parameters have the same shapes are stored in one stack. If all layers of the model
have, its path in the tree is `layers`; else each group of layers is a stack at `layers.<name>`.
Files name a layer by its number in the model, trees by a stack and a position in it.

To scan the layers, their order is written as nested repetitions, so that each repeated part is
compiled once. Here `s` is a layer of one group (such as sliding window) and `f` of another (full):

    layers in order         s s s f s s s f s        tree paths layers.s, layers.f
    runs                    2 × (3 × s, f), s        two bodies of s and one of f are compiled
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from purelora.models.reading import Config, Group

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
    """

    times: int
    body: int | tuple["Run", ...]


def runs(sequence: Sequence[int]) -> tuple[Run, ...]:
    """Writes the order of layers as nested repetitions.

    It goes greedily from the front: of all periods it takes the one whose whole repetitions reach
    furthest, of several such the shortest. A period of more than one layer is written as runs too.

    Args:
      sequence: the stack of each layer, see `numbers`.
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
    """How many layers from the front repeat the first `period` of them; 0 without repetition."""
    first, count = sequence[:period], 1
    while sequence[count * period : (count + 1) * period] == first:
        count += 1
    return count * period if count > 1 else 0


def counts(run: Run) -> dict[int, int]:
    """How many layers of each stack are in the body of `run`, by the index of the stack."""
    if isinstance(run.body, int):
        return {run.body: 1}
    found: dict[int, int] = {}
    for part in run.body:
        for stack, count in counts(part).items():
            found[stack] = found.get(stack, 0) + part.times * count
    return found
