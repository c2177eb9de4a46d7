"""Optimisers that `optim.factory` names, as a user writes them; and functions that are none."""

from typing import Any

import jax
import optax

from purelora.config import schema

NO_FUNCTION = 3


def mixed(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    """With every sort of state: a count, a key, sums of rows and columns, a mean of updates."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    return optax.chain(_drawn(), factored, optax.ema(cfg.b1))


def _drawn() -> optax.GradientTransformation:
    """Multiplies each update by a number that it draws: its state is a key."""

    def init(params: Any) -> jax.Array:
        del params
        return jax.random.key(3)

    def update(updates: Any, key: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        del params
        number = jax.random.uniform(key, minval=0.5)
        return jax.tree.map(lambda u: u * number, updates), jax.random.fold_in(key, 1)

    return optax.GradientTransformation(init, update)


def plain_lion(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=cfg.b1)


def lion(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    """A complete optimiser, with a learning rate of its own."""
    return optax.lion(cfg.learning_rate)


def nothing(cfg: schema.OptimConfig) -> None:
    """No transformation."""


def failing(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=cfg.beta)
