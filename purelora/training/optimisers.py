"""Optimisers and learning-rate schedules: a table of each.

A transformation holds no learning rate: the schedule is a function of the state's own `step`,
which counts consumed global batches, and multiplies the update in the step, which subtracts it. So
an optimiser here is what optax calls `scale_by_...`. A new one is a function and a line of
`OPTIMISERS`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from purelora.config import factory, schema
from purelora.core import errors, param_info, trees
from purelora.core.paths import Path
from purelora.lora import targets

Schedule = Callable[[jax.Array], jax.Array]


def _adam(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)


def _sgd(cfg: schema.OptimConfig) -> optax.GradientTransformation:
    return optax.trace(decay=cfg.momentum) if cfg.momentum else optax.identity()


# By `optim.name`: the direction of the update, out of the optimiser's settings.
OPTIMISERS: Mapping[str, Callable[[schema.OptimConfig], optax.GradientTransformation]] = {
    "adamw": _adam,
    "sgd": _sgd,
}
# By `optim.schedule`: the share of the learning rate (beyond its minimum) that is left when a share
# `done`, from 0 to 1, of the steps after the warm-up is over.
SCHEDULES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "constant": jnp.ones_like,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
}


def check(cfg: schema.OptimConfig) -> None:
    """Checks that both tables have what the settings name.

    Raises:
      ConfigError: one has not; both problems together.
    """
    named = {"optim.name": (cfg.name, OPTIMISERS), "optim.schedule": (cfg.schedule, SCHEDULES)}
    problems = [
        errors.Problem(key, name, f"must be one of {', '.join(map(repr, table))}", "")
        for key, (name, table) in named.items()
        if name not in table
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def schedule(cfg: schema.OptimConfig, total_steps: int) -> Schedule:
    """Learning rate as a function of `step` (0 for the first update).

    Warm-up is linear from `learning_rate / warmup_steps` at step 0 to `learning_rate` at step
    `warmup_steps - 1`; then `constant`, or `linear` or `cosine` down to
    `min_lr_ratio · learning_rate` at `total_steps`, and constant afterwards.

    Raises:
      ConfigError: `SCHEDULES` has no such schedule.
    """
    check(cfg)
    warmup, span = cfg.warmup_steps, max(total_steps - cfg.warmup_steps, 1)

    def rate(step: jax.Array) -> jax.Array:
        step = step.astype(jnp.float32)
        done = jnp.clip((step - warmup) / span, 0.0, 1.0)
        left = SCHEDULES[cfg.schedule](done)
        decayed = cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * left
        warm = (step + 1.0) / max(warmup, 1)
        return cfg.learning_rate * jnp.where(step < warmup, warm, decayed)

    return rate


def transformation(cfg: schema.OptimConfig, infos: trees.Tree) -> optax.GradientTransformation:
    """Clipping, the optimiser, and decoupled weight decay; everything but the learning rate.

    Args:
      cfg: the optimiser's settings.
      infos: declarations of the trained leaves; weight decay applies to matrices and adapters, not
        to norms, biases and magnitudes.

    Raises:
      ConfigError: `OPTIMISERS` has no such optimiser, or `optim.factory` cannot be used.
    """
    parts = [optax.identity()]
    if cfg.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(cfg.clip_norm))
    parts.append(_direction(cfg, infos))
    if cfg.weight_decay:
        decayed = trees.map_leaves(lambda leaf: leaf.is_matrix, infos)
        parts.append(optax.add_decayed_weights(cfg.weight_decay, mask=decayed))
    if cfg.loraplus_lr_ratio != 1:
        parts.append(_scaled(_rate_ratios(infos, cfg.loraplus_lr_ratio)))
    return optax.chain(*parts)


def _direction(cfg: schema.OptimConfig, infos: trees.Tree) -> optax.GradientTransformation:
    """The optimiser by its name in the table, or of the user's own function."""
    if cfg.factory is None:
        check(cfg)
        return OPTIMISERS[cfg.name](cfg)
    create = factory.load("optim.factory", cfg.factory)
    try:
        tx = create(cfg)
    except Exception as error:  # It is the user's own code and may raise anything.
        raise factory.failed("optim.factory", cfg.factory, error) from error
    if not isinstance(tx, optax.GradientTransformation):
        what = f"returns a {type(tx).__name__} and no optax.GradientTransformation"
        remedy = "return one, for example optax.scale_by_lion()"
        raise errors.ConfigError("optim.factory", cfg.factory, what, remedy)
    if _descends(tx, infos):
        what = "turns the gradient round, as optax's complete optimisers do with a learning rate"
        remedy = (
            "optim.learning_rate and optim.schedule multiply its update, which is subtracted: "
            "return the part without learning rate (optax.scale_by_lion for optax.lion), or chain "
            "it with optax.scale(-1)"
        )
        raise errors.ConfigError("optim.factory", cfg.factory, what, remedy)
    return tx


def _descends(tx: optax.GradientTransformation, infos: trees.Tree) -> bool:
    """Whether the first update from a gradient of ones points against it."""
    ones = trees.map_leaves(lambda leaf: jnp.ones((2,) * len(leaf.shape), leaf.dtype), infos)
    with jax.numpy_dtype_promotion("standard"):  # As in the step.
        updates, _ = tx.update(ones, tx.init(ones), ones)
    return sum(float(leaf.sum()) for leaf in jax.tree.leaves(updates)) < 0


def _rate_ratios(infos: trees.Tree, ratio: float) -> trees.Tree:
    """LoRA+ (Hayou et al. 2024): `ratio` for `lora_b` and for vectors, 1 for the rest.

    Adapters of the embedding keep the plain rate: there it is `lora_a` that begins at zero. The
    transformation holds no learning rate, so the factor of the rate is one of the update.
    """
    flat = trees.flatten(infos)
    return trees.unflatten({p: ratio if _is_faster(p, leaf) else 1.0 for p, leaf in flat.items()})


def _is_faster(path: Path, leaf: param_info.ParamInfo) -> bool:
    of_embedding = path.parent.is_below(targets.EMBEDDING)
    return (path.ends_with("lora_b") and not of_embedding) or not leaf.is_matrix


def _scaled(ratios: trees.Tree) -> optax.GradientTransformation:
    """Multiplies every leaf's update by its own constant."""

    def update(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda u, ratio: u * jnp.asarray(ratio, u.dtype), updates, ratios)

    return optax.stateless(update)
