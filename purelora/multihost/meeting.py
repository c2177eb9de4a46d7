"""How the processes of a run find each other: the start of JAX's own runtime, with clear errors."""

import os
import signal
import socket
import sys
import threading
import time

import jax
from jax._src import distributed  # What the runtime knows has no public name.

from purelora.core import errors
from purelora.multihost.options import ProcessOptions

# How long the processes wait for each other when they start, and how long of it without a word.
_MEET_SECS, _SILENT_SECS = 300, 15
_POLL_SECS = 0.5
_APART_STATUS = 2  # As of any other error that the user can fix.


def meet(options: ProcessOptions) -> None:
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
        raise _meeting_error(options.coordinator_address, str(error)) from error
    finally:
        signal.signal(signal.SIGINT, previous)
        for timer in timers:
            timer.cancel()


def _say_waits() -> None:
    state = distributed.global_state
    text = f"process {state.process_id} waits for all others to come to {state.coordinator_address}"
    print(f"{text}, {_MEET_SECS} seconds at most", file=sys.stderr, flush=True)


def _give_up() -> None:
    """Ends this process, whose main thread waits."""
    why = f"not all have come in {_MEET_SECS} seconds"
    error = _meeting_error(distributed.global_state.coordinator_address, why)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(_APART_STATUS)


def _wait_for_main(address: str) -> None:
    """Waits until process 0 has opened its port. Raises ConfigError if it does not."""
    host, _, port = address.rpartition(":")
    start, is_silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _POLL_SECS).close()
            return
        except OSError as error:
            waited_secs, why = time.monotonic() - start, error
        if waited_secs > _MEET_SECS:
            what = f"process 0 has not answered for {_MEET_SECS} seconds: {why}"
            raise _meeting_error(address, what)
        if waited_secs > _SILENT_SECS and is_silent:
            is_silent = False
            text = f"waits for process 0 at {address}, {_MEET_SECS} seconds at most ({why})"
            print(text, file=sys.stderr, flush=True)
        time.sleep(_POLL_SECS)


def _meeting_error(address: str | None, why: str) -> errors.ConfigError:
    where = "--distributed" if address is None else "--coordinator_address"
    what = f"does not bring the processes together: {why}"
    remedy = "give all of them one address, of process 0 with a port that is free there, one "
    remedy += "--num_processes, and each a --process_id of its own"
    return errors.ConfigError(where, address, what, remedy)


def coordinator_host() -> str:
    address = distributed.global_state.coordinator_address
    return str(address).rpartition(":")[0].strip("[]")
