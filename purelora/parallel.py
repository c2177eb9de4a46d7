"""What the maths of a module needs to know of the devices that share its weight.

On one device all of this is the identity. `specs` holds the form for a mesh, and is the only place
that knows the names of mesh axes.
"""

import dataclasses
from typing import Any, Literal

import jax

Splits = Literal["inputs", "outputs"]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How a matmul's weight is split between devices that hold the same rows of the batch.

    Split by outputs, every device computes some columns of the result from the whole input, and
    what follows works on its columns; split by inputs, every device computes a part of each sum.
    A pair of one and the other, with what lies between, needs one sum of results forward and one
    of gradients backward (Shoeybi et al. 2019, section 3). Rows of an embedding table count as its
    outputs, as they are those of the head.

    Attributes:
      splits: which dimension of the weight is split; None: none.
    """

    splits: Splits | None = None

    @property
    def ways(self) -> int:
        """How many devices share the weight."""
        return 1

    def first(self, size: int) -> Any:
        """Number, in the whole dimension, of the first element of this device's `size`."""
        del size
        return 0

    def psum(self, parts: Any) -> Any:
        """Sum of a pytree over the devices that share the weight."""
        return parts

    def pmax(self, part: jax.Array) -> jax.Array:
        """Largest over the devices that share the weight; not differentiable."""
        return part

    def spread(self, x: Any) -> Any:
        """The input (a pytree) of a module that is split by outputs: its gradients are summed."""
        return x

    def collect(self, y: jax.Array) -> jax.Array:
        """The output of a module that is split by inputs: the sum of its parts."""
        return y


WHOLE = Parallel()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How tokens reach experts, where devices with different rows hold different ones.

    Every device gets the rows of all, and its own rows' sums of what all have computed.
    """

    @property
    def ways(self) -> int:
        """How many devices share the experts."""
        return 1

    def first(self, size: int) -> Any:
        """Number of the first of this device's `size` experts."""
        del size
        return 0

    def gather(self, rows: jax.Array) -> jax.Array:
        """The rows of all devices, `[B, ...]`, one device's after the other's."""
        return rows

    def sum_scatter(self, rows: jax.Array) -> jax.Array:
        """This device's rows of the sum over the devices; the transpose of `gather`."""
        return rows


ALONE = Exchange()
