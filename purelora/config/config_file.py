"""Config files: Python with a `get_config()`."""

import difflib
import inspect
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import ml_collections

from purelora.config import factory
from purelora.core import errors

_PACKAGE = pathlib.Path(__file__).parent.parent


def ready_folder() -> pathlib.Path:
    """The folder of the ready configs: in an installed package its own, in a clone `configs/`."""
    installed = _PACKAGE / "ready" / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def ready_names() -> tuple[str, ...]:
    """The names of the ready configs."""
    helpers = ("__init__", "variants")
    return tuple(sorted(p.stem for p in ready_folder().glob("*.py") if p.stem not in helpers))


def _resolved(path: pathlib.Path) -> pathlib.Path:
    """The file of a ready config, if that is what `path` names and no file is called so."""
    is_name = not path.suffix and len(path.parts) == 1 and not path.exists()
    return ready_folder() / f"{path}.py" if is_name and str(path) in ready_names() else path


def load(path: pathlib.Path) -> dict[str, Any]:
    """Runs a config file's `get_config()` and returns its keys as nested dicts.

    The name of a ready config stands for its file. A colon and the name of a variant may follow, as
    in `mixtral_8x7b_qlora:small`: it becomes the argument of `get_config`. The folder above the
    file's own is importable meanwhile, and after all others that of the ready configs, so that
    `from configs import base` works from everywhere.

    Raises:
      ConfigError: the file is missing, fails, or has no `get_config` that returns a ConfigDict.
    """
    path, variant = _file_and_variant(path)
    if not path.is_file():
        raise _missing(path)
    before = list(sys.path)
    sys.path[:] = [str(path.resolve().parent.parent), *before, str(ready_folder().parent)]
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
        sys.path[:] = before
    if raw is None:
        remedy = "define get_config(), starting from configs.base.get_config()"
        what = "has no get_config() that returns a ConfigDict"
        raise errors.ConfigError(str(path), None, what, remedy)
    return raw


def _file_and_variant(path: pathlib.Path) -> tuple[pathlib.Path, tuple[str, ...]]:
    """The file that a `--config` names, and the variant, if it names one."""
    variant: tuple[str, ...] = ()
    name, colon, text = str(path).rpartition(":")
    if colon and not path.is_file():
        path, variant = pathlib.Path(name), (text,)
    return _resolved(path), variant


def load_factory(path: pathlib.Path, key: str, text: str) -> None:
    """Imports the module of a "module:function" from the folder of a config or the current one.

    Args:
      path: the config, as for `load`.
      key: the key that names the function.
      text: its value.

    Raises:
      ConfigError: see `factory.load`.
    """
    before = list(sys.path)
    sys.path[:] = [
        str(_file_and_variant(path)[0].resolve().parent),
        str(pathlib.Path.cwd()),
        *before,
    ]
    try:
        factory.load(key, text)
    finally:
        sys.path[:] = before


def _missing(path: pathlib.Path) -> errors.ConfigError:
    """The error for a path that is no file: names files beside it, or the ready configs."""
    if not path.suffix and len(path.parts) == 1:
        remedy = f"known: {', '.join(ready_names())}; or give the path of a config file"
        close = difflib.get_close_matches(str(path), ready_names(), n=1)
        remedy = f"did you mean {close[0]!r}? {remedy}" if close else remedy
        what = "is neither a ready config nor a file"
        return errors.ConfigError("--config", str(path), what, remedy)
    near = sorted(map(str, path.parent.glob("*.py"))) if path.parent.is_dir() else []
    remedy = errors.nearest(str(path), near) if near else "give the path of a config file"
    return errors.ConfigError("--config", str(path), "is not a file", remedy)


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
