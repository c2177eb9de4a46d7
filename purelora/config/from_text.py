"""Values of typed keys out of the texts of a command line."""

import ast
import collections.abc
import contextlib
import re
import types
import typing
from typing import Any


def parse(text: str, annotation: Any) -> Any:
    """The value that `text` stands for in a key of this type; `text` itself if it is none.

    Names joined by commas are a list where the key takes one: no name has a comma.
    """
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (types.UnionType, typing.Union)
        else (annotation,)
    )
    if type(None) in options and text in ("None", "none"):
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in options:
            with contextlib.suppress(ValueError):
                return kind(text)
    for option in options:
        if typing.get_origin(option) is collections.abc.Mapping:
            return _literal(text)
        if typing.get_origin(option) is tuple:
            return _list_from_text(text, option, is_plain_string_too=str in options)
    return text


_NAMES = re.compile(r"[\w.\-]+(\s*,\s*[\w.\-]+)+")


def _list_from_text(text: str, kind: Any, *, is_plain_string_too: bool) -> Any:
    """`['a', 'b']` or `a,b`; a comma separates only where all the parts are plain names."""
    if text[:1] in ("(", "["):
        value = _literal(text)
        if value != text:
            # ('q_proj') is a string in parentheses to Python; whoever writes it means a list.
            return (value,) if isinstance(value, str) else value
    of_ints = typing.get_args(kind)[0] is int
    if of_ints or _NAMES.fullmatch(text):
        parts = [part.strip() for part in text.split(",")]
        return tuple(_literal(part) if of_ints else part for part in parts if part)
    return text if is_plain_string_too else (text,) if text else ()


def _literal(text: str) -> Any:
    """The Python literal that `text` is; `text` itself if it is none."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text
