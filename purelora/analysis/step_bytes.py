"""Bytes of a training step on one device, counted from its declarations: no weight is read."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purelora.core import train_state, trees
from purelora.core.batch import Batch
from purelora.lora import targets
from purelora.models import loss
from purelora.sharding import rules, specs
from purelora.training import optimisers, plan_report, programs
from purelora.training import step as steps
from purelora.training.plan import Plan


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
      gathered_layer: the weights of one layer that are gathered, in their stored dtype.
      gathered_table: the largest weight outside of the layers that is gathered, likewise.
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
        """Bytes of the arguments of the step."""
        return sum(self.base.values()) + self.trained + self.moments + self.batch


class StepParts(NamedTuple):
    """The optimiser and the layout of a plan's step."""

    tx: optax.GradientTransformation
    layout: steps.Layout

    @classmethod
    def of(cls, plan: Plan) -> "StepParts":
        tx = optimisers.transformation(plan.config.optim, plan.trainable_infos)
        return cls(tx, programs.layout_of(plan, tx))


def abstract_arguments(plan: Plan) -> Arguments:
    """The arguments of a plan's step, without arrays."""
    tx, layout = StepParts.of(plan)
    base = jax.tree.map(lambda leaf: leaf.abstract, plan.base_infos)
    c = plan.config
    shape = (c.accum_steps, c.micro_batch_size, c.max_length)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ints, ints, jax.ShapeDtypeStruct(shape, jnp.float32), ints, ints)
    rows = Batch(*(specs.BATCH_SPEC for _ in batch))
    sharded = (
        jax.tree.map(_with_sharding, tree, specs.shardings(spec, plan.mesh))
        for tree, spec in ((base, layout.base), (batch, rows))
    )
    return Arguments(programs.abstract_state(plan, layout, tx), *sharded)


def _with_sharding(
    array: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def base_bytes(plan: Plan) -> int:
    """Bytes of the frozen base on one device."""
    return sum(row.device_bytes for row in plan_report.array_rows(plan) if not row.is_trained)


def _bytes(tree: Any) -> int:
    """Bytes on one device of a tree of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def counted(plan: Plan, arguments: Arguments) -> Parts:
    """Counts the bytes of each part from shapes and shardings."""
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
        inputs = {id(array) for array in jax.tree.leaves((trainable, base, batch, rest))}
        # One array may be a residual of several operations.
        residuals = {id(array): array for array in jax.tree.leaves(pull)}
        kept.append(
            sum(a.size * a.dtype.itemsize for name, a in residuals.items() if name not in inputs)
        )
        return total, losses

    tx, layout = StepParts.of(plan)
    schedule = optimisers.schedule(plan.config.optim, 1)
    jax.eval_shape(steps.make_train_step(observed, tx, schedule, layout), *arguments)
    return kept[0]


def _axis_size(plan: Plan, spec: Any, *, gathered: bool) -> int:
    """Product of the sizes of a spec's mesh axes: of those that are gathered, or of the others."""
    axes = [axis for axis in spec if axis is not None]
    return math.prod(plan.mesh.shape[a] for a in axes if (a in rules.BATCH_AXES) == gathered)


def _gradient_bytes(plan: Plan) -> int:
    """Adapters are gathered in the loops, like their gradients; full weights stay sharded."""
    return sum(
        row.device_bytes * (_axis_size(plan, row.spec, gathered=True) if row.is_adapter else 1)
        for row in plan_report.array_rows(plan)
        if row.is_trained
    )


def _gathered(plan: Plan) -> tuple[int, int]:
    """Gathered bytes on a device: of the largest layer, and of the largest weight of no layer."""
    of_stack, tables = dict.fromkeys(plan.model.stack_paths, 0), dict[str, int]()
    for row in plan_report.array_rows(plan):
        axis_size = _axis_size(plan, row.spec, gathered=True)
        if axis_size == 1 or row.is_adapter:
            continue
        if row.info.is_stacked:
            stack = next(path for path in of_stack if row.leaf.startswith(f"{path}."))
            of_stack[stack] += row.device_bytes * axis_size // row.info.shape[0]
        else:
            tables[row.leaf] = tables.get(row.leaf, 0) + row.device_bytes * axis_size
    return max(of_stack.values()), max(tables.values(), default=0)


def _logits_bytes(plan: Plan) -> int:
    """float32 logits of one chunk: the rows of the head that a device has, for so many tokens."""
    c = plan.config
    tokens = c.micro_batch_size // specs.row_ways(plan.mesh) * c.max_length
    chunks = -(-tokens // c.loss_chunk_tokens)
    name = targets.EMBEDDING if plan.model.is_tied else targets.HEAD
    head = next(row for row in plan_report.array_rows(plan) if row.leaf == f"{name}.weight")
    rows = head.info.shape[0] // _axis_size(plan, head.spec[:1], gathered=False)
    return -(-tokens // chunks) * rows * 4
