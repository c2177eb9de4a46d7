"""Which array of a MaxText checkpoint holds each tensor of a model, and in which shape.

config.json decides which arrays there must be. Whether layers are scanned shows in their names, and
along which axis shows in their shapes: it is the axis by which the shapes of all arrays are right.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from purelora.core import errors, layer_axis
from purelora.interop.maxtext import names as maxtext_names
from purelora.models import causal_lm

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where a tensor of Hugging Face's model is in a MaxText checkpoint.

    Attributes:
      path: path of the array in MaxText's model.
      leaf: name and dimensions of the array, without the layers.
      layer: which layer of the array it is.
      change: how MaxText's values differ from Hugging Face's.
      expert: which expert of the array it is; None if the array is not of experts.
      is_last: whether it is the last tensor in its array.
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
    """Where each tensor of a model is in a MaxText checkpoint, by Hugging Face name.

    Args:
      model: the model that config.json describes.
      config: the contents of config.json.
      where: the name of that file, for messages.
      scanned: whether the checkpoint stacks the layers.

    Raises:
      ModelError: MaxText has no such model, or computes it in another way than config.json says.
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


class Expected(NamedTuple):
    """The shape that an array of a checkpoint must have.

    Attributes:
      shape: the shape of one layer.
      depth: how many layers are stacked in the array; None if it is not a stack.
    """

    shape: tuple[int, ...]
    depth: int | None

    def stacked(self, axis: int) -> tuple[int, ...]:
        """The whole shape, with the layers along `axis`."""
        if self.depth is None:
            return self.shape
        layer = layer_axis.Pair(None, jax.ShapeDtypeStruct(self.shape, np.float32))
        shape: tuple[int, ...] = layer_axis.stack([layer] * self.depth, axis).arrays.shape
        return shape


class Fit(NamedTuple):
    """The result of comparing the arrays of a folder with those that there must be.

    Attributes:
      axis: the axis of the layers in stacked arrays.
      problems: arrays of a wrong shape; or one problem if the shapes do not tell the axis.
    """

    axis: int
    problems: list[errors.Problem]


def fit(where: str, wanted: Mapping[str, Expected], found: Mapping[str, tuple[int, ...]]) -> Fit:
    """Finds the axis of the layers, by which the shapes of all arrays are as they must be.

    Args:
      where: the name of the folder, for messages.
      wanted: the arrays that must be there, by name.
      found: the shapes of those that are there, by name.
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


def _shape_problem(
    where: str, name: str, wanted: Expected, found: tuple[int, ...]
) -> errors.Problem:
    either = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(wanted.stacked, (0, 1))))
    what = f"has shape {list(found)}, but config.json makes it {either}"
    return errors.Problem(f"{where}: {name}", None, what, "")
