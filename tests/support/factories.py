"""Optimisers that `optim.factory` names, as a user writes them; and functions that are none."""

import jax
import optax

from purelora.config import schema

NO_FUNCTION = 3


def mixed(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    """With every sort of state: a count and a key, sums of rows and columns, a mean of updates."""
    noise = optax.add_noise(0.01, 0.55, key=jax.random.key(3))
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    return optax.chain(noise, factored, optax.ema(cfg.b1))


def plain_lion(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=cfg.b1)


def lion(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    """A complete optimiser, with a learning rate of its own."""
    return optax.lion(cfg.learning_rate)


def nothing(cfg: schema.OptimConfig) -> None:
    """No transformation."""


def failing(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=cfg.beta)
