"""The rows of a `.jsonl` or `.json` file, each with its line, and what is wrong with the file."""

import codecs
import json
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from purelora.core import errors


def rows_of(path: pathlib.Path, problems: list[errors.Problem]) -> Iterator[tuple[int, Any]]:
    """Yields (line, row) of each row of a file, in order; what is no JSON goes to `problems`.

    Args:
      path: a `.jsonl` file, an object a line, or a `.json` file, a list of objects.
      problems: is extended by the lines that are not valid JSON.

    Raises:
      DataError: the file cannot be read, has another suffix or is not UTF-8.
    """
    text = _decode(path, _bytes(path))
    rows = _list_rows if path.suffix == ".json" else _line_rows
    yield from rows(path, text, problems)


def _bytes(path: pathlib.Path) -> bytes:
    if path.suffix not in (".jsonl", ".json"):
        raise errors.DataError(
            str(path),
            None,
            f"has the unknown suffix {path.suffix!r}",
            "name it .jsonl (one object a line) or .json (a list of objects)",
        )
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.read_bytes()
    except FileNotFoundError as error:
        folder = path.parent.resolve()
        raise errors.DataError(
            str(path), None, f"does not exist (looked in {folder})", "check the path"
        ) from error
    except OSError as error:
        raise errors.DataError(
            str(path), None, f"cannot be read: {error.strerror}", "check the path"
        ) from error
    what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
    raise errors.DataError(str(path), None, f"is {what}", "name a .jsonl or .json file")


def _decode(path: pathlib.Path, data: bytes) -> str:
    """Decodes UTF-8, with or without its byte order mark."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise errors.DataError(str(path), None, "is UTF-16", "save it as UTF-8")
    body = data.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        offset = error.start + len(data) - len(body)
        raise errors.DataError(
            f"{path}:{line}",
            body[error.start : error.end],
            f"is not UTF-8 (byte {offset} of the file)",
            "save the file as UTF-8",
        ) from error


class _DuplicateKeyError(ValueError):
    """An object that has one key twice; JSON leaves open which value counts."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _DuplicateKeyError("the key " + ", ".join(map(repr, twice)) + " twice in one object")
    return result


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _line_rows(
    path: pathlib.Path, text: str, problems: list[errors.Problem]
) -> Iterator[tuple[int, Any]]:
    """Yields (line, row) of a `.jsonl` file; a line that is not JSON goes to `problems`."""
    # Not str.splitlines: a JSON string may hold U+2028 and its like as they are.
    for line, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = DECODER.decode(raw)
        except (ValueError, RecursionError) as error:
            problems.append(invalid_json(f"{path}:{line}", raw, error))
            continue
        yield line, row


def _list_rows(
    path: pathlib.Path, text: str, problems: list[errors.Problem]
) -> Iterator[tuple[int, Any]]:
    """Yields (line, row) of a `.json` file; if it is not a list, that goes to `problems`."""
    if not text.strip():
        return
    try:
        rows = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raw = text.split("\n")[line - 1]
        problems.append(invalid_json(f"{path}:{line}", raw, error))
        return
    if not isinstance(rows, list):
        remedy = "put the rows in [...], or name the file .jsonl if it has one object a line"
        problems.append(errors.Problem(f"{path}:1", rows, "is not a list of objects", remedy))
        return
    yield from zip(_item_lines(text, len(rows)), rows, strict=True)


def _item_lines(text: str, count: int) -> Iterator[int]:
    """The line on which each of the `count` items of the JSON list `text` begins."""
    line, start, position = 1, 0, text.index("[") + 1
    for _ in range(count):
        while text[position] in ", \t\r\n":
            position += 1
        line += text.count("\n", start, position)
        yield line
        start, (_, position) = position, DECODER.raw_decode(text, position)


def invalid_json(where: str, raw: str, error: Exception) -> errors.Problem:
    if isinstance(error, _DuplicateKeyError):
        return errors.Problem(where, raw, f"has {error}", "keep one of them")
    detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return errors.Problem(
        where,
        raw,
        f"is not valid JSON ({detail or error})",
        "a .jsonl file has one complete object a line, a .json file one list of objects",
    )
