"""Out of trained leaves: the adapter of a run or a step, in PEFT's shapes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from purelora.core.paths import Path
from purelora.interop.peft import record
from purelora.interop.peft.adapter_config import AdapterConfig
from purelora.interop.peft.artefact import Adapter
from purelora.lora import kinds, targets

Leaves = Mapping[str, np.ndarray]


def unrolled(
    leaves: Leaves,
    known: record.Record,
    *,
    path: str,
    base_fingerprint: str | None,
    initial: Leaves | None = None,
) -> Adapter:
    """The adapter of trained leaves.

    Args:
      leaves: the trained leaves by path, float32.
      known: what the checkpoint says of them.
      path: where they come from, for messages.
      base_fingerprint: identity of the original base.
      initial: the adapter that was taken out of the weights (`lora_a`, `lora_b` by path), if one
        was. The result is then for the original base: what was trained less what was taken out,
        with twice the rank.
    """
    modules: dict[str, dict[str, np.ndarray]] = {}
    for module, target in known.adaptation.targets.items():
        for position, name in enumerate(target.names):
            tensors = _module_tensors(module, target, position, leaves)
            if initial:
                tensors = _difference(tensors, _module_tensors(module, target, position, initial))
            modules.setdefault(name, {}).update(tensors)
    for leaf, layout in known.whole.items():
        for name, tensors in _whole_tensors(Path(leaf), leaves[leaf], layout):
            modules.setdefault(name, {}).update(tensors)
    if known.adaptation.token_ids:
        rows = kinds.TOKEN_ROWS
        modules.setdefault(known.embedding, {})[rows.leaves[0]] = leaves[rows.path]
    config = _doubled(known.config) if initial else known.config
    return Adapter(path, config, modules, base_fingerprint, interleaved=known.interleaved)


def _module_tensors(
    module: str, target: targets.Target, position: int, leaves: Leaves
) -> dict[str, np.ndarray]:
    """One module's adapter in PEFT's shapes, without the padding of ranks."""
    tensors = {}
    for name, leaf in kinds.of_target(target).peft_leaves(target).items():
        if f"{module}.{name}" not in leaves:
            continue
        array = leaves[f"{module}.{name}"]
        layer = array[position] if target.layers else array
        used = leaf.shape(layer.shape, target.ranks[position])
        tensors[leaf.tensor] = leaf.in_peft(layer[tuple(map(slice, used))])
    return tensors


def _difference(
    trained: Mapping[str, np.ndarray], initial: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return {
        "lora_A": np.concatenate([trained["lora_A"], initial["lora_A"]], axis=0),
        "lora_B": np.concatenate([trained["lora_B"], -initial["lora_B"]], axis=1),
    }


def _whole_tensors(
    leaf: Path, array: np.ndarray, layout: record.WholeLeaf
) -> Iterable[tuple[str, dict[str, np.ndarray]]]:
    layers = array if layout.stacked else array[None]
    for name, layer in zip(layout.modules, layers, strict=True):
        yield name, {leaf.name: layer.T if layout.transposed else layer}


def _doubled(settings: AdapterConfig) -> AdapterConfig:
    """Twice the rank at the same scaling."""
    factor = math.sqrt(2) if settings.use_rslora else 2
    return dataclasses.replace(
        settings,
        r=2 * settings.r,
        lora_alpha=factor * settings.lora_alpha,
        rank_pattern={k: 2 * r for k, r in settings.rank_pattern.items()},
        alpha_pattern=_doubled_alphas(settings, factor),
        init_lora_weights="default",
    )


def _doubled_alphas(settings: AdapterConfig, factor: float) -> dict[str, float]:
    return {k: factor * alpha for k, alpha in settings.alpha_pattern.items()}
