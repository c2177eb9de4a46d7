"""Mesh, rules and PartitionSpecs: the only module that knows the names of mesh axes.

A spec tree is parallel to an info tree; a quantised leaf's spec is a QArray of specs. Rules turn
logical axes into mesh axes. A dimension that its mesh axis does not divide is an error that names a
way out; nothing is trimmed, padded or replicated to make it fit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import qwix
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora import errors, info, lora, quant
from purelora import tree as trees

DATA, FSDP = "data", "fsdp"
BATCH_AXES = (DATA, FSDP)  # The rows of a batch are split over both.
Rules = tuple[tuple[str, str], ...]
RULES: Rules = (("embed", FSDP),)
BATCH_SPEC = P(None, BATCH_AXES)


def make_mesh(data: int, fsdp: int | None, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh `data` × `fsdp` over all `devices`.

    Args:
      data: size of the axis that only the batch is split over.
      fsdp: size of the axis that batch and base are split over; None takes what `data` leaves.
      devices: all devices of the run.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    count = len(devices)
    if fsdp is None:
        if count % data:
            raise errors.ConfigError(
                "mesh.data", data, f"does not divide the {count} devices", _divisors_remedy(count)
            )
        fsdp = count // data
    if data * fsdp != count:
        raise errors.ConfigError(
            "mesh.data × mesh.fsdp",
            f"{data} × {fsdp}",
            f"is {data * fsdp}, but there are {count} devices",
            "leave mesh.fsdp out to use them all, or show fewer devices to the process",
        )
    grid = np.asarray(devices).reshape(data, fsdp)
    return Mesh(grid, BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


def spec_tree(infos: trees.Tree, mesh: Mesh, rules: Rules = RULES) -> trees.Tree:
    """PartitionSpecs of full rank for a tree of infos, quantised leaves included.

    Raises:
      ConfigError: dimensions (or tile counts) that the mesh does not divide, all in one error.
    """
    problems: list[errors.Problem] = []
    flat: dict[str, Any] = {}
    for path, leaf in trees.flatten(infos).items():
        if isinstance(leaf, qwix.QArray):
            codes = _spec(path, leaf.qvalue, mesh, rules, problems, leaf)
            scale = _spec(path, leaf.scale, mesh, rules, problems, leaf)
            flat[path] = qwix.QArray(codes, scale, None, leaf.qtype)
        else:
            flat[path] = _spec(path, leaf, mesh, rules, problems)
    if problems:
        # Codes and scales of one weight have the same problem.
        raise errors.ConfigError.of(dict.fromkeys(problems))
    return trees.unflatten(flat)


def _spec(
    path: str,
    leaf: info.ParamInfo,
    mesh: Mesh,
    rules: Rules,
    problems: list[errors.Problem],
    quantised: qwix.QArray | None = None,
) -> P:
    """The spec of one array; the first rule for an axis wins and a mesh axis is used once."""
    table = dict(reversed(rules))
    entries: list[str | None] = []
    for dim, axis in enumerate(leaf.axes):
        mesh_axis = table.get(axis) if axis is not None else None
        if mesh_axis is None or mesh.shape[mesh_axis] == 1 or mesh_axis in entries:
            entries.append(None)
            continue
        entries.append(mesh_axis)
        if leaf.shape[dim] % mesh.shape[mesh_axis]:
            problems.append(_indivisible(path, leaf, dim, mesh_axis, mesh, quantised))
    return P(*entries)


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
        return errors.Problem(f"mesh.{mesh_axis}", ways, what, _divisors_remedy(stored.shape[dim]))
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


def _sharded_dims(spec: P) -> tuple[tuple[int, str], ...]:
    return tuple((i - len(spec), axis) for i, axis in enumerate(spec) if axis is not None)


def gathers(specs: trees.Tree) -> dict[str, Gather]:
    """A Gather for each leaf that is sharded, by path."""
    found: dict[str, Gather] = {}
    for path, leaf in trees.flatten(specs).items():
        arrays = jax.tree.leaves(leaf, is_leaf=lambda s: isinstance(s, P))
        dims = tuple(map(_sharded_dims, arrays))
        if any(dims):
            found[path] = Gather(dims)
    return found


@dataclasses.dataclass(frozen=True)
class GradientPath:
    """How one trained leaf enters the shard_map's loops and how its gradient leaves them.

    The leaf becomes varying over exactly the batch axes that are absent from its spec, so that its
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


def gradient_paths(specs: trees.Tree) -> trees.Tree:
    """A GradientPath for each trained leaf; those called `lora_*` are gathered before the loops."""

    def path_of(path: str, spec: P) -> GradientPath:
        sharded = _sharded_dims(spec)
        used = {axis for _, axis in sharded}
        cast = tuple(axis for axis in BATCH_AXES if axis not in used)
        return GradientPath(cast, sharded if lora.is_adapter(path) else ())

    return trees.unflatten({p: path_of(p, s) for p, s in trees.flatten(specs).items()})


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


def adapter_rules(rules: Rules, sharded: bool) -> Rules:
    """Rules for the adapters: the base's own, or none (replicated)."""
    return rules if sharded else ()
