"""Fails as the first argument says, in the process that the second names."""

from purelora.commands import entry
from purelora.core import errors
from purelora.multihost import runtime


def main(argv):
    joining, which = entry.processes(argv)
    runtime.initialise(joining)
    kind, where = which
    if where in ("all", str(runtime.process_index())):
        if kind == "fault":
            raise ZeroDivisionError("a fault of the program")
        raise errors.DataError("file.jsonl:3", None, "cannot be used", "mend it")
    runtime.barrier("never")
    return 0


entry.run_command(main, "")
