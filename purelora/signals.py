"""SIGTERM and SIGINT as a request to stop at the next step border."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signum: int | None = None

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
        stop.signum = signum
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
