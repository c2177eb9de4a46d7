"""Functions of the user's own that a key names as "module:function"."""

import importlib
from collections.abc import Callable
from typing import Any

from purelora.core import errors


def load(where: str, text: str) -> Callable[..., Any]:
    """The function that a key names; its module is imported.

    Args:
      where: the key.
      text: its value, "module:function"; the module may have dots.

    Raises:
      ConfigError: there is no such module or function, or importing the module fails.
    """
    module_name, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # It is the user's own code and may raise anything.
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, module_name):
            remedy = "put it into the config's folder or the current one, or install it"
            raise errors.ConfigError(
                where, text, f"there is no module {error.name!r}", remedy
            ) from None
        raise failed(where, text, error) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = f"{module_name} has no function {name!r}"
        remedy = errors.nearest(name, known) if known else "define it there"
        raise errors.ConfigError(where, text, what, remedy)
    return function


def failed(where: str, text: str, error: Exception) -> errors.ConfigError:
    """The error of code that raised another."""
    what = f"fails with {type(error).__name__}: {error}"
    return errors.ConfigError(where, text, what, "correct the function or its module")


def _is_part(name: str | None, module_name: str) -> bool:
    """Whether it is the module or a package that it is in, not one that the module imports."""
    return name is not None and f"{module_name}.".startswith(f"{name}.")
