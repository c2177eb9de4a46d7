"""Several processes as one run, on JAX's own runtime: how they start, agree and end together.

Every process runs the same program on the same files; each holds its own shards and builds its own
rows. Process 0 is the main one: it alone prints, locks the run's folder and writes its records.

What they tell each other on the host goes through the coordination service that JAX starts in
process 0, never through a collective: so it may happen beside a step, in any thread. Beside it each
process keeps a connection to the main one (`failure_detection`), by which all learn of an end at
once.

With one process nothing here does anything.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # Its client has no public name.
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import errors
from purelora.multihost import failure_detection, meeting
from purelora.multihost.options import ProcessOptions

# A dead process ends all waits: see `failure_detection`, and the heartbeats of JAX's own.
_WAIT_MSECS = 7 * 24 * 60 * 60 * 1000


@dataclasses.dataclass(frozen=True)
class _Membership:
    """This process as one of the several processes of a run."""

    index: int
    count: int
    link: failure_detection.Link
    # How often each exchange was made: their keys must differ.
    turns: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def client(self) -> Any:
        """The client of JAX's coordination service."""
        return distributed.global_state.client

    def key(self, name: str) -> str:
        """A new key, the same in all processes that make the same exchanges."""
        self.turns[name] += 1
        return f"purelora/{name}/{self.turns[name]}"


class _Process:
    """What this process is. `membership` is None where it is the only one of its run.

    Kept here, and not asked of JAX, which would open its devices at once, whatever the command.
    """

    membership: _Membership | None = None


def initialise(options: ProcessOptions) -> None:
    """Joins the other processes, if `options` say that there are some; before JAX sees a device.

    Raises:
      ConfigError: the options do not fit together, or the others cannot be reached.
    """
    options = options.completed(os.environ)
    if not options.is_one_of_several:
        return
    # It would take SIGTERM away from `signals`.
    jax.config.update("jax_enable_preemption_service", False)
    meeting.meet(options)
    index, count = jax.process_index(), jax.process_count()
    if count > 1:
        client: Any = distributed.global_state.client
        link = failure_detection.join(
            client, index, count, host=meeting.coordinator_host(), wait_msecs=_WAIT_MSECS
        )
        _Process.membership = _Membership(index, count, link)


def process_count() -> int:
    """Processes of the run."""
    membership = _Process.membership
    return 1 if membership is None else membership.count


def process_index() -> int:
    """Number of this process, from 0."""
    membership = _Process.membership
    return 0 if membership is None else membership.index


def is_main() -> bool:
    """Whether this is process 0, which prints and writes."""
    return process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes are here.

    A `name` is for one thread of a process: two would wait under each other's keys.
    """
    membership = _Process.membership
    if membership is not None:
        membership.client.wait_at_barrier(membership.key(name), _WAIT_MSECS)


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """A block that the main process leaves before the others enter, to fill a cache for example."""
    if not is_main():
        barrier(name)
    yield
    if is_main():
        barrier(name)


def from_main(name: str, make: Callable[[], Any]) -> Any:
    """Broadcasts what `make` returns in the main process, which alone calls it, as JSON."""
    membership = _Process.membership
    if membership is None:
        return make()
    key = membership.key(name)
    if is_main():
        value = make()
        membership.client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(membership.client.blocking_key_value_get(key, _WAIT_MSECS))


def gathered(name: str, text: str) -> list[str]:
    """Gathers the `text` of every process, in the order of their numbers."""
    membership = _Process.membership
    if membership is None:
        return [text]
    folder = membership.key(name)
    membership.client.key_value_set(f"{folder}/{membership.index}", text)
    keys = [f"{folder}/{index}" for index in range(membership.count)]
    return [membership.client.blocking_key_value_get(key, _WAIT_MSECS) for key in keys]


def check_equal(name: str, text: str) -> None:
    """Raises ConfigError with the first line that differs unless all processes have one `text`."""
    for index, other in enumerate(gathered(name, text)):
        if other != text:
            lines = itertools.zip_longest(other.splitlines(), text.splitlines())
            theirs, ours = next(pair for pair in lines if pair[0] != pair[1])
            what = f"is {theirs!r} in process {index} and {ours!r} in process {process_index()}"
            remedy = "give all processes the same arguments and the same files"
            raise errors.ConfigError(name, None, what, remedy)


class Votes:
    """A maximum over all processes that nothing waits for: each result is one exchange late.

    An exchange is a collective beside the steps, so all processes make it between the same two
    steps; its result is read at the next one, when it has long been there.
    """

    def __init__(self, count: int):
        """Votes of `count` numbers, not negative."""
        devices = np.asarray(jax.devices())
        mesh = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        self._shape = (len(devices), count)
        self._sharding = NamedSharding(mesh, P("devices"))
        everywhere = NamedSharding(mesh, P())
        self._largest = jax.jit(lambda votes: votes.max(axis=0), out_shardings=everywhere)
        self._pending: jax.Array | None = None

    def exchange(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Sends this process's numbers; returns the maxima of the exchange before, 0 at first."""
        votes = np.asarray([numbers], np.int32)
        array = jax.make_array_from_callback(self._shape, self._sharding, lambda _: votes)
        done, self._pending = self._pending, self._largest(array)
        return (0,) * len(numbers) if done is None else tuple(np.asarray(done).tolist())


def fail(text: str, status: int) -> None:
    """Ends all processes with `status`; `text` is printed once, by the main one. If alone, returns.

    The first process to fail is the one that is heard; nothing more is waited for or saved.
    """
    if _Process.membership is not None:
        sys.stdout.flush()
        _Process.membership.link.fail(text, status)


def finish() -> None:
    """The end of a run that did not fail: waits until all processes are here."""
    if _Process.membership is not None:
        barrier("finish")
        _Process.membership.link.close()
        _Process.membership = None
