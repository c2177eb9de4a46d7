"""Checkpoints of a run: the whole train state and what it belongs to, one folder a step.

    <workdir>/checkpoints/<step>/state            arrays, one leaf per dotted path (orbax)
                         /meta                    JSON: see `document`
                         /base, /initial          more arrays, where a run saves them
                         /manifest.json           sizes and SHA-256 sums of all files, written last

Nothing is read from a step whose files are not as its manifest says, so neither a killed save nor a
flipped bit gets into a run: see `step_folders`. Restoring is strict: every leaf must have the shape
and dtype that is wanted. Nothing is cast, cut, padded, zero-filled or skipped.

Of several processes, which must see the same folder, each writes and reads its own shards. The main
one looks after the folder: it removes what is left over, writes the manifest when all have written
their parts, and deletes old steps.

Orbax writes and reads the arrays. When to save, what to keep and the thread are ours and not its
CheckpointManager's: that takes a step for complete without checksums, deletes whatever has a number
for its name, and counts a step as kept before a manifest could be written for it.
"""

import concurrent.futures
import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purelora.checkpoint import (
    compatibility,
    document,
    items,
    manifest,
    orbax_files,
    retention,
    step_folders,
)
from purelora.checkpoint.orbax_files import EXTRAS
from purelora.core import errors, train_state, trees
from purelora.multihost import runtime

