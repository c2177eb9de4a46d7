"""Adapters from a MaxText checkpoint, under Hugging Face names and in PEFT's shapes.

    decoder.layers.self_attention.query.kernel_lora_a   [D, L, r]     scanned along axis 1
    decoder.layers.self_attention.query.kernel_lora_b   [r, L, N·H]

MaxText adds `x A B · lora_alpha / lora_rank` to what a kernel gives. So B differs from Hugging
Face's as the columns of its kernel do: by the factor of queries, and by the order within heads.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora import errors
from purelora.io import array_store, maxtext, maxtext_names, peft, peft_config
from purelora.models import causal_lm

_NO_FINGERPRINT = "it does not say which base it belongs to, so that is not checked"


class _Pair(NamedTuple):
    """The two arrays of an adapted module.

    Attributes:
      place: where its weight lies.
      a, b: paths of the arrays.
    """

    place: maxtext.Place
    a: str
    b: str


def read(
    folder: str, config: Mapping[str, Any], where: str, *, lora_alpha: float | None
) -> peft.Adapter:
    """Reads the adapters in a folder of arrays.

    Args:
      folder: from `maxtext.find`.
      config: the config.json of their base.
      where: names that in messages.
      lora_alpha: what a checkpoint that does not say it is taken to have; None: that is an error.

    Raises:
      ModelError: there are none, they do not fit the base or each other, or the folder is damaged.
    """
    model = causal_lm.from_hf(config, where, dtype="float32")
    named = maxtext.parameters(folder)
    own = {path: stored for path, stored in named.items() if maxtext.is_adapter(path)}
    if not own:
        what = "holds no adapters"
        remedy = "give a MaxText checkpoint that has arrays kernel_lora_a and kernel_lora_b"
        raise errors.ModelError(folder, None, what, remedy)
    known = maxtext.places(model, config, where, scanned=maxtext.is_scanned(folder, list(own)))
    pairs = {
        name.removesuffix(".weight"): _Pair(p, f"{p.path}_lora_a", f"{p.path}_lora_b")
        for name, p in known.items()
        if p.path.endswith(".kernel") and {f"{p.path}_lora_a", f"{p.path}_lora_b"} & own.keys()
    }
    problems = list(_membership(folder, pairs, own))
    if problems:
        raise errors.ModelError.of(errors.first(problems, folder))
    arrays = _Arrays(array_store.open_store(folder, list(own.values())), own)
    first = next(iter(pairs.values()))
    r = arrays.shape(first.a)[-1]
    axis = arrays.fitted_axis(folder, pairs.values(), maxtext_names.sizes(model.config), r)
    settings, notes = _settings(folder, r, tuple(pairs), lora_alpha)
    modules = {
        name: arrays.module(pair, maxtext_names.sizes(model.config), axis)
        for name, pair in pairs.items()
    }
    return peft.Adapter(folder, settings, modules, None, notes)


def _membership(
    folder: str, pairs: Mapping[str, _Pair], own: Mapping[str, str]
) -> Iterator[errors.Problem]:
    """Arrays without their other half, and of modules that purelora cannot adapt."""
    wanted = {path for pair in pairs.values() for path in (pair.a, pair.b)}
    for path in sorted(wanted - own.keys()):
        yield errors.Problem(folder, None, f"holds no array {path!r}", "")
    for path in sorted(own.keys() - wanted):
        what = f"holds an array {path!r} that is of no linear module of this architecture"
        yield errors.Problem(folder, None, what, "is config.json of another model?")


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The adapters' arrays by path in MaxText's model."""

    store: array_store.Store
    names: Mapping[str, str]

    def shape(self, path: str) -> tuple[int, ...]:
        return self.store.shape(self.names[path])

    def fitted_axis(self, folder: str, pairs: Any, sizes: Mapping[str, int], r: int) -> int:
        """The scan axis. Raises ModelError unless all arrays have the shapes that they must."""
        wanted = {}
        for pair in pairs:
            outs, ins = map(_product, pair.place.leaf.group_sizes(sizes))
            layer = pair.place.layer
            depth = None if layer.number is None else layer.depth
            wanted[pair.a] = maxtext.Stack((ins, r), depth)
            wanted[pair.b] = maxtext.Stack((r, outs), depth)
        fitted = maxtext.fit(folder, wanted, {path: self.shape(path) for path in wanted})
        if fitted.problems:
            raise errors.ModelError.of(errors.first(fitted.problems, folder))
        return fitted.axis

    def module(self, pair: _Pair, sizes: Mapping[str, int], axis: int) -> dict[str, np.ndarray]:
        """The adapter of one module in PEFT's shapes."""
        a, b = (self._layer(path, pair.place.layer, axis) for path in (pair.a, pair.b))
        outs, _ = pair.place.leaf.group_sizes(sizes)
        columns = pair.place.change.undone(b.reshape(len(b), *outs))
        return {"lora_A": a.T, "lora_B": columns.reshape(len(b), -1).T}

    def _layer(self, path: str, layer: maxtext_names.Layer, axis: int) -> np.ndarray:
        box = [slice(0, size) for size in self.shape(path)]
        if layer.number is None:
            return self.store.read(self.names[path], tuple(box))
        box[axis] = slice(layer.number, layer.number + 1)
        return self.store.read(self.names[path], tuple(box)).squeeze(axis)


def _product(dims: tuple[int, ...]) -> int:
    return int(np.prod(dims))


def _settings(
    folder: str, r: int, targets: tuple[str, ...], lora_alpha: float | None
) -> tuple[peft_config.AdapterConfig, tuple[str, ...]]:
    """PEFT's settings and what a user should be told, from what MaxText noted beside the arrays."""
    step = os.path.join(folder, os.pardir)
    noted = array_store.notes(step).get("lora") or {}
    rank, alpha = noted.get("lora_rank", r), noted.get("lora_alpha", lora_alpha)
    where = os.path.join(folder, os.pardir, array_store.NOTES)
    if rank != r:
        what = f"is not the rank {r} of the arrays"
        raise errors.ModelError(f"{where}: lora_rank", rank, what, "is it of another checkpoint?")
    if alpha is None:
        what = "does not say its lora_alpha"
        remedy = "start a run from it: init_adapter takes it to be lora.lora_alpha"
        raise errors.ModelError(folder, None, what, remedy)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0:
        what = "scales the adapters to nothing"
        raise errors.ModelError(f"{where}: lora_alpha", alpha, what, "it must be above 0")
    notes: tuple[str, ...] = (_NO_FINGERPRINT,)
    if "lora_alpha" not in noted:
        notes = (f"it does not say its lora_alpha, which is taken to be {alpha:g}", *notes)
    return peft_config.AdapterConfig(r=r, lora_alpha=float(alpha), target_modules=targets), notes
