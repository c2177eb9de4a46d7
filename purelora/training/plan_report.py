"""A plan for people: what is trained, the table of all arrays, and bytes. `--plan` prints it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from purelora.core import param_info, trees
from purelora.core.paths import Path
from purelora.lora import adapters, kinds, targets
from purelora.training.plan import Plan


def describe_targets(plan: Plan) -> str:
    """Which modules are trained, and the trained share of all parameters."""
    adaptation = plan.model.adaptation
    trained = adapters.count(plan.trainable_infos, adaptation.targets)
    added_infos = {p: i for p, i in trees.flatten(plan.trainable_infos).items()
                if plan.config.lora.enabled and p not in adaptation.full}  # fmt: skip
    added = adapters.count(trees.unflatten(added_infos), adaptation.targets)
    total = trees.count(_plain(plan.model.infos)) + added
    share = f"{trained:,} of {total:,} parameters trained ({trained / total:.3%})"
    if not plan.config.lora.enabled:
        return f"full fine-tuning: {share}"
    parts = [_describe_adapters(adaptation)]
    if adaptation.full:
        tied = f" ({targets.HEAD} is tied to it)" if _trains_tied_table(plan) else ""
        parts.append(f"in full {', '.join(adaptation.full)}{tied}")
    if adaptation.token_ids:
        parts.append(f"{len(adaptation.token_ids)} rows of {targets.EMBEDDING}")
    in_full = {Path(path).without("weight") for path in adaptation.full}
    frozen = [
        f"{_short_name(path)} (router) frozen"
        for path, module in plan.model.modules.items()
        if module.kind == "router" and path not in {*adaptation.targets, *in_full}
    ]
    parts += dict.fromkeys(frozen)
    return f"{', '.join(parts)}: {share}"


def describe_base(plan: Plan) -> str:
    """Bytes of the base by dtype, and which of its matrices stay unquantised."""
    size = f"{bytes_by_dtype(plan.base_infos or plan.trainable_infos)} bytes"
    kept = {
        path.without("weight").name: " (router)" if leaf.is_router else ""
        for path, leaf in trees.flatten(plan.base_infos).items()
        if isinstance(leaf, param_info.ParamInfo) and leaf.is_matrix
    }
    if plan.config.quant.qtype == "none" or not kept:
        return size
    return f"{size} ({', '.join(name + what for name, what in kept.items())} not quantised)"


def _trains_tied_table(plan: Plan) -> bool:
    return plan.model.is_tied and f"{targets.EMBEDDING}.weight" in plan.model.adaptation.full


def _describe_adapters(adaptation: targets.Adaptation) -> str:
    """`adapters (r=16) on q_proj in 30 layers, ...`, with the ranks of a target that differs."""
    ranks = {r for target in adaptation.targets.values() for r in target.ranks}
    by_name: dict[str, list[targets.Target]] = {}
    for path, target in adaptation.targets.items():
        # A module may be in several stacks.
        by_name.setdefault(_short_name(path), []).append(target)
    modules = []
    for name, stacks in by_name.items():
        layer_ranks = [r for target in stacks for r in target.ranks]
        rank = f" (r={_span(layer_ranks)})" if len(ranks) > 1 else ""
        count = len(layer_ranks)
        modules.append(f"{name}{rank} in {count} layer{'s' if count != 1 else ''}")
    shared = f" (r={min(ranks)})" if len(ranks) == 1 else ""
    return f"adapters{shared} on {', '.join(modules)}"


def _short_name(path: str) -> str:
    """The last part of a module's path; the last two for matrices of experts and for routers."""
    parts = Path(path).parts
    return Path.of(parts[-2:] if {"experts", "router"} & set(parts) else parts[-1:])


