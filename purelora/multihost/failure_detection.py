"""Connections by which processes learn at once that one of them has failed or has gone.

    process 1 ──┐
    process 2 ──┼── process 0        one TCP connection each, lines of JSON
    process 3 ──┘

A connection that ends without a word is a process that was killed, or a machine that is down; JAX's
own heartbeats would notice it after their timeout, and end the others with a stack trace. A process
that fails says why; process 0 prints that, and all processes end with the same status. A process is
ended from a thread, as the main one may wait for ever in a collective that one of them has left.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from typing import Any, NoReturn, Protocol

from purelora.core import errors

_CONNECT_SECS = 60.0
# How long an end waits for the others to hear of it.
_END_SECS = 10.0
_LOST_STATUS = 1
# How long a fault waits for the end of another process to be seen. A collective that a process has
# left fails in the others, and whichever is noticed first, it is the process that must be named.
_ECHO_SECS = 5.0
_KEY = "purelora/links"
_BYE = {"bye": True}
_LOOPBACK = ("127.0.0.1", "localhost")


class Client(Protocol):
    """The part of JAX's coordination service that is used here."""

    def key_value_set(self, key: str, value: str) -> None:
        """Publishes a value."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value."""


class Link(Protocol):
    """This process's end of the connections."""

    def fail(self, text: str, status: int) -> NoReturn:
        """Ends all processes with `status`, after process 0 has printed the first such `text`."""

    def close(self) -> None:
        """Says that this process is about to end as it should."""


def join(client: Client, index: int, count: int, *, host: str, wait_msecs: int) -> Link:
    """Connects this process with process 0, or as that one waits for all others.

    Args:
      client: through it process 0 says where it listens.
      index: number of this process.
      count: how many there are.
      host: name or address of process 0.
      wait_msecs: how long to wait for process 0 to say so.

    Raises:
      ConfigError: no connection was possible.
    """
    try:
        if index == 0:
            return _Hub(client, count, host)
        port, token = json.loads(client.blocking_key_value_get(_KEY, wait_msecs))
        return _Spoke(index, socket.create_connection((host, port), _CONNECT_SECS), token)
    except OSError as error:
        who = f"process {index}" if index else f"all of the {count} processes"
        what = f"does not let {who} connect to process 0: {error}"
        remedy = "let all processes reach the host of process 0, on any port"
        raise errors.ConfigError("--coordinator_address", host, what, remedy) from error


def _server(host: str, count: int) -> socket.socket:
    """Listens on any port: of the host itself if no other takes part, and else of its networks."""
    if host in _LOOPBACK:
        return socket.create_server((socket.gethostbyname(host), 0), backlog=count)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=count)


def _leave(connection: socket.socket) -> None:
    """The other end may have left already."""
    with contextlib.suppress(OSError):
        _send(connection, _BYE)
        connection.shutdown(socket.SHUT_WR)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _exit(text: str | None, status: int) -> NoReturn:
    """Ends this process at once, whatever its other threads do."""
    if text:
        print(f"\n{text}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


class _Hub:
    """Process 0's end of all connections."""

    def __init__(self, client: Client, count: int, host: str):
        self._count = count
        self._connections: dict[int, socket.socket] = {}
        self._ended = {index: threading.Event() for index in range(1, count)}
        self._is_over = threading.Event()
        self._has_lost = threading.Event()
        self._first = threading.Lock()
        token = secrets.token_hex()
        with _server(host, count) as server:
            server.settimeout(_CONNECT_SECS)
            client.key_value_set(_KEY, json.dumps([server.getsockname()[1], token]))
            while len(self._connections) < count - 1:
                self._accept(server.accept()[0], token)

    def _accept(self, connection: socket.socket, token: str) -> None:
        """Takes a connection that knows the token; whoever does not is none of ours."""
        connection.settimeout(_CONNECT_SECS)
        reader = connection.makefile("r", encoding="utf-8")
        try:
            hello = json.loads(reader.readline(1000))
            index, is_ours = hello["process"], secrets.compare_digest(hello["token"], token)
        except (OSError, ValueError, LookupError, TypeError):
            is_ours = False
        if not is_ours:
            connection.close()
            return
        connection.settimeout(None)
        self._connections[index] = connection
        threading.Thread(target=self._listen, args=(index, reader), daemon=True).start()

    def _listen(self, index: int, reader: Any) -> None:
        """Until the process has gone: without a word, that is the end of the run."""
        try:
            for line in reader:
                message = json.loads(line)
                if message == _BYE:
                    return
                # In a thread of its own: it waits for this one to see the process end.
                failure = (message["text"], message["status"])
                threading.Thread(target=self._end_failed, args=failure, daemon=True).start()
        except (OSError, ValueError):
            pass  # As if it had been closed.
        self._ended[index].set()
        if not self._is_over.is_set():
            self._has_lost.set()
            self._end_all(_lost(f"process {index} of {self._count}"), _LOST_STATUS)

    def fail(self, text: str, status: int) -> NoReturn:
        """See `Link`."""
        self._end_failed(text, status)
        threading.Event().wait()  # Another thread ends this process.
        raise AssertionError

    def _end_failed(self, text: str, status: int) -> None:
        """As `_end_all`, unless the failure is the echo of a process that has gone."""
        if status == _LOST_STATUS and self._has_lost.wait(_ECHO_SECS):
            return
        self._end_all(text, status)

    def _end_all(self, text: str, status: int) -> None:
        """Prints `text` and ends all processes, this one last; the first call counts."""
        if not self._first.acquire(blocking=False):
            return
        self._is_over.set()
        print(f"\n{text}", file=sys.stderr, flush=True)
        for connection in self._connections.values():
            try:
                _send(connection, {"status": status})
            except OSError:
                continue  # It has gone.
        for ended in self._ended.values():
            ended.wait(_END_SECS)
        _exit(None, status)

    def close(self) -> None:
        """See `Link`."""
        self._is_over.set()
        for connection in self._connections.values():
            _leave(connection)


class _Spoke:
    """The end of the connection of a process other than 0."""

    def __init__(self, index: int, connection: socket.socket, token: str):
        self._connection = connection
        self._is_over = threading.Event()
        connection.settimeout(None)
        _send(connection, {"process": index, "token": token})
        self._index = index
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            with self._connection.makefile("r", encoding="utf-8") as reader:
                for line in reader:
                    message = json.loads(line)
                    if message == _BYE:
                        return
                    _exit(None, message["status"])
        except (OSError, ValueError):
            pass  # As if it had been closed.
        if not self._is_over.is_set():
            _exit(_lost("process 0"), _LOST_STATUS)

    def fail(self, text: str, status: int) -> NoReturn:
        """See `Link`."""
        with contextlib.suppress(OSError):
            _send(self._connection, {"text": text, "status": status})
        threading.Event().wait(2 * _END_SECS)  # `_listen` ends this process.
        _exit(f"process {self._index}: {text}", status)

    def close(self) -> None:
        """See `Link`."""
        self._is_over.set()
        _leave(self._connection)


def _lost(name: str) -> str:
    return (
        f"{name} has gone without a word: it was killed, or its machine is down; all processes end,"
        " and the same command continues the run from its newest checkpoint"
    )
