"""Runs of the train command in processes of their own, killed at chosen moments.

A run's output says what it is doing: each of some lines begins a phase. Where in which phase a run
is killed is drawn from the phases of a run that was not.
"""

import math
import queue
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

_LINE = re.compile(r"(start|resume|eval|step|save|finish)(?: at step)? (\d+)(?:: |/(\d+) )")


class Phase(NamedTuple):
    """What a run is doing, and in which step (0 before the first)."""

    name: Literal["start", "compile", "eval", "step", "save", "end"]
    step: int

    def __str__(self) -> str:
        texts = {
            "start": "while loading",
            "compile": "while restoring and compiling",
            "eval": f"in the eval of step {self.step}",
            "step": f"in step {self.step}",
            "save": f"at the save of step {self.step}",
            "end": "after the last save",
        }
        return texts[self.name]


class Mark(NamedTuple):
    """The beginning of a phase, in seconds since the epoch."""

    phase: Phase
    secs: float


class Moment(NamedTuple):
    """When to kill a run: the seconds after the beginning of one of its phases."""

    phase: Phase
    delay_secs: float


def phase_after(line: str, *, evaluates: Callable[[int, bool], bool]) -> Phase | None:
    """The phase that a line of a run's output begins, None if it begins none.

    Args:
      line: the line.
      evaluates: whether the run evaluates after a step (0: before the first), given that step and
        whether it is the last.
    """
    if line.startswith("base: "):
        return Phase("compile", 0)
    match = _LINE.match(line)
    if match is None:
        return None
    name, step = match[1], int(match[2])
    if name in ("save", "finish"):
        return Phase("save" if name == "save" else "end", step)
    # An eval's own line ends it; all others end what comes before an eval.
    if name in ("start", "step") and evaluates(step, match[2] == match[3]):
        return Phase("eval", step)
    return Phase("step", step + 1)


class Child:
    """A run in a process of its own.

    Attributes:
      marks: the phases that it began.
      output: its lines.
      secs_into_phase: how long it had been in the last phase when it was killed.
    """

    def __init__(self, command: Sequence[str], evaluates: Callable[[int, bool], bool]):
        """Starts `command`; `evaluates` as for `phase_after`."""
        self.marks = [Mark(Phase("start", 0), time.time())]
        self.output: list[str] = []
        self.secs_into_phase = 0.0
        self._evaluates = evaluates
        self._lines: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it if it is still running."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def run(self, moment: Moment | None, *, last_save: int | None) -> int | None:
        """Waits until the run ends, or kills it with SIGKILL.

        Args:
          moment: when to kill it; None: not at all.
          last_save: it is killed at the latest when it begins to save this step: what comes after
            is of no interest. None: no such step.

        Returns:
          Its exit status, None if it was killed.
        """
        due = math.inf
        latest = None if last_save is None else Phase("save", last_save)
        if moment is not None and moment.phase.name == "start":
            due = self.marks[0].secs + moment.delay_secs
        while True:
            try:
                wait_secs = None if due == math.inf else max(0.0, due - time.time())
                received = self._lines.get(timeout=wait_secs)
            except queue.Empty:
                self._process.kill()
                self.secs_into_phase = time.time() - self.marks[-1].secs
                self._process.wait()
                return None
            if received is None:
                return self._process.wait()
            mark = self._marked(*received)
            if moment is not None and mark is not None:
                if mark.phase == moment.phase:
                    due = min(due, mark.secs + moment.delay_secs)
                elif mark.phase == latest:
                    due = mark.secs

    def _read(self) -> None:
        """In a thread: the lines with their times, then None."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put((line.rstrip("\n"), time.time()))
        self._lines.put(None)

    def _marked(self, line: str, secs: float) -> Mark | None:
        self.output.append(line)
        phase = phase_after(line, evaluates=self._evaluates)
        if phase is None:
            return None
        mark = Mark(phase, secs)
        self.marks.append(mark)
        return mark


class Moments:
    """Draws moments to kill a run at; the phases (step, save, eval and so on) take turns."""

    def __init__(self, marks: Sequence[Mark], *, save_secs: float, saves_first: bool, seed: int):
        """Prepares to draw.

        Args:
          marks: of a run that was not killed.
          save_secs: how long it takes to write a checkpoint.
          saves_first: whether a run saves its first step after each start.
          seed: of what is drawn.
        """
        self._random = random.Random(seed)
        self._secs: dict[Phase, float] = {}
        self._save_secs = save_secs
        self._saves_first = saves_first
        self.observe(marks)
        names = self._random.sample(("step", "save", "eval"), 3)
        # The first start after the unbroken one is the first to find its programs compiled, so how
        # long that takes is known from the second on.
        names.insert(self._random.randrange(1, 4), "compile")
        self._phase_names = [*names, "start"]

    def observe(self, marks: Sequence[Mark]) -> None:
        """Learns how long phases take; of loading and compiling the shortest time counts."""
        for mark, after in zip(marks, marks[1:], strict=False):
            secs = after.secs - mark.secs
            if mark.phase.name == "save":
                secs = min(secs, self._save_secs)
            self._secs[mark.phase] = min(secs, self._secs.get(mark.phase, math.inf))

    def draw(self, number: int, *, resumes_from: int | None, last_step: int) -> Moment:
        """The moment of kill `number`, counted from 0.

        Args:
          number: of the kill.
          resumes_from: the step that the run will go on from; None: it begins anew.
          last_step: at its save a run is as good as complete, so it is not for this kill.
        """
        first = () if resumes_from is None else (Phase("save", resumes_from + 1),)
        secs = {phase: self._save_secs for phase in first if self._saves_first} | self._secs
        coming = [
            phase
            for phase in secs
            if phase.name in ("start", "compile")
            or ((resumes_from is None or phase.step > resumes_from) and phase.step <= last_step)
        ]
        for name in self._phase_names[number % 5 :] + self._phase_names[: number % 5]:
            phases = [p for p in coming if p.name == name and p != Phase("save", last_step)]
            if phases:
                phase = self._random.choice(phases)
                return Moment(phase, self._random.uniform(0, secs[phase]))
        raise AssertionError("every run starts")
