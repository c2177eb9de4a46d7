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
from collections.abc import Sequence

import jax

from purelora.analysis import estimate_report
from purelora.config import command_line, schema
from purelora.core import errors
from purelora.core.paths import Path
from purelora.interop import open_model
from purelora.sharding import rules

_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_MOST_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments beside the configuration; see the module's text."""

    devices: int | None = None
    memory_gb: float | None = None
    method: str = "auto"


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options, settings = _parse(argv)
    hf_config = open_model.open_config(settings.model.path, settings.model.hf_folder)
    count = _device_count(options, settings)
    if _virtual_devices() < count:
        return _with_devices(count, argv)
    devices = jax.devices()[:count]
    for line in estimate_report.report(
        settings, hf_config, devices, method=options.method, memory_gb=options.memory_gb
    ):
        print(line, flush=True)
    return 0


def _parse(argv: Sequence[str]) -> tuple[Options, schema.Config]:
    """Parses the arguments of this command and of the run; all problems are one error."""
    config_arguments, option_arguments = command_line.divided(
        argv, lambda name: Path(name).first == "config"
    )
    problems: list[errors.Problem] = []
    options, settings = Options(), None
    with errors.collected(problems):
        options = command_line.options(Options, option_arguments)
        _check(options)
    with errors.collected(problems):
        settings = command_line.parse(config_arguments, flags=()).config
    if problems or settings is None:
        raise errors.ConfigError.of(problems)
    return options, settings


def _check(options: Options) -> None:
    problems = []
    if options.method not in estimate_report.METHODS:
        remedy = errors.nearest(options.method, estimate_report.METHODS)
        problems.append(errors.Problem("--method", options.method, "is no method", remedy))
    if options.devices is not None and not 0 < options.devices <= _MOST_DEVICES:
        what = f"is not between 1 and {_MOST_DEVICES}"
        problems.append(errors.Problem("--devices", options.devices, what, ""))
    memory = options.memory_gb
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        problems.append(errors.Problem("--memory_gb", memory, "is not a size", "for example 80"))
    if problems:
        raise errors.ConfigError.of(problems)


def _device_count(options: Options, settings: schema.Config) -> int:
    if options.devices is not None:
        return options.devices
    mesh = dataclasses.asdict(settings.mesh)
    return math.prod(mesh[axis] or 1 for axis in rules.MESH_AXES)


def _virtual_devices() -> int:
    """How many devices of the CPU this process has; 0 if it was not started for them."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return 0
    counts = re.findall(rf"{_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 0


def _with_devices(count: int, argv: Sequence[str]) -> int:
    """Runs the command in a process with `count` virtual CPU devices and no accelerator."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES_FLAG}={count}".strip()
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "purelora.estimate", *argv]
    return subprocess.run(command, env=environment, check=False).returncode