def _span(ranks: Sequence[int]) -> str:
    low, high = min(ranks), max(ranks)
    return str(low) if low == high else f"{low} to {high}"


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array of a plan.

    Attributes:
      leaf: tree path of the leaf that it is, or is part of.
      path: its own; those of the two arrays of a QArray end in `.qvalue` and `.scale`.
      info: its declaration.
      spec: how it is split.
      is_trained: whether it is trained.
      is_adapter: whether it is part of an adapter.
      total_bytes: bytes of the whole array.
      device_bytes: bytes on one device.
    """

    leaf: str
    path: str
    info: param_info.ParamInfo
    spec: P
    is_trained: bool
    is_adapter: bool
    total_bytes: int
    device_bytes: int

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of it."""
        return all(entry is None for entry in self.spec)


def array_rows(plan: Plan) -> list[ArrayRow]:
    """Every array of the base and of what is trained."""
    rows = []
    for tree, placed, is_trained in (
        (plan.base_infos, plan.base_specs, False),
        (plan.trainable_infos, plan.trainable_specs, True),
    ):
        flat_specs = trees.flatten(placed)
        for path, leaf in trees.flatten(tree).items():
            for suffix, one, spec in _arrays(leaf, flat_specs[path]):
                sizes = trees.leaf_bytes(one.abstract), device_bytes(one, spec, plan.mesh)
                is_adapter = plan.config.lora.enabled and kinds.is_adapter(path)
                names = path, path + suffix
                rows.append(ArrayRow(*names, one, spec, is_trained, is_adapter, *sizes))
    return rows


def table(plan: Plan) -> str:
    """The mesh; every array with path, shape, dtype, spec, bytes and copies; the totals."""
    arrays = array_rows(plan)
    cells = [("path", "shape", "dtype", "spec", "bytes/device", "copies", "trained")]
    for row in arrays:
        shape = "×".join(map(str, row.info.shape))
        copies = plan.mesh.size * row.device_bytes // max(row.total_bytes, 1)
        flag = "yes" if row.is_trained else ""
        spec, size = _spec_text(row.spec), f"{row.device_bytes:,}"
        cells.append((row.path, shape, row.info.dtype, spec, size, str(copies), flag))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    axes = " × ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    totals = [
        f"{name}: {bytes_by_dtype(tree)} bytes in all, "
        + _totals([row for row in arrays if row.is_trained == (name == "trained")])
        for name, tree in (("base", plan.base_infos), ("trained", plan.trainable_infos))
        if tree
    ]
    return "\n".join([f"mesh: {axes}", *lines, *totals])


def _totals(rows: Sequence[ArrayRow]) -> str:
    """Bytes on a device, and the share of the bytes in all that is whole on every device."""
    total, replicated = (
        sum(row.total_bytes for row in chosen)
        for chosen in (rows, [row for row in rows if row.is_replicated])
    )
    per_device = sum(row.device_bytes for row in rows)
    return f"{per_device:,} on each device; {replicated / max(total, 1):.1%} on every one alike"


def bytes_by_dtype(infos: trees.Tree) -> str:
    """Bytes of a tree of infos by dtype, for people."""
    parts = [f"{name} {size:,}" for name, size in trees.bytes_by_dtype(_plain(infos)).items()]
    return ", ".join(parts)


def _arrays(leaf: Any, spec: Any) -> list[tuple[str, param_info.ParamInfo, P]]:
    if isinstance(leaf, qwix.QArray):
        return [(".qvalue", leaf.qvalue, spec.qvalue), (".scale", leaf.scale, spec.scale)]
    return [("", leaf, spec)]


def _spec_text(spec: P) -> str:
    return "(" + ", ".join(str(axis) if axis else "-" for axis in spec) + ")"


def device_bytes(leaf: param_info.ParamInfo, spec: P, mesh: Mesh) -> int:
    """Bytes of one array on one device."""
    shape = [
        n // (mesh.shape[axis] if axis else 1) for n, axis in zip(leaf.shape, spec, strict=True)
    ]
    return trees.leaf_bytes(jax.ShapeDtypeStruct(tuple(shape), np.dtype(jnp.dtype(leaf.dtype))))


def _plain(infos: trees.Tree) -> Any:
    """A tree of infos as abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.abstract, infos)
