"""SIGTERM and SIGINT as a request to stop at the next step border, the same for all processes."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from purelora.multihost import runtime


class Stop:
    """Whether the run was asked to stop, and by which signal.

    Attributes:
      signum: the signal; where there are several processes, one that all of them know of.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._own: int = 0
        self._votes = runtime.Votes(2) if runtime.process_count() > 1 else None

    def receive(self, signum: int) -> None:
        """Takes a signal to this process."""
        self._own = signum
        if self._votes is None:
            self.signum = signum

    def poll(self, wish: int = 0) -> int:
        """Learns of signals to other processes, a step late; all processes poll equally often.

        Args:
          wish: a number, not negative, that this process votes for.

        Returns:
          The largest wish of all processes at the poll before this; alone, `wish`.
        """
        if self._votes is None:
            return wish
        signum, largest = self._votes.exchange((self._own, wish))
        if signum:
            self.signum = signum
        return largest

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @property
    def status(self) -> int:
        """Exit status as in a shell, 128 + signal: a scheduler sees that the run is unfinished."""
        return 0 if self.signum is None else 128 + self.signum


@contextlib.contextmanager
def catch() -> Iterator[Stop]:
    """Records SIGTERM and SIGINT while the context lasts; a second signal acts as usual."""
    stop = Stop()
    previous = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def record(signum: int, frame: FrameType | None) -> None:
        del frame
        stop.receive(signum)
        restore()

    def restore() -> None:
        for which, handler in previous.items():
            signal.signal(which, handler)

    for which in previous:
        signal.signal(which, record)
    try:
        yield stop
    finally:
        restore()
