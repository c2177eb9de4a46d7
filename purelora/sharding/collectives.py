"""Inside the shard_map: how shards become whole, and how gradients and sums leave it.

What lies where is data (`specs`); here is what it means for the maths on one device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from purelora.core import errors, param_info, trees
from purelora.lora import kinds
from purelora.ops import quant
from purelora.sharding import parallel
from purelora.sharding.rules import BATCH_AXES, EXPERT, MESH_AXES, SPLIT_AXES, TENSOR


@dataclasses.dataclass(frozen=True)
class Gather:
    """Makes a shard whole inside the shard_map: one all-gather a sharded array.

    Attributes:
      dims: for each array of the weight (a QArray has two), the sharded dimensions, counted from
        the end so that they hold with and without the layer axis, and their mesh axes.
    """

    dims: tuple[tuple[tuple[int, str], ...], ...]

    def __call__(self, weight: quant.Weight) -> quant.Weight:
        arrays, structure = jax.tree.flatten(weight)
        return jax.tree.unflatten(structure, map(_gather_array, arrays, self.dims))


def _gather_array(array: jax.Array, dims: tuple[tuple[int, str], ...]) -> jax.Array:
    for dim, axis in dims:
        array = jax.lax.all_gather(array, axis, axis=array.ndim + dim, tiled=True)
    return array


def _gathered_dims(spec: P) -> tuple[tuple[int, str], ...]:
    """The sharded dimensions, from the end, that are made whole before the maths."""
    return tuple(
        (i - len(spec), axis) for i, axis in enumerate(spec) if axis not in (None, *SPLIT_AXES)
    )


def _arrays(leaf: Any) -> list[P]:
    """The spec of an array, or the two of a QArray."""
    specs: list[P] = jax.tree.leaves(leaf, is_leaf=lambda s: isinstance(s, P))
    return specs


@dataclasses.dataclass(frozen=True)
class TensorParallel(parallel.Parallel):
    """`Parallel` over the `tensor` axis, inside the shard_map.

    What every device of the axis has alike is invariant over it, and the results of its own part
    are varying. `copy_to` is a cast from one to the other, whose transpose is the sum of gradients;
    `psum` goes back, and its transpose is the cast.
    """

    @property
    def axis_size(self) -> int:
        return jax.lax.axis_size(TENSOR)

    def first(self, size: int) -> jax.Array:
        return jax.lax.axis_index(TENSOR) * size

    def psum(self, parts: Any) -> Any:
        return jax.lax.psum(parts, TENSOR)

    def pmax(self, part: jax.Array) -> jax.Array:
        return jax.lax.pmax(part, TENSOR)

    def copy_to(self, x: Any) -> Any:
        return jax.lax.pcast(x, TENSOR, to="varying") if self.style == "column" else x

    def reduce_from(self, y: jax.Array) -> jax.Array:
        return self.psum(y) if self.style == "row" else y


@dataclasses.dataclass(frozen=True)
class ExpertParallel(parallel.Exchange):
    """`Exchange` over the `expert` axis, inside the shard_map."""

    @property
    def axis_size(self) -> int:
        return jax.lax.axis_size(EXPERT)

    def first(self, size: int) -> jax.Array:
        return jax.lax.axis_index(EXPERT) * size

    def gather(self, rows: jax.Array) -> jax.Array:
        return jax.lax.all_gather(rows, EXPERT, axis=0, tiled=True)

    def reduce_scatter(self, rows: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(rows, EXPERT, scatter_dimension=0, tiled=True)


def shards(
    specs: trees.Tree, infos: Mapping[str, param_info.ParamInfo], *, keep_gathered: bool = False
) -> parallel.Shards:
    """How the leaves of a model lie on a mesh.

    Args:
      specs: specs of base and trained leaves together.
      infos: flat declarations of the unquantised weights.
      keep_gathered: see `parallel.Shards`.

    Raises:
      ConfigError: modules that work on each other's outputs are not split alike.
    """
    flat = trees.flatten(specs)
    found = {path: tuple(map(_gathered_dims, _arrays(leaf))) for path, leaf in flat.items()}
    # The step gathers adapters, once before its loops.
    gathers = {
        p: Gather(dims) for p, dims in found.items() if any(dims) and not kinds.is_adapter(p)
    }
    splits = _tensor_splits(flat, infos)
    _check_splits(flat, infos)
    parallels = {path: TensorParallel(split) for path, split in splits.items()}
    exchanges = {
        path.rpartition(".")[0]: ExpertParallel()
        for path in infos
        if path in flat and EXPERT in _arrays(flat[path])[0]
    }
    return parallel.Shards(gathers, parallels, exchanges, keep_gathered)


# Modules of one parent that share one of these are parts of one computation.
_JOINT_AXES = {"heads": "heads", "kv_heads": "heads", "mlp": "mlp"}


def _check_splits(flat: Mapping[str, Any], infos: Mapping[str, param_info.ParamInfo]) -> None:
    joint: dict[tuple[str, str], dict[str, bool]] = {}
    for path, leaf in infos.items():
        module = path.rpartition(".")[0]
        names = {_JOINT_AXES[axis] for axis in leaf.axes if axis in _JOINT_AXES}
        is_split = path in flat and TENSOR in _arrays(flat[path])[0]
        for name in names if path.endswith(".weight") else ():
            joint.setdefault((module.rpartition(".")[0], name), {})[module] = is_split
    problems = []
    for modules in joint.values():
        whole = [module for module, is_split in modules.items() if not is_split]
        if whole and len(whole) < len(modules):
            split = [module for module in modules if module not in whole]
            what = f"split {', '.join(split)} over {TENSOR}, but not {', '.join(whole)}"
            remedy = "give heads and kv_heads one rule, and the modules of one block one override"
            problems.append(errors.Problem("mesh.rules, mesh.overrides", None, what, remedy))
    if problems:
        raise errors.ConfigError.of(problems)


def _tensor_splits(
    flat: Mapping[str, Any], infos: Mapping[str, param_info.ParamInfo]
) -> dict[str, parallel.Style]:
    """Which dimension of each module's weight is split over `tensor`, if one is."""
    found: dict[str, parallel.Style] = {}
    for path, leaf in infos.items():
        spec = _arrays(flat[path])[0] if path in flat and leaf.is_matrix else P()
        if TENSOR in spec:
            inner, _ = leaf.matrix_dims
            found[path.rpartition(".")[0]] = "row" if spec[inner] == TENSOR else "column"
    return found


