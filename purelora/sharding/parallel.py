"""What the maths of a module needs to know of the devices that share its weight.

On one device all of this is the identity. `specs` holds the form for a mesh, and is the only place
that knows the names of mesh axes.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax

from purelora.ops import quant

Style = Literal["column", "row"]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How a matmul's weight is split between devices that hold the same rows of the batch.

    Column-parallel: the weight is split by its outputs. Every device computes some columns of the
    result from the whole input, and what follows works on its columns. Row-parallel: it is split by
    its inputs, and every device computes a part of each sum. A pair of one and the other, with what
    lies between, needs one sum of results forward and one of gradients backward (Shoeybi et al.
    2019, section 3). Rows of an embedding table count as its outputs, as they are those of the
    head.

    Attributes:
      style: column- or row-parallel; None: the weight is not split.
    """

    style: Style | None = None

    @property
    def axis_size(self) -> int:
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

    def copy_to(self, x: Any) -> Any:
        """Marks the input (a pytree) of a column-parallel module.

        The forward value is the same. In the backward pass its gradients are summed over the
        devices that share the weight.
        """
        return x

    def reduce_from(self, y: jax.Array) -> jax.Array:
        """The output of a row-parallel module: the sum of its parts."""
        return y


WHOLE = Parallel()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Expert parallelism: how tokens reach experts on other devices, and results return.

    Devices with different rows of the batch hold different experts. An all-gather gives every
    device the rows of all; a reduce-scatter of the outputs gives back the sums of its own rows.
    This class is the case of a single device, where both are the identity.
    """

    @property
    def axis_size(self) -> int:
        """How many devices share the experts."""
        return 1

    def first(self, size: int) -> Any:
        """Number of this device's first expert, when each device holds `size` of them."""
        del size
        return 0

    def gather(self, rows: jax.Array) -> jax.Array:
        """The rows of all devices, in their order: `[B, ...] -> [axis_size · B, ...]`."""
        return rows

    def reduce_scatter(self, rows: jax.Array) -> jax.Array:
        """This device's rows of the sum over the devices, `[axis_size · B, ...] -> [B, ...]`.

        It is the transpose of `gather`.
        """
        return rows


ALONE = Exchange()


def whole(weight: quant.Weight) -> quant.Weight:
    """The gather of a weight that is not sharded: the identity."""
    return weight


class Shards(NamedTuple):
    """How the leaves lie on the devices; what is not named is whole on each.

    Attributes:
      gathers: how to make a sharded leaf whole, by leaf path.
      parallels: how a matmul is split, by module path.
      exchanges: how tokens reach the experts of other devices, by module path.
      keep_gathered: keep what was gathered for the backward pass, instead of gathering it again.
    """

    gathers: Mapping[str, quant.Gather] = types.MappingProxyType({})
    parallels: Mapping[str, Parallel] = types.MappingProxyType({})
    exchanges: Mapping[str, Exchange] = types.MappingProxyType({})
    keep_gathered: bool = False


NO_SHARDS = Shards()
