"""Several processes as one run, on JAX's own runtime: how they start, agree and end together.

Every process runs the same program on the same files; each holds its own shards and builds its own
rows. Process 0 is the main one: it alone prints, locks the run's folder and writes its records.

What they tell each other on the host goes through the coordination service that JAX starts in
process 0, never through a collective: so it may happen beside a step, in any thread. Beside it each
process keeps a connection to the main one (`links`), by which all of them learn of an end at once.

With one process nothing here does anything.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed  # Its client has no public name.
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import errors
from purelora.multihost import failure_detection

# A dead process ends all waits: see `links`, and the heartbeats of JAX's own.
_WAIT_MSECS = 7 * 24 * 60 * 60 * 1000
# With less, a process that is only busy counts as one that is gone.
LEAST_HEARTBEAT_SECS = 5
# How long the processes wait for each other when they start, and how long of it without a word.
_MEET_SECS, _SILENT_SECS = 300, 15
_POLL_SECS = 0.5
_APART_STATUS = 2  # As of any other error that the user can fix.
_ENVIRONMENT = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments that make a process one of several; the environment fills what is absent.

    Attributes:
      coordinator_address: HOST:PORT of process 0, which opens that port; the environment variable
        JAX_COORDINATOR_ADDRESS says the same.
      num_processes: how many there are (JAX_NUM_PROCESSES).
      process_id: which this is, from 0 (JAX_PROCESS_ID).
      distributed: let JAX find the rest in its environment: Slurm, Open MPI, Kubernetes, Cloud TPU.
      heartbeat_timeout_seconds: a process that is silent for so long ends the run.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    distributed: bool = False
    heartbeat_timeout_seconds: int = 30

    def completed(self, environment: Mapping[str, str]) -> "Options":
        """With what the environment says of the fields that are None.

        Raises:
          ConfigError: values that are no numbers, out of range, or do not go together.
        """
        found: dict[str, Any] = {}
        for field, variable in _ENVIRONMENT.items():
            text = environment.get(variable)
            if getattr(self, field) is None and text:
                is_number = field != "coordinator_address"
                if is_number and not text.isdecimal():
                    raise errors.ConfigError(variable, text, "is not a whole number", "")
                found[field] = int(text) if is_number else text
        whole = dataclasses.replace(self, **found)
        problems = list(whole._problems())
        if problems:
            raise errors.ConfigError.of(problems)
        return whole

    @property
    def is_one_of_several(self) -> bool:
        """Whether they say that there are other processes."""
        return self.distributed or self != Options(
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds
        )

    def _problems(self) -> Iterator[errors.Problem]:
        address, count, index = self.coordinator_address, self.num_processes, self.process_id
        if address is not None and not _is_address(address):
            what, remedy = "is no host with a port", "write HOST:PORT, the same for all processes"
            yield errors.Problem("--coordinator_address", address, what, remedy)
        if count is not None and count < 1:
            yield errors.Problem("--num_processes", count, "must be at least 1", "")
        if index is not None and not 0 <= index < (count or index + 1):
            what = "must be from 0 to the number of processes less one"
            yield errors.Problem("--process_id", index, what, "")
        if self.heartbeat_timeout_seconds < LEAST_HEARTBEAT_SECS:
            what = f"must be at least {LEAST_HEARTBEAT_SECS}"
            yield errors.Problem(
                "--heartbeat_timeout_seconds", self.heartbeat_timeout_seconds, what, ""
            )
        given = (address, count, index)
        if not self.distributed and None in given and given != (None,) * 3:
            missing = [n for n, v in zip(_ENVIRONMENT, given, strict=True) if v is None]
            what = f"must be given too (or {', '.join(_ENVIRONMENT[name] for name in missing)})"
            where = ", ".join(f"--{name}" for name in missing)
            yield errors.Problem(where, None, what, "or --distributed, if JAX knows the cluster")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


@dataclasses.dataclass(frozen=True)
class _Group:
    """The processes of the run, of which this is one."""

    index: int
    count: int
    link: failure_detection.Link
    # How often each exchange was made: their keys must differ.
    turns: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def client(self) -> Any:
        """Of JAX's coordination service."""
        return jax_distributed.global_state.client

    def key(self, name: str) -> str:
        """A new key, the same in all processes that make the same exchanges."""
        self.turns[name] += 1
        return f"purelora/{name}/{self.turns[name]}"


# What this process is; empty where it is the only one. JAX is not asked, as it would open its
# devices at once, whatever the command.
_groups: list[_Group] = []


def initialise(options: Options) -> None:
    """Joins the other processes, if `options` say that there are some; before JAX sees a device.

    Raises:
      ConfigError: the options do not fit together, or the others cannot be reached.
    """
    options = options.completed(os.environ)
    if not options.is_one_of_several:
        return
    # It would take SIGTERM away from `signals`.
    jax.config.update("jax_enable_preemption_service", False)
    _meet(options)
    index, count = jax.process_index(), jax.process_count()
    if count > 1:
        client: Any = jax_distributed.global_state.client
        link = failure_detection.join(
            client, index, count, host=_coordinator_host(), wait_msecs=_WAIT_MSECS
        )
        _groups.append(_Group(index, count, link))


