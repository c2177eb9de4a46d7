"""The train step and the eval step, as pure functions compiled once.

    jit  ─ shard_map ─ scan over micro-batches ─ value_and_grad(forward)   sums of loss and grads
         │           └ one reduction per leaf
         └ optax update, kept only if the batch was good

`forward` is an argument: this module knows no model. Losses and gradients travel as sums beside the
sum of token weights, and are divided once. The base is an argument of `forward` that is never
differentiated, donated or returned.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from purelora.core import train_state as state
from purelora.core import trees
from purelora.core.batch import Batch
from purelora.models import loss
from purelora.sharding import collectives, specs
from purelora.training import optimisers


class Forward(Protocol):
    """What one micro-batch adds to the loss."""

    def __call__(
        self,
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Batch,
        *,
        key: jax.Array | None,
        rows_B: jax.Array,
        row_weight: jax.Array,
    ) -> tuple[jax.Array, loss.Losses]:
        """The sum that is differentiated, and the losses that it is made of.

        Args:
          trainable: the trained leaves.
          base: the frozen ones.
          batch: `[B, T]` arrays.
          key: None outside training.
          rows_B: number of each row within the global batch.
          row_weight: W / N, with W the sum of the token weights of the global batch and N the
            number of its rows that are not empty. Losses that are sums over rows are multiplied by
            it, so that the one division by W at the end makes them means over rows.
        """
        ...


class Metrics(NamedTuple):
    """What one step says of itself, float32 scalars.

    Attributes:
      loss_sum: weighted sum of the token losses.
      weight_sum: sum of the token weights.
      grad_norm: global norm of the mean gradient, before clipping.
      learning_rate: the rate of this step.
      applied: 1 if the update was made, 0 if the batch was skipped.
      router: the router's losses, `[L]` each with one value for each layer that has experts, means
        over the rows that are not empty; None for a model without experts.
    """

    loss_sum: jax.Array
    weight_sum: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    applied: jax.Array
    router: Any

    @property
    def loss(self) -> float:
        """Mean loss of the tokens, by weight; waits for the device. Not a number without any."""
        weight = float(np.asarray(self.weight_sum))
        return float(np.asarray(self.loss_sum)) / weight if weight else float("nan")


# (state, base, batch) -> (state, metrics); the old state is donated.
TrainStep = Callable[[state.TrainState, trees.Tree, Batch], tuple[state.TrainState, Metrics]]
# (trainable, base, batch) -> (loss_sum, weight_sum); nothing is donated.
EvalStep = Callable[[trees.Tree, trees.Tree, Batch], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies: the mesh and the specs of the trained tree, the base and the state."""

    mesh: Mesh
    trainable: trees.Tree
    base: trees.Tree
    state: Any


class Program:
    """A jitted function on its own mesh, whatever mesh a caller has set with `jax.set_mesh`."""

    def __init__(self, function: Callable[..., Any], shardings: Any, **options: Any):
        """Jits `function` for arguments with these shardings; `options` are those of `jax.jit`."""
        self._jitted = jax.jit(function, in_shardings=shardings, **options)
        self._shardings = shardings

    def __call__(self, *arguments: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return self._jitted(*arguments)
        # Arrays that were made under another mesh lie on it.
        with jax.set_mesh(_NO_MESH):
            return self._jitted(*jax.device_put(arguments, self._shardings))

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """As the method of what `jax.jit` returns."""
        return self._jitted.lower(*arguments)


_NO_MESH = Mesh(np.empty((), object), ())


class Sums(NamedTuple):
    """Sums over a global batch.

    Attributes:
      losses: `loss.Losses` of all micro-batches.
      weight: float32 sum of the token weights, by which token losses and gradients are divided.
      rows: float32 number of rows that are not empty, by which the router's losses are divided.
      grads: gradients of the trained leaves.
    """

    losses: Any
    weight: Any
    rows: Any
    grads: trees.Tree


def make_train_step(
    forward: Forward,
    tx: optax.GradientTransformation,
    schedule: optimisers.Schedule,
    layout: Layout,
) -> Program:
    """The compiled step `(state, base, batch) -> (state, metrics)`; the old state is donated."""
    sums = collectives.shard_step(
        _local_sums(forward, collectives.gradient_paths(layout.trainable, layout.base)),
        layout.mesh,
        in_specs=(layout.trainable, layout.base, specs.BATCH_SPEC, P()),
        out_specs=Sums(P(), P(), P(), layout.trainable),
    )

    def train_step(
        old: state.TrainState, base: trees.Tree, batch: Batch
    ) -> tuple[state.TrainState, Metrics]:
        _check_batch(batch)
        key = jax.random.fold_in(old.key, old.step)
        return update(old, sums(old.trainable, base, batch, key), tx=tx, schedule=schedule)

    placed = specs.shardings((layout.state, layout.base, specs.BATCH_SPEC), layout.mesh)
    out = (placed[0], specs.replicated(layout.mesh))
    return Program(train_step, placed, out_shardings=out, donate_argnums=0)


def update(
    old: state.TrainState,
    sums: Sums,
    *,
    tx: optax.GradientTransformation,
    schedule: optimisers.Schedule,
) -> tuple[state.TrainState, Metrics]:
    """One optimiser update from sums.

    A batch that is empty or not finite changes nothing but `step`. The choice is made inside the
    compiled step, so the state that comes out is always a good one.
    """
    weight = jnp.maximum(sums.weight, 1e-9)
    grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), sums.grads)
    grad_norm = optax.tree_utils.tree_norm(grads)
    rate = schedule(old.step)

    # optax mixes dtypes (its counters are int32), so strict promotion does not hold inside it.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = tx.update(grads, old.opt_state, old.trainable)
    moved = jax.tree.map(lambda p, u: p - (rate * u).astype(p.dtype), old.trainable, updates)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(moved)]
    good = (sums.weight > 0) & jnp.isfinite(sums.losses.xent) & jnp.isfinite(grad_norm)
    good = good & jnp.stack(finite).all()
    trainable, opt_state = jax.tree.map(
        lambda new, kept: jnp.where(good, new, kept),
        (moved, opt_state),
        (old.trainable, old.opt_state),
    )
    applied = good.astype(jnp.int32)
    new = state.TrainState(trainable, opt_state, old.step + 1, old.updates + applied, old.key)
    router = jax.tree.map(lambda total: total / jnp.maximum(sums.rows, 1), sums.losses.router)
    applied_32 = applied.astype(jnp.float32)
    return new, Metrics(sums.losses.xent, sums.weight, grad_norm, rate, applied_32, router)


