"""Trained leaves of a model put together from an adapter's tensors, layer by layer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from purelora.core import errors, trees
from purelora.core.paths import Path
from purelora.interop.peft import adapter_config
from purelora.lora import adapters, kinds, targets
from purelora.models import causal_lm

_FLOAT32 = np.finfo(np.float32)
# Tensors by module and name, from which those that are used are taken out.
Rest = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Leaves as they are put together, and what is wrong with them."""

    path: str
    leaves: dict[str, np.ndarray]
    problems: list[errors.Problem]

    def problem(self, name: str, what: str, remedy: str) -> None:
        self.problems.append(errors.Problem(f"{self.path}: {name}", None, what, remedy))

    def fits(self, name: str, array: np.ndarray, shape: Sequence[int]) -> bool:
        if array.shape == tuple(shape):
            return True
        what = f"has shape {list(array.shape)}, but this model makes it {list(shape)}"
        self.problem(name, what, "use the base that the adapter was trained on")
        return False


def take_adapters(
    rest: Rest,
    settings: adapter_config.AdapterConfig,
    model: causal_lm.CausalLM,
    result: Leaves,
) -> dict[str, targets.Target]:
    """Moves the adapters' tensors out of `rest` into stacked leaves."""
    adapted: dict[str, targets.Target] = {}
    for path, module in model.modules.items():
        target = _target(rest, settings, module, result)
        if target is None:
            continue
        adapted[path] = target
        infos = trees.flatten(adapters.adapter_infos(model.modules, {path: target}))
        for name, leaf in kinds.of_target(target).peft_leaves(target).items():
            arrays = [rest[layer].pop(leaf.tensor) for layer in target.names]
            shape = infos[f"{path}.{name}"].shape
            stacked = _stacked(name, leaf, arrays, target, shape, result)
            if stacked is not None:
                result.leaves[Path(path) / name] = stacked
    return adapted


def _target(
    rest: Rest,
    settings: adapter_config.AdapterConfig,
    module: targets.AdaptableModule,
    result: Leaves,
) -> targets.Target | None:
    """The adapters that the tensors give a module; None if it has none."""
    kind, is_embedding = settings.adapter_kind, module.kind == "embedding"
    # On an embedding a kind may have a meaning of its own, which `kinds.conflicts` refuses.
    if not (is_embedding or kind.adapts(module)):
        return None
    variants = [kind.variant(name, settings.patterns) for name in module.names]
    probe = targets.Target((), (), (), (), is_embedding, kind.name, variants[0])
    first = next(iter(kind.peft_leaves(probe).values())).tensor
    layers = [i for i, name in enumerate(module.names) if first in rest.get(name, {})]
    if not layers:
        return None
    names = tuple(module.names[i] for i in layers)
    if len({variants[i] for i in layers}) > 1:
        what = "has an adapter of one form in some layers, and of another one in the others"
        result.problem(names[0], what, "merge the adapter into its base in PEFT")
    target = dataclasses.replace(
        probe,
        layers=tuple(layers) if module.is_stacked else (),
        names=names,
        ranks=tuple(adapter_config.rank(settings, name) for name in names),
        scalings=tuple(adapter_config.scaling(settings, name) for name in names),
        variant=variants[layers[0]],
    )
    for name, scaling in zip(target.names, target.scalings, strict=True):
        if not float(_FLOAT32.tiny) <= scaling <= float(_FLOAT32.max):
            what = f"is scaled by {scaling:g}, which float32 cannot hold"
            result.problem(name, what, "correct lora_alpha and r")
    return target


def _stacked(
    name: str,
    leaf: kinds.Leaf,
    arrays: Sequence[np.ndarray],
    target: targets.Target,
    shape: Sequence[int],
    result: Leaves,
) -> np.ndarray | None:
    """One leaf of PEFT's tensors: in our layout, padded, stacked, float32; None if one is wrong."""
    padded = tuple(shape[1:] if target.layers else shape)
    layers = []
    for module, r, array in zip(target.names, target.ranks, arrays, strict=True):
        used = leaf.shape(padded, r)
        if result.fits(f"{module}.{name}", array, leaf.in_peft(np.empty(used, bool)).shape):
            layer = np.zeros(padded, np.float32)
            layer[tuple(map(slice, used))] = leaf.from_peft(array.astype(np.float32))
            layers.append(layer)
    if len(layers) < len(arrays):
        return None
    return np.stack(layers) if target.layers else layers[0]


def take_token_rows(
    rest: Rest,
    settings: adapter_config.AdapterConfig,
    model: causal_lm.CausalLM,
    result: Leaves,
) -> tuple[int, ...]:
    name = model.modules[targets.EMBEDDING].names[0]
    rows = rest.get(name, {}).pop(kinds.TOKEN_ROWS.leaves[0], None)
    if rows is None:
        return ()
    ids = next(iter(settings.trainable_token_indices.values()))
    size = model.modules[targets.EMBEDDING].weight.shape[0]
    for token in (token for token in ids if token >= size):
        result.problem(name, f"has the row of token {token}, the base has {size} rows", "")
    if result.fits(name, rows, (len(ids), model.modules[targets.EMBEDDING].weight.shape[1])):
        result.leaves[kinds.TOKEN_ROWS.path] = rows.astype(np.float32)
    return tuple(ids)


def take_copies(rest: Rest, model: causal_lm.CausalLM, result: Leaves) -> dict[str, np.ndarray]:
    """The base's own weights that PEFT stores beside adapters on the embedding or the head."""
    copies: dict[str, np.ndarray] = {}
    for path in (targets.EMBEDDING, targets.HEAD):
        name = model.modules[path].names[0]
        copy = rest.get(name, {}).pop("base_weight", None)
        if copy is not None and result.fits(name, copy, model.modules[path].weight.shape):
            has_weight = f"{path}.weight" in model.flat_infos
            copies[f"{path if has_weight else targets.EMBEDDING}.weight"] = copy
    return copies


def take_whole(rest: Rest, model: causal_lm.CausalLM, result: Leaves) -> tuple[str, ...]:
    """Moves whole weights and biases out of `rest`."""
    if model.is_tied:  # The two are equal, see `_tied_problems`.
        rest.get(model.modules[targets.HEAD].names[0], {}).pop("weight", None)
    full = []
    for leaf, hf_names in model.hf_names.items():
        tensor = Path(leaf).name
        names = [Path(name).parent for name in hf_names]
        having = [name for name in names if tensor in rest.get(name, {})]
        if not having:
            continue
        if len(having) < len(names):
            what = f"is trained whole in {len(having)} of {len(names)} layers, which needs them all"
            result.problem(having[0], what, "")
        arrays = [rest[name].pop(tensor) for name in having]
        info = model.flat_infos[leaf]
        fitting = [result.fits(n, a, info.file_shape) for n, a in zip(having, arrays, strict=True)]
        if all(fitting):
            layers = [(a.T if info.is_transposed else a).astype(np.float32) for a in arrays]
            result.leaves[leaf] = np.stack(layers) if info.is_stacked else layers[0]
        full.append(leaf)
    return tuple(full)
