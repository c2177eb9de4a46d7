"""How every command begins and ends: its processes, its help, and errors without tracebacks."""

import contextlib
import dataclasses
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from purelora.config import command_line
from purelora.core import errors
from purelora.multihost import runtime
from purelora.multihost.options import ProcessOptions

USER_ERROR_STATUS = 2


def processes(argv: Sequence[str]) -> tuple[ProcessOptions, list[str]]:
    """Takes the arguments that make a process one of several out of a command line.

    Returns:
      What they say, and the other arguments.

    Raises:
      ConfigError: they have values of a wrong type.
    """
    names = {field.name for field in dataclasses.fields(ProcessOptions)}
    own, others = command_line.divided(argv, lambda name: name.replace("-", "_") in names)
    return command_line.options(ProcessOptions, own), others


@contextlib.contextmanager
def _exit_on_user_error() -> Iterator[None]:
    try:
        yield
    except errors.UserError as error:
        text = "\n".join(f"{type(error).__name__}: {problem}" for problem in error.problems)
        runtime.fail(text, USER_ERROR_STATUS)
        print(text, file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None
    except BrokenPipeError:
        # Who read the output has gone; what is still in the buffer has no one to go to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        # Before the loop, which handles signals itself, there is nothing to save.
        runtime.fail("interrupted", 128 + signal.SIGINT)
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception:
        # A fault of the program: the other processes would wait for this one.
        runtime.fail(traceback.format_exc(), 1)
        raise


def run_command(
    main: Callable[[Sequence[str]], int], usage: str, argv: Sequence[str] | None = None
) -> NoReturn:
    """Runs a command: prints `usage` for --help, and users' errors without a traceback.

    Exits with the status that `main` returns, or 2 for an error that the user can fix.

    Args:
      main: takes the arguments and returns the exit status.
      usage: the text that --help prints.
      argv: the arguments; by default those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Not every terminal knows "×".
    argv = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"}.isdisjoint(argv):
        print(usage.strip())
        raise SystemExit(0)
    with _exit_on_user_error():
        status = main(argv)
        runtime.finish()
        sys.stdout.flush()
    raise SystemExit(status)
