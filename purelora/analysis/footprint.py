"""What a training step holds and moves on one device, from declarations alone: no weight is read.

`compiled` lowers and compiles the real step for abstract arguments on the devices of the plan's
mesh, which may be virtual ones of the CPU, and reads the compiler's memory analysis and program.
`formula` does that at two small depths and goes on from there: the arguments and what the backward
pass keeps are counted at the full depth, and only the rest of the temporary buffers, which hardly
depends on it, is taken to be linear in the number of layers.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from purelora.analysis import hlo, step_bytes
from purelora.config import schema
from purelora.core import errors
from purelora.training import planning, programs
from purelora.training.plan import Plan

# Depths that a formula is made from. With fewer layers an unrolled step has another shape: its peak
# is in the loss, and not in the layers.
DEPTHS = (16, 32)
_LAYERS = "num_hidden_layers"


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one step needs on one device.

    Attributes:
      method: "compiled" or "formula".
      parts: what of it is counted.
      argument_bytes: the step's arguments, by the compiler's count.
      temp_bytes: its temporary buffers, and results that are no arguments.
      traffic: its collectives.
      unknown_loops: loops whose trip count is not known, so that `traffic` counts them once.
      secs: time to compile it.
    """

    method: str
    parts: step_bytes.Parts
    argument_bytes: int
    temp_bytes: int
    traffic: Sequence[hlo.Traffic]
    unknown_loops: Sequence[str]
    secs: float

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that are in use at once."""
        return self.argument_bytes + self.temp_bytes

    @property
    def working_bytes(self) -> int:
        """Temporary buffers beside activations and gradients: of a layer, or of a loss chunk."""
        return max(0, self.temp_bytes - self.parts.activations - self.parts.gradients)


def compiled(plan: Plan) -> Footprint:
    """Compiles the plan's step and reads what it needs; allocates none of its arrays."""
    start = time.perf_counter()
    arguments, executable = _compile(plan)
    secs = time.perf_counter() - start
    analysis = executable.memory_analysis()
    program = hlo.Program.of(executable.as_text())
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Footprint(
        method="compiled",
        parts=step_bytes.counted(plan, arguments),
        argument_bytes=analysis.argument_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes + results,
        traffic=program.traffic(),
        unknown_loops=program.unknown_loops,
        secs=secs,
    )


def program_of(plan: Plan) -> hlo.Program:
    """The HLO of the plan's compiled step."""
    return hlo.Program.of(_compile(plan)[1].as_text())


def _compile(plan: Plan) -> tuple[step_bytes.Arguments, Any]:
    """The step's abstract arguments, and the step compiled for them."""
    tx, layout = step_bytes.StepParts.of(plan)
    arguments = step_bytes.abstract_arguments(plan)
    step = programs.train_step(plan, layout, tx, schedule_steps=1)
    return arguments, step.lower(*arguments).compile()


def formula(
    settings: schema.Config,
    hf_config: Mapping[str, Any],
    where: str,
    devices: Sequence[jax.Device],
    depths: tuple[int, int] = DEPTHS,
) -> Footprint:
    """Extrapolates what a step needs from steps of the same model with fewer layers.

    Args:
      settings: the configuration.
      hf_config: the model's config.json.
      where: its file, for messages.
      devices: the devices of the mesh.
      depths: the two numbers of layers that are compiled.

    Raises:
      ConfigError: settings that name layers which the smaller models do not have.
      ModelError: as `planning.make_plan`.
    """
    plan = planning.make_plan(settings, hf_config, where, devices)
    layers = plan.model.config.num_hidden_layers
    if len(plan.model.stack_paths) > 1:
        what = "has layers of different parameters, for which there is no formula"
        raise errors.ModelError(where, None, what, "use --method=compiled")
    if not depths[0] < depths[1] <= layers:
        what = f"is not more than the {depths[1]} layers that a formula is made from"
        raise errors.ModelError(f"{where}: {_LAYERS}", layers, what, "use --method=compiled")
    few, more = (
        compiled(planning.make_plan(settings, _shallow(hf_config, depth), where, devices))
        for depth in depths
    )
    ahead = (layers - depths[0]) / (depths[1] - depths[0])

    def extended(a: int, b: int) -> int:
        return round(a + (b - a) * ahead)

    parts = step_bytes.counted(plan, step_bytes.abstract_arguments(plan))
    rest = [f.temp_bytes - f.parts.activations for f in (few, more)]
    return Footprint(
        method="formula",
        parts=parts,
        argument_bytes=extended(few.argument_bytes, more.argument_bytes),
        temp_bytes=parts.activations + extended(*rest),
        traffic=_extended_traffic(few.traffic, more.traffic, extended),
        unknown_loops=more.unknown_loops,
        secs=few.secs + more.secs,
    )


def _extended_traffic(
    few: Sequence[hlo.Traffic], more: Sequence[hlo.Traffic], extended: Callable[[int, int], int]
) -> list[hlo.Traffic]:
    """The collectives at the full depth, kind by kind."""
    before = {(t.kind, t.dtypes, t.group_size): t for t in few}
    traffic = []
    for t in more:
        key = (t.kind, t.dtypes, t.group_size)
        old = before.get(key, t._replace(runs=0, received_bytes=0))
        size = extended(old.received_bytes, t.received_bytes)
        traffic.append(t._replace(runs=extended(old.runs, t.runs), received_bytes=size))
    return sorted(traffic, key=lambda row: -row.received_bytes)


def _shallow(hf_config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The config of the first `depth` layers of a model."""
    nested = hf_config.get("text_config")
    if isinstance(nested, Mapping):
        return {**hf_config, "text_config": _shallow(nested, depth)}
    types = hf_config.get("layer_types")
    cut = {"layer_types": types[:depth]} if isinstance(types, list) else {}
    return {**hf_config, **cut, _LAYERS: depth}


class Fit(NamedTuple):
    """The most rows that fit, or that nothing does.

    Attributes:
      rows: of each device and micro-batch; 0 if not even one fits.
      peak_bytes: what they need; with `rows` 0, what one row needs.
    """

    rows: int
    peak_bytes: int


def most_rows(peak_of: Callable[[int], int], limit_bytes: int, most: int) -> Fit:
    """The largest number of rows, up to `most`, whose peak is within the limit.

    `peak_of` never falls. It costs a compilation and is nearly straight, so the next number to try
    is where the line through two known points meets the limit.
    """
    low, high, guess = (1, peak_of(1)), None, min(4, most)
    if low[1] > limit_bytes:
        return Fit(0, low[1])
    while low[0] < guess <= most:
        tried = (guess, peak_of(guess))
        slope = (tried[1] - low[1]) / (tried[0] - low[0])
        low, high = (tried, high) if tried[1] <= limit_bytes else (low, guess)
        top = most if high is None else high - 1
        guess = min(top, low[0] + int((limit_bytes - low[1]) / slope) if slope > 0 else 8 * low[0])
        if high is not None and high - low[0] > max(2, low[0]):
            guess = max(guess, (low[0] + high) // 2)  # The line was no guide.
    return Fit(*low)
