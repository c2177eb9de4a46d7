"""Data sets that come with purelora, by name."""

import pathlib

from purelora.core import errors

_FILES = pathlib.Path(__file__).parent / "files"


def names() -> tuple[str, ...]:
    """Names of the built-in data sets."""
    return tuple(sorted(path.stem for path in _FILES.glob("*.jsonl")))


def resolve(name_or_path: str, key: str) -> pathlib.Path:
    """The file of a built-in data set, or the path itself.

    Args:
      name_or_path: what the config says.
      key: the config key that says it, for messages.

    Raises:
      DataError: `name_or_path` is no built-in name and does not look like a file.
    """
    if name_or_path in names():
        return _FILES / f"{name_or_path}.jsonl"
    path = pathlib.Path(name_or_path)
    if path.suffix or len(path.parts) > 1 or path.exists():
        return path
    raise errors.DataError(
        key,
        name_or_path,
        "is neither a built-in data set nor a file",
        errors.nearest(name_or_path, names()),
    )
