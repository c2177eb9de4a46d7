"""What a run needs, as text: parameters, bytes by part, collectives, operations, and what fits."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from purelora.analysis import footprint, hlo, step_bytes
from purelora.config import schema
from purelora.core import errors, trees
from purelora.sharding import specs
from purelora.training import plan_report, planning
from purelora.training.plan import Plan

METHODS = ("auto", "compiled", "formula")
_MOST_ROWS = 4096
_TILES = (None, 128, 64, 32)
_REMATS: tuple[Literal["none", "full"], ...] = ("none", "full")
_NOTE = (
    "the buffers are those of XLA's CPU compiler, which also gathers bfloat16 weights as float32; "
    "a GPU's or TPU's fuses and schedules otherwise, so temporary bytes differ there"
)


def report(
    settings: schema.Config,
    hf_config: Mapping[str, Any],
    devices: Sequence[jax.Device],
    *,
    method: str = "auto",
    memory_gb: float | None = None,
) -> Iterator[str]:
    """Yields the lines of the report, each as soon as it is known.

    Args:
      settings: the configuration of the run.
      hf_config: the model's config.json.
      devices: the devices of the mesh, which may be virtual ones of the CPU.
      method: one of `METHODS`: "compiled", "formula", or "auto" for a formula only if many layers
        would be compiled one by one.
      memory_gb: also find the most rows that fit in so many 10^9 bytes a device.

    Raises:
      ConfigError, ModelError: as `plan.make` and `footprint.formula`.
    """
    where = settings.model.path
    plan = planning.make_plan(settings, hf_config, where, devices)
    yield from _describe_run(plan)
    # The formula takes all layers to be alike.
    is_long = _layers_compiled(plan) > max(footprint.DEPTHS) and len(plan.model.stack_paths) == 1
    by_formula = method == "formula" or (method == "auto" and is_long)
    if by_formula:
        needs = footprint.formula(settings, hf_config, where, devices)
    else:
        needs = footprint.compiled(plan)
    yield from _describe_bytes(plan, needs)
    yield from _describe_traffic(needs)
    yield from _describe_flops(plan)
    yield f"note: {_NOTE}"
    if memory_gb is not None:
        yield from _describe_fits(plan, hf_config, memory_gb)


def _layers_compiled(plan: Plan) -> int:
    """How many layers the compiler sees one by one."""
    if plan.config.scan_layers:
        return 1
    return plan.model.config.num_hidden_layers


def _describe_run(plan: Plan) -> Iterator[str]:
    c = plan.config
    total = sum(math.prod(leaf.shape) for leaf in plan.model.flat_infos.values())
    trained = trees.count(jax.tree.map(lambda leaf: leaf.abstract, plan.trainable_infos))
    yield f"model: {c.model.path}: {total:,} parameters, {trained:,} trained"
    yield plan_report.describe_targets(plan)
    axes = " × ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    rows = _rows(c.micro_batch_size // specs.row_ways(plan.mesh))
    yield (
        f"mesh: {axes}; remat {c.remat}; {rows} of {c.max_length:,} tokens a device, "
        f"accum_steps {c.accum_steps}: {_tokens(c):,} tokens a step"
    )


def _rows(count: int) -> str:
    return f"{count:,} row{'s' if count > 1 else ''}"


def _tokens(settings: schema.Config) -> int:
    return settings.batch_size * settings.max_length


def _describe_bytes(plan: Plan, needs: footprint.Footprint) -> Iterator[str]:
    if needs.method == "compiled":
        count = plan.mesh.size
        devices = f"{count} virtual CPU device{'s' if count > 1 else ''}"
        how = f"compiled for {devices} in {needs.secs:.1f} s"
    else:
        depths = " and ".join(map(str, footprint.DEPTHS))
        how = f"formula, from steps of {depths} layers compiled in {needs.secs:.1f} s"
    parts = needs.parts
    rows = [
        *((f"base {dtype}", size) for dtype, size in parts.base.items()),
        ("adapters" if plan.config.lora.enabled else "weights, all trained", parts.trained),
        ("moments", parts.moments),
        ("batch", parts.batch),
        ("activations kept for the backward pass", parts.activations),
        ("gradients", parts.gradients),
        ("working space of a layer or a loss chunk", needs.working_bytes),
        ("peak", needs.peak_bytes),
    ]
    yield f"\nMB on each device ({how})"
    yield from (f"  {name:<42}{size / 1e6:>12,.1f}" for name, size in rows)
    inside = [("logits of a loss chunk", parts.logits)]
    if parts.gathered_layer or parts.gathered_table:
        inside += [("a layer's gathered weights", parts.gathered_layer)]
        inside += [("the largest gathered table", parts.gathered_table)]
    text = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in inside)
    yield f"  in the working space, not all at once: {text}"


def _describe_traffic(needs: footprint.Footprint) -> Iterator[str]:
    if not needs.traffic:
        yield "\ncollectives: none"
        return
    yield f"\n{'collectives of a step':<24}{'dtype':<10}{'group':>6}{'count':>8}{'MB received':>14}"
    yield from map(traffic_row, needs.traffic)
    total = sum(row.received_bytes for row in needs.traffic)
    yield f"  {'in all':<22}{'':<10}{'':>6}{'':>8}{total / 1e6:>14,.1f}"
    if needs.unknown_loops:
        loops = ", ".join(needs.unknown_loops)
        yield f"  at least: the trip counts of these loops are not known: {loops}"


def traffic_row(row: hlo.Traffic) -> str:
    """One line of the table of collectives; bytes are what one device receives."""
    return (
        f"  {row.kind:<22}{' '.join(row.dtypes):<10}{row.group_size:>6}{row.runs:>8,}"
        f"{row.received_bytes / 1e6:>14,.1f}"
    )


def _describe_flops(plan: Plan) -> Iterator[str]:
    each, tokens = plan.flops_per_token, _tokens(plan.config)
    yield (
        f"\nfloating point operations: {each:.3g} a token, {each * tokens:.3g} a step, "
        f"{each * tokens / plan.mesh.size:.3g} of them on each device (remat not counted)"
    )


def _describe_fits(plan: Plan, hf_config: Mapping[str, Any], memory_gb: float) -> Iterator[str]:
    c = plan.config
    scanned = "" if c.scan_layers else ", with scan_layers=True"
    yield f"\nwhat fits in {memory_gb:g} GB a device{scanned}"
    fits = []
    for remat in _REMATS:
        fit = _most_rows(plan, hf_config, remat, memory_gb)
        fits.append((fit.peak_bytes, remat, fit.rows))
        size = f"{fit.peak_bytes / 1e9:.4g} GB"
        if fit.rows == 0:
            yield f"  remat={remat}: not one row a device, which needs {size}"
            continue
        batch_size = fit.rows * specs.row_ways(plan.mesh) * c.accum_steps
        more = " or more" if fit.rows == _MOST_ROWS else ""
        yield (
            f"  remat={remat}: {_rows(fit.rows)}{more} a device, batch_size={batch_size:,}, "
            f"{batch_size * c.max_length:,} tokens a step, {size}"
        )
    peak, remat, _ = min(fits)
    if not any(rows for _, _, rows in fits):
        yield (
            f"  nothing fits; the nearest is remat={remat} with one row a device, "
            f"{peak / 1e9:.4g} GB: use more devices along mesh.fsdp or mesh.tensor, a smaller "
            "max_length or loss_chunk_tokens, or quant.qtype=nf4"
        )
    yield from _describe_tiles(plan, hf_config)


def _most_rows(
    plan: Plan, hf_config: Mapping[str, Any], remat: Literal["none", "full"], memory_gb: float
) -> footprint.Fit:
    """The most rows of a device and micro-batch that fit."""
    c = dataclasses.replace(plan.config, remat=remat, scan_layers=True)
    devices = list(plan.mesh.devices.flat)

    def peak_of(rows: int) -> int:
        batch_size = rows * specs.row_ways(plan.mesh) * c.accum_steps
        tried = dataclasses.replace(c, batch_size=batch_size)
        plan_of_rows = planning.make_plan(tried, hf_config, c.model.path, devices)
        return footprint.compiled(plan_of_rows).peak_bytes

    return footprint.most_rows(peak_of, int(memory_gb * 1e9), _MOST_ROWS)


def _describe_tiles(plan: Plan, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """What the base takes with other tile sizes; those that do not divide are left out."""
    c = plan.config
    if c.quant.qtype == "none":
        return
    sizes = []
    for tile in dict.fromkeys((*_TILES, c.quant.tile_size)):
        tiled = dataclasses.replace(c, quant=dataclasses.replace(c.quant, tile_size=tile))
        try:
            other = planning.make_plan(tiled, hf_config, c.model.path, list(plan.mesh.devices.flat))
        except errors.ConfigError:
            continue
        base = step_bytes.base_bytes(other)
        sizes.append(f"{tile} {base / 1e9:.4g}{' (now)' if tile == c.quant.tile_size else ''}")
    yield f"  GB of the base on each device by quant.tile_size: {', '.join(sizes)}"
