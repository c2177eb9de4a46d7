"""The folder that holds a folder for each step: which there are, which are whole, and deletion.

A step is complete once it has its manifest, and whole while all its files are as the manifest says.
A folder without a manifest is unfinished if its document states a format that this version reads;
anything else by such a name is foreign, and is never touched.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from purelora.checkpoint import document, manifest, orbax_files
from purelora.core import errors


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


class StepFolders:
    """The step folders of one run."""

    def __init__(self, folder: Path):
        """`folder` holds, or will hold, a folder for each step; nothing is created here."""
        self._folder = folder.absolute()
        # By step, the stamp that its folder had when it was found whole.
        self._verified: dict[int, object] = {}
        self._damaged: set[int] = set()

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self._folder / str(step)

    def complete(self) -> list[int]:
        """The complete steps, ascending; whether they are whole is not looked at."""
        return [number for number in self._numbers() if manifest.exists(self.path(number))]

    def newest_whole(self) -> Newest:
        """Looks for the newest whole step, from the newest folder down."""
        unfinished = [self._folder / name for name in self._unfinished()]
        passed_over = [PassedOver(incomplete(path), is_damage=False) for path in unfinished]
        for step in reversed(self._numbers()):
            problem = self.problem(step)
            if problem is None:
                return Newest(step, tuple(passed_over))
            is_damage = manifest.exists(self.path(step))
            passed_over.append(PassedOver(problem, is_damage, is_foreign(self.path(step))))
            if is_damage:
                self._damaged.add(step)
        return Newest(None, tuple(passed_over))

    def mark_verified(self, step: int) -> None:
        """Takes a step for whole as it is now."""
        self._verified[step] = manifest.stamp(self.path(step))

    def problem(self, step: int) -> errors.Problem | None:
        """What keeps a step from being whole; a folder is read again only when it has changed."""
        path = self.path(step)
        if not manifest.exists(path):
            return incomplete(path)
        stamp = manifest.stamp(path)
        if step in self._verified and self._verified[step] == stamp:
            return None
        damage = manifest.damage(path)
        if damage is not None:
            remedy = "delete the folder to continue from an earlier step"
            return errors.Problem(str(path), None, f"is damaged: {damage}", remedy)
        self._verified[step] = stamp
        return None

    def whole_path(self, step: int) -> Path:
        """The folder of a whole step.

        Raises:
          CheckpointError: there is no such step, or it is damaged.
        """
        problem = self.problem(step)
        if problem is not None:
            steps = ", ".join(map(str, self.complete())) or "none"
            known = f"complete steps in this folder: {steps}"
            remedy = f"{problem.remedy}; {known}" if problem.remedy else known
            raise errors.CheckpointError.of([dataclasses.replace(problem, remedy=remedy)])
        return self.path(step)

    def check_free(self, step: int) -> None:
        """Checks that a step can be saved.

        Raises:
          CheckpointError: there is a whole checkpoint of it, or something foreign by its name.
        """
        path = self.path(step)
        if self.problem(step) is None:
            remedy = "choose another workdir, or delete the folder"
            raise errors.CheckpointError(str(path), None, "already holds this step", remedy)
        if is_foreign(path):
            raise errors.CheckpointError.of([incomplete(path)])

    def retained(self) -> list[int]:
        """The complete steps that retention may delete: all that were not found damaged."""
        return [step for step in self.complete() if step not in self._damaged]

    def written(self, step: int) -> None:
        """Notes that a step has been written anew, whatever its folder held."""
        self._damaged.discard(step)

    def delete(self, step: int) -> None:
        """Deletes a step's folder; renamed first, as half of it would look damaged or foreign."""
        path = self.path(step)
        shutil.rmtree(path.rename(self._folder / f"{path.name}{orbax_files.TMP_SUFFIX}-deleted"))

    def delete_unfinished(self) -> None:
        """Gives back the space of what killed and failed saves left, as far as that is possible."""
        for name in self._unfinished():
            shutil.rmtree(self._folder / name, ignore_errors=True)
        for step in self._numbers():
            if not manifest.exists(self.path(step)) and _is_unfinished(self.path(step)):
                self.delete_if_possible(step)

    def delete_if_possible(self, step: int) -> None:
        """Deletes a step's folder, or leaves it where the disk refuses."""
        with contextlib.suppress(OSError):
            self.delete(step)

    def _numbers(self) -> list[int]:
        """Of the entries that have a number for a name, that number; ascending."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir())
        return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)

    def _unfinished(self) -> list[str]:
        """Names of what killed saves and deletions left."""
        return sorted(path.name for path in self._folder.glob(f"*{orbax_files.TMP_SUFFIX}*"))


def incomplete(path: Path) -> errors.Problem:
    """What is wrong with a path that has no manifest."""
    if not os.path.lexists(path):
        return errors.Problem(str(path), None, "is not a complete checkpoint: there is none", "")
    if is_foreign(path):
        what = "is no checkpoint that this version of purelora has made"
        return errors.Problem(str(path), None, what, "choose another workdir, or delete it")
    what = "is not a complete checkpoint: its save was killed"
    return errors.Problem(str(path), None, what, "the next save of this run removes it")


def is_foreign(path: Path) -> bool:
    """Whether there is something without a manifest that this version did not leave."""
    is_left = orbax_files.TMP_SUFFIX in path.name or manifest.exists(path) or _is_unfinished(path)
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
    return document.is_readable(meta)
