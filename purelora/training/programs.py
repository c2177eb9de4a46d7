"""The programs that a plan is compiled to, and the state that they carry from step to step."""

import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from purelora.core import train_state, trees
from purelora.models import objective
from purelora.sharding import specs
from purelora.training import optimisers
from purelora.training.plan import Plan
from purelora.training.step import Forward, Layout, Program, make_train_step


def forward_of(plan: Plan) -> Forward:
    """What one micro-batch adds to the loss: the token loss, and those of the routers."""
    return objective.make_forward(
        plan.model,
        plan.execution,
        plan.shards,
        dropout_rate=plan.config.lora.lora_dropout,
        router=plan.router_weights,
    )


def layout_of(plan: Plan, tx: optax.GradientTransformation) -> Layout:
    """Mesh and specs of a run; moments take the spec of their leaf."""
    state_specs = train_state.state_specs(plan.trainable_specs, tx, _trainable(plan), P())
    return Layout(plan.mesh, plan.trainable_specs, plan.base_specs, state_specs)


def replicated_layout(
    mesh: Mesh, trainable: trees.Tree, base: trees.Tree, tx: optax.GradientTransformation
) -> Layout:
    """The layout of trees of arrays that lie whole on every device of a mesh."""

    def everywhere(tree: trees.Tree) -> trees.Tree:
        return jax.tree.map(lambda _: P(), tree)

    state_specs = train_state.state_specs(everywhere(trainable), tx, trainable, P())
    return Layout(mesh, everywhere(trainable), everywhere(base), state_specs)


def train_step(
    plan: Plan, layout: Layout, tx: optax.GradientTransformation, schedule_steps: int
) -> Program:
    """The jitted step of a run."""
    schedule = optimisers.schedule(plan.config.optim, schedule_steps)
    return make_train_step(forward_of(plan), tx, schedule, layout)


def fresh_state(
    plan: Plan, layout: Layout, tx: optax.GradientTransformation, trainable: trees.Tree
) -> train_state.TrainState:
    """The state before the first step, placed; `trainable` is donated to it."""

    def create(leaves: trees.Tree, key: jax.Array) -> train_state.TrainState:
        return train_state.create(leaves, tx, key=key)

    shardings = specs.shardings(layout.state, plan.mesh)
    key = jax.random.fold_in(jax.random.key(plan.config.seed), 1)
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(trainable, key)


def abstract_state(plan: Plan, layout: Layout, tx: optax.GradientTransformation) -> Any:
    """The state as ShapeDtypeStructs with shardings: what a checkpoint is restored into."""
    create = functools.partial(train_state.create, tx=tx, key=jax.random.key(0))
    shapes = jax.eval_shape(create, _trainable(plan))

    def placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes, specs.shardings(layout.state, plan.mesh))


def _trainable(plan: Plan) -> Any:
    return jax.tree.map(lambda leaf: leaf.abstract, plan.trainable_infos)
