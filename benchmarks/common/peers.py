"""What benchmarks/trainers.py knows of a trainer, and of other libraries' trainers in general."""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Way(NamedTuple):
    """A trainer that is ready to run.

    Attributes:
      step: takes the next step and returns its loss; and for a mixture of experts the
        load-balancing loss divided by the number of experts of a token, else None.
      adapters: how many parameters are trained.
    """

    step: Callable[[], tuple[float, float | None]]
    adapters: int


class Task(NamedTuple):
    """What all trainers do.

    Attributes:
      shape: name of the file in configs/shapes/small.
      sizes: the contents of that file.
      rank: rank of the adapters.
      alpha: their lora_alpha.
      tile: tile size of the int8 base.
      rate: learning rate.
      balance: coefficient of the load-balancing loss.
      remat: "none" or "full".
      devices: number of devices, all along fsdp; each gets one row.
      length: tokens of a row.
      folder: where a peer may write.
    """

    shape: str
    sizes: Mapping[str, Any]
    rank: int
    alpha: float
    tile: int
    rate: float
    balance: float
    remat: str
    devices: int
    length: int
    folder: str


class NotThere(Exception):
    """A peer that is not installed, or has no such model."""


def tried(make: Callable[[], Way]) -> Way | str:
    """The way, whose first step is known to succeed; or why there is none."""
    try:
        way = make()
        taken = itertools.chain([way.step()], iter(way.step, None))
        return way._replace(step=functools.partial(next, taken))
    except NotThere as error:
        return str(error)
    except Exception as error:  # Whatever a peer raises belongs in the table.
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:110]}"


def need(package: str) -> None:
    """Raises NotThere without the package."""
    if importlib.util.find_spec(package) is None:
        raise NotThere("not installed")


def count(module: Any) -> int:
    """Elements of all adapters of an NNX module. Raises ValueError if it has none."""
    import jax
    from flax import nnx

    found = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.LoRAParam)))
    if not found:
        raise ValueError("no adapters were injected")
    return found
