"""Mesh and PartitionSpecs: with `rules`, all that knows the names of mesh axes.

A spec tree is parallel to an info tree; a quantised leaf's spec is a QArray of specs. Rules turn
logical axes into mesh axes. A dimension that its mesh axis does not divide is an error that names a
way out; nothing is trimmed, padded or replicated to make it fit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import qwix
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora import errors, info, lora, parallel, params, quant
from purelora import rules as rules_lib
from purelora import tree as trees
from purelora.rules import BATCH_AXES, MESH_AXES, TENSOR

BATCH_SPEC = P(None, BATCH_AXES)


def make_mesh(
    data: int, fsdp: int | None, devices: Sequence[jax.Device], *, tensor: int = 1
) -> Mesh:
    """The mesh `data` × `fsdp` × `tensor` over all `devices`, neighbours along `tensor`.

    Args:
      data: size of the axis that only the batch is split over.
      fsdp: size of the axis that batch and base are split over; None takes what the others leave.
      devices: all devices of the run.
      tensor: size of the axis that matmuls are split over.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    count = len(devices)
    if fsdp is None:
        if count % (data * tensor):
            key = "mesh.data" if tensor == 1 else "mesh.data × mesh.tensor"
            value = data if tensor == 1 else f"{data} × {tensor}"
            what = f"does not divide the {count} devices"
            raise errors.ConfigError(key, value, what, _divisors_remedy(count))
        fsdp = count // (data * tensor)
    sizes = (data, fsdp, tensor)
    if math.prod(sizes) != count:
        raise errors.ConfigError(
            "mesh.data × mesh.fsdp × mesh.tensor",
            " × ".join(map(str, sizes)),
            f"is {math.prod(sizes)}, but there are {count} devices",
            "leave mesh.fsdp out to use them all, or show fewer devices to the process",
        )
    grid = np.asarray(devices).reshape(sizes)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def spec_tree(
    infos: trees.Tree,
    mesh: Mesh,
    rules: rules_lib.Rules = rules_lib.RULES,
    counts: Mapping[str, int] | None = None,
) -> trees.Tree:
    """PartitionSpecs of full rank for a tree of infos, quantised leaves included.

    Args:
      infos: declarations of arrays and QArrays.
      mesh: the devices.
      rules: from logical axes to mesh axes.
      counts: of the logical axes whose elements belong together, such as those of a head, how many
        groups there are; `tensor` must divide this number too.

    Raises:
      ConfigError: dimensions (or tile counts) that the mesh does not divide, all in one error.
    """
    problems: list[errors.Problem] = []
    flat: dict[str, Any] = {}
    for path, leaf in trees.flatten(infos).items():
        place = _Placing(path, mesh, rules.of(path), counts or {}, problems)
        if isinstance(leaf, qwix.QArray):
            codes = place(leaf.qvalue, leaf)
            flat[path] = qwix.QArray(codes, place(leaf.scale, leaf), None, leaf.qtype)
        else:
            flat[path] = place(leaf)
    if problems:
        # Codes and scales of one weight have the same problem.
        raise errors.ConfigError.of(dict.fromkeys(problems))
    return trees.unflatten(flat)


@dataclasses.dataclass(frozen=True)
class _Placing:
    """Gives the arrays of one leaf their specs, and collects what does not divide."""

    path: str
    mesh: Mesh
    table: rules_lib.Table
    counts: Mapping[str, int]
    problems: list[errors.Problem]

    def __call__(self, leaf: info.ParamInfo, quantised: qwix.QArray | None = None) -> P:
        entries: list[str | None] = [None] * len(leaf.axes)
        for dim, mesh_axis in self._chosen(leaf.axes):
            entries[dim] = mesh_axis
            ways, axis = self.mesh.shape[mesh_axis], leaf.axes[dim]
            groups = self.counts.get(str(axis), ways)
            if mesh_axis == TENSOR and groups % ways:
                self.problems.append(self._inseparable(str(axis), groups, ways))
            elif leaf.shape[dim] % ways:
                found = _indivisible(self.path, leaf, dim, mesh_axis, self.mesh, quantised)
                self.problems.append(found)
        return P(*entries)

    def _chosen(self, axes: Sequence[str | None]) -> list[tuple[int, str]]:
        """(dimension, mesh axis) of the dimensions that are split."""
        chosen: dict[int, str | None] = {}
        for axis, mesh_axis in self.table:
            is_free = mesh_axis is None or mesh_axis not in chosen.values()
            dims = [i for i, a in enumerate(axes) if a == axis and i not in chosen]
            if dims and is_free:
                chosen[dims[0]] = mesh_axis
        return [(i, to) for i, to in chosen.items() if to is not None and self.mesh.shape[to] > 1]

    def _inseparable(self, axis: str, groups: int, ways: int) -> errors.Problem:
        what = f"{self.path}: {groups} {axis} do not divide over {ways} devices"
        remedy = f"{_divisors_remedy(groups)}; to keep attention whole on each device, replace "
        remedy += "heads and kv_heads in mesh.rules: heads:none, kv_heads:none"
        return errors.Problem(f"mesh.{TENSOR}", ways, what, remedy)


