"""Optimiser and learning-rate schedule.

The transformation holds no learning rate: the schedule is a function of the state's own `step`,
which counts consumed global batches, and multiplies the update in the step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from purelora.config import schema
from purelora.core import param_info, trees
from purelora.lora import targets

Schedule = Callable[[jax.Array], jax.Array]


def schedule(cfg: schema.OptimConfig, total_steps: int) -> Schedule:
    """Learning rate as a function of `step` (0 for the first update).

    Warm-up is linear from `learning_rate / warmup_steps` at step 0 to `learning_rate` at step
    `warmup_steps - 1`; then `constant`, or `linear` or `cosine` down to
    `min_lr_ratio · learning_rate` at `total_steps`, and constant afterwards.
    """
    warmup, span = cfg.warmup_steps, max(total_steps - cfg.warmup_steps, 1)

    def rate(step: jax.Array) -> jax.Array:
        step = step.astype(jnp.float32)
        done = jnp.clip((step - warmup) / span, 0.0, 1.0)
        if cfg.schedule == "constant":
            decay = jnp.ones_like(done)
        elif cfg.schedule == "linear":
            decay = 1.0 - done
        else:
            decay = 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        decayed = cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * decay
        warm = (step + 1.0) / max(warmup, 1)
        return cfg.learning_rate * jnp.where(step < warmup, warm, decayed)

    return rate


def transformation(cfg: schema.OptimConfig, infos: trees.Tree) -> optax.GradientTransformation:
    """Clipping, AdamW or SGD, and decoupled weight decay; everything but the learning rate.

    Args:
      cfg: the optimiser's settings.
      infos: declarations of the trained leaves; weight decay applies to matrices and adapters, not
        to norms, biases and magnitudes.
    """
    parts = [optax.identity()]
    if cfg.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(cfg.clip_norm))
    if cfg.name == "adamw":
        parts.append(optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps))
    elif cfg.momentum:
        parts.append(optax.trace(decay=cfg.momentum))
    if cfg.weight_decay:
        decayed = trees.map_leaves(lambda leaf: leaf.is_matrix, infos)
        parts.append(optax.add_decayed_weights(cfg.weight_decay, mask=decayed))
    if cfg.loraplus_lr_ratio != 1:
        parts.append(_scaled(_rate_ratios(infos, cfg.loraplus_lr_ratio)))
    return optax.chain(*parts)


def _rate_ratios(infos: trees.Tree, ratio: float) -> trees.Tree:
    """LoRA+ (Hayou et al. 2024): `ratio` for `lora_b` and for vectors, 1 for the rest.

    Adapters of the embedding keep the plain rate: there it is `lora_a` that begins at zero. The
    transformation holds no learning rate, so the factor of the rate is one of the update.
    """
    flat = trees.flatten(infos)
    return trees.unflatten({p: ratio if _is_faster(p, leaf) else 1.0 for p, leaf in flat.items()})


def _is_faster(path: str, leaf: param_info.ParamInfo) -> bool:
    of_embedding = path.startswith(f"{targets.EMBEDDING}.")
    return (path.endswith(".lora_b") and not of_embedding) or not leaf.is_matrix


def _scaled(ratios: trees.Tree) -> optax.GradientTransformation:
    """Multiplies every leaf's update by its own constant."""

    def update(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda u, ratio: u * jnp.asarray(ratio, u.dtype), updates, ratios)

    return optax.stateless(update)
