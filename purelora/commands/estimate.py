"""Estimates what a run needs, without weights and without the accelerator.

    python -m purelora.estimate --config=configs/qlora.py
    python -m purelora.estimate --config=configs/qlora.py --devices=8 --config.batch_size=8 \\
        --config.model.path=configs/shapes/llama3_1_8b.json --memory_gb=80

--config=FILE        a config file; configs/base.py documents every key
--config.KEY=VALUE   overrides a key; model.path may also be a config.json alone, or its folder
--devices=N          size of the mesh; by default what mesh.* multiplies to
--memory_gb=G        finds the most rows that fit in G · 10^9 bytes a device
--method=METHOD      "compiled": compile the real step here, for N virtual devices of the CPU;
                     "formula": compile two with fewer layers, and go on from there;
                     "auto" (the default): a formula only if many layers are to be compiled one by
                     one (scan_layers=False)

Prints the parameters, the bytes on each device by part, the collectives of a step and its floating
point operations. Exit status: 0, or 2 for an error that the user can fix.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from purelora.analysis import footprint, hlo
from purelora.config import command_line, schema
from purelora.core import errors, trees
from purelora.interop import builtin, open_model
from purelora.sharding import rules, specs
from purelora.training import plan_report, planning
from purelora.training.plan import Plan
from purelora.weights import hf_folder as hf

METHODS = ("auto", "compiled", "formula")
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_MOST_DEVICES = 4096
_MOST_ROWS = 4096
_TILES = (None, 128, 64, 32)
_REMATS: tuple[Literal["none", "full"], ...] = ("none", "full")
_NOTE = (
    "the buffers are those of XLA's CPU compiler, which also gathers bfloat16 weights as float32; "
    "a GPU's or TPU's fuses and schedules otherwise, so temporary bytes differ there"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments beside the configuration; see the module's text."""

    devices: int | None = None
    memory_gb: float | None = None
    method: str = "auto"


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options, settings = _parse(argv)
    hf_config = open_config(settings.model.path, settings.model.hf_folder)
    count = _device_count(options, settings)
    if _virtual_devices() < count:
        return _with_devices(count, argv)
    devices = jax.devices()[:count]
    for line in report(options, settings, hf_config, devices):
        print(line, flush=True)
    return 0


def _parse(argv: Sequence[str]) -> tuple[Options, schema.Config]:
    """Both kinds of arguments; what is wrong with them comes in one error."""
    of_config, own = command_line.divided(argv, lambda name: name.partition(".")[0] == "config")
    problems: list[errors.Problem] = []
    options, settings = Options(), None
    with errors.collected(problems):
        options = command_line.options(Options, own)
        _check(options)
    with errors.collected(problems):
        settings = command_line.parse(of_config, flags=()).config
    if problems or settings is None:
        raise errors.ConfigError.of(problems)
    return options, settings


def _check(options: Options) -> None:
    problems = []
    if options.method not in METHODS:
        remedy = errors.nearest(options.method, METHODS)
        problems.append(errors.Problem("--method", options.method, "is no method", remedy))
    if options.devices is not None and not 0 < options.devices <= _MOST_DEVICES:
        what = f"is not between 1 and {_MOST_DEVICES}"
        problems.append(errors.Problem("--devices", options.devices, what, ""))
    memory = options.memory_gb
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        problems.append(errors.Problem("--memory_gb", memory, "is not a size", "for example 80"))
    if problems:
        raise errors.ConfigError.of(problems)


def open_config(path: str, hf_folder: str | None = None) -> Mapping[str, Any]:
    """The config.json of the model at `path`; neither weights nor tokenizer need to be there.

    Args:
      path: a config.json, a folder that has one, or whatever else `model.path` may name.
      hf_folder: `model.hf_folder`; if it is set, the config.json is read from there.

    Raises:
      ModelError: there is none, or it is damaged.
    """
    if hf_folder is not None:
        return hf.read_config(os.path.expanduser(hf_folder))
    place = os.path.expanduser(path)
    if place.endswith(".json") and not path.startswith(builtin.RANDOM):
        return hf.read_unquantised(place)
    is_folder = os.path.isdir(place) and path not in builtin.NAMES
    if is_folder and not os.path.isdir(os.path.join(place, "checkpoints")):
        return hf.read_config(place)
    return open_model.open_model(path).source.config


def _device_count(options: Options, settings: schema.Config) -> int:
    if options.devices is not None:
        return options.devices
    mesh = dataclasses.asdict(settings.mesh)
    return math.prod(mesh[axis] or 1 for axis in rules.MESH_AXES)


def _virtual_devices() -> int:
    """How many devices of the CPU this process has; 0 if it was not started for them."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return 0
    found = re.findall(rf"{_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 0


def _with_devices(count: int, argv: Sequence[str]) -> int:
    """Runs the command in a process that has so many virtual devices, and no accelerator."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES_FLAG}={count}".strip()
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "purelora.estimate", *argv]
    return subprocess.run(command, env=environment, check=False).returncode


def report(
    options: Options,
    settings: schema.Config,
    hf_config: Mapping[str, Any],
    devices: Sequence[jax.Device],
) -> Iterator[str]:
    """The lines of the command's output, as they are found out."""
    where = settings.model.path
    plan = planning.make_plan(settings, hf_config, where, devices)
    yield from _describe_run(plan)
    # The formula takes all layers to be alike.
    is_long = _layers_compiled(plan) > max(footprint.DEPTHS) and len(plan.model.stack_paths) == 1
    by_formula = options.method == "formula" or (options.method == "auto" and is_long)
    if by_formula:
        needs = footprint.formula(settings, hf_config, where, devices)
    else:
        needs = footprint.compiled(plan)
    yield from _describe_bytes(plan, needs)
    yield from _describe_traffic(needs)
    yield from _describe_flops(plan)
    yield f"note: {_NOTE}"
    if options.memory_gb is not None:
        yield from _describe_fits(plan, hf_config, options.memory_gb)


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
        made = planning.make_plan(tried, hf_config, c.model.path, devices)
        return footprint.compiled(made).peak_bytes

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
        base = footprint.base_bytes(other)
        sizes.append(f"{tile} {base / 1e9:.4g}{' (now)' if tile == c.quant.tile_size else ''}")
    yield f"  GB of the base on each device by quant.tile_size: {', '.join(sizes)}"