def _indivisible(
    path: str,
    leaf: info.ParamInfo,
    dim: int,
    mesh_axis: str,
    mesh: Mesh,
    quantised: qwix.QArray | None,
) -> errors.Problem:
    size, ways = leaf.shape[dim], mesh.shape[mesh_axis]
    stored = leaf if quantised is None else quantised.qvalue
    length = leaf.shape[dim] if quantised is None else quant.weight_info(quantised).shape[dim]
    packed = length > stored.shape[dim] and quantised is not None
    if stored.shape[dim] % ways:
        pairs = ", two codes a byte," if packed else ""
        what = f"{path}: {stored.axes[dim]} = {length}{pairs} does not divide over {ways} devices"
        remedy = _divisors_remedy(stored.shape[dim])
        if mesh_axis == TENSOR:
            remedy += (
                f"; to keep it whole on each device, use {stored.axes[dim]}:none in mesh.rules"
            )
        return errors.Problem(f"mesh.{mesh_axis}", ways, what, remedy)
    tile = length // size
    what = f"{path}: gives {size} tiles along {leaf.axes[dim]} = {length}, not divisible by "
    return errors.Problem(
        "quant.tile_size",
        tile,
        what + f"mesh.{mesh_axis} = {ways}",
        tile_remedy(length, tile, ways, packed=packed),
    )


def check_tiles(infos: trees.Tree, tile_size: int, skip: Sequence[str]) -> None:
    """Raises ConfigError for matrices whose contracting dimension `tile_size` does not divide."""
    problems = []
    for path, leaf in trees.flatten(infos).items():
        if not leaf.is_matrix or quant.is_skipped(path, skip):
            continue
        length, axis = leaf.shape[leaf.contracting], leaf.axes[leaf.contracting]
        if length % tile_size:
            what = f"{path}: does not divide {axis} = {length}"
            remedy = tile_remedy(length, tile_size, 1)
            problems.append(errors.Problem("quant.tile_size", tile_size, what, remedy))
    if problems:
        raise errors.ConfigError.of(problems)