def make_eval_step(forward: Forward, layout: Layout) -> Program:
    """The compiled `(trainable, base, batch) -> (loss_sum, weight_sum)`; nothing is donated."""
    paths = collectives.gradient_paths(layout.trainable, layout.base)

    def local(trainable: trees.Tree, base: trees.Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        _check_batch(batch)
        entered = trees.map_leaves(lambda path, leaf: path.enter(leaf), paths, trainable)

        def micro(total: jax.Array, xs: tuple[jax.Array, Batch]) -> tuple[jax.Array, None]:
            index, rows = xs
            numbers = _row_numbers(index, rows)
            # Evaluation reports the token losses alone, so the router's get no weight.
            _, losses = forward(
                entered, base, rows, key=None, rows_B=numbers, row_weight=jnp.float32(0)
            )
            return total + losses.xent, None

        total, _ = jax.lax.scan(micro, collectives.varying(jnp.float32(0)), _numbered(batch))
        return collectives.psum(total), collectives.psum(batch.weights.sum())

    in_specs = (layout.trainable, layout.base, specs.BATCH_SPEC)
    sharded = collectives.shard_step(local, layout.mesh, in_specs=in_specs, out_specs=(P(), P()))
    shardings = specs.shardings(in_specs, layout.mesh)
    return Program(sharded, shardings, out_shardings=specs.replicated(layout.mesh))


def _local_sums(forward: Forward, paths: trees.Tree) -> Callable[..., Sums]:
    """Sums over all micro-batches and devices, computed on this device's shards.

    The gradients are local in the loop and reduced once after it: see `collectives.GradientPath`.
    The token weights are summed before the loop, because `row_weight` is needed in it.
    """

    def local(trainable: trees.Tree, base: trees.Tree, batch: Batch, key: jax.Array) -> Sums:
        entered = trees.map_leaves(lambda path, leaf: path.enter(leaf), paths, trainable)
        weight = collectives.psum(batch.weights.sum())
        count = collectives.psum((batch.segment_ids > 0).any(axis=-1).sum().astype(jnp.float32))
        row_weight = weight / jnp.maximum(count, 1)

        def micro(total: trees.Tree, xs: tuple[jax.Array, Batch]) -> tuple[trees.Tree, loss.Losses]:
            index, rows = xs
            (_, losses), grads = jax.value_and_grad(forward, has_aux=True)(
                entered,
                base,
                rows,
                key=key,
                rows_B=_row_numbers(index, rows),
                row_weight=row_weight,
            )
            return jax.tree.map(jnp.add, total, grads), losses

        zeros = jax.tree.map(jnp.zeros_like, entered)
        grads, losses = jax.lax.scan(micro, zeros, _numbered(batch))
        losses = collectives.psum(jax.tree.map(lambda parts: parts.sum(axis=0), losses))
        grads = trees.map_leaves(lambda path, grad: path.leave(grad), paths, grads)
        return Sums(losses, weight, count, grads)

    return local


def _check_batch(batch: Batch) -> None:
    """What a batch must be, looked at while the step is traced."""
    chex.assert_rank(list(batch), 3)
    chex.assert_equal_shape(list(batch))
    chex.assert_type(list(batch), [int, int, float, int, int])


def _numbered(batch: Batch) -> tuple[jax.Array, Batch]:
    return jnp.arange(batch.tokens.shape[0]), batch


def _row_numbers(index: jax.Array, rows: Batch) -> jax.Array:
    """Number of each row within the global batch, whatever the mesh."""
    count = rows.tokens.shape[0]
    first = index * collectives.rows_of_micro_batch(count) + collectives.first_row(count)
    return first + jnp.arange(count)
