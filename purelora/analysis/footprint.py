"""What a training step holds and moves on one device, from declarations alone: no weight is read.

`compiled` lowers and compiles the real step for abstract arguments on the devices of the plan's
mesh, which may be virtual ones of the CPU, and reads the compiler's memory analysis and program.
`formula` does that at two small depths and goes on from there: the arguments and what the backward
pass keeps are counted at the full depth, and only the rest of the temporary buffers, which hardly
depends on it, is taken to be linear in the number of layers.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purelora.analysis import hlo
from purelora.config import schema
from purelora.core import errors, train_state, trees
from purelora.core.batch import Batch
from purelora.lora import targets
from purelora.models import loss
from purelora.sharding import rules, specs
from purelora.training import optimisers, plan_report, planning, programs
from purelora.training import step as steps
from purelora.training.plan import Plan

# Depths that a formula is made from. With fewer layers an unrolled step has another shape: its peak
# is in the loss, and not in the layers.
DEPTHS = (16, 32)
_LAYERS = "num_hidden_layers"


class Arguments(NamedTuple):
    """What a step is called with, as ShapeDtypeStructs that carry their shardings."""

    state: train_state.TrainState
    base: trees.Tree
    batch: Batch


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on one device, counted from shapes and shardings.

    Attributes:
      base: the frozen base by dtype.
      trained: adapters, or whatever is trained.
      moments: the optimiser's state, and the few numbers of the run's own.
      batch: one global batch's share.
      activations: what one micro-batch's forward pass leaves for its backward pass.
      gradients: one gradient of each trained leaf, as the loops hold it.
      logits: one loss chunk's logits.
      gathered_layer: the weights of one layer that are made whole, in their stored dtype.
      gathered_table: the largest weight outside of the layers that is made whole, likewise.
    """

    base: Mapping[str, int]
    trained: int
    moments: int
    batch: int
    activations: int
    gradients: int
    logits: int
    gathered_layer: int
    gathered_table: int

    @property
    def arguments(self) -> int:
        """Everything that is there before the step begins."""
        return sum(self.base.values()) + self.trained + self.moments + self.batch


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
    parts: Parts
    argument_bytes: int
    temp_bytes: int
    traffic: Sequence[hlo.Traffic]
    unknown_loops: Sequence[str]
    secs: float

    @property
    def peak_bytes(self) -> int:
        """Everything that is there at once, at the worst."""
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
        parts=counted(plan, arguments),
        argument_bytes=analysis.argument_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes + results,
        traffic=program.traffic(),
        unknown_loops=program.unknown_loops,
        secs=secs,
    )


def program_of(plan: Plan) -> hlo.Program:
    """The plan's compiled step as text, read."""
    return hlo.Program.of(_compile(plan)[1].as_text())


class _Setup(NamedTuple):
    """What a plan's step is made with."""

    tx: optax.GradientTransformation
    layout: steps.Layout

    @classmethod
    def of(cls, plan: Plan) -> "_Setup":
        tx = optimisers.transformation(plan.config.optim, plan.trainable_infos)
        return cls(tx, programs.layout_of(plan, tx))


def _compile(plan: Plan) -> tuple[Arguments, Any]:
    """The step's abstract arguments, and the step compiled for them."""
    tx, layout = _Setup.of(plan)
    arguments = abstract_arguments(plan)
    step = programs.train_step(plan, layout, tx, schedule_steps=1)
    return arguments, step.lower(*arguments).compile()


def formula(
    settings: schema.Config,
    hf_config: Mapping[str, Any],
    where: str,
    devices: Sequence[jax.Device],
    depths: tuple[int, int] = DEPTHS,
) -> Footprint:
    """What the step of a model needs, from two of its kind with fewer layers.

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

    parts = counted(plan, abstract_arguments(plan))
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
    found = []
    for t in more:
        key = (t.kind, t.dtypes, t.group_size)
        old = before.get(key, t._replace(runs=0, received_bytes=0))
        size = extended(old.received_bytes, t.received_bytes)
        found.append(t._replace(runs=extended(old.runs, t.runs), received_bytes=size))
    return sorted(found, key=lambda row: -row.received_bytes)


def abstract_arguments(plan: Plan) -> Arguments:
    """The arguments of a plan's step, without arrays."""
    tx, layout = _Setup.of(plan)
    base = jax.tree.map(lambda leaf: leaf.abstract, plan.base_infos)
    c = plan.config
    shape = (c.accum_steps, c.micro_batch_size, c.max_length)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ints, ints, jax.ShapeDtypeStruct(shape, jnp.float32), ints, ints)
    rows = Batch(*(specs.BATCH_SPEC for _ in batch))
    placed = (
        jax.tree.map(_placed, tree, specs.shardings(spec, plan.mesh))
        for tree, spec in ((base, layout.base), (batch, rows))
    )
    return Arguments(programs.abstract_state(plan, layout, tx), *placed)


