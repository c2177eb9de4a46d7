"""Adapters from a MaxText checkpoint, under Hugging Face names and in PEFT's shapes.

    decoder.layers.self_attention.query.kernel_lora_a   [D, L, r]     scanned along axis 1
    decoder.layers.self_attention.query.kernel_lora_b   [r, L, N·H]

MaxText adds `x A B · lora_alpha / lora_rank` to the output of a kernel. Its outputs are not all
those of Hugging Face's model (`maxtext_names.Change`), and what is true of the columns of a kernel
is true of the columns of B: those of queries hold the scale of the scores, and those of queries and
keys may be in another order within a head.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors, layer_axis
from purelora.formats import array_store
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.maxtext import names as maxtext_names
from purelora.interop.maxtext import places as maxtext_places
from purelora.interop.peft import adapter_config, artefact
from purelora.models import causal_lm

_NO_FINGERPRINT = "it does not say which base it belongs to, so that is not checked"


class _Pair(NamedTuple):
    """The two arrays of an adapted module.

    Attributes:
      place: where the module's weight is in a checkpoint of the base.
      a, b: paths of `lora_a` and `lora_b` in MaxText's model.
    """

    place: maxtext_places.Place
    a: str
    b: str


def read(
    folder: str, config: Mapping[str, Any], where: str, *, lora_alpha: float | None
) -> artefact.Adapter:
    """Reads the adapters in a folder of arrays.

    Args:
      folder: from `maxtext_folder.find`.
      config: the config.json of the base.
      where: the name of that file, for messages.
      lora_alpha: used if the checkpoint does not state its own; None makes that an error.

    Raises:
      ModelError: there are none, they do not fit the base or each other, or the folder is damaged.
    """
    model = causal_lm.from_hf(config, where, dtype="float32")
    named = maxtext_folder.parameters(folder)
    own = {path: stored for path, stored in named.items() if maxtext_folder.is_adapter(path)}
    if not own:
        what = "holds no adapters"
        remedy = "give a MaxText checkpoint that has arrays kernel_lora_a and kernel_lora_b"
        raise errors.ModelError(folder, None, what, remedy)
    scanned = maxtext_folder.is_scanned(folder, list(own))
    known = maxtext_places.places(model, config, where, scanned=scanned)
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
    return artefact.Adapter(folder, settings, modules, None, notes)


def _membership(
    folder: str, pairs: Mapping[str, _Pair], own: Mapping[str, str]
) -> Iterator[errors.Problem]:
    """A problem for each array that lacks its other half, or that is of no linear module."""
    wanted = {path for pair in pairs.values() for path in (pair.a, pair.b)}
    for path in sorted(wanted - own.keys()):
        yield errors.Problem(folder, None, f"holds no array {path!r}", "")
    for path in sorted(own.keys() - wanted):
        what = f"holds an array {path!r} that is of no linear module of this architecture"
        yield errors.Problem(folder, None, what, "is config.json of another model?")


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """Reads the adapters' arrays.

    Attributes:
      store: the arrays.
      names: their names in the store, by path in MaxText's model.
    """

    store: array_store.Store
    names: Mapping[str, str]

    def shape(self, path: str) -> tuple[int, ...]:
        return self.store.shape(self.names[path])

    def fitted_axis(self, folder: str, pairs: Any, sizes: Mapping[str, int], r: int) -> int:
        """The axis of the layers. Raises ModelError for arrays of another shape than expected."""
        wanted = {}
        for pair in pairs:
            outs, ins = map(math.prod, pair.place.leaf.group_sizes(sizes))
            layer = pair.place.layer
            depth = None if layer.number is None else layer.depth
            wanted[pair.a] = maxtext_places.Expected((ins, r), depth)
            wanted[pair.b] = maxtext_places.Expected((r, outs), depth)
        fitted = maxtext_places.fit(folder, wanted, {path: self.shape(path) for path in wanted})
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
        read = self.store.read(self.names[path], tuple(box))
        one: np.ndarray = layer_axis.layer_of(read, 0, axis)
        return one


def _settings(
    folder: str, r: int, targets: tuple[str, ...], lora_alpha: float | None
) -> tuple[adapter_config.AdapterConfig, tuple[str, ...]]:
    """PEFT's config and the notes for the user, from the metadata that MaxText saved with a step.

    Raises:
      ModelError: the stated rank is not that of the arrays, or there is no usable lora_alpha.
    """
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
    return adapter_config.AdapterConfig(r=r, lora_alpha=float(alpha), target_modules=targets), notes
