"""The leaves that a run begins with: base and trained, placed on the mesh.

Most adapters begin from random numbers alone. Some need the weights: those that were taken out of
them while reading (`lora.weight_init`), those of a kind that looks at the weight, and rows of the
embedding.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import trees
from purelora.lora import adapters as lora
from purelora.lora import kinds, targets
from purelora.ops import quant
from purelora.sharding import host_arrays, specs
from purelora.training.plan import Plan


class Start(NamedTuple):
    """The leaves before the first step, placed."""

    base: trees.Tree
    trainable: trees.Tree


def start_of(
    run: Plan,
    loaded: trees.Tree,
    *,
    initial: trees.Tree,
    adapters: trees.Tree | None,
) -> Start:
    """Base and trained leaves before the first step.

    Args:
      run: the run.
      loaded: the weights as read.
      initial: adapters that were taken out of them; empty if none were.
      adapters: trained leaves of a warm start, all that the run trains; None for a fresh start.
    """
    adaptation = run.model.adaptation if run.config.lora.enabled else None
    trained, base = targets.split_trained(trees.flatten(loaded), adaptation)
    if adapters is not None:
        trained = trees.flatten(adapters)
    elif run.config.lora.enabled:
        trained |= trees.flatten(initial) or _fresh(run)
        trained |= _from_weights(run, base) | _token_rows(run, base)
    placed = specs.shardings(run.trainable_specs, run.mesh)
    in_order = {path: trained[path] for path in trees.flatten(run.trainable_infos)}
    return Start(trees.unflatten(base), host_arrays.place(trees.unflatten(in_order), placed))


def without_full(run: Plan, loaded: trees.Tree) -> trees.Tree:
    """The weights as read, without those that are trained whole."""
    parts = targets.split_trained(trees.flatten(loaded), run.model.adaptation)
    return trees.unflatten(parts.frozen)


def _fresh(run: Plan) -> dict[str, jax.Array]:
    """Adapters from random numbers, before the weights are looked at."""
    adapted, init = run.model.adaptation.targets, run.config.lora.init_lora_weights
    infos = lora.adapter_infos(run.model.modules, adapted, init=init)
    make = functools.partial(lora.initial, infos, adapted)
    return trees.flatten(jax.jit(lambda key: make(key=key))(jax.random.key(run.config.seed)))


def _from_weights(run: Plan, base: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Leaves of kinds that begin as the weights say."""
    initial: dict[str, jax.Array] = {}
    for path, target in run.model.adaptation.targets.items():
        if not kinds.of_target(target).begins_at_weight:
            continue
        module = run.model.modules[path]
        # A tied head has no weight of its own.
        weight = base.get(f"{path}.weight", base.get(f"{targets.EMBEDDING}.weight"))
        leaves = _of_weight(
            weight, kinds.of_target(target), module.weight.contracting, module.is_stacked
        )
        layers = np.asarray(target.layers)
        for name, leaf in leaves.items():
            initial[f"{path}.{name}"] = leaf[layers] if target.layers else leaf
    return initial


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _of_weight(
    weight: quant.Weight, kind: kinds.Kind, contracting: int, is_stacked: bool
) -> dict[str, jax.Array]:
    def one(layer: quant.Weight) -> dict[str, jax.Array]:
        values = quant.dequantise(layer).astype(jnp.float32)
        return kind.from_weight(values if contracting == -2 else values.T)

    # One layer after the other, so that only one exists as floats.
    return jax.lax.map(one, weight) if is_stacked else one(weight)


def _token_rows(run: Plan, base: Mapping[str, Any]) -> dict[str, jax.Array]:
    ids = run.model.adaptation.token_ids
    if not ids:
        return {}
    table = base[f"{targets.EMBEDDING}.weight"]
    return {kinds.TOKEN_ROWS.path: kinds.TOKEN_ROWS.of_table(table, ids)}
