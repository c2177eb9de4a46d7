"""The text of `configs/base.py`: every key with its comment and default, from the declarations.

python -m purelora.config.document > configs/base.py
"""

import collections.abc
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from purelora.config import declare, schema

_WIDTH = 100  # Of a line of code.
_WRAPPER = textwrap.TextWrapper(
    _WIDTH - 4,
    initial_indent="# ",
    subsequent_indent="# ",
    break_long_words=False,
    break_on_hyphens=False,
)
_HEAD = '''\
"""Every key with its meaning, unit, limits and default.

The other configs start from here and change what they need. On the command line any key can be
overridden: `python -m purelora.train --config=configs/qlora.py --config.lora.r=8`. A list is
written `--config.lora.target_modules=q_proj,v_proj`, nothing as `--config.steps=None`. Keys marked
[resumable] may change when a run is resumed.

Keys are declared in `purelora/config`; this file is written from there, by
`python -m purelora.config.document`.
"""

from ml_collections import config_dict


def optional(value: object, kind: type) -> config_dict.FieldReference:
    """A key that may also be None."""
    return config_dict.FieldReference(value, field_type=kind)


def either(value: object) -> config_dict.FieldReference:
    """A key that takes a list, or else a string or None."""
    return config_dict.FieldReference(value, field_type=object)


def table(value: dict[str, object]) -> config_dict.FieldReference:
    """A key that takes a dict; the names in it may have dots."""
    return config_dict.FieldReference(value, field_type=dict)


def get_config() -> config_dict.ConfigDict:
    """All defaults."""
    c = config_dict.ConfigDict()
'''


def text() -> str:
    """The whole file."""
    return _HEAD + "".join(f"    {line}\n" if line else "\n" for line in _body()) + "    return c\n"


def _body() -> Iterator[str]:
    section = ""
    for declaration in schema.KEYS.values():
        if declaration.path.parent != section:
            section = declaration.path.parent
            yield from ("", f"c.{section} = config_dict.ConfigDict()")
        lines = _WRAPPER.wrap(_comment(declaration.key))
        yield from (line.replace("\xa0", " ") for line in lines)
        yield from _assignment(f"c.{declaration.path}", declaration)


def _comment(key: declare.Key) -> str:
    """The meaning, and in brackets unit, limits and whether it is resumable."""
    limits = "" if key.limits is None else key.limits.brief
    marks = [mark for mark in (key.unit, limits, "resumable" * key.is_resumable) if mark]
    # Non-breaking spaces keep a bracket on one line.
    bracket = f" [{', '.join(marks)}]".replace(" ", "\xa0").replace("\xa0", " ", 1)
    return key.meaning + (bracket if marks else "")


def _assignment(name: str, declaration: declare.Declaration) -> Iterator[str]:
    value = _literal(declaration.default)
    options = _options(declaration.annotation)
    origins = [typing.get_origin(option) for option in options]
    if collections.abc.Mapping in origins:
        value = f"table({value})"
    elif len(options) > 1 and tuple in origins:
        value = f"either({value})"
    elif type(None) in options:
        kind = next(option for option in options if option is not type(None))
        value = f"optional({value}, {kind.__name__})"
    if len(f"    {name} = {value}") <= _WIDTH:
        yield f"{name} = {value}"
        return
    yield f"{name} = ("
    yield from (f"    {_literal(item)}," for item in declaration.default)
    yield ")"


def _options(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _literal(value: object) -> str:
    """A default as Python, with double quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        items = ", ".join(map(_literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    return repr(value)


if __name__ == "__main__":
    print(text(), end="")
