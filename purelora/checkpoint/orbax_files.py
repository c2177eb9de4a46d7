"""The files of one step, written and read by orbax: trees of arrays, and a JSON document.

This is the only module that imports orbax.
"""

import dataclasses
import logging
import os
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from purelora.checkpoint import items
from purelora.core import errors
from purelora.multihost import runtime

# What a step may hold beside `state` and `meta`.
EXTRAS = ("base", "initial")
# In the name of what orbax has not finished.
TMP_SUFFIX: str = ocp.utils.TMP_DIR_SUFFIX
# What orbax adds to the arrays; measured at 25 kB for 52 of them.
_OVERHEAD_BYTES = 1_000_000


class SavedItem(NamedTuple):
    """Shape and dtype of every leaf of an item, as it was given, by dotted path; and its keys.

    Attributes:
      leaves: ShapeDtypeStructs; of keys, that of a key and not of its data.
      key_impls: implementation of every leaf that is a key.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    key_impls: Mapping[str, str]


class OrbaxFiles:
    """Writes the files of a step with all processes together, and reads them in each by itself."""

    def __init__(self) -> None:
        logging.getLogger("absl").addFilter(_is_for_users)
        self._reader = _checkpointer({runtime.process_index()})
        self._writer = _checkpointer(set(range(runtime.process_count())))

    def close(self) -> None:
        """Frees all threads."""
        self._reader.close()
        self._writer.close()

    def write(self, path: Path, all_items: Mapping[str, items.Item], meta: dict[str, Any]) -> None:
        """Writes `state`, extras and document into a new folder.

        It begins when all processes are here, and ends when all have written their parts.
        """
        arguments = {
            name: ocp.args.PyTreeSave(item.arrays, custom_metadata=item.notes)
            for name, item in all_items.items()
        }
        self._writer.save(path, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **arguments))

    def document(self, path: Path) -> dict[str, Any]:
        """The JSON document of a step, as it is.

        Raises:
          CheckpointError: it is damaged.
        """
        with damaged(path):
            arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta: dict[str, Any] = self._reader.restore(path, args=arguments)["meta"]
        return meta

    def saved(self, path: Path, item: str) -> SavedItem:
        """What leaves an item of a step has.

        Raises:
          CheckpointError: the step has no such item, or is damaged.
        """
        if not (path / item).is_dir():
            remedy = "it was saved without" if item in EXTRAS else "it is none of purelora's"
            raise errors.CheckpointError(str(path), None, f"holds no {item!r}", remedy)
        with damaged(path):
            metadata = self._reader.metadata(path).item_metadata[item]
            key_impls: dict[str, str] = metadata.custom_metadata["key_impls"]
            leaves: dict[str, Any] = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for name, leaf in metadata.tree.items()
            }
        for name, impl in key_impls.items():
            leaves[name] = items.key_of(leaves[name], impl)
        return SavedItem(leaves, key_impls)

    def read_on_host(self, path: Path, item: str) -> dict[str, np.ndarray]:
        """All leaves of an item by dotted path; keys as their data."""
        names = self.saved(path, item).leaves
        return self._read(
            path, item, {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        )

    def read_placed(self, path: Path, item: str, like: Any) -> Any:
        """An item as the tree `like` of ShapeDtypeStructs with shardings, whose leaves it has."""
        # The sharding of keys fits their data too, which have a dimension more.
        arguments = {
            name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=leaf.sharding)
            for name, leaf in items.flat(like).items()
        }
        placed = self._read(path, item, arguments)
        for name, impl in self.saved(path, item).key_impls.items():
            placed[name] = jax.random.wrap_key_data(placed[name], impl=impl)
        return jax.tree.unflatten(jax.tree.structure(like), [placed[name] for name in arguments])

    def _read(self, path: Path, item: str, how: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        arguments = {item: ocp.args.PyTreeRestore(restore_args=dict(how))}
        with damaged(path):
            read: dict[str, Any] = self._reader.restore(path, args=ocp.args.Composite(**arguments))[
                item
            ]
        return read


def _checkpointer(processes: set[int]) -> ocp.Checkpointer:
    """Orbax for what `processes` do together. Its waits are no collectives: a thread may save."""
    together = ocp.options.MultiprocessingOptions(
        primary_host=min(processes), active_processes=processes
    )
    # Compression takes half of a save's time and spares 7 % of float32 weights.
    arrays = {
        name: ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together)
        for name in ("state", *EXTRAS)
    }
    handler = ocp.CompositeCheckpointHandler(
        meta=ocp.JsonCheckpointHandler(multiprocessing_options=together),
        composite_options=ocp.CompositeOptions(multiprocessing_options=together),
        **arrays,
    )
    return ocp.Checkpointer(handler, multiprocessing_options=together)


def check_space(path: Path, needed_bytes: int) -> None:
    """Raises OSError if a step would not fit on the disk.

    Orbax notices too, but by then it prints tracebacks of all arrays that did not fit.
    """
    probe = path.with_name(f"{path.name}{TMP_SUFFIX}") / "space"
    probe.parent.mkdir(parents=True)
    needed_bytes += _OVERHEAD_BYTES
    free = shutil.disk_usage(probe.parent).free
    if free < needed_bytes:
        raise OSError(f"{free / 1e6:.1f} MB are free, {needed_bytes / 1e6:.1f} MB needed")
    if sys.platform == "linux":  # This also finds quotas and limits.
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, needed_bytes)
    shutil.rmtree(probe.parent)


@dataclasses.dataclass(frozen=True)
class Explained:
    """Turns what orbax raises about files into a CheckpointError that names the step folder.

    That is OSError, ValueError or KeyError, and for an array file that is cut short a bare
    `Exception`. No `except` can name that one alone, hence a context manager.
    """

    path: Path
    what: str
    remedy: str

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if kind is Exception or isinstance(error, (OSError, ValueError, KeyError)):
            # The bare one has the reason in its cause.
            cause = error.__cause__ if error is not None and kind is Exception else None
            what = f"{self.what} ({str(cause or error)[:300]})"
            raise errors.CheckpointError(str(self.path), None, what, self.remedy) from error


def damaged(path: Path) -> Explained:
    """The errors of reading a step."""
    return Explained(path, "is damaged", "delete the folder to continue from an earlier step")


def _is_for_users(record: logging.LogRecord) -> bool:
    """Keeps of orbax's records, which go to absl's logger, the warnings and errors.

    Those with a traceback go too: what they tell of is raised as well.
    """
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.WARNING and record.exc_info is None
