"""Weights from a MaxText checkpoint, under Hugging Face names and in Hugging Face layout.

    <run>/checkpoints/<step>/items        what MaxText's trainers and its converter write
                            /model_params what its SFT trainer (of Tunix) writes

It holds arrays and little else, so config.json and the tokenizer come from a Hugging Face folder.
What config.json says decides which arrays there must be and in which shapes: the arrays of the
model must be those and no others. So it also tells whether and along which axis layers are scanned.

A program that writes unsharded arrays stores a stack of layers in one piece. Such a stack is read
once and kept until its last layer has been asked for; otherwise a layer is read by itself.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from purelora import errors, scan_axis
from purelora.io import array_store, hf, maxtext_names, source
from purelora.models import causal_lm

_ITEMS = ("items", "model_params")
_TMP = ".orbax-checkpoint-tmp"
# The rows of a table may be filled up for the devices, MaxText's Gemma 2 has 128 more than tokens.
_MOST_PADDING = 1024
_RANDOM_STATE = {"rngs", "dropout"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_ADAPTER = re.compile(r"_lora_[ab]$")


# ---- folders -----------------------------------------------------------------------------------


def find(path: str) -> str | None:
    """The folder of arrays that `path` names: itself, or of a step, or of the newest one of a run.

    Returns:
      None if `path` is not of a MaxText checkpoint.

    Raises:
      ModelError: it is, but none is complete.
    """
    if array_store.is_store(path):
        # A step of purelora has a folder `meta` beside its arrays.
        return None if os.path.isdir(os.path.join(path, os.pardir, "meta")) else path
    if _TMP in os.path.basename(os.path.normpath(path)) and _has_items(path):
        raise _unfinished(path)
    held = _items_of(path)
    if held is not None:
        return held
    inner = os.path.join(path, "checkpoints")
    folder = inner if os.path.isdir(inner) else path
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [name for name in names if name.partition(".")[0].isdecimal()]
    if not any(_has_items(os.path.join(folder, name)) for name in steps):
        return None
    complete = sorted((name for name in steps if name.isdecimal()), key=int)
    newest = os.path.join(folder, complete[-1]) if complete else folder
    held = _items_of(newest)
    if held is None:
        raise _unfinished(newest)
    return held


def _has_items(step: str) -> bool:
    names = os.listdir(step) if os.path.isdir(step) else []
    return any(name.partition(".")[0] in _ITEMS for name in names)


def _items_of(step: str) -> str | None:
    held = [os.path.join(step, name) for name in _ITEMS]
    return next((folder for folder in held if array_store.is_store(folder)), None)


def _unfinished(path: str) -> errors.ModelError:
    what = "holds no complete checkpoint: writing it was not finished"
    return errors.ModelError(path, None, what, "name the folder of a complete step")


# ---- what is in a folder -----------------------------------------------------------------------


def parameters(folder: str) -> dict[str, str]:
    """The parameters in a folder of arrays: their paths in MaxText's model, with stored names.

    Left out are moments, the step, and the state of random numbers. MaxText's own trainers put the
    parameters under `params`; its SFT trainer stores the whole model, with `value` at the end.

    Raises:
      ModelError: the folder is damaged, or holds no model.
    """
    found = array_store.leaves(folder)
    own = {name: keys for name, keys in found.items() if keys[0] == "params"} or found
    paths = {}
    for name, keys in own.items():
        if _RANDOM_STATE & set(keys):
            continue
        while keys[:1] == ("params",):
            keys = keys[1:]
        paths[".".join(keys[:-1] if keys[-1:] == ("value",) else keys)] = name
    if not any(path.startswith(("decoder.", "token_embedder.")) for path in paths):
        what = "holds no parameters of a MaxText model"
        raise errors.ModelError(folder, None, what, "give the folder of a MaxText checkpoint")
    return paths


def is_adapter(path: str) -> bool:
    """Whether a parameter is of an adapter."""
    return _ADAPTER.search(path) is not None


def is_scanned(folder: str, paths: Sequence[str]) -> bool:
    """Whether layers are stacked.

    Raises:
      ModelError: there are no layers, or some are and some are not.
    """
    stacked = any(
        path.startswith(("decoder.layers.", "decoder.layers_remainder.")) for path in paths
    )
    single = any(re.match(r"decoder\.layers_\d", path) for path in paths)
    if stacked == single:
        what = "holds layers both scanned and not" if stacked else "holds no layers of a decoder"
        raise errors.ModelError(folder, None, what, "is it of a model that purelora knows?")
    return stacked


class Place(NamedTuple):
    """Where a parameter lies.

    Attributes:
      path: of the array in MaxText's model.
      leaf: what the array holds of a layer.
      layer: the layer.
      change: how its values differ.
      expert: the number of the expert, None if it is of none.
      is_last: whether it is the last in its array.
    """

    path: str
    leaf: maxtext_names.Leaf
    layer: maxtext_names.Layer
    change: maxtext_names.Change
    expert: int | None = None
    is_last: bool = True


def places(
    model: causal_lm.CausalLM, config: Mapping[str, Any], where: str, *, scanned: bool
) -> dict[str, Place]:
    """Where each tensor of a model lies, by Hugging Face name.

    Raises:
      ModelError: MaxText has no such model, or computes it otherwise.
    """
    family = maxtext_names.family(config, where)
    count = model.config.num_hidden_layers
    if count % len(family.roles):
        what = f"is not a multiple of {len(family.roles)}, as in MaxText"
        raise errors.ModelError(f"{where}: num_hidden_layers", count, what, "is it the model's?")
    layers = family.layers(count, scanned)
    outside = maxtext_names.Layer("", "")
    found = {}
    for name in model.layout.shapes:
        change = maxtext_names.change(name, family, model.config, config, where)
        number, _, own = name.removeprefix("model.layers.").partition(".")
        numbered = _EXPERT.fullmatch(own)
        expert = int(numbered[2]) if numbered else None
        own = f"{numbered[1]}.{numbered[3]}" if numbered else own
        if name in maxtext_names.TOP:
            leaf = maxtext_names.TOP[name]
            found[name] = Place(leaf.name, leaf, outside, change)
        elif own in family.leaves:
            leaf, layer = family.leaves[own], layers[int(number)]
            is_last = expert is None or expert == maxtext_names.sizes(model.config)["experts"] - 1
            is_last &= layer.number is None or layer.number == layer.depth - 1
            found[name] = Place(layer.path(leaf), leaf, layer, change, expert, is_last)
        else:
            what = f"says that there is a tensor {name!r}, which MaxText does not have"
            raise errors.ModelError(where, None, what, "is it the model's?")
    return found


# ---- the scan axis -----------------------------------------------------------------------------


class Stack(NamedTuple):
    """An array that must be there, maybe a stack of layers.

    Attributes:
      shape: of one layer.
      depth: how many layers it has, None for an array that is no stack.
    """

    shape: tuple[int, ...]
    depth: int | None

    def stacked(self, axis: int) -> tuple[int, ...]:
        """Its shape where layers are scanned along `axis`."""
        if self.depth is None:
            return self.shape
        return (*self.shape[:axis], self.depth, *self.shape[axis:])


class Fit(NamedTuple):
    """How the arrays of a folder fit those that there must be.

    Attributes:
      axis: along which layers are scanned.
      problems: arrays of another shape, or that both axes fit.
    """

    axis: int
    problems: list[errors.Problem]


def fit(where: str, wanted: Mapping[str, Stack], found: Mapping[str, tuple[int, ...]]) -> Fit:
    """The axis of the layers: the one by which the shapes of all arrays are as they must be.

    Args:
      where: names the folder in messages.
      wanted: the arrays by name.
      found: shapes of those that there are.
    """
    there = [name for name in wanted if name in found]
    wrong = {a: [n for n in there if found[n] != wanted[n].stacked(a)] for a in (0, 1)}
    axis = min(wrong, key=lambda a: len(wrong[a]))
    is_stack = any(wanted[name].depth is not None for name in there)
    if is_stack and not (wrong[0] or wrong[1]):
        what = "fits scan axis 0 and 1: there are as many layers as the arrays are long"
        remedy = "save it with scan_layers=False"
        return Fit(axis, [errors.Problem(where, None, what, remedy)])
    return Fit(axis, [_shape_problem(where, n, wanted[n], found[n]) for n in wrong[axis]])


def _shape_problem(where: str, name: str, wanted: Stack, found: tuple[int, ...]) -> errors.Problem:
    either = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(wanted.stacked, (0, 1))))
    what = f"has shape {list(found)}, but config.json makes it {either}"
    return errors.Problem(f"{where}: {name}", None, what, "")


# ---- the source --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MaxTextSource:
    """The weights of a MaxText checkpoint. Made by `open_folder`.

    Attributes:
      path: the folder of arrays.
      hf_folder: the folder that config.json comes from.
      config: its contents.
      model: the model that this describes.
      places: where each parameter lies, by Hugging Face name.
      stacks: reads layers.
    """

    path: str
    hf_folder: str
    config: Mapping[str, Any]
    model: causal_lm.CausalLM
    places: Mapping[str, Place]
    stacks: "Layers"
    identity: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        return {name: self._shape(place.leaf) for name, place in self.places.items()}

    def read(self, name: str) -> source.Tensor:
        """Reads one tensor into Hugging Face layout.

        It is float32 where MaxText's values are not Hugging Face's. Its digest depends neither on
        how layers are scanned nor on padding.
        """
        source.check_name(self.path, name, self.places)
        shape = self._shape(self.places[name].leaf)
        array = np.ascontiguousarray(self.read_part(name, tuple(slice(0, n) for n in shape)))
        known = {dtype: dtype_name for dtype_name, dtype in source.DTYPES.items()}
        return source.Tensor(array, source.digest(known[array.dtype], array.shape, array))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one tensor in `box`; whole heads of the file are read."""
        source.check_name(self.path, name, self.places)
        place = self.places[name]
        leaf = place.leaf
        groups = leaf.group_sizes(maxtext_names.sizes(self.model.config))
        covers = [_cover(group, part) for group, part in zip(groups, box, strict=False)]
        outs, ins = covers[0], covers[1] if leaf.ins else _Cover((), slice(None))
        order = (outs, ins) if leaf.is_table else (ins, outs)
        expert = () if place.expert is None else (slice(place.expert, place.expert + 1),)
        stored = self.stacks.read(place, expert + order[0].dims + order[1].dims)
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
    """The part of some dimensions that covers a range of them as one.

    Attributes:
      dims: a slice for each dimension.
      rest: the range within that part.
    """

    dims: tuple[slice, ...]
    rest: slice