def tile_remedy(length: int, tile: int, ways: int, *, packed: bool = False) -> str:
    """Names the tile size nearest to `tile` whose count along `length` divides by `ways`.

    With `packed` codes, two a byte, a tile must be even and at least 4.
    """
    first, step = (4, 2) if packed else (1, 1)
    sizes = range(first, length // ways + 1, step)
    good = [t for t in sizes if length % t == 0 and length // t % ways == 0]
    if not good:
        return "use one scale per channel (tile_size=None)"
    best = min(good, key=lambda t: (abs(math.log(t / tile)), t))
    return f"use {best} ({length // best} tiles), or one scale per channel (tile_size=None)"


def _divisors_remedy(count: int) -> str:
    divisors = [d for d in range(1, min(count, 64) + 1) if count % d == 0]
    return f"sizes that divide: {', '.join(map(str, divisors))}"


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Specs with their mesh: a tree of NamedShardings of the same structure."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


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
    return tuple((i - len(spec), axis) for i, axis in enumerate(spec) if axis not in (None, TENSOR))


def _arrays(leaf: Any) -> list[P]:
    """The spec of an array, or the two of a QArray."""
    specs: list[P] = jax.tree.leaves(leaf, is_leaf=lambda s: isinstance(s, P))
    return specs


@dataclasses.dataclass(frozen=True)
class TensorParallel(parallel.Parallel):
    """`Parallel` over the `tensor` axis, inside the shard_map.

    What every device of the axis has alike is invariant over it, and the results of its own part
    are varying. `spread` is a cast from one to the other, whose transpose is the sum of gradients;
    `sum` goes back, and its transpose is the cast.
    """

    @property
    def ways(self) -> int:
        return jax.lax.axis_size(TENSOR)

    def first(self, size: int) -> jax.Array:
        return jax.lax.axis_index(TENSOR) * size

    def sum(self, parts: Any) -> Any:
        return jax.lax.psum(parts, TENSOR)

    def max(self, part: jax.Array) -> jax.Array:
        return jax.lax.pmax(part, TENSOR)

    def spread(self, x: jax.Array) -> jax.Array:
        return jax.lax.pcast(x, TENSOR, to="varying") if self.splits == "outputs" else x

    def collect(self, y: jax.Array) -> jax.Array:
        return self.sum(y) if self.splits == "inputs" else y


def shards(
    specs: trees.Tree, infos: Mapping[str, info.ParamInfo], *, keep_gathered: bool = False
) -> params.Shards:
    """How the leaves of a model lie on a mesh.

    Args:
      specs: specs of base and trained leaves together.
      infos: flat declarations of the unquantised weights.
      keep_gathered: see `params.Shards`.

    Raises:
      ConfigError: modules that work on each other's outputs are not split alike.
    """
    flat = trees.flatten(specs)
    found = {path: tuple(map(_gathered_dims, _arrays(leaf))) for path, leaf in flat.items()}
    # The step gathers adapters, once before its loops.
    gathers = {p: Gather(dims) for p, dims in found.items() if any(dims) and not lora.is_adapter(p)}
    splits = _tensor_splits(flat, infos)
    _check_splits(infos, splits)
    parallels = {path: TensorParallel(split) for path, split in splits.items()}
    return params.Shards(gathers, parallels, keep_gathered)


# Modules of one parent that share one of these are parts of one computation.
_JOINT_AXES = {"heads": "heads", "kv_heads": "heads", "mlp": "mlp"}


def _check_splits(
    infos: Mapping[str, info.ParamInfo], splits: Mapping[str, parallel.Splits]
) -> None:
    joint: dict[tuple[str, str], dict[str, bool]] = {}
    for path, leaf in infos.items():
        module = path.rpartition(".")[0]
        names = {_JOINT_AXES[axis] for axis in leaf.axes if axis in _JOINT_AXES}
        for name in names if leaf.is_matrix else ():
            joint.setdefault((module.rpartition(".")[0], name), {})[module] = module in splits
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
    flat: Mapping[str, Any], infos: Mapping[str, info.ParamInfo]
) -> dict[str, parallel.Splits]:
    """Which dimension of each module's weight is split over `tensor`, if one is."""
    found: dict[str, parallel.Splits] = {}
    for path, leaf in infos.items():
        spec = _arrays(flat[path])[0] if path in flat and leaf.is_matrix else P()
        if TENSOR in spec:
            inner, _ = leaf.matrix_dims
            found[path.rpartition(".")[0]] = "inputs" if spec[inner] == TENSOR else "outputs"
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
    """

    cast: tuple[str, ...]
    dims: tuple[tuple[int, str], ...]

    def enter(self, leaf: jax.Array) -> jax.Array:
        if self.cast:
            leaf = jax.lax.pcast(leaf, self.cast, to="varying")
        return _gather_array(leaf, self.dims)

    def leave(self, gradient: jax.Array) -> jax.Array:
        for dim, axis in reversed(self.dims):
            gradient = jax.lax.psum_scatter(
                gradient, axis, scatter_dimension=gradient.ndim + dim, tiled=True
            )
        return jax.lax.psum(gradient, self.cast) if self.cast else gradient


def gradient_paths(specs: trees.Tree, base_specs: trees.Tree) -> trees.Tree:
    """A GradientPath for each trained leaf; those called `lora_*` are gathered before the loops.

    Args:
      specs: specs of the trained leaves.
      base_specs: specs of the frozen ones.
    """

    flat = trees.flatten(specs)
    all_specs = {**flat, **trees.flatten(base_specs)}
    split = {p.rpartition(".")[0] for p, s in all_specs.items() if TENSOR in _arrays(s)[0]}

    def path_of(path: str, spec: P) -> GradientPath:
        is_adapter = lora.is_adapter(path)
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


def row_ways(mesh: Mesh) -> int:
    """How many ways the rows of a micro-batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
