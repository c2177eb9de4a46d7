"""Reads ranges of bytes, text and JSON; whatever is wrong with a file is a `ModelError`."""

import collections
import json
import os
import stat
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors

_REPLACE = "copy or download the file again"


class Entry(NamedTuple):
    """The type, shape and position of one tensor in a file that holds several.

    Attributes:
      dtype: the format's name of its element or block type.
      shape: in numpy order.
      start: its first byte.
      n_bytes: its length.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


def check_readable(path: str) -> None:
    """Raises a `ModelError` unless `path` is a regular file that can be opened.

    A pipe or a device would block or never end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise errors.ModelError(path, None, "is not a regular file", "give a file")
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.ModelError(path, None, f"cannot be read ({reason})", _REPLACE) from error


def read_range(path: str, start: int, n_bytes: int) -> np.ndarray:
    """Reads `n_bytes` bytes of a file from `start`, uint8 [n_bytes].

    Raises:
      ModelError: it cannot be read, or ends before.
    """
    try:
        data = np.fromfile(path, np.uint8, n_bytes, offset=start)
    except OSError as error:
        what = f"cannot be read: {error}"
        raise errors.ModelError(path, None, what, "check the file's permissions") from error
    if len(data) < n_bytes:
        raise errors.ModelError(path, None, "has become shorter", "download the file again")
    return data


def read_rows(path: str, start: int, n_bytes: int, stride_bytes: int, count: int) -> np.ndarray:
    """Reads `n_bytes` bytes of each of `count` rows of a file, which begin `stride_bytes` apart.

    Raises:
      ModelError: as for `read_range`.
    """
    if n_bytes == stride_bytes:
        return read_range(path, start, count * n_bytes)
    rows = np.empty((count, n_bytes), np.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            sizes = [
                os.preadv(file.fileno(), [row.data], start + number * stride_bytes)
                for number, row in enumerate(rows)
            ]
    except OSError as error:
        what = f"cannot be read: {error}"
        raise errors.ModelError(path, None, what, "check the file's permissions") from error
    if any(size < n_bytes for size in sizes):
        raise errors.ModelError(path, None, "has become shorter", "download the file again")
    return rows.reshape(-1)


def read_text(path: str) -> str:
    """The text of a UTF-8 file.

    Raises:
      ModelError: the file cannot be read, is empty or is not UTF-8.
    """
    check_readable(path)
    with open(path, "rb") as file:
        data = file.read()
    if not data.strip():
        raise errors.ModelError(path, None, "is empty", _REPLACE)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.ModelError(
            path, None, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from error


def read_json_object(path: str, *, may_repeat: bool = False) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Args:
      path: the file.
      may_repeat: whether an object may have a key twice, of which the last one counts then.

    Raises:
      ModelError: the file cannot be read, is empty, is not UTF-8, is not valid JSON (a truncated
        file, for example), holds something other than an object, or a key twice.
    """
    text = read_text(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(name, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
            what = f"holds {name!r} twice in one object"
            raise errors.ModelError(path, None, what, "delete the one that is wrong")
        return found

    try:
        value = json.loads(text, object_pairs_hook=None if may_repeat else unique)
    except RecursionError as error:
        raise errors.ModelError(path, None, "is nested too deeply", _REPLACE) from error
    except ValueError as error:
        raise errors.ModelError(
            path, None, f"is not valid JSON ({error}); is it truncated?", _REPLACE
        ) from error
    if not isinstance(value, dict):
        raise errors.ModelError(
            path, None, f"holds a JSON {_json_type(value)} where an object is expected", _REPLACE
        )
    return value


def typed(path: str, data: dict[str, Any], key: str, kinds: type | tuple[type, ...]) -> Any:
    """The value of `key` in `data`, or None when it is absent or null.

    Raises:
      ModelError: the value has none of the types `kinds`. A JSON boolean is never an integer.
    """
    value = data.get(key)
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    wrong_bool = isinstance(value, bool) and bool not in wanted
    if value is None or (isinstance(value, wanted) and not wrong_bool):
        return value
    names = " or ".join(_TYPE_NAMES[kind] for kind in wanted)
    raise errors.ModelError(f"{path}: {key}", value, f"is not a JSON {names}", f"correct {key!r}")


_TYPE_NAMES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}


def _json_type(value: object) -> str:
    return _TYPE_NAMES.get(type(value), "null")
