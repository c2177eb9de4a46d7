"""The leaves that a run begins with: base and trained, placed on the mesh.

Most adapters begin from random numbers alone. Some need the weights: those that were taken out of
them while reading (`factoring`), DoRA's magnitudes, and rows of the embedding.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import trees
from purelora.lora import adapters as lora
from purelora.lora import targets
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
    flat = trees.flatten(loaded)
    full = run.model.adaptation.full if run.config.lora.enabled else tuple(flat)
    base = {path: leaf for path, leaf in flat.items() if path not in full}
    trained = {path: flat[path] for path in full}
    if adapters is not None:
        trained = trees.flatten(adapters)
    elif run.config.lora.enabled:
        trained |= trees.flatten(initial) or _fresh(run)
        trained |= _magnitudes(run, base) | _token_rows(run, base)
    placed = specs.shardings(run.trainable_specs, run.mesh)
    in_order = {path: trained[path] for path in trees.flatten(run.trainable_infos)}
    return Start(trees.unflatten(base), host_arrays.place(trees.unflatten(in_order), placed))


def without_full(run: Plan, loaded: trees.Tree) -> trees.Tree:
    """The weights as read, without those that are trained whole."""
    full = run.model.adaptation.full
    return trees.unflatten({p: leaf for p, leaf in trees.flatten(loaded).items() if p not in full})


def _fresh(run: Plan) -> dict[str, jax.Array]:
    """Adapters from random numbers; magnitudes are not among them yet."""
    adapted, init = run.model.adaptation.targets, run.config.lora.init_lora_weights
    infos = lora.adapter_infos(run.model.modules, adapted, init=init)
    make = functools.partial(lora.initial, infos, adapted)
    return trees.flatten(jax.jit(lambda key: make(key=key))(jax.random.key(run.config.seed)))


def _magnitudes(run: Plan, base: Mapping[str, Any]) -> dict[str, jax.Array]:
    """DoRA's magnitudes: the norms of the weights, since `lora_b` is zero."""
    found: dict[str, jax.Array] = {}
    for path, target in run.model.adaptation.targets.items():
        if not target.use_dora:
            continue
        module = run.model.modules[path]
        # A tied head has no weight of its own.
        weight = base.get(f"{path}.weight", base.get(f"{targets.EMBEDDING}.weight"))
        norms = _norms(weight, module.weight.contracting, module.is_stacked)
        layers = np.asarray(target.layers)
        found[f"{path}.lora_magnitude"] = norms[layers] if target.layers else norms
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _norms(weight: quant.Weight, contracting: int, is_stacked: bool) -> jax.Array:
    def one(layer: quant.Weight) -> jax.Array:
        values = quant.dequantise(layer).astype(jnp.float32)
        return lora.column_norms(values if contracting == -2 else values.T)

    # One layer after the other, so that only one exists as floats.
    return jax.lax.map(one, weight) if is_stacked else one(weight)


def _token_rows(run: Plan, base: Mapping[str, Any]) -> dict[str, jax.Array]:
    ids = run.model.adaptation.token_ids
    if not ids:
        return {}
    table = base[f"{targets.EMBEDDING}.weight"]
    rows = quant.take_rows(table, jnp.asarray(ids), jnp.dtype("float32"))
    return {targets.TOKEN_ROWS: rows}
