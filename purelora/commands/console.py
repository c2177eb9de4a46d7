"""The console command: `purelora train --config=qlora` is `python -m purelora.train ...`."""

import ast
import importlib
import pathlib
import sys

from purelora.core import errors

# Each is a module of this package; its docstring is the text of --help.
NAMES = (
    "train", "generate", "chat", "export", "merge", "adapters", "estimate", "verify", "launch",
)  # fmt: skip
_USER_ERROR_STATUS = 2


def main() -> None:
    """Runs the sub-command that the first argument names; exits with its status."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if name not in NAMES:
        problem = errors.Problem("purelora", name, "is no command", errors.nearest(name, NAMES))
        print(f"ConfigError: {problem}", file=sys.stderr)
        raise SystemExit(_USER_ERROR_STATUS)
    # Only now, so that the help does not wait for jax.
    command = importlib.import_module(f"purelora.commands.{name}")
    entry = importlib.import_module("purelora.commands.entry")
    entry.run_command(command.main, command.__doc__, argv)


def usage() -> str:
    """The text of --help: every command with the first sentence of its own."""
    width = max(map(len, NAMES))
    lines = [f"  {name:<{width}}  {_summary(name)}" for name in NAMES]
    head = "purelora COMMAND [ARGUMENTS]; purelora COMMAND --help lists the arguments of one."
    return "\n".join([head, "", *lines])


def _summary(name: str) -> str:
    """The first line of a command's docstring, read off its source: importing it takes seconds."""
    source = (pathlib.Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
