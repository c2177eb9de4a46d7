"""Proves that a run which is killed and resumed ends as an unbroken one does, bit by bit."""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from purelora.analysis import fault_injection
from purelora.checkpoint import manifest, orbax_files, step_folders, store
from purelora.config import schema
from purelora.core import errors
from purelora.training import log


class ResumeProof:
    """An unbroken run, one that is killed and resumed, and the comparison of both."""

    def __init__(
        self,
        settings: schema.Config,
        run_arguments: Sequence[str],
        folder: pathlib.Path,
        *,
        kills: int,
        seed: int,
        evaluates: Callable[[int, bool], bool],
    ):
        """Prepares both runs; starts nothing.

        Args:
          settings: the configuration.
          run_arguments: the arguments of the train command that say the same.
          folder: where each run gets a folder.
          kills: how often the second run is killed.
          seed: of the random numbers that say when.
          evaluates: as for `fault_injection.phase_after`.
        """
        self._settings = settings
        self._arguments = run_arguments
        self._unbroken, self._broken = folder / "unbroken", folder / "broken"
        self._kills, self._seed = kills, seed
        self._evaluates = evaluates

    def problems(self) -> list[str]:
        """Makes both runs and returns what differs between them.

        Raises:
          ConfigError: the run does not even come to its end unbroken.
        """
        child = self._child(self._unbroken)
        with child:
            status = child.run(None, last_save=None)
        if status:
            remedy = "make this command work: " + " ".join(self._command(self._unbroken))
            what = f"the unbroken run ended with status {status}: {_end(child.output)}"
            raise errors.ConfigError("--config", None, what, remedy)
        last = store.find(self._unbroken)[1]
        secs = child.marks[-1].secs - child.marks[0].secs
        log.say(f"unbroken run: {last} steps in {secs:.1f} s")

        failure = self._break(child.marks, last)
        if failure is not None:
            return [failure]
        return [*self._state_problems(), *self._record_problems(last)]

    def _break(self, marks: Sequence[fault_injection.Mark], last: int) -> str | None:
        """Makes the run that is killed and resumed; returns what went wrong, None if nothing."""
        moments = fault_injection.Moments(
            marks,
            save_secs=self._save_secs(marks),
            saves_first=self._settings.checkpoint.save_first,
            seed=self._seed,
        )
        for number in range(self._kills):
            resumes_from = _newest(self._broken).step
            moment = moments.draw(number, resumes_from=resumes_from, last_step=last)
            child = self._child(self._broken)
            with child:
                status = child.run(moment, last_save=last)
            if status == 0:
                log.say(f"kill {number + 1} came too late: the run was complete")
                return None
            if status is not None:
                return f"a resumed run ended with status {status}: {_end(child.output)}"
            moments.observe(child.marks)
            log.say(self._kill_report(number, child))
        child = self._child(self._broken)
        with child:
            status = child.run(None, last_save=None)
        return f"a resumed run ended with status {status}: {_end(child.output)}" if status else None

    def _kill_report(self, number: int, child: fault_injection.Child) -> str:
        """Where a kill hit, and what it left."""
        step, passed_over = _newest(self._broken)
        names = [pathlib.Path(passed.problem.where).name for passed in passed_over]
        torn = f" (incomplete: {', '.join(names)})" if names else ""
        then = "it begins anew" if step is None else f"it goes on from step {step}"
        where = f"{child.marks[-1].phase}, {child.secs_into_phase:.2f} s into it"
        return f"kill {number + 1} of {self._kills}: {where}; {then}{torn}"

    def _save_secs(self, marks: Sequence[fault_injection.Mark]) -> float:
        """How long the longest of the saves took whose checkpoints are still there."""
        begun = {mark.phase.step: mark.secs for mark in marks if mark.phase.name == "save"}
        folder = self._unbroken / "checkpoints"
        ends = {
            step: path.stat().st_mtime
            for step in begun
            if (path := folder / str(step) / manifest.NAME).exists()
        }
        return max(ends[step] - begun[step] for step in ends)

    def _state_problems(self) -> list[str]:
        (unbroken, step), (broken, last) = map(store.find, (self._unbroken, self._broken))
        if step != last:
            return [f"the last checkpoint is of step {last} instead of {step}"]
        problems = []
        for item in ("state", *orbax_files.EXTRAS):
            if (self._unbroken / "checkpoints" / str(step) / item).exists():
                leaves = unbroken.leaves(step, item)
                problems += differences(leaves, broken.leaves(step, item))
                total = sum(leaf.nbytes for leaf in leaves.values())
                log.say(f"{item} at step {step}: {len(leaves)} leaves, {total:,} bytes compared")
        return problems

    def _record_problems(self, last: int) -> list[str]:
        unbroken, broken = map(_records, (self._unbroken, self._broken))
        log.say(f"records: {len(unbroken)} of steps and evals compared")
        steps = [record.step for record in broken if record.kind == "train"]
        problems = []
        if steps != list(range(1, last + 1)):
            problems.append(f"the steps recorded are not each of 1 to {last} once: {steps}")
        pairs = zip(unbroken, broken, strict=False)
        problems += [
            f"record {ours} instead of {wanted}" for wanted, ours in pairs if ours != wanted
        ]
        if len(unbroken) != len(broken):
            problems.append(f"{len(broken)} records instead of {len(unbroken)}")
        return problems

    def _child(self, workdir: pathlib.Path) -> fault_injection.Child:
        return fault_injection.Child(self._command(workdir), self._evaluates)

    def _command(self, workdir: pathlib.Path) -> list[str]:
        # Every step is recorded, and every start goes on where the one before was killed.
        more = [
            f"--config.workdir={workdir}",
            "--config.log_steps=1",
            "--config.checkpoint.resume=auto",
        ]
        return [sys.executable, "-m", "purelora.train", *self._arguments, *more]


def differences(wanted: Mapping[str, np.ndarray], leaves: Mapping[str, np.ndarray]) -> list[str]:
    """The leaves that are not equal bit by bit, as messages with the largest difference."""
    problems = [f"{name}: only in one of the checkpoints" for name in wanted.keys() ^ leaves.keys()]
    for name in wanted.keys() & leaves.keys():
        a, b = wanted[name], leaves[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{name}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
        elif a.tobytes() != b.tobytes():
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
            both = [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in (a, b)]
            unequal = int((both[0] != both[1]).sum())
            problems.append(f"{name}: differs in {unequal} bytes, by up to {distance.max():.3g}")
    return sorted(problems)


class _Record(NamedTuple):
    """The fields of a record that must be equal in both runs; times need not be."""

    kind: str
    step: int
    loss: float | str
    grad_norm: float | str | None
    learning_rate: float | None


def _records(workdir: pathlib.Path) -> list[_Record]:
    """The records of steps and evals; those of a run without a checkpoint of its own have gone."""
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        _Record("train", r["step"], r["loss"], r["grad_norm"], r["learning_rate"])
        if r["kind"] == "train"
        else _Record("eval", r["step"], r["loss"], None, None)
        for r in records
        if r["kind"] in ("train", "eval")
    ]


def _newest(workdir: pathlib.Path) -> step_folders.Newest:
    return store.to_read(workdir / "checkpoints").newest_whole()


def _end(output: Sequence[str]) -> str:
    """The last line, which names the error."""
    return output[-1] if output else "no output"
