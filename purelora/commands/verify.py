"""Proves on a configuration of yours that a killed run ends as an unbroken one does.

    python -m purelora.verify --config=configs/tiny.py
    python -m purelora.verify --config=configs/qlora.py --config.checkpoint.save_steps=5 --kills=5

--config=FILE, --config.KEY=VALUE   the run, as for purelora.train; its workdir is not touched
--kills=3            how many times to kill it, in steps, saves, evals and while it compiles
--seed=0             of the random numbers that say when it is killed
--workdir=FOLDER     an empty or new folder for the two runs; else one is made for the time of it

The run is made once unbroken and once killed with SIGKILL and started again, with the same command.
Then all leaves of the last checkpoint are compared bit by bit, and all records.

Exit status: 0 when everything is equal, 1 when something differs, 2 for an error that the user can
fix.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from purelora.analysis import fault_injection as kills
from purelora.checkpoint import manifest, orbax_files, step_folders, store
from purelora.commands import train
from purelora.config import command_line, schema
from purelora.core import errors
from purelora.training import log


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command takes beside the configuration."""

    kills: int = 3
    seed: int = 0
    workdir: str | None = None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    run_arguments, others = _sorted(argv)
    options = command_line.options(Options, others)
    if options.kills < 1:
        raise errors.ConfigError("--kills", options.kills, "must be at least 1", "")
    settings = command_line.parse(run_arguments, flags=()).config
    for line in _introduction(settings):
        log.say(line)
    with _folder(options.workdir) as folder:
        proof = Proof(settings, run_arguments, folder, options)
        problems = proof.problems()
    for problem in problems:
        log.say(f"  {problem}")
    log.say("FAIL" if problems else "PASS")
    return 1 if problems else 0


class Proof:
    """An unbroken run, a broken one, and what differs between them."""

    def __init__(
        self,
        settings: schema.Config,
        run_arguments: Sequence[str],
        folder: pathlib.Path,
        options: Options,
    ):
        """Prepares the runs of a configuration in two folders of `folder`."""
        self._settings = settings
        self._arguments = run_arguments
        self._unbroken, self._broken = folder / "unbroken", folder / "broken"
        self._options = options

    def problems(self) -> list[str]:
        """Makes both runs and says what differs.

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

    def _break(self, marks: Sequence[kills.Mark], last: int) -> str | None:
        """The broken run, until it is complete; says what went wrong if it does not get there."""
        moments = kills.Moments(
            marks,
            save_secs=self._save_secs(marks),
            saves_first=self._settings.checkpoint.save_first,
            seed=self._options.seed,
        )
        for number in range(self._options.kills):
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
            moments.saw(child.marks)
            log.say(self._told(number, child))
        child = self._child(self._broken)
        with child:
            status = child.run(None, last_save=None)
        return f"a resumed run ended with status {status}: {_end(child.output)}" if status else None

    def _told(self, number: int, child: kills.Child) -> str:
        """Where a kill hit, and what it left."""
        step, passed_over = _newest(self._broken)
        names = [pathlib.Path(passed.problem.where).name for passed in passed_over]
        torn = f" (incomplete: {', '.join(names)})" if names else ""
        then = "it begins anew" if step is None else f"it goes on from step {step}"
        where = f"{child.marks[-1].phase}, {child.secs_into_phase:.2f} s into it"
        return f"kill {number + 1} of {self._options.kills}: {where}; {then}{torn}"

    def _save_secs(self, marks: Sequence[kills.Mark]) -> float:
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
        (whole, step), (broken, its_step) = map(store.find, (self._unbroken, self._broken))
        if step != its_step:
            return [f"the last checkpoint is of step {its_step} instead of {step}"]
        problems = []
        for item in ("state", *orbax_files.EXTRAS):
            if (self._unbroken / "checkpoints" / str(step) / item).exists():
                leaves = whole.leaves(step, item)
                problems += differences(leaves, broken.leaves(step, item))
                total = sum(leaf.nbytes for leaf in leaves.values())
                log.say(f"{item} at step {step}: {len(leaves)} leaves, {total:,} bytes compared")
        return problems

    def _record_problems(self, last: int) -> list[str]:
        whole, broken = map(_records, (self._unbroken, self._broken))
        log.say(f"records: {len(whole)} of steps and evals compared")
        steps = [record.step for record in broken if record.kind == "train"]
        problems = []
        if steps != list(range(1, last + 1)):
            problems.append(f"the steps recorded are not each of 1 to {last} once: {steps}")
        pairs = zip(whole, broken, strict=False)
        problems += [
            f"record {ours} instead of {wanted}" for wanted, ours in pairs if ours != wanted
        ]
        if len(whole) != len(broken):
            problems.append(f"{len(broken)} records instead of {len(whole)}")
        return problems

    def _child(self, workdir: pathlib.Path) -> kills.Child:
        return kills.Child(self._command(workdir), self._evaluates)

    def _command(self, workdir: pathlib.Path) -> list[str]:
        # Every step is recorded, and every start goes on where the one before was killed.
        own = [
            f"--config.workdir={workdir}",
            "--config.log_steps=1",
            "--config.checkpoint.resume=auto",
        ]
        return [sys.executable, "-m", "purelora.train", *self._arguments, *own]

    def _evaluates(self, step: int, is_last: bool) -> bool:
        data = self._settings.data
        if data.eval is None and data.eval_fraction == 0:
            return False
        return step == 0 or is_last or train.is_due(step, self._settings.eval_steps)


def differences(wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> list[str]:
    """What differs between two sets of leaves, bit by bit, the largest difference of each named."""
    problems = [f"{name}: only in one of the checkpoints" for name in wanted.keys() ^ found.keys()]
    for name in wanted.keys() & found.keys():
        a, b = wanted[name], found[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{name}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
        elif a.tobytes() != b.tobytes():
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
            both = [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in (a, b)]
            unequal = int((both[0] != both[1]).sum())
            problems.append(f"{name}: differs in {unequal} bytes, by up to {distance.max():.3g}")
    return sorted(problems)


class _Record(NamedTuple):
    """What must be equal of a record: times need not be."""

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


def _introduction(settings: schema.Config) -> Iterator[str]:
    saving = settings.checkpoint
    if saving.save_steps is None and saving.save_secs is None:
        start = "the save of its first step" if saving.save_first else "the beginning"
        yield f"checkpoint.save_steps is None: a killed run goes on from {start}"


def _end(output: Sequence[str]) -> str:
    """The last line, which names the error."""
    return output[-1] if output else "no output"


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the run, and those of this command."""
    run_arguments: list[str] = []
    others: list[str] = []
    target = others
    for argument in argv:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            target = run_arguments if f"{name}.".startswith("--config.") else others
        target.append(argument)
    return run_arguments, others


@contextlib.contextmanager
def _folder(workdir: str | None) -> Iterator[pathlib.Path]:
    """A new folder for the runs; one that the user did not name is removed in the end."""
    if workdir is None:
        with tempfile.TemporaryDirectory(prefix="purelora-verify-") as made:
            yield pathlib.Path(made)
        return
    folder = pathlib.Path(workdir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.ConfigError("--workdir", workdir, "is not an empty folder", "name a new one")
    yield folder
