"""The command line: a config file, overrides, and errors without tracebacks.

It is our own because the parsers that there are (absl, tyro, ml_collections' config_flags) stop at
the first mistake. This one reports all of them at once, each with its remedy: the nearest name, or
what a key of another program is called here.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from purelora.config import config_file, foreign_keys, from_dict, from_text, key_types, schema
from purelora.core import errors
from purelora.core.paths import Path

# The options of the commands that are paths: a leading `~` in them is the user's home.
PATHS = frozenset({"adapter", "hf_folder", "model", "output", "prompts_file", "run", "workdir"})
# Which weights stay unquantised where an option does not say: as quant.skip in configs/base.py.
QUANT_SKIP = ("embed_tokens",)
T = TypeVar("T")


class Arguments(NamedTuple):
    """A parsed command line: the configuration, and the names of the flags that were given."""

    config: schema.Config
    flags: frozenset[str]


def parse(argv: Sequence[str], flags: Sequence[str]) -> Arguments:
    """Parses `--config=FILE`, `--config.KEY=VALUE` and the given boolean `flags`.

    Raises:
      ConfigError: an unknown argument or key, a value of a wrong type, a file that cannot be used,
        or a configuration that does not hold together.
    """
    path, overrides, given, problems = _sort_arguments(argv, flags)
    if path is None and not problems:
        remedy = "for example --config=configs/qlora.py"
        problems.append(errors.Problem("--config", None, "is missing", remedy))
    if problems:
        raise errors.ConfigError.of(problems)
    file = pathlib.Path(os.path.expanduser(typing.cast(str, path)))
    raw = config_file.load(file)
    for key, text in overrides:
        problem = _override(raw, key, text)
        if problem:
            problems.append(problem)
    if problems:
        raise errors.ConfigError.of(problems)
    config = from_dict.parse(raw)
    if config.optim.factory is not None:
        config_file.load_factory(file, "optim.factory", config.optim.factory)
    return Arguments(config, frozenset(given))


def _sort_arguments(
    argv: Sequence[str], flags: Sequence[str]
) -> tuple[str | None, list[tuple[str, str]], list[str], list[errors.Problem]]:
    path: str | None = None
    overrides: list[tuple[str, str]] = []
    given: list[str] = []
    problems: list[errors.Problem] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name.lstrip("-") in flags and name.startswith("--") and not equals:
            given.append(name.removeprefix("--"))
            continue
        is_key = name == "--config" or name.startswith("--config.")
        if is_key and not equals and rest and not rest[0].startswith("--"):
            value, equals = rest.pop(0), "="
        if name == "--config" and equals:
            path = value
        elif is_key and equals:
            overrides.append((name.removeprefix("--config."), value))
        elif is_key:
            problems.append(errors.Problem(argument, None, "has no value", f"write {name}=VALUE"))
        else:
            problems.append(_unknown_argument(argument, flags))
    return path, overrides, given, problems


def _unknown_argument(argument: str, flags: Sequence[str]) -> errors.Problem:
    known = ["--config", *(f"--{flag}" for flag in flags)]
    bare = argument.partition("=")[0].lstrip("-")
    keys = schema.field_types()
    if bare in keys:
        remedy = f"write --config.{bare}"
    elif bare in foreign_keys.FOREIGN_KEYS:
        remedy = f"--config.KEY=VALUE sets a key; here it is {foreign_keys.FOREIGN_KEYS[bare]}"
    else:
        near = difflib.get_close_matches(argument, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}, --config.KEY"
    return errors.Problem(argument, None, "is not an argument of this command", remedy)


def options(kind: type[T], argv: Sequence[str]) -> T:
    """Parses `--name=VALUE` or `--name VALUE` into the frozen dataclass `kind`.

    A field `max_new_tokens` is the argument `--max-new-tokens`. A bool is a flag without a value, a
    field without default must be given, and a `tuple[str, ...]` takes one entry each time that its
    argument is given, as it is: commas mean nothing. In the fields that `PATHS` names, `~` is
    expanded.

    Raises:
      ConfigError: arguments that are unknown, missing, doubled, without a value or of a wrong type;
        all of them in one error.
    """
    annotations = typing.get_type_hints(kind)
    given, problems = _sort_options(argv, annotations)
    values = {}
    for name, texts in given.items():
        if texts:
            if name in PATHS:
                texts = [_expanded(text) for text in texts]
            values[name], problem = _option(_argument(name), texts, annotations[name])
            problems += [problem] if problem else []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        has_default = {field.default, field.default_factory} != {dataclasses.MISSING}
        if not has_default and field.name not in given:
            where = _argument(field.name)
            problems.append(errors.Problem(where, None, "is missing", f"write {where}=VALUE"))
    if problems:
        raise errors.ConfigError.of(problems)
    return kind(**values)


def divided(argv: Sequence[str], is_first: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Divides a command line by the names of its options, each with the texts that follow it.

    Args:
      argv: the arguments.
      is_first: whether an option is to be in the first list, by its name without dashes and value.

    Returns:
      Those, and the others; texts before all options are among the others.
    """
    first: list[str] = []
    others: list[str] = []
    target = others
    for argument in argv:
        if argument.startswith("--"):
            target = first if is_first(argument.removeprefix("--").partition("=")[0]) else others
        target.append(argument)
    return first, others


