"""Adapters as pure functions of declarations and rules, whatever their kind (`kinds`).

A kind declares its leaves for one layer; here they become those of a stack. `n` is the number of
layers of the stack that are adapted: all L, unless the settings name only some. Then the adapters
are stored for these layers alone (so counts, gradients and exports hold nothing else) and spread
over the stack when the forward pass begins (`expand`).

Layers of one stack may have different ranks. Their adapters are stored with the largest; the rest
is zero in all leaves with a rank, which makes the gradients of all of them exactly zero there, so
it stays zero without a mask.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import layer_axis, param_info, trees
from purelora.core.paths import Path
from purelora.lora import kinds
from purelora.lora.targets import EMBEDDING, AdaptableModule, Adaptation, Target


def adapter_infos(
    modules: Mapping[str, AdaptableModule], targets: Mapping[str, Target], *, init: str = "default"
) -> trees.Tree:
    """Declarations of every target's leaves `[n, ...]`, in float32.

    Args:
      modules: what adapters can go to.
      targets: what they go to.
      init: "gaussian" for a normal `lora_a`; with everything else it is uniform.
    """
    flat: dict[str, param_info.ParamInfo] = {}
    for path, target in targets.items():
        weight = layer_axis.declared_layer(modules[path].weight)
        declared = kinds.of_target(target).declare(weight, target, init)
        if target.layers:
            layers = [declared] * len(target.layers)
            declared = layer_axis.stack(layers, name=layer_axis.LAYERS)
        flat |= {f"{path}.{name}": info for name, info in declared.items()}
    return trees.unflatten(flat)


def trained_infos(
    leaves: Mapping[str, param_info.ParamInfo],
    modules: Mapping[str, AdaptableModule],
    adaptation: Adaptation,
    *,
    init: str = "default",
) -> trees.Tree:
    """Declarations of everything that is trained beside a base, in float32.

    Args:
      leaves: flat declarations of the base.
      modules: what adapters can go to.
      adaptation: what is trained.
      init: see `adapter_infos`.
    """
    flat = trees.flatten(adapter_infos(modules, adaptation.targets, init=init))
    for path in adaptation.full:
        flat[Path(path)] = kinds.WHOLE_MODULE.declared(leaves[path])
    if adaptation.token_ids:
        table = leaves[f"{EMBEDDING}.weight"]
        rows = kinds.TOKEN_ROWS.declared(table, len(adaptation.token_ids))
        flat[kinds.TOKEN_ROWS.path] = rows
    return trees.unflatten(flat)


def initial(infos: trees.Tree, targets: Mapping[str, Target], *, key: jax.Array) -> trees.Tree:
    """Initial values of adapters that do not depend on the weights; padding of ranks is zero.

    Magnitudes come out as ones: see `Kind.from_weight`.
    """
    declared = trees.flatten(infos)
    flat = trees.flatten(param_info.initial_tree(infos, key=key))
    for path, target in targets.items():
        if len(set(target.ranks)) > 1:
            flat |= _of_ranks(path, target, declared, flat)
    return trees.unflatten(flat)


def _of_ranks(
    path: str,
    target: Target,
    declared: Mapping[str, param_info.ParamInfo],
    flat: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """The leaves of one module whose layers have different ranks."""
    names = [Path(leaf).name for leaf in flat if Path(leaf).parent == path]
    leaves = {name: flat[f"{path}.{name}"] for name in names}
    infos = {name: declared[f"{path}.{name}"] for name in names}
    for name, info in infos.items():
        axes = info.axes
        if "rank" in axes:
            shape = [1] * len(axes)
            shape[0], shape[axes.index("rank")] = len(target.ranks), target.r
            leaves[name] = leaves[name] * rank_mask(target).reshape(shape)
    leaves = kinds.of_target(target).rescaled(leaves, infos, target)
    return {f"{path}.{name}": leaf for name, leaf in leaves.items()}


def rank_mask(target: Target) -> np.ndarray:
    """`[n, r]`, 1 where a layer has that rank, 0 in its padding."""
    columns = np.arange(target.r)[None, :] < np.asarray(target.ranks)[:, None]
    return columns.astype(np.float32)


def count(infos: trees.Tree, targets: Mapping[str, Target]) -> int:
    """Number of trained elements; the padding of ranks is none."""
    total = 0
    for path, info in trees.flatten(infos).items():
        size = int(np.prod(info.shape, dtype=np.int64))
        if "rank" in info.axes:
            target = targets[path.parent]
            size = size * sum(target.ranks) // (len(target.ranks) * target.r)
        total += size
    return total


def expand(adapter: jax.Array, layers: Sequence[int], stack_size: int) -> jax.Array:
    """Spreads the adapters of some layers over a whole stack; the other layers get zeros.

    `[n, ...] -> [stack_size, ...]`. Zeros in both `lora_a` and `lora_b` add nothing, and the
    gradient of the spread reaches only the stored layers.
    """
    if len(layers) == stack_size:
        return adapter
    full = jnp.zeros((stack_size, *adapter.shape[1:]), adapter.dtype)
    return full.at[np.asarray(layers)].set(adapter)


def bind(
    path: Path, target: Target, leaves: Mapping[str, jax.Array], stack_size: int | None
) -> kinds.Bound:
    """The adapter of one module for a forward pass, spread over its stack.

    Args:
      path: the module's.
      target: which adapter.
      leaves: trained leaves by path.
      stack_size: number of layers of the stack; None if the module is not in one.
    """
    kind = kinds.of_target(target)
    names = tuple(n for n in kind.order if n == "scaling" or path / n in leaves)
    values = {name: leaves[path / name] for name in names if name != "scaling"}
    if stack_size is None:
        scaling = jnp.float32(target.scalings[0])
    else:
        values = {n: expand(value, target.layers, stack_size) for n, value in values.items()}
        factors = np.zeros(stack_size, np.float32)
        factors[list(target.layers)] = target.scalings
        scaling = jnp.asarray(factors)
    values["scaling"] = scaling
    return kinds.Bound(tuple(values[name] for name in names), kind, names)
