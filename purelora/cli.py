"""The command line: a config file, overrides, and errors without tracebacks."""

import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import inspect
import io
import math
import os
import pathlib
import re
import runpy
import signal
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ml_collections

from purelora import config, distributed, errors

USER_ERROR_STATUS = 2
# The options of the commands that are paths: a leading `~` in them is the user's home.
PATHS = frozenset({"adapter", "hf_folder", "model", "output", "prompts_file", "run", "workdir"})
# Which weights stay unquantised where an option does not say: as quant.skip in configs/base.py.
QUANT_SKIP = ("embed_tokens",)
T = TypeVar("T")


class Arguments(NamedTuple):
    """A parsed command line: the configuration, and the names of the flags that were given."""

    config: config.Config
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
    raw = load_file(pathlib.Path(os.path.expanduser(typing.cast(str, path))))
    for key, text in overrides:
        problem = _override(raw, key, text)
        if problem:
            problems.append(problem)
    if problems:
        raise errors.ConfigError.of(problems)
    return Arguments(config.parse(raw), frozenset(given))


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
    keys = config.field_types()
    if bare in keys:
        remedy = f"write --config.{bare}"
    elif bare in config.FOREIGN_KEYS:
        remedy = f"--config.KEY=VALUE sets a key; here it is {config.FOREIGN_KEYS[bare]}"
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


def processes(argv: Sequence[str]) -> tuple[distributed.Options, list[str]]:
    """Takes the arguments that make a process one of several out of a command line.

    Returns:
      What they say, and the other arguments.

    Raises:
      ConfigError: they have values of a wrong type.
    """
    names = {field.name for field in dataclasses.fields(distributed.Options)}
    own, others = divided(argv, lambda name: name.replace("-", "_") in names)
    return options(distributed.Options, own), others


def divided(argv: Sequence[str], is_own: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Divides a command line by the names of its options, each with the texts that follow it.

    Args:
      argv: the arguments.
      is_own: whether an option is to be in the first list, by its name without dashes and value.

    Returns:
      Those, and the others; texts before all options are among the others.
    """
    own: list[str] = []
    others: list[str] = []
    target = others
    for argument in argv:
        if argument.startswith("--"):
            target = own if is_own(argument.removeprefix("--").partition("=")[0]) else others
        target.append(argument)
    return own, others


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
    values = [from_text(text, float) for text in texts]
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
            dataclasses.replace(problem, where=_argument(problem.where.removeprefix("quant.")))
            if problem.where.startswith("quant.")
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
    value = from_text(texts[0], annotation)
    return value, config.type_problem(where, value, annotation)


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


def load_file(path: pathlib.Path) -> dict[str, Any]:
    """Runs a config file's `get_config()` and returns its keys as nested dicts.

    A colon and the name of a variant may follow the file's name, as in
    `configs/mixtral_8x7b_qlora.py:small`: it becomes the argument of `get_config`. The folder above
    the file's own is importable meanwhile, so that `from configs import base` works from
    everywhere.

    Raises:
      ConfigError: the file is missing, fails, or has no `get_config` that returns a ConfigDict.
    """
    variant: tuple[str, ...] = ()
    name, colon, text = str(path).rpartition(":")
    if colon and not path.is_file():
        path, variant = pathlib.Path(name), (text,)
    if not path.is_file():
        near = sorted(map(str, path.parent.glob("*.py"))) if path.parent.is_dir() else []
        remedy = errors.nearest(str(path), near) if near else "give the path of a config file"
        raise errors.ConfigError("--config", str(path), "is not a file", remedy)
    parent = str(path.resolve().parent.parent)
    sys.path.insert(0, parent)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        _check_variant(path, get_config, variant)
        result = get_config(*variant) if callable(get_config) else None
        raw = result.to_dict() if isinstance(result, ml_collections.ConfigDict) else None
    except errors.ConfigError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # The file is the user's own code and may raise anything.
        where = f"{path}{_line_of(error, path)}"
        what = f"{type(error).__name__}: {error}"
        remedy = f"correct or leave out {variant[0]!r}, or " if variant else ""
        raise errors.ConfigError(where, None, what, f"{remedy}fix the config file") from error
    finally:
        sys.path.remove(parent)
    if raw is None:
        remedy = "define get_config(), starting from configs.base.get_config()"
        what = "has no get_config() that returns a ConfigDict"
        raise errors.ConfigError(str(path), None, what, remedy)
    return raw


def _check_variant(path: pathlib.Path, get_config: Any, variant: Sequence[str]) -> None:
    """A variant may be named only if the file's `get_config` takes one."""
    if variant and callable(get_config) and not inspect.signature(get_config).parameters:
        where = f"--config={path}:{variant[0]}"
        raise errors.ConfigError(
            where, None, "names a variant, but the file has none", f"write {path}"
        )


def _line_of(error: BaseException, path: pathlib.Path) -> str:
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _override(raw: dict[str, Any], key: str, text: str) -> errors.Problem | None:
    """Sets one key from the command line, or says why not."""
    annotation = config.field_types().get(key)
    if annotation is None:
        sections = {name.rpartition(".")[0] for name in config.field_types()}
        if key in sections - {""}:
            return errors.Problem(key, text, "is a section of keys", f"set --config.{key}.KEY")
        return config.unknown_key(key)
    value = from_text(text, annotation)
    problem = config.type_problem(key, value, annotation)
    if problem is None:
        *parents, name = key.split(".")
        section: Any = raw
        for parent in parents:
            section = section[parent]
        section[name] = value
    return problem


def from_text(text: str, annotation: Any) -> Any:
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


def describe(flat: Mapping[str, Any]) -> str:
    """The resolved configuration, one key a line."""
    width = max(map(len, flat))
    return "\n".join(f"{key:<{width}}  {value!r}" for key, value in flat.items())


@contextlib.contextmanager
def _exit_on_user_error() -> Iterator[None]:
    try:
        yield
    except errors.UserError as error:
        text = "\n".join(f"{type(error).__name__}: {problem}" for problem in error.problems)
        distributed.fail(text, USER_ERROR_STATUS)
        print(text, file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None
    except BrokenPipeError:
        # Who read the output has gone; what is still in the buffer has no one to go to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        # Before the loop, which handles signals itself, there is nothing to save.
        distributed.fail("interrupted", 128 + signal.SIGINT)
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:
        # A fault of the program: the other processes would wait for this one.
        distributed.fail(traceback.format_exc(), 1)
        raise


def run_command(main: Callable[[Sequence[str]], int], usage: str) -> None:
    """Runs a command: prints `usage` for --help, and users' errors without a traceback.

    Exits with the status that `main` returns, or 2 for an error that the user can fix.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Not every terminal knows "×".
    argv = sys.argv[1:]
    if not {"-h", "--help"}.isdisjoint(argv):
        print(usage.strip())
        raise SystemExit(0)
    with _exit_on_user_error():
        status = main(argv)
        distributed.finish()
        sys.stdout.flush()
    raise SystemExit(status)