@dataclasses.dataclass(frozen=True)
class GradientPath:
    """How one trained leaf enters the shard_map's loops and how its gradient leaves them.

    The leaf becomes varying over exactly the batch axes that are absent from its spec (and over
    `tensor`, if it is the whole factor of an adapter whose other one is split), so that its
    gradient stays local in every loop (without the cast each use would be summed over the devices
    where it stands); the sum over these axes follows once, after the loops. An adapter that is
    sharded is gathered once before the loops and its gradient reduce-scattered once after them; a
    sharded weight is gathered by the model, layer by layer, and the transpose of that gather has
    already summed over the axis.

    See https://docs.jax.dev/en/latest/notebooks/shard_map.html.

    Attributes:
      cast: the mesh axes of the cast and of the sum.
      dims: of a sharded adapter, the dimensions that are gathered, as `Gather` has them.
    """

    cast: tuple[str, ...]
    dims: tuple[tuple[int, str], ...]

    def enter(self, leaf: jax.Array) -> jax.Array:
        """A device's shard as the loops take it: varying, and whole along `dims`."""
        if self.cast:
            leaf = jax.lax.pcast(leaf, self.cast, to="varying")
        return _gather_array(leaf, self.dims)

    def leave(self, gradient: jax.Array) -> jax.Array:
        """A device's part of the gradient of what `enter` gave: the shard of the sum."""
        for dim, axis in reversed(self.dims):
            gradient = jax.lax.psum_scatter(
                gradient, axis, scatter_dimension=gradient.ndim + dim, tiled=True
            )
        return jax.lax.psum(gradient, self.cast) if self.cast else gradient


def gradient_paths(specs: trees.Tree, base_specs: trees.Tree) -> trees.Tree:
    """A GradientPath for each trained leaf; adapters are gathered before the loops.

    Args:
      specs: specs of the trained leaves.
      base_specs: specs of the frozen ones.
    """
    flat = trees.flatten(specs)
    all_specs = {**flat, **trees.flatten(base_specs)}
    split = {p.rpartition(".")[0] for p, s in all_specs.items() if TENSOR in _arrays(s)[0]}

    def path_of(path: str, spec: P) -> GradientPath:
        is_adapter = kinds.is_adapter(path)
        axes = MESH_AXES if is_adapter and path.rpartition(".")[0] in split else BATCH_AXES
        cast = tuple(axis for axis in axes if axis not in spec)
        return GradientPath(cast, _gathered_dims(spec) if is_adapter else ())

    return trees.unflatten({p: path_of(p, s) for p, s in flat.items()})


def shard_step(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` on every device's own shards."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )


def psum(tree: Any) -> Any:
    """Sum over all devices that hold different rows."""
    return jax.lax.psum(tree, BATCH_AXES)


def varying(tree: Any) -> Any:
    """Casts fresh (replicated) arrays to varying over the batch axes, as a loop's carry must be."""
    return jax.tree.map(functools.partial(jax.lax.pcast, axis_name=BATCH_AXES, to="varying"), tree)


def first_row(rows: int) -> jax.Array:
    """Number, within its micro-batch, of the first of this device's `rows` rows."""
    return jax.lax.axis_index(BATCH_AXES) * rows


def rows_of_micro_batch(rows: int) -> int:
    """Rows of a whole micro-batch of which each device holds `rows`; inside the shard_map."""
    return rows * jax.lax.axis_size(BATCH_AXES)
