"""What a run carries from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purelora.core import trees


class TrainState(NamedTuple):
    """Everything a step reads and writes, donated to it.

    Attributes:
      trainable: the trained leaves, float32.
      opt_state: optax state, for the trained leaves only.
      step: int32, consumed global batches; always advances, and the schedule reads it.
      updates: int32, optimiser updates; less than `step` by the batches that were skipped.
      key: the run's PRNG key; steps fold their number into it and never change it.
    """

    trainable: trees.Tree
    opt_state: Any
    step: jax.Array
    updates: jax.Array
    key: jax.Array


def create(
    trainable: trees.Tree, tx: optax.GradientTransformation, *, key: jax.Array
) -> TrainState:
    """The state before the first step."""
    return TrainState(trainable, tx.init(trainable), jnp.int32(0), jnp.int32(0), key)


def state_specs(
    specs: trees.Tree, tx: optax.GradientTransformation, abstract: Any, spec: Any
) -> Any:
    """Specs of a whole TrainState.

    Args:
      specs: specs of the trained leaves. Of the optimiser's state, whatever has the shape of its
        leaf takes that leaf's spec; all else is replicated, as Adafactor's row and column sums.
      tx: the optimiser.
      abstract: the trained leaves as ShapeDtypeStructs.
      spec: the spec of everything that is replicated.
    """
    opt_state = jax.eval_shape(tx.init, abstract)

    def spec_of(of_state: Any, leaf_spec: Any, leaf: Any) -> Any:
        return leaf_spec if of_state.shape == leaf.shape else spec

    opt_specs = optax.tree_utils.tree_map_params(
        tx, spec_of, opt_state, specs, abstract, transform_non_params=lambda _: spec
    )
    return TrainState(specs, opt_specs, spec, spec, spec)