def _argument(name: str) -> str:
    return "--" + name.replace("_", "-")


def _expanded(text: str) -> str:
    """A path, or NAME=PATH, with the user's home in place of a leading `~`."""
    name, equals, path = text.partition("=")
    if equals and "/" not in name:
        return f"{name}={os.path.expanduser(path)}"
    return os.path.expanduser(text)


def numbers(where: str, texts: Sequence[str]) -> list[float]:
    """The numbers that were given for an option that may be given several times.

    Raises:
      ConfigError: texts that are no finite numbers; all of them in one error.
    """
    values = [from_text.parse(text, float) for text in texts]
    problems = [
        errors.Problem(where, text, "is not a finite number", "")
        for text, value in zip(texts, values, strict=True)
        if not isinstance(value, float) or not math.isfinite(value)
    ]
    if problems:
        raise errors.ConfigError.of(problems)
    return values


@contextlib.contextmanager
def quant_options() -> Iterator[None]:
    """ConfigErrors raised inside name the option `--tile-size` for the key `quant.tile_size`."""
    try:
        yield
    except errors.ConfigError as error:
        raise errors.ConfigError.of(
            dataclasses.replace(problem, where=_argument(key.name))
            if (key := Path(problem.where)).parent == "quant"
            else problem
            for problem in error.problems
        ) from error


def _option(where: str, texts: Sequence[str], annotation: Any) -> tuple[Any, errors.Problem | None]:
    """The value of one field from all that was given for it, and what is wrong with it."""
    kinds = (annotation, *typing.get_args(annotation))
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(texts), None
    if annotation is bool:
        return True, None
    if len(texts) > 1:
        return None, errors.Problem(where, texts[-1], "is given more than once", "give it once")
    value = from_text.parse(texts[0], annotation)
    return value, key_types.problem(where, value, annotation)


def _sort_options(
    argv: Sequence[str], annotations: Mapping[str, Any]
) -> tuple[dict[str, list[str]], list[errors.Problem]]:
    """The texts given for each field, and what is wrong with the arguments themselves."""
    given: dict[str, list[str]] = {}
    problems: list[errors.Problem] = []
    rest = list(argv)
    while rest:
        argument, equals, value = rest.pop(0).partition("=")
        name = argument.removeprefix("--").replace("-", "_")
        known = argument.startswith("--") and name in annotations
        is_flag = known and annotations[name] is bool
        # The value of an unknown argument is not a problem of its own.
        takes_next = not is_flag and not equals and argument.startswith("-")
        if takes_next and rest and not rest[0].startswith("--"):
            value, equals = rest.pop(0), "="
        if not known:
            problems.append(_unknown_option(argument, list(annotations)))
            continue
        texts = given.setdefault(name, [])
        if is_flag == bool(equals):
            what = "takes no value" if is_flag else "has no value"
            remedy = f"write {argument}" if is_flag else f"write {argument}=VALUE"
            problems.append(errors.Problem(argument, None, what, remedy))
        else:
            texts.append(value)
    return given, problems


def _unknown_option(argument: str, names: Sequence[str]) -> errors.Problem:
    known = [_argument(name) for name in names]
    near = difflib.get_close_matches("--" + argument.lstrip("-").replace("_", "-"), known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return errors.Problem(argument, None, "is not an argument of this command", remedy)


def _override(raw: dict[str, Any], key: str, text: str) -> errors.Problem | None:
    """Sets one key from the command line, or says why not."""
    annotation = schema.field_types().get(key)
    if annotation is None:
        sections = {path.parent for path in schema.KEYS}
        if key in sections - {""}:
            return errors.Problem(key, text, "is a section of keys", f"set --config.{key}.KEY")
        return foreign_keys.unknown_key(key)
    value = from_text.parse(text, annotation)
    problem = key_types.problem(key, value, annotation)
    if problem is None:
        *parents, name = Path(key).parts
        section: Any = raw
        for parent in parents:
            section = section[parent]
        section[name] = value
    return problem


def describe(flat: Mapping[str, Any]) -> str:
    """The resolved configuration, one key a line."""
    width = max(map(len, flat))
    return "\n".join(f"{key:<{width}}  {value!r}" for key, value in flat.items())