def _cover(sizes: tuple[int, ...], part: slice) -> _Cover:
    inner = math.prod(sizes[1:])
    first, last = part.start // inner, -(-part.stop // inner)
    whole = tuple(slice(0, size) for size in sizes[1:])
    rest = slice(part.start - first * inner, part.stop - first * inner)
    return _Cover((slice(first, last), *whole), rest)


class Layers:
    """Reads layers out of stacks; see the module's text."""

    def __init__(self, store: array_store.Store, names: Mapping[str, str], axis: int, keep: int):
        """Reads from a store.

        Args:
          store: the arrays.
          names: their names in the store by path in MaxText's model.
          axis: along which layers are scanned.
          keep: how many stacks are kept at most, as layers may lie in them in turn.
        """
        self._store = store
        self._names = names
        self._axis = axis
        self._keep = keep
        self._kept: dict[str, np.ndarray] = {}

    def read(self, place: Place, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one layer in `box`."""
        name, layer = self._names[place.path], place.layer
        if layer.number is None:
            return self._store.read(name, box)
        if self._store.chunk(name)[self._axis] == 1:
            own = slice(layer.number, layer.number + 1)
            part = (*box[: self._axis], own, *box[self._axis :])
            return _layer_of(self._store.read(name, part), self._axis, 0)
        stack = self._kept.pop(name, None)
        if stack is None:
            whole = tuple(slice(0, size) for size in self._store.shape(name))
            stack = self._store.read(name, whole)
        if not place.is_last:
            self._kept[name] = stack
            for oldest in list(self._kept)[: -self._keep]:
                del self._kept[oldest]
        # A copy: a view would keep the whole stack.
        return np.array(_layer_of(stack, self._axis, layer.number)[box])


def _layer_of(stack: np.ndarray, axis: int, number: int) -> np.ndarray:
    pair = scan_axis.Pair(None, stack)
    layer: np.ndarray = scan_axis.remove_scan_axis(pair, axis, layer=number).arrays
    return layer


def open_folder(path: str, hf_folder: str) -> MaxTextSource:
    """Opens a folder of arrays and checks that they are those of a model; reads no weights.

    Args:
      path: the folder, from `find`.
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
    named = parameters(path)
    base = {own: stored for own, stored in named.items() if not is_adapter(own)}
    if not base:
        what = "holds adapters without their base"
        remedy = "give it as init_adapter, and the base as model.path"
        raise errors.ModelError(path, None, what, remedy)
    known = places(model, config, where, scanned=is_scanned(path, list(base)))
    head = maxtext_names.TOP["lm_head.weight"]
    if model.is_tied and head.name in base:  # `load` compares it with the table.
        place = Place(head.name, head, maxtext_names.Layer("", ""), maxtext_names.Change())
        known["lm_head.weight"] = place
    store = array_store.open_store(
        path, [base[place.path] for place in known.values() if place.path in base]
    )
    fitted = _fit(path, known, base, store, model)
    problems = [*_membership(path, known, base), *fitted.problems]
    if problems:
        raise errors.ModelError.of(errors.first(problems, path))
    family = maxtext_names.family(config, where)
    layers = Layers(store, base, fitted.axis, max(family.period, len(family.roles)))
    return MaxTextSource(path, hf_folder, config, model, known, layers)


def _membership(
    path: str, known: Mapping[str, Place], base: Mapping[str, str]
) -> Iterator[errors.Problem]:
    """Arrays that are missing or surplus."""
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
    known: Mapping[str, Place],
    base: Mapping[str, str],
    store: array_store.Store,
    model: causal_lm.CausalLM,
) -> Fit:
    """How the base's arrays fit; types that are not read are problems too."""
    found = {own: store.shape(stored) for own, stored in base.items() if stored in store.arrays}
    sizes = maxtext_names.sizes(model.config)
    table = maxtext_names.TOP["model.embed_tokens.weight"].name
    rows = found[table][0] if table in found else 0
    if 0 <= rows - sizes["vocab"] < _MOST_PADDING:
        sizes["vocab"] = rows
    wanted = {}
    for place in known.values():
        depth = None if place.layer.number is None else place.layer.depth
        wanted[place.path] = Stack(place.leaf.stored_shape(sizes), depth)
    fitted = fit(path, wanted, found)
    floats = list(source.DTYPES.values())
    types = [
        source.dtype_error(path, own, str(store.dtype(base[own]))).problems[0]
        for own in found
        if store.dtype(base[own]) not in floats
    ]
    return Fit(fitted.axis, [*fitted.problems, *types])
