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
import functools
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from purelora.analysis import resume_proof
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
        problems = resume_proof.ResumeProof(
            settings,
            run_arguments,
            folder,
            kills=options.kills,
            seed=options.seed,
            evaluates=functools.partial(_evaluates, settings),
        ).problems()
    for problem in problems:
        log.say(f"  {problem}")
    log.say("FAIL" if problems else "PASS")
    return 1 if problems else 0


def _evaluates(settings: schema.Config, step: int, is_last: bool) -> bool:
    """Whether a run evaluates after `step`."""
    if settings.data.eval is None and settings.data.eval_fraction == 0:
        return False
    return step == 0 or is_last or train.is_due(step, settings.eval_steps)


def _introduction(settings: schema.Config) -> Iterator[str]:
    saving = settings.checkpoint
    if saving.save_steps is None and saving.save_secs is None:
        start = "the save of its first step" if saving.save_first else "the beginning"
        yield f"checkpoint.save_steps is None: a killed run goes on from {start}"


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the arguments of the train command from those of this one."""
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
        with tempfile.TemporaryDirectory(prefix="purelora-verify-") as temporary:
            yield pathlib.Path(temporary)
        return
    folder = pathlib.Path(workdir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.ConfigError("--workdir", workdir, "is not an empty folder", "name a new one")
    yield folder