def _placed(array: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def base_bytes(plan: Plan) -> int:
    """Bytes of the frozen base on one device."""
    return sum(row.device_bytes for row in plan_report.array_rows(plan) if not row.is_trained)


def _bytes(tree: Any) -> int:
    """Bytes on one device of a tree of placed ShapeDtypeStructs."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def counted(plan: Plan, arguments: Arguments) -> Parts:
    """Everything that shapes and shardings alone tell."""
    base: dict[str, int] = {}
    for leaf in jax.tree.leaves(arguments.base):
        base[leaf.dtype.name] = base.get(leaf.dtype.name, 0) + _bytes(leaf)
    trained = _bytes(arguments.state.trainable)
    layer, table = _gathered(plan)
    return Parts(
        base=dict(sorted(base.items(), key=lambda item: -item[1])),
        trained=trained,
        moments=_bytes(arguments.state) - trained,
        batch=_bytes(arguments.batch),
        activations=kept_bytes(plan, arguments),
        gradients=_gradient_bytes(plan),
        logits=_logits_bytes(plan),
        gathered_layer=layer,
        gathered_table=table,
    )


def kept_bytes(plan: Plan, arguments: Arguments) -> int:
    """Bytes on one device of what the forward pass of a micro-batch leaves for the backward pass.

    It is read off the residuals of the real step's own differentiation: whatever the model, remat
    and the layout make of it. Weights are not counted, unless they are kept gathered.
    """
    forward = programs.forward_of(plan)
    kept: list[int] = []

    def observed(
        trainable: Any, base: Any, batch: Any, **rest: Any
    ) -> tuple[jax.Array, loss.Losses]:
        # The step differentiates this function too; only the residuals of `vjp` are wanted here.
        trainable = jax.lax.stop_gradient(trainable)
        total, pull, losses = jax.vjp(
            lambda t: forward(t, base, batch, **rest), trainable, has_aux=True
        )
        given = {id(array) for array in jax.tree.leaves((trainable, base, batch, rest))}
        # One array may be a residual of several operations.
        residuals = {id(array): array for array in jax.tree.leaves(pull)}
        kept.append(
            sum(a.size * a.dtype.itemsize for name, a in residuals.items() if name not in given)
        )
        return total, losses

    tx, layout = _Setup.of(plan)
    schedule = optimisers.schedule(plan.config.optim, 1)
    jax.eval_shape(steps.make_train_step(observed, tx, schedule, layout), *arguments)
    return kept[0]


def _ways(plan: Plan, spec: Any, *, gathered: bool) -> int:
    """Into how many parts a spec splits an array: those that are gathered, or the others."""
    axes = [axis for axis in spec if axis is not None]
    return math.prod(plan.mesh.shape[a] for a in axes if (a in rules.BATCH_AXES) == gathered)


def _gradient_bytes(plan: Plan) -> int:
    """Adapters are whole in the loops, and so are their gradients; sharded weights stay shards."""
    return sum(
        row.device_bytes * (_ways(plan, row.spec, gathered=True) if row.is_adapter else 1)
        for row in plan_report.array_rows(plan)
        if row.is_trained
    )


def _gathered(plan: Plan) -> tuple[int, int]:
    """Gathered bytes on a device: of the largest layer, and of the largest weight of no layer."""
    of_stack, tables = dict.fromkeys(plan.model.stack_paths, 0), dict[str, int]()
    for row in plan_report.array_rows(plan):
        ways = _ways(plan, row.spec, gathered=True)
        if ways == 1 or row.is_adapter:
            continue
        if row.info.is_stacked:
            stack = next(path for path in of_stack if row.leaf.startswith(f"{path}."))
            of_stack[stack] += row.device_bytes * ways // row.info.shape[0]
        else:
            tables[row.leaf] = tables.get(row.leaf, 0) + row.device_bytes * ways
    return max(of_stack.values()), max(tables.values(), default=0)


def _logits_bytes(plan: Plan) -> int:
    """float32 logits of one chunk: the rows of the head that a device has, for so many tokens."""
    c = plan.config
    tokens = c.micro_batch_size // specs.row_ways(plan.mesh) * c.max_length
    chunks = -(-tokens // c.loss_chunk_tokens)
    name = targets.EMBEDDING if plan.model.is_tied else targets.HEAD
    head = next(row for row in plan_report.array_rows(plan) if row.leaf == f"{name}.weight")
    rows = head.info.shape[0] // _ways(plan, head.spec[:1], gathered=False)
    return -(-tokens // chunks) * rows * 4


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
