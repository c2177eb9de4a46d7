"""Checkpoints of a run: the whole train state and what it belongs to, one folder a step.

    <workdir>/checkpoints/<step>/state            arrays, one leaf per dotted path (orbax)
                         /meta                    JSON: format, config, fingerprints, eval loss, …
                         /base, /initial          more arrays, where a run saves them
                         /manifest.json           sizes and SHA-256 sums of all files, written last

A step is complete once it has its manifest, and whole while all its files are as the manifest says;
nothing is read from a step that is not whole. So neither a killed save nor a flipped bit gets into
a run. A folder without a manifest is unfinished if its meta states `FORMAT`, and the next save
deletes it; anything else by such a name is foreign, and is never touched. Restoring is strict:
every leaf must have the shape and dtype that is wanted. Nothing is cast, cut, padded, zero-filled
or skipped.

Of several processes, which must see the same folder, each writes and reads its own shards. The main
one looks after the folder: it removes what is left over, writes the manifest when all have written
their parts, and deletes old steps.

This is the only module that imports orbax.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from purelora.checkpoint import compatibility, items, manifest, retention
from purelora.core import errors, trees
from purelora.core import train_state as state
from purelora.multihost import runtime

# Of a step's files and of what its meta holds. A version that reads others has another number.
FORMAT = 2
# What a step may hold beside `state` and `meta`.
EXTRAS = ("base", "initial")

_NOTHING: Mapping[str, trees.Tree] = types.MappingProxyType({})
_TMP_SUFFIX = ocp.utils.TMP_DIR_SUFFIX
# What orbax adds to the arrays; measured at 25 kB for 52 of them.
_OVERHEAD_BYTES = 1_000_000


class PassedOver(NamedTuple):
    """A folder newer than the step that is used, and what is wrong with it.

    Attributes:
      problem: names the folder.
      is_damage: it was complete once. Otherwise a save was killed, which loses nothing.
      is_foreign: it is none of this version's, and may hold what someone still needs.
    """

    problem: errors.Problem
    is_damage: bool
    is_foreign: bool = False


class Newest(NamedTuple):
    """The newest whole step, None if there is none, and the newer folders that are not whole."""

    step: int | None
    passed_over: tuple[PassedOver, ...]


class Checkpoints:
    """The checkpoints in one folder, which one run at a time writes to.

    Nothing is created before the first `save`, so a folder can be opened just to read it.
    """

    def __init__(self, folder: Path, keep: retention.Policy, *, in_background: bool):
        """Opens `folder`.

        Args:
          folder: holds, or will hold, a folder for each step.
          keep: which steps a save leaves.
          in_background: `save` returns when it has copied the state, and a thread writes it.
        """
        logging.getLogger("absl").addFilter(_is_for_users)
        self._folder = folder.absolute()
        self._keep = keep
        self._in_background = in_background
        # Made by the first save. One thread, hence one save at a time.
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._verified: dict[int, object] = {}
        self._damaged: set[int] = set()
        # Reading is each process's own affair; a save is made by all of them together.
        self._reader = _checkpointer({runtime.process_index()})
        self._writer = _checkpointer(set(range(runtime.process_count())))

    def steps(self) -> list[int]:
        """The complete steps, ascending; whether they are whole is not looked at."""
        return [number for number in self._numbers() if manifest.exists(self._path(number))]

    def newest_whole(self) -> Newest:
        """Looks for the newest whole step, from the newest folder down."""
        unfinished = [self._folder / name for name in self._unfinished()]
        passed_over = [PassedOver(_incomplete(path), is_damage=False) for path in unfinished]
        for step in reversed(self._numbers()):
            damage = self._damage(step)
            if damage is None:
                return Newest(step, tuple(passed_over))
            is_damage = manifest.exists(self._path(step))
            passed_over.append(PassedOver(damage, is_damage, _is_foreign(self._path(step))))
            if is_damage:
                self._damaged.add(step)
        return Newest(None, tuple(passed_over))

    def save(
        self,
        step: int,
        state: state.TrainState,
        meta: Mapping[str, Any],
        extras: Mapping[str, trees.Tree] = _NOTHING,
    ) -> None:
        """Deletes what killed saves left, saves a step, and deletes the steps not to be kept.

        In the background, this first waits for the save before, and then only until `state` is
        copied: it may be donated at once. `extras` are read later and must not be donated.

        Args:
          step: the state's step.
          state: arrays, on any mesh.
          meta: what JSON can hold; with its `eval_loss`, or None, if the best is kept. Tuples come
            back as lists.
          extras: more trees of arrays, by names of `EXTRAS`.

        Raises:
          CheckpointError: there is a whole checkpoint of this step or something foreign by its
            name, or it (or, in the background, the save before) cannot be written.
        """
        self.wait()
        if runtime.is_main():
            self._check_free(step)
        plain_meta = json.loads(json.dumps({"format": FORMAT, **meta}))
        item = items.encoded(state, copy=True)
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving = self._thread.submit(self._write, step, item, plain_meta, extras)
        if not self._in_background:
            self.wait()

    def _check_free(self, step: int) -> None:
        path = self._path(step)
        if self._damage(step) is None:
            remedy = "choose another workdir, or delete the folder"
            raise errors.CheckpointError(str(path), None, "already holds this step", remedy)
        if _is_foreign(path):
            raise errors.CheckpointError.of([_incomplete(path)])

    def trust(self, step: int) -> None:
        """Takes a step for whole as it is now, because another process has found it so."""
        self._verified[step] = manifest.stamp(self._path(step))

    def wait(self) -> None:
        """Waits for a save that is being written.

        Raises:
          CheckpointError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def check_fits(
        self, step: int, like: state.TrainState, now: Mapping[str, Any], resumable: Sequence[str]
    ) -> None:
        """Checks that a run can continue a step.

        Args:
          step: a whole step.
          like: the run's state, as for `restore`.
          now: the run's meta: see `checkpoint_fit.setting_problems`.
          resumable: config keys that may differ.

        Raises:
          CheckpointError: there is no such step, it is damaged, or it belongs to another run:
            settings, fingerprints and leaves that differ are all named.
        """
        settings = compatibility.setting_problems(self.meta(step), now, resumable)
        leaves = self._leaf_problems(step, "state", like)
        if settings or leaves:
            raise errors.CheckpointError.of([*settings, *leaves])

    def restore(self, step: int, like: state.TrainState) -> state.TrainState:
        """The state of a step, bit for bit.

        Args:
          step: one of `steps()`.
          like: the state as ShapeDtypeStructs with NamedShardings, on any mesh; the key is a
            typed key.

        Raises:
          CheckpointError: there is no such step, it is damaged, or leaves of it differ from `like`
            in path, shape or dtype. All those leaves are named, and no array has been read yet.
        """
        restored: state.TrainState = self._restored(step, "state", like)
        return restored

    def restore_extra(self, step: int, name: str, like: trees.Tree) -> trees.Tree:
        """One of the `extras` of a step, bit for bit; otherwise as `restore`."""
        restored: trees.Tree = self._restored(step, name, like)
        return restored

    def trained(self, step: int) -> dict[str, np.ndarray]:
        """The trained leaves of a step by path; otherwise as `leaves`."""
        prefix = "trainable."
        read = self.leaves(step, "state", prefix)
        return {name.removeprefix(prefix): leaf for name, leaf in read.items()}

    def extras(self, step: int) -> list[str]:
        """Which of `EXTRAS` a step holds."""
        return [name for name in EXTRAS if (self._path(step) / name).is_dir()]

    def leaves(self, step: int, item: str, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays of `state` or of an extra by dotted path, without saying what is wanted.

        Args:
          step: one of `steps()`.
          item: "state" or one of `EXTRAS`.
          prefix: only paths that begin so; it is left on.

        Raises:
          CheckpointError: there is no such step or item, or it is damaged.
        """
        path = self._whole_path(step)
        saved, _ = self._saved(path, item)
        on_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in saved}
        read = self._read(path, item, on_host)
        return {name: leaf for name, leaf in read.items() if name.startswith(prefix)}

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the state.

        Raises:
          CheckpointError: there is no such step, it is damaged, or another version of purelora
            wrote it.
        """
        path = self._whole_path(step)
        meta = self._read_meta(path)
        found = meta.pop("format", None)
        if found != FORMAT:
            has = "has no format number" if found is None else f"is of format {found}"
            what = f"was written by another version of purelora: it {has}, this one reads {FORMAT}"
            raise errors.CheckpointError(str(path), None, what, "use the version that wrote it")
        if not isinstance(meta.get("config"), dict):
            what = "is damaged: its meta holds no config"
            raise errors.CheckpointError(str(path), None, what, "delete the folder")
        return meta

    def close(self) -> None:
        """Waits for a save that is being written, whatever becomes of it, and frees all threads."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._reader.close()
        self._writer.close()

    def _write(
        self, step: int, item: items.Item, meta: dict[str, Any], extras: Mapping[str, trees.Tree]
    ) -> None:
        """Writes a step and its manifest, then deletes what is not kept."""
        path = self._path(step)
        with _Explained(path, "cannot be written", "free some space, or check the permissions"):
            all_items = {"state": item}
            all_items |= {name: items.encoded(tree, copy=False) for name, tree in extras.items()}
            try:
                self._write_items(path, all_items, meta)
            except Exception:
                if runtime.is_main():
                    self._delete_unfinished()
                    if path.is_dir() and not manifest.exists(path):
                        self._delete_if_possible(path)
                raise
            self._damaged.discard(step)
            if runtime.is_main():
                self._delete_old(step)
            runtime.barrier("checkpoint")

    def _write_items(
        self, path: Path, all_items: Mapping[str, items.Item], meta: dict[str, Any]
    ) -> None:
        if runtime.is_main():
            self._delete_unfinished()
            _check_space(path, sum(a.nbytes for i in all_items.values() for a in i.arrays.values()))
            if manifest.exists(path):  # Damaged.
                self._delete(path)
        arguments = {
            name: ocp.args.PyTreeSave(item.arrays, custom_metadata=item.notes)
            for name, item in all_items.items()
        }
        # It begins when all processes are here, and ends when all have written their parts.
        self._writer.save(path, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **arguments))
        if runtime.is_main():
            manifest.write(path)

    def _restored(self, step: int, item: str, like: Any) -> Any:
        path = self._whole_path(step)
        problems = self._leaf_problems(step, item, like)
        if problems:
            raise errors.CheckpointError.of(problems)
        # The sharding of keys fits their data too, which have a dimension more.
        arguments = {
            name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=leaf.sharding)
            for name, leaf in items.flat(like).items()
        }
        placed = self._read(path, item, arguments)
        for name, impl in self._saved(path, item)[1]["key_impls"].items():
            placed[name] = jax.random.wrap_key_data(placed[name], impl=impl)
        return jax.tree.unflatten(jax.tree.structure(like), [placed[name] for name in arguments])

    def _leaf_problems(self, step: int, item: str, like: Any) -> list[errors.Problem]:
        path = self._whole_path(step)
        saved, _ = self._saved(path, item)
        problems = list(compatibility.leaf_problems(saved, items.flat(like)))
        if not problems:
            return []
        what = f"does not fit this run: {len(problems)} leaves of the {item} differ"
        remedy = "set the config back to that of the checkpoint, or choose another workdir"
        return [errors.Problem(str(path), None, what, remedy), *problems]

    def _saved(self, path: Path, item: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shape and dtype of every leaf of an item as it was given, and orbax's notes on it."""
        if not (path / item).is_dir():
            remedy = "it was saved without" if item in EXTRAS else "it is none of purelora's"
            raise errors.CheckpointError(str(path), None, f"holds no {item!r}", remedy)
        with _damaged(path):
            metadata = self._reader.metadata(path).item_metadata[item]
            notes: dict[str, Any] = metadata.custom_metadata
            leaves: dict[str, Any] = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for name, leaf in metadata.tree.items()
            }
        for name, impl in notes["key_impls"].items():
            leaves[name] = items.key_of(leaves[name], impl)
        return leaves, notes

    def _read(self, path: Path, item: str, how: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        """All leaves of an item; keys as their data."""
        arguments = {item: ocp.args.PyTreeRestore(restore_args=dict(how))}
        with _damaged(path):
            read: dict[str, Any] = self._reader.restore(path, args=ocp.args.Composite(**arguments))[
                item
            ]
        return read

    def _read_meta(self, path: Path) -> dict[str, Any]:
        with _damaged(path):
            arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta: dict[str, Any] = self._reader.restore(path, args=arguments)["meta"]
        return meta

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _numbers(self) -> list[int]:
        """Of the entries that have a number for a name, that number; ascending."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir())
        return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)

    def _unfinished(self) -> list[str]:
        """Names of what killed saves and deletions left."""
        return sorted(path.name for path in self._folder.glob(f"*{_TMP_SUFFIX}*"))

    def _damage(self, step: int) -> errors.Problem | None:
        """What keeps a step from being whole; a folder is read again only when it has changed."""
        path = self._path(step)
        if not manifest.exists(path):
            return _incomplete(path)
        stamp = manifest.stamp(path)
        if step in self._verified and self._verified[step] == stamp:
            return None
        damage = manifest.damage(path)
        if damage is not None:
            remedy = "delete the folder to continue from an earlier step"
            return errors.Problem(str(path), None, f"is damaged: {damage}", remedy)
        self._verified[step] = stamp
        return None

    def _whole_path(self, step: int) -> Path:
        problem = self._damage(step)
        if problem is not None:
            steps = ", ".join(map(str, self.steps())) or "none"
            known = f"complete steps in this folder: {steps}"
            remedy = f"{problem.remedy}; {known}" if problem.remedy else known
            raise errors.CheckpointError.of([dataclasses.replace(problem, remedy=remedy)])
        return self._path(step)

    def _delete_unfinished(self) -> None:
        """Gives back the space of what killed and failed saves left, as far as that is possible."""
        for name in self._unfinished():
            shutil.rmtree(self._folder / name, ignore_errors=True)
        for path in map(self._path, self._numbers()):
            if not manifest.exists(path) and _is_unfinished(path):
                self._delete_if_possible(path)

    def _delete_if_possible(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._delete(path)

    def _delete(self, path: Path) -> None:
        """Deletes a step's folder; renamed first, as half of it would look damaged or foreign."""
        shutil.rmtree(path.rename(self._folder / f"{path.name}{_TMP_SUFFIX}-deleted"))

    def _delete_old(self, saved: int) -> None:
        """Deletes the whole steps that are not to be kept."""
        steps = [step for step in self.steps() if step not in self._damaged]
        keep = retention.kept(self._keep, {step: self._eval_loss(step) for step in steps}, saved)
        for step in steps:
            if step not in keep:
                self._delete(self._path(step))

    def _eval_loss(self, step: int) -> float | None:
        if not self._keep.best:
            return None
        loss: float | None = self._read_meta(self._path(step))["eval_loss"]
        return loss


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


def to_read(folder: Path) -> Checkpoints:
    """The checkpoints in a folder, to which nothing will be saved."""
    policy = retention.Policy(last=1, every=None, best=False)
    return Checkpoints(folder, policy, in_background=False)


def find(path: Path) -> tuple[Checkpoints, int]:
    """The newest whole checkpoint of a run, to read from.

    Args:
      path: a run's folder, its checkpoints folder, or the folder of one step.

    Raises:
      CheckpointError: there is none, or the newest that was complete is damaged.
    """
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    is_step = path.name.isdecimal() and not any(p.name.isdecimal() for p in _entries(path))
    found = to_read(path.parent if is_step else path)
    if is_step:
        found.meta(int(path.name))
        return found, int(path.name)
    newest = found.newest_whole()
    damaged = [passed.problem for passed in newest.passed_over if passed.is_damage]
    if damaged:
        remedy = "delete it, or name the folder of the step that you want"
        raise errors.CheckpointError.of(
            [dataclasses.replace(problem, remedy=remedy) for problem in damaged]
        )
    if newest.step is None:
        foreign = [passed.problem for passed in newest.passed_over if passed.is_foreign]
        if foreign:
            raise errors.CheckpointError.of(errors.first(foreign, str(path)))
        remedy = "name the folder of a run or of one of its steps"
        raise errors.CheckpointError(str(path), None, "holds no complete checkpoint", remedy)
    return found, newest.step


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _incomplete(path: Path) -> errors.Problem:
    """What is wrong with a path that has no manifest."""
    if not os.path.lexists(path):
        return errors.Problem(str(path), None, "is not a complete checkpoint: there is none", "")
    if _is_foreign(path):
        what = "is no checkpoint that this version of purelora has made"
        return errors.Problem(str(path), None, what, "choose another workdir, or delete it")
    what = "is not a complete checkpoint: its save was killed"
    return errors.Problem(str(path), None, what, "the next save of this run removes it")


def _is_foreign(path: Path) -> bool:
    """Whether there is something without a manifest that this version did not leave."""
    is_left = _TMP_SUFFIX in path.name or manifest.exists(path) or _is_unfinished(path)
    return os.path.lexists(path) and not is_left


def _is_unfinished(path: Path) -> bool:
    """Whether a folder without a manifest is what a killed save left: it holds nothing whole.

    Orbax gives a folder the number for its name when meta and arrays are in it, so its meta states
    the format. After a failure of the machine it may be empty or hold zeros.
    """
    if not path.is_dir():
        return False
    try:
        meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return not any(entry.is_file() for entry in path.rglob("*"))
    except OSError:
        return False
    except ValueError:
        return True
    return isinstance(meta, dict) and meta.get("format") == FORMAT


def _check_space(path: Path, needed_bytes: int) -> None:
    """Raises OSError if a step would not fit on the disk.

    Orbax notices too, but by then it prints tracebacks of all arrays that did not fit.
    """
    probe = path.with_name(f"{path.name}{_TMP_SUFFIX}") / "space"
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
class _Explained:
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


def _damaged(path: Path) -> _Explained:
    return _Explained(path, "is damaged", "delete the folder to continue from an earlier step")


def _is_for_users(record: logging.LogRecord) -> bool:
    """Keeps of orbax's records, which go to absl's logger, the warnings and errors.

    Those with a traceback go too: what they tell of is raised as well.
    """
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.WARNING and record.exc_info is None
