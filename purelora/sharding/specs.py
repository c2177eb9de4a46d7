"""Mesh and PartitionSpecs; with `rules` and `collectives`, all that knows mesh axes by name.

A spec tree is parallel to an info tree; a quantised leaf's spec is a QArray of specs. Rules turn
logical axes into mesh axes. A dimension that its mesh axis does not divide is an error that names a
way out; nothing is trimmed, padded or replicated to make it fit.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import qwix
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import errors, param_info, trees
from purelora.ops import quant
from purelora.sharding import rules as rules_lib
from purelora.sharding.rules import BATCH_AXES, MESH_AXES, SPLIT_AXES, TENSOR

BATCH_SPEC = P(None, BATCH_AXES)


def make_mesh(
    data: int,
    fsdp: int | None,
    devices: Sequence[jax.Device],
    *,
    expert: int = 1,
    tensor: int = 1,
) -> Mesh:
    """The mesh `data` × `fsdp` × `expert` × `tensor` over all `devices`, neighbours along `tensor`.

    Args:
      data: size of the axis that only the batch is split over.
      fsdp: size of the axis that batch and base are split over; None takes what the others leave.
      devices: all devices of the run.
      expert: size of the axis that batch and experts are split over.
      tensor: size of the axis that matmuls are split over.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    count = len(devices)
    if fsdp is None:
        given = {"data": data, "expert": expert, "tensor": tensor}
        given = {name: size for name, size in given.items() if name == "data" or size > 1}
        if count % math.prod(given.values()):
            key = " × ".join(f"mesh.{name}" for name in given)
            value = data if len(given) == 1 else " × ".join(map(str, given.values()))
            what = f"does not divide the {count} devices"
            raise errors.ConfigError(key, value, what, _divisors_remedy(count))
        fsdp = count // math.prod(given.values())
    sizes = (data, fsdp, expert, tensor)
    if math.prod(sizes) != count:
        raise errors.ConfigError(
            "mesh.data × mesh.fsdp × mesh.expert × mesh.tensor",
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

    def __call__(self, leaf: param_info.ParamInfo, quantised: qwix.QArray | None = None) -> P:
        entries: list[str | None] = [None] * len(leaf.axes)
        for dim, mesh_axis in self._chosen(leaf.axes):
            entries[dim] = mesh_axis
            ways, axis = self.mesh.shape[mesh_axis], leaf.axes[dim]
            groups = self.counts.get(str(axis), ways)
            if mesh_axis == TENSOR and groups % ways:
                self.problems.append(self._inseparable(str(axis), groups, ways))
            elif leaf.shape[dim] % ways:
                self.problems.append(self._indivisible(leaf, dim, mesh_axis, quantised))
        return P(*entries)

    def _chosen(self, axes: Sequence[str | None]) -> list[tuple[int, str]]:
        """(dimension, mesh axis) of the dimensions that are split."""
        found = rules_lib.chosen(self.table, axes).items()
        return [(i, to) for i, to in found if to is not None and self.mesh.shape[to] > 1]

    def _inseparable(self, axis: str, groups: int, ways: int) -> errors.Problem:
        what = f"{self.path}: {groups} {axis} do not divide over {ways} devices"
        remedy = f"{_divisors_remedy(groups)}; to keep attention whole on each device, replace "
        remedy += "heads and kv_heads in mesh.rules: heads:none, kv_heads:none"
        return errors.Problem(f"mesh.{TENSOR}", ways, what, remedy)

    def _indivisible(
        self, leaf: param_info.ParamInfo, dim: int, mesh_axis: str, quantised: qwix.QArray | None
    ) -> errors.Problem:
        size, ways = leaf.shape[dim], self.mesh.shape[mesh_axis]
        stored = leaf if quantised is None else quantised.qvalue
        length = leaf.shape[dim] if quantised is None else quant.weight_info(quantised).shape[dim]
        packed = length > stored.shape[dim] and quantised is not None
        if stored.shape[dim] % ways:
            pairs, axis = ", two codes a byte," if packed else "", stored.axes[dim]
            what = f"{self.path}: {axis} = {length}{pairs} does not divide over {ways} devices"
            remedy = _divisors_remedy(stored.shape[dim])
            if mesh_axis in SPLIT_AXES:
                remedy += f"; to keep it whole on each device, write {axis}:none in mesh.rules for "
                remedy += f"{axis}:{mesh_axis}"
            return errors.Problem(f"mesh.{mesh_axis}", ways, what, remedy)
        tile = length // size
        what = f"{self.path}: gives {size} tiles along {leaf.axes[dim]} = {length}, "
        what += f"not divisible by mesh.{mesh_axis} = {ways}"
        remedy = tile_remedy(length, tile, ways, packed=packed)
        return errors.Problem("quant.tile_size", tile, what, remedy)


def check_tiles(infos: trees.Tree, tile_size: int, skip: Sequence[str]) -> None:
    """Raises ConfigError for matrices whose contracting dimension `tile_size` does not divide."""
    problems = []
    for path, leaf in trees.flatten(infos).items():
        if not leaf.is_quantisable or quant.is_skipped(path, skip):
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
    """All of an array of any rank on every device."""
    return NamedSharding(mesh, P())


def row_ways(mesh: Mesh) -> int:
    """How many ways the rows of a micro-batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
