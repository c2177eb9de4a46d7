"""Files and folders that appear complete or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from purelora.core import errors

_ELSEWHERE = "free some space or choose another place"


@contextlib.contextmanager
def new_folder(path: str, n_bytes: int = 0) -> Iterator[str]:
    """A temporary folder beside `path`, renamed to it when the block ends without an error.

    Otherwise it is removed, and nothing at `path` has changed. Missing parents are made.

    Args:
      path: the folder to make; it may exist if it is empty.
      n_bytes: what will be written at least; a disk without that much space is refused at once.

    Raises:
      ModelError: `path` exists and is not an empty folder, or it cannot be written.
    """
    check_free(path)
    target = os.path.realpath(path)
    with _partial(path, n_bytes) as partial:
        yield partial
        _make_durable(partial)
        os.rename(partial, target)


@contextlib.contextmanager
def new_file(path: str, n_bytes: int = 0) -> Iterator[str]:
    """A temporary path of a file, renamed to `path` when the block ends without an error.

    Raises:
      ModelError: `path` exists, or it cannot be written.
    """
    if os.path.lexists(path):
        raise _taken(path)
    with _partial(path, n_bytes) as partial:
        file = os.path.join(partial, "file")
        yield file
        _make_durable(partial)
        os.rename(file, os.path.realpath(path))
        os.rmdir(partial)


def check_free(path: str) -> None:
    """Raises a `ModelError` unless a new folder can go to `path`: absent, or an empty folder.

    To be called before long work whose result goes there.
    """
    empty = os.path.isdir(path) and os.access(path, os.R_OK) and not os.listdir(path)
    if os.path.lexists(path) and not empty:
        raise _taken(path)


def _taken(path: str) -> errors.ModelError:
    what = "exists, and nothing is overwritten"
    return errors.ModelError(path, None, what, "choose another place, or remove it")


@contextlib.contextmanager
def _partial(path: str, n_bytes: int) -> Iterator[str]:
    """A temporary folder beside `path`, removed after an error; OSErrors become ModelErrors."""
    try:
        parent, name = os.path.split(os.path.realpath(path))
        os.makedirs(parent, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < n_bytes:
            what = f"needs {n_bytes:,} bytes, and its disk has {free:,} left"
            raise errors.ModelError(path, None, what, _ELSEWHERE)
        partial = tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise errors.ModelError(path, None, what, _ELSEWHERE) from error


def _make_durable(folder: str) -> None:
    """Gives the folder the usual permissions and syncs its files to the disk."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(folder, 0o777 & ~umask)
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
