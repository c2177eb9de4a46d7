"""Starts a run of several processes on this machine, which meet on its loopback.

    python -m purelora.launch --processes=2 --devices_per_process=2 -- --config=configs/tiny.py

--processes=N            how many
--devices_per_process=N  CPU devices of each, or the accelerators I·N, …, I·N + N - 1 of process I
--heartbeat_timeout_seconds=20   a process that is silent for so long ends the run
--                       after it: the arguments of purelora.train

Signals go to all processes. When one of them ends too early so do the others, of themselves or at
last by SIGKILL; the same command continues the run. On several machines start purelora.train on
each of them, see there.

Exit status: that of the processes; if they differ, that of the first to fail.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from purelora.config import command_line
from purelora.core import errors
from purelora.multihost.options import LEAST_HEARTBEAT_SECS
from purelora.training import log

_POLL_SECS = 0.05
# Beyond the heartbeats' timeout: what a process that has noticed may take to end.
_GRACE_SECS = 20.0
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")
# JAX's transport on CPUs tells of every connection, in lines that threads write into one another.
_NOISE = (b"[Gloo]", b" peer ranks")


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments before `--`."""

    processes: int
    devices_per_process: int = 1
    heartbeat_timeout_seconds: int = 20

    def problems(self) -> Iterator[errors.Problem]:
        """Values out of range."""
        for name, value in dataclasses.asdict(self).items():
            is_timeout = name == "heartbeat_timeout_seconds"
            least = LEAST_HEARTBEAT_SECS if is_timeout else 1
            if value < least:
                yield errors.Problem(f"--{name}", value, f"must be at least {least}", "")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    options, arguments = command_line.options(Options, argv[:end]), list(argv[end + 1 :])
    problems = list(options.problems())
    if not arguments:
        remedy = "write -- and then the arguments of purelora.train"
        problems.append(errors.Problem("--", None, "is not followed by anything", remedy))
    if problems:
        raise errors.ConfigError.of(problems)
    log.say(
        f"{options.processes} processes of {options.devices_per_process} devices each, "
        f"heartbeat_timeout_seconds={options.heartbeat_timeout_seconds}"
    )
    with started(options, arguments) as processes, _signals_to(processes):
        return _wait(processes, options.heartbeat_timeout_seconds + _GRACE_SECS)


@contextlib.contextmanager
def started(options: Options, arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a run, by number; those that still run at the end are killed."""
    timeout = f"--heartbeat_timeout_seconds={options.heartbeat_timeout_seconds}"
    command = [sys.executable, "-m", "purelora.train", *arguments, timeout]
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    relays: list[threading.Thread] = []
    try:
        for index in range(options.processes):
            # Not in the terminal's group: its SIGINT comes to each once, from here.
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment(os.environ, options, index, port),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE if index else None,
                    start_new_session=True,
                )
            )
            relays += _relays(processes[-1], index)
            log.say(f"process {index}: pid {processes[-1].pid}")
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for relay in relays:
            relay.join()


def environment(
    outer: Mapping[str, str], options: Options, index: int, port: int
) -> dict[str, str]:
    """The environment variables of process `index`; process 0 listens at `port`."""
    count = options.devices_per_process
    device_ids = range(index * count, (index + 1) * count)
    return {
        **outer,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(index),
        # One counts for CPUs, the other for GPUs.
        "JAX_NUM_CPU_DEVICES": str(count),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, device_ids)),
        "XLA_FLAGS": _DEVICE_COUNT.sub("", outer.get("XLA_FLAGS", "")).strip(),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _relays(process: subprocess.Popen[bytes], index: int) -> Iterator[threading.Thread]:
    """Threads that pass on what a process prints; process 0 has the terminal's stderr itself."""
    for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if pipe is not None:
            prefix = f"[process {index}] " if index else ""
            thread = threading.Thread(target=_relay, args=(pipe, to, prefix), daemon=True)
            thread.start()
            yield thread


def _relay(pipe: IO[bytes], to: IO[str], prefix: str) -> None:
    for line in pipe:
        if not any(part in line for part in _NOISE):
            to.write(prefix + line.decode(errors="replace"))
            to.flush()


@contextlib.contextmanager
def _signals_to(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes SIGTERM and SIGINT on."""

    def forward(signum: int, frame: FrameType | None) -> None:
        del frame
        for process in processes:
            process.send_signal(signum)

    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {which: signal.signal(which, forward) for which in signals}
    try:
        yield
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]], patience_secs: float) -> int:
    """Waits for all processes; once one has failed, not longer than `patience_secs`."""
    statuses: dict[int, int] = {}
    deadline: float | None = None
    while len(statuses) < len(processes):
        time.sleep(_POLL_SECS)
        for index, process in enumerate(processes):
            status = process.poll()
            if status is None or index in statuses:
                continue
            statuses[index] = 128 - status if status < 0 else status
            print(f"process {index} {_described(status)}", file=sys.stderr, flush=True)
            if status and deadline is None:
                deadline = time.monotonic() + patience_secs
        if deadline is not None and time.monotonic() > deadline:
            for index, process in enumerate(processes):
                if index not in statuses:
                    print(f"process {index} does not end: killed", file=sys.stderr, flush=True)
                    process.kill()
            deadline = None
    return next((status for status in statuses.values() if status), 0)


def _described(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
