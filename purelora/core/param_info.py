"""ParamInfo: one parameter declared once, from which every other tree is derived.

Abstract values, PartitionSpecs, random initial values, the quantised layout and the shapes of the
adapters all come from the shape, dtype and logical axes that stand here.
"""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import trees

# The logical axis of stacked layers; what adds and removes it is `layer_axis`.
LAYERS = "layers"


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """A parameter without its values.

    Attributes:
      shape: full (unsharded) shape.
      dtype: name of the dtype it is stored in.
      axes: logical axis of each dimension, None for one that is never sharded.
      init: `normal`, `zeros`, `ones` or `he_uniform`.
      std: standard deviation of `normal`; None for 1 / sqrt(fan_in).
      contracting: the dimension, counted from the end, that a matmul with this parameter sums
        over; None for vectors.
      is_router: whether it is the router of a mixture of experts. A router is small, and rounding
        it would send tokens to other experts: it is never quantised, and gets an adapter only if
        `target_modules` or `target_parameters` names it.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    init: str = "normal"
    contracting: int | None = None
    std: float | None = None
    is_router: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def is_matrix(self) -> bool:
        return self.contracting is not None

    @property
    def is_quantisable(self) -> bool:
        """Whether a quantised base holds it as codes (unless `quant.skip` names it)."""
        return self.is_matrix and not self.is_router

    @property
    def is_stacked(self) -> bool:
        """Whether it leads with a layer axis."""
        return LAYERS in self.axes

    @property
    def has_experts(self) -> bool:
        """Whether it holds the weights of several experts, along the axis `experts`."""
        return "experts" in self.axes

    @property
    def is_transposed(self) -> bool:
        """Whether files hold it the other way round: Hugging Face keeps kernels as [out, in]."""
        return self.contracting == -2

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one layer in Hugging Face's order of dimensions; with experts `[E, out, in]`."""
        dims = zip(self.shape, self.axes, strict=True)
        shape = tuple(size for size, axis in dims if axis != LAYERS)
        return (*shape[:-2], *shape[:-3:-1]) if self.is_transposed else shape

    @property
    def matrix_dims(self) -> tuple[int, int]:
        """Of a matrix: the contracting dimension and the other one of its last two."""
        assert self.contracting is not None
        first = len(self.shape) - 2
        inner = len(self.shape) + self.contracting
        return inner, 2 * first + 1 - inner

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))


def initial(info: ParamInfo, *, key: jax.Array) -> jax.Array:
    """Random or constant initial values of one parameter.

    `normal` has variance 1 / fan_in unless the info has a `std`. `he_uniform` is uniform on
    ±sqrt(6 / fan_in) as in qwix's `lora_a` (fan_in is the contracting dimension). Every element has
    its own draw, so the layers of a stack differ.
    """
    dtype = jnp.dtype(info.dtype)
    if info.init == "zeros":
        return jnp.zeros(info.shape, dtype)
    if info.init == "ones":
        return jnp.ones(info.shape, dtype)
    fan_in = info.shape[info.contracting if info.contracting is not None else -1]
    if info.init == "normal":
        std = 1 / math.sqrt(fan_in) if info.std is None else info.std
        return (jax.random.normal(key, info.shape) * std).astype(dtype)
    if info.init == "he_uniform":
        limit = math.sqrt(6 / fan_in)
        return jax.random.uniform(key, info.shape, minval=-limit, maxval=limit).astype(dtype)
    raise ValueError(f"unknown init {info.init!r}")


def initial_tree(infos: trees.Tree, *, key: jax.Array) -> trees.Tree:
    """Initial values of a tree of infos; each leaf's key is folded from its path.

    A leaf's values therefore do not depend on which other leaves there are.
    """
    flat = trees.flatten(infos)
    return trees.unflatten({p: initial(i, key=path_key(key, p)) for p, i in flat.items()})


def path_key(key: jax.Array, path: str) -> jax.Array:
    """`key` folded with a path, the same on every machine and Python run."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(path.encode())))