_NOTHING: Mapping[str, trees.Tree] = types.MappingProxyType({})


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
        self._folders = step_folders.StepFolders(folder)
        self._keep = keep
        self._in_background = in_background
        # Made by the first save. One thread, hence one save at a time.
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._files = orbax_files.OrbaxFiles()

    def steps(self) -> list[int]:
        """The complete steps, ascending; whether they are whole is not looked at."""
        return self._folders.complete()

    def newest_whole(self) -> step_folders.Newest:
        """Looks for the newest whole step, from the newest folder down."""
        return self._folders.newest_whole()

    def save(
        self,
        step: int,
        state: train_state.TrainState,
        meta: Mapping[str, Any],
        extras: Mapping[str, trees.Tree] = _NOTHING,
    ) -> None:
        """Deletes what killed saves left, saves a step, and deletes the steps not to be kept.

        In the background, this first waits for the save before, and then only until `state` is
        copied: it may be donated at once. `extras` are read later and must not be donated.

        Args:
          step: the state's step.
          state: arrays, on any mesh.
          meta: what JSON can hold, see `document`; with its `eval_loss`, or None, if the best is
            kept. Tuples come back as lists.
          extras: more trees of arrays, by names of `EXTRAS`.

        Raises:
          CheckpointError: there is a whole checkpoint of this step or something foreign by its
            name, or it (or, in the background, the save before) cannot be written.
        """
        self.wait()
        if runtime.is_main():
            self._folders.check_free(step)
        plain_meta = document.to_json(meta)
        item = items.encoded(state, copy=True)
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving = self._thread.submit(self._write, step, item, plain_meta, extras)
        if not self._in_background:
            self.wait()

    def mark_verified(self, step: int) -> None:
        """Takes a step for whole as it is now, because another process has found it so."""
        self._folders.mark_verified(step)

    def wait(self) -> None:
        """Waits for a save that is being written.

        Raises:
          CheckpointError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def check_fits(
        self,
        step: int,
        like: train_state.TrainState,
        now: Mapping[str, Any],
        resumable: Sequence[str],
    ) -> None:
        """Checks that a run can continue a step.

        Args:
          step: a whole step.
          like: the run's state, as for `restore`.
          now: the run's meta: see `compatibility.setting_problems`.
          resumable: config keys that may differ.

        Raises:
          CheckpointError: there is no such step, it is damaged, or it belongs to another run:
            settings, fingerprints and leaves that differ are all named.
        """
        settings = compatibility.setting_problems(self.meta(step), now, resumable)
        leaves = self._leaf_problems(step, "state", like)
        if settings or leaves:
            raise errors.CheckpointError.of([*settings, *leaves])

    def restore(self, step: int, like: train_state.TrainState) -> train_state.TrainState:
        """The state of a step, bit for bit.

        Args:
          step: one of `steps()`.
          like: the state as ShapeDtypeStructs with NamedShardings, on any mesh; the key is a
            typed key.

        Raises:
          CheckpointError: there is no such step, it is damaged, or leaves of it differ from `like`
            in path, shape or dtype. All those leaves are named, and no array has been read yet.
        """
        restored: train_state.TrainState = self._restored(step, "state", like)
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
        return [name for name in EXTRAS if (self._folders.path(step) / name).is_dir()]

    def leaves(self, step: int, item: str, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays of `state` or of an extra by dotted path, without saying what is wanted.

        Args:
          step: one of `steps()`.
          item: "state" or one of `EXTRAS`.
          prefix: only paths that begin so; it is left on.

        Raises:
          CheckpointError: there is no such step or item, or it is damaged.
        """
        read = self._files.read_on_host(self._folders.whole_path(step), item)
        return {name: leaf for name, leaf in read.items() if name.startswith(prefix)}

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the state.

        Raises:
          CheckpointError: there is no such step, it is damaged, or another version of purelora
            wrote it.
        """
        path = self._folders.whole_path(step)
        written = self._files.document(path)
        if not document.is_readable(written):
            number = written.get("format")
            has = "has no format number" if number is None else f"is of format {number}"
            reads = f"{document.FORMAT} and {document.OLDER_FORMAT}"
            what = f"was written by another version of purelora: it {has}, this one reads {reads}"
            raise errors.CheckpointError(str(path), None, what, "use the version that wrote it")
        try:
            return document.from_json(written)
        except (LookupError, TypeError, AttributeError) as error:
            what = "is damaged: its meta holds no config"
            raise errors.CheckpointError(str(path), None, what, "delete the folder") from error

    def close(self) -> None:
        """Waits for a save that is being written, whatever becomes of it, and frees all threads."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._files.close()

    def _write(
        self, step: int, item: items.Item, meta: dict[str, Any], extras: Mapping[str, trees.Tree]
    ) -> None:
        """Writes a step and its manifest, then deletes what is not kept."""
        path = self._folders.path(step)
        remedy = "free some space, or check the permissions"
        with orbax_files.Explained(path, "cannot be written", remedy):
            all_items = {"state": item}
            all_items |= {name: items.encoded(tree, copy=False) for name, tree in extras.items()}
            try:
                self._write_items(step, all_items, meta)
            except Exception:
                if runtime.is_main():
                    self._folders.delete_unfinished()
                    if path.is_dir() and not manifest.exists(path):
                        self._folders.delete_if_possible(step)
                raise
            self._folders.written(step)
            if runtime.is_main():
                self._delete_old(step)
            runtime.barrier("checkpoint")

    def _write_items(
        self, step: int, all_items: Mapping[str, items.Item], meta: dict[str, Any]
    ) -> None:
        path = self._folders.path(step)
        if runtime.is_main():
            self._folders.delete_unfinished()
            needed_bytes = sum(a.nbytes for i in all_items.values() for a in i.arrays.values())
            orbax_files.check_space(path, needed_bytes)
            if manifest.exists(path):  # Damaged.
                self._folders.delete(step)
        self._files.write(path, all_items, meta)
        if runtime.is_main():
            manifest.write(path)

    def _restored(self, step: int, item: str, like: Any) -> Any:
        problems = self._leaf_problems(step, item, like)
        if problems:
            raise errors.CheckpointError.of(problems)
        return self._files.read_placed(self._folders.path(step), item, like)

    def _leaf_problems(self, step: int, item: str, like: Any) -> list[errors.Problem]:
        path = self._folders.whole_path(step)
        saved = self._files.saved(path, item).leaves
        problems = list(compatibility.leaf_problems(saved, items.flat(like)))
        if not problems:
            return []
        what = f"does not fit this run: {len(problems)} leaves of the {item} differ"
        remedy = "set the config back to that of the checkpoint, or choose another workdir"
        return [errors.Problem(str(path), None, what, remedy), *problems]

    def _delete_old(self, saved: int) -> None:
        """Deletes the whole steps that are not to be kept."""
        steps = self._folders.retained()
        keep = retention.kept(self._keep, {step: self._eval_loss(step) for step in steps}, saved)
        for step in steps:
            if step not in keep:
                self._folders.delete(step)

    def _eval_loss(self, step: int) -> float | None:
        if not self._keep.best:
            return None
        meta = document.from_json(self._files.document(self._folders.path(step)))
        loss: float | None = meta["eval_loss"]
        return loss


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
    checkpoints = to_read(path.parent if is_step else path)
    if is_step:
        checkpoints.meta(int(path.name))
        return checkpoints, int(path.name)
    newest = checkpoints.newest_whole()
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
    return checkpoints, newest.step


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
