"""Weights from a MaxText checkpoint, under Hugging Face names and in Hugging Face layout.

A checkpoint holds arrays and little else, so config.json and the tokenizer come from a Hugging Face
folder. Its arrays must be exactly those of the model that config.json describes.

Some programs write a stack of scanned layers as a single chunk, of which no part can be read by
itself. Such a stack is read once and kept until its last layer has been asked for.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors, layer_axis
from purelora.formats import array_store, source
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.maxtext import names as maxtext_names
from purelora.interop.maxtext import places as maxtext_places
from purelora.models import causal_lm
from purelora.weights import hf_folder as hf

# MaxText may pad the vocabulary of its tables for the devices: Gemma 2's by 128 rows.
_MOST_PADDING = 1024


@dataclasses.dataclass(frozen=True)
class MaxTextSource:
    """The weights of a MaxText checkpoint. Made by `open_folder`.

    Attributes:
      path: the folder of arrays.
      hf_folder: the folder that config.json comes from.
      config: the contents of config.json.
      model: the model that config.json describes.
      places: where each tensor is, by Hugging Face name.
      layers: reads single layers of the arrays.
    """

    path: str
    hf_folder: str
    config: Mapping[str, Any]
    model: causal_lm.CausalLM
    places: Mapping[str, maxtext_places.Place]
    layers: "LayerReader"
    identity: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        return {name: self._shape(place.leaf) for name, place in self.places.items()}

    def read(self, name: str) -> source.Tensor:
        """Reads one tensor into Hugging Face layout.

        Where MaxText's values are not Hugging Face's (`maxtext_names.Change`), it is float32. Its
        digest is the same whether and along which axis layers are scanned, and however the
        vocabulary is padded.
        """
        source.check_name(self.path, name, self.places)
        shape = self._shape(self.places[name].leaf)
        array = np.ascontiguousarray(self.read_part(name, tuple(slice(0, n) for n in shape)))
        known = {dtype: dtype_name for dtype_name, dtype in source.DTYPES.items()}
        return source.Tensor(array, source.digest(known[array.dtype], array.shape, array))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one tensor in `box`, which may cut heads: whole heads are read for it."""
        source.check_name(self.path, name, self.places)
        place = self.places[name]
        leaf = place.leaf
        groups = leaf.group_sizes(maxtext_names.sizes(self.model.config))
        covers = [_cover(group, part) for group, part in zip(groups, box, strict=False)]
        outs, ins = covers[0], covers[1] if leaf.ins else _Cover((), slice(None))
        order = (outs, ins) if leaf.is_table else (ins, outs)
        expert = () if place.expert is None else (slice(place.expert, place.expert + 1),)
        stored = self.layers.read(place, expert + order[0].dims + order[1].dims)
        values = place.change.undone(stored if place.expert is None else stored[0])
        if not leaf.ins:
            return values.reshape(-1)[outs.rest]
        rows = math.prod(values.shape[: len(order[0].dims)])
        flat = values.reshape(rows, -1)
        return (flat if leaf.is_table else flat.T)[outs.rest, ins.rest]

    def _shape(self, leaf: maxtext_names.Leaf) -> tuple[int, ...]:
        outs, ins = leaf.group_sizes(maxtext_names.sizes(self.model.config))
        return (math.prod(outs), math.prod(ins)) if ins else (math.prod(outs),)


class _Cover(NamedTuple):
    """How to read a range of a dimension that is stored as several, such as N·H as [N, H].

    Attributes:
      dims: a slice for each stored dimension; together the least part that covers the range.
      rest: the range within that part, when the part is flattened again.
    """

    dims: tuple[slice, ...]
    rest: slice


def _cover(sizes: tuple[int, ...], part: slice) -> _Cover:
    """Covers the range `part` of a dimension that is stored as dimensions of `sizes`."""
    inner = math.prod(sizes[1:])
    first, last = part.start // inner, -(-part.stop // inner)
    whole = tuple(slice(0, size) for size in sizes[1:])
    rest = slice(part.start - first * inner, part.stop - first * inner)
    return _Cover((slice(first, last), *whole), rest)