def _meet(options: Options) -> None:
    """Starts JAX's own runtime, which waits for the other processes.

    It does so without a word, deaf to SIGINT, and would in the end abort with a stack trace.
    """
    if options.process_id:
        _wait_for_main(str(options.coordinator_address))
    timers = [threading.Timer(_SILENT_SECS, _say_waits), threading.Timer(_MEET_SECS, _give_up)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
            initialization_timeout=2 * _MEET_SECS,
        )
    except (ValueError, RuntimeError) as error:
        raise _apart(options.coordinator_address, str(error)) from error
    finally:
        signal.signal(signal.SIGINT, previous)
        for timer in timers:
            timer.cancel()


def _say_waits() -> None:
    known = jax_distributed.global_state
    text = f"process {known.process_id} waits for all others to come to {known.coordinator_address}"
    print(f"{text}, {_MEET_SECS} seconds at most", file=sys.stderr, flush=True)


def _give_up() -> None:
    """Ends this process, whose main thread waits."""
    why = f"not all have come in {_MEET_SECS} seconds"
    error = _apart(jax_distributed.global_state.coordinator_address, why)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(_APART_STATUS)


def _wait_for_main(address: str) -> None:
    """Until process 0 has opened its port. Raises ConfigError if it does not."""
    host, _, port = address.rpartition(":")
    start, is_silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _POLL_SECS).close()
            return
        except OSError as error:
            waited_secs, why = time.monotonic() - start, error
        if waited_secs > _MEET_SECS:
            raise _apart(address, f"process 0 has not answered for {_MEET_SECS} seconds: {why}")
        if waited_secs > _SILENT_SECS and is_silent:
            is_silent = False
            text = f"waits for process 0 at {address}, {_MEET_SECS} seconds at most ({why})"
            print(text, file=sys.stderr, flush=True)
        time.sleep(_POLL_SECS)


def _apart(address: str | None, why: str) -> errors.ConfigError:
    where = "--distributed" if address is None else "--coordinator_address"
    what = f"does not bring the processes together: {why}"
    remedy = "give all of them one address, of process 0 with a port that is free there, one "
    remedy += "--num_processes, and each a --process_id of its own"
    return errors.ConfigError(where, address, what, remedy)


def _coordinator_host() -> str:
    address = jax_distributed.global_state.coordinator_address
    return str(address).rpartition(":")[0].strip("[]")


def process_count() -> int:
    """Processes of the run."""
    return _groups[0].count if _groups else 1


def process_index() -> int:
    """Number of this process, from 0."""
    return _groups[0].index if _groups else 0


def is_main() -> bool:
    """Whether this is process 0, which prints and writes."""
    return process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes are here.

    A `name` is for one thread of a process: two would wait under each other's keys.
    """
    if _groups:
        group = _groups[0]
        group.client.wait_at_barrier(group.key(name), _WAIT_MSECS)


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """A block that the others enter when the main process has left it: it fills a cache, say."""
    if not is_main():
        barrier(name)
    yield
    if is_main():
        barrier(name)


def from_main(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns in the main process, which alone calls it; JSON can hold it."""
    if not _groups:
        return make()
    group = _groups[0]
    key = group.key(name)
    if is_main():
        value = make()
        group.client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(group.client.blocking_key_value_get(key, _WAIT_MSECS))


def gathered(name: str, text: str) -> list[str]:
    """The `text` of every process, in their order."""
    if not _groups:
        return [text]
    group = _groups[0]
    folder = group.key(name)
    group.client.key_value_set(f"{folder}/{group.index}", text)
    keys = [f"{folder}/{index}" for index in range(group.count)]
    return [group.client.blocking_key_value_get(key, _WAIT_MSECS) for key in keys]


def check_equal(name: str, text: str) -> None:
    """Raises ConfigError with the first line that differs unless all processes have one `text`."""
    for index, other in enumerate(gathered(name, text)):
        if other != text:
            lines = itertools.zip_longest(other.splitlines(), text.splitlines())
            theirs, own = next(pair for pair in lines if pair[0] != pair[1])
            what = f"is {theirs!r} in process {index} and {own!r} in process {process_index()}"
            remedy = "give all processes the same arguments and the same files"
            raise errors.ConfigError(name, None, what, remedy)


class Votes:
    """Small numbers of which all processes learn the largest: one exchange late, without waiting.

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

    def exchange(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Gives this process's numbers; returns the largest of the exchange before, 0 at first."""
        votes = np.asarray([own], np.int32)
        spread = jax.make_array_from_callback(self._shape, self._sharding, lambda _: votes)
        done, self._pending = self._pending, self._largest(spread)
        return (0,) * len(own) if done is None else tuple(np.asarray(done).tolist())


def fail(text: str, status: int) -> None:
    """Ends all processes with `status`; `text` is printed once, by the main one. If alone, returns.

    The first process to fail is the one that is heard; nothing more is waited for or saved.
    """
    if _groups:
        sys.stdout.flush()
        _groups[0].link.fail(text, status)


def finish() -> None:
    """The end of a run that did not fail: waits until all processes are here."""
    if _groups:
        barrier("finish")
        _groups.pop().link.close()
