"""The configuration out of nested or flat dicts, with everything that is wrong with them."""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from purelora.config import checks, foreign_keys, key_types, schema
from purelora.core import errors
from purelora.core.paths import Path


def parse(raw: Mapping[str, Any]) -> schema.Config:
    """Builds the Config from nested dicts.

    Raises:
      ConfigError: unknown or missing keys, wrong types, values out of range and keys that do not
        fit together, all in one error. Values are only checked when names and types are right.
    """
    problems: list[errors.Problem] = []
    config: schema.Config = _build(schema.Config, raw, Path(), problems)
    if problems:
        raise errors.ConfigError.of(problems)
    problems = checks.check(config)
    if problems:
        raise errors.ConfigError.of(problems)
    return config


def from_flat(flat: Mapping[str, Any]) -> schema.Config:
    """The Config that `schema.as_flat` was given, also after JSON and in an older version.

    Raises:
      ConfigError: a key is missing, or one is not of this version.
    """
    nested: dict[str, Any] = {}
    for key, value in {**schema.LATER_KEYS, **flat}.items():
        *sections, name = Path(key).parts
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return parse(nested)


def _build(
    cls: Callable[..., Any], raw: Mapping[str, Any], parent: Path, problems: list[errors.Problem]
) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    problems += [foreign_keys.unknown_key(parent / name) for name in raw if name not in hints]
    for name, annotation in hints.items():
        key = parent / name
        if name not in raw:
            remedy = "start the config from configs/base.py, which holds every key"
            problems.append(errors.Problem(key, None, "is missing", remedy))
        elif dataclasses.is_dataclass(annotation):
            if isinstance(raw[name], Mapping):
                values[name] = _build(typing.cast(type, annotation), raw[name], key, problems)
            else:
                problems.append(errors.Problem(key, raw[name], "must be a section of keys", ""))
        else:
            problem = key_types.problem(key, raw[name], annotation)
            problems += [problem] if problem else []
            values[name] = key_types.normal(raw[name], annotation)
    return None if problems else cls(**values)
