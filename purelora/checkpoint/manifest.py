"""Whether a folder is whole: sizes and SHA-256 sums of all its files, in a file written last.

    <folder>/manifest.json    {"files": {"meta/metadata": {"bytes": 8, "sha256": …}, …},
                               "sha256": …}

A folder without this file was never finished. The sum at its end is that of the file itself, so a
flipped bit in it is found as one in any other file is. Files that it does not list do no harm.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

NAME = "manifest.json"


def write(folder: pathlib.Path) -> None:
    """Puts all files of `folder` on disk for good, and then the manifest, in one move.

    Raises:
      OSError: a file cannot be read, or the manifest cannot be written.
    """
    files = {}
    for path in _files(folder):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = _entry(path)
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_dir():
            _sync(path)
    temporary = folder / f"{NAME}.tmp"
    temporary.write_text(_text(files), encoding="utf-8")
    _sync(temporary)
    temporary.replace(folder / NAME)
    _sync(folder)


def exists(folder: pathlib.Path) -> bool:
    """Whether `folder` was finished. It may have been damaged since: see `damage`."""
    return (folder / NAME).is_file()


def damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a folder that has a manifest; None if it is as it was written."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        is_intact = text == _text(files)
    except (OSError, ValueError, LookupError, TypeError):
        is_intact = False
    if not is_intact:
        return f"{NAME} is damaged"
    for name, entry in files.items():
        problem = _problem(folder / name, entry)
        if problem:
            return f"{name} {problem}"
    return None


def stamp(folder: pathlib.Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a file of `folder` is written to, and costs no reading."""
    stats = [(str(path), path.stat()) for path in _files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _problem(path: pathlib.Path, entry: dict[str, Any]) -> str | None:
    try:
        has = path.stat().st_size
        if has != entry["bytes"]:
            return f"has {has} bytes instead of {entry['bytes']}"
        return None if _entry(path) == entry else "has not the checksum that it was saved with"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _entry(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _text(files: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1) + "\n"


def _sync(path: pathlib.Path) -> None:
    """Waits until a file or folder is on disk, so that a machine that fails does not lose it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