class LayerReader:
    """Reads single layers of stacked arrays, and keeps stacks that must be read as a whole."""

    def __init__(self, store: array_store.Store, names: Mapping[str, str], axis: int, keep: int):
        """Takes what it reads from.

        Args:
          store: the arrays.
          names: their names in the store, by path in MaxText's model.
          axis: the axis of the layers in stacked arrays.
          keep: how many stacks are kept at most: as many as consecutive layers are spread over.
        """
        self._store = store
        self._names = names
        self._axis = axis
        self._keep = keep
        self._kept: dict[str, np.ndarray] = {}

    def read(self, place: maxtext_places.Place, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one layer of an array in `box`, a slice for each of its dimensions."""
        name, layer = self._names[place.path], place.layer
        if layer.number is None:
            return self._store.read(name, box)
        if self._store.chunk(name)[self._axis] == 1:
            own = slice(layer.number, layer.number + 1)
            part = (*box[: self._axis], own, *box[self._axis :])
            one: np.ndarray = layer_axis.layer_of(self._store.read(name, part), 0, self._axis)
            return one
        stack = self._kept.pop(name, None)
        if stack is None:
            whole = tuple(slice(0, size) for size in self._store.shape(name))
            stack = self._store.read(name, whole)
        if not place.is_last:
            self._kept[name] = stack
            for oldest in list(self._kept)[: -self._keep]:
                del self._kept[oldest]
        # A view would keep the whole stack in memory.
        return np.array(layer_axis.layer_of(stack, layer.number, self._axis)[box])


def open_folder(path: str, hf_folder: str) -> MaxTextSource:
    """Opens a folder of arrays and checks that they are those of a model; reads no weights.

    Args:
      path: the folder of arrays, from `maxtext_folder.find`.
      hf_folder: a Hugging Face folder with the config.json of the model.

    Raises:
      ModelError: a file is damaged; or arrays are missing, surplus, of another shape or not floats,
        all in one error.
    """
    where = os.path.join(hf_folder, "config.json")
    if not os.path.lexists(where):
        remedy = "give the folder of config.json and tokenizer.json of the same model"
        raise errors.ModelError(hf_folder, None, "has no config.json", remedy)
    config = hf.read_config(hf_folder)
    model = causal_lm.from_hf(config, where, dtype="float32")
    named = maxtext_folder.parameters(path)
    base = {own: stored for own, stored in named.items() if not maxtext_folder.is_adapter(own)}
    if not base:
        what = "holds adapters without their base"
        remedy = "give it as init_adapter, and the base as model.path"
        raise errors.ModelError(path, None, what, remedy)
    scanned = maxtext_folder.is_scanned(path, list(base))
    known = maxtext_places.places(model, config, where, scanned=scanned)
    head = maxtext_names.TOP["lm_head.weight"]
    if model.is_tied and head.name in base:  # `load` compares it with the table.
        known["lm_head.weight"] = maxtext_places.Place(
            head.name, head, maxtext_names.Layer("", ""), maxtext_names.Change()
        )
    store = array_store.open_store(
        path, [base[place.path] for place in known.values() if place.path in base]
    )
    fitted = _fit(path, known, base, store, model)
    problems = [*_membership(path, known, base), *fitted.problems]
    if problems:
        raise errors.ModelError.of(errors.first(problems, path))
    family = maxtext_names.family(config, where)
    layers = LayerReader(store, base, fitted.axis, max(family.period, len(family.roles)))
    return MaxTextSource(path, hf_folder, config, model, known, layers)


def _membership(
    path: str, known: Mapping[str, maxtext_places.Place], base: Mapping[str, str]
) -> Iterator[errors.Problem]:
    """A problem for each array that is missing or surplus."""
    wanted = dict.fromkeys(place.path for place in known.values())
    for name in wanted:
        if name not in base:
            yield errors.Problem(path, None, f"holds no array {name!r}", "")
    for name in base:
        if name not in wanted:
            what = f"holds an array {name!r} that this architecture does not have"
            yield errors.Problem(path, None, what, "is config.json of another model?")


def _fit(
    path: str,
    known: Mapping[str, maxtext_places.Place],
    base: Mapping[str, str],
    store: array_store.Store,
    model: causal_lm.CausalLM,
) -> maxtext_places.Fit:
    """Compares shapes and dtypes of the base's arrays with those that there must be."""
    found = {own: store.shape(stored) for own, stored in base.items() if stored in store.arrays}
    sizes = maxtext_names.sizes(model.config)
    table = maxtext_names.TOP["model.embed_tokens.weight"].name
    rows = found[table][0] if table in found else 0
    if 0 <= rows - sizes["vocab"] < _MOST_PADDING:
        sizes["vocab"] = rows
    wanted = {}
    for place in known.values():
        depth = None if place.layer.number is None else place.layer.depth
        wanted[place.path] = maxtext_places.Expected(place.leaf.stored_shape(sizes), depth)
    fitted = maxtext_places.fit(path, wanted, found)
    floats = list(source.DTYPES.values())
    types = [
        source.dtype_error(path, own, str(store.dtype(base[own]))).problems[0]
        for own in found
        if store.dtype(base[own]) not in floats
    ]
    return maxtext_places.Fit(fitted.axis, [*fitted.problems, *types])
