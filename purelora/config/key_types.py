"""Types of keys: whether a value is of one, how a user reads it, and one form for each value."""

import collections.abc
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from purelora.core import errors


def problem(key: str, value: Any, annotation: Any) -> errors.Problem | None:
    """A problem if `value` is not of the key's type."""
    if _is_of(value, annotation):
        return None
    return errors.Problem(key, value, f"must be {describe(annotation)}", "")


def describe(annotation: Any) -> str:
    """A type as a user reads it."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in typing.get_args(annotation))
    if origin is tuple:
        kind = typing.get_args(annotation)[0]
        return "a list of whole numbers" if kind is int else "a list of strings"
    if origin is collections.abc.Mapping:
        named = {int: "whole numbers", float: "numbers", str: "strings", bool: "True or False"}
        kinds = typing.get_args(_of_values(annotation)) or (_of_values(annotation),)
        return f"a dict from names to {', '.join(named[kind] for kind in kinds)}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
    return names.get(annotation, "None")


def normal(value: Any, annotation: Any) -> Any:
    """Lists become tuples, and whole numbers floats where the key (or a dict's value) is one."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Mapping):
        return {key: normal(v, _of_values(annotation)) for key, v in value.items()}
    options = typing.get_args(annotation) or (annotation,)
    if isinstance(value, int) and not isinstance(value, bool) and float in options:
        # Beyond float64 it is out of every range.
        return float(value) if abs(value) < 10**300 else math.inf
    return value


def _of_values(annotation: Any) -> Any:
    """The type of the values of a `Mapping[str, ...]`."""
    return typing.get_args(annotation)[1]


def _is_of(value: Any, annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return any(value == option for option in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(value, option) for option in typing.get_args(annotation))
    if origin is tuple:
        kind = typing.get_args(annotation)[0]
        return isinstance(value, (tuple, list)) and all(_is_of(v, kind) for v in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(
            isinstance(k, str) and _is_of(v, _of_values(annotation)) for k, v in value.items()
        )
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is type(None):
        return value is None
    return isinstance(value, annotation)
