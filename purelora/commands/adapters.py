"""Scales, adds, averages or truncates adapters of one base, and writes a new PEFT folder.

    python -m purelora.adapters --op=average --adapter=runs/a --adapter=runs/b --output=mean
    python -m purelora.adapters --op=truncate --r=8 --adapter=runs/a --output=small

--op=NAME       scale        --factor times the update of one adapter
                add          the sum of the updates
                average      their mean
                interpolate  (1 - t) times the first and --t times the second
                concatenate  the sum with a --weight for each
                truncate     the nearest adapter of rank --r, by singular values
--adapter=PATH  a run, one of its steps, or a PEFT folder; may be given several times
--output=PATH   a new folder

Sums are exact: the ranks add up. --r with any of them truncates the result. Copies of the base's
own weights, which PEFT stores beside the adapter of an embedding or output head, are kept; adapters
whose copies differ are not of one base and are refused.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from purelora.config import command_line
from purelora.core import errors
from purelora.formats import atomic_output
from purelora.interop.peft import adapter_sources, algebra, artefact
from purelora.interop.peft import files as peft_files

Op = Literal["scale", "add", "average", "interpolate", "concatenate", "truncate"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    op: Op
    adapter: tuple[str, ...]
    output: str
    factor: float | None = None
    t: float | None = None
    r: int | None = None
    weight: tuple[str, ...] = ()


# What each operation needs: how many adapters (at least, at most), and which arguments.
_NEEDS: dict[str, tuple[int, int | None, str | None]] = {
    "scale": (1, 1, "factor"),
    "add": (2, None, None),
    "average": (2, None, None),
    "interpolate": (2, 2, "t"),
    "concatenate": (2, None, "weight"),
    "truncate": (1, 1, "r"),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    _check(options)
    atomic_output.check_free(options.output)
    adapters = [adapter_sources.open_adapter(path) for path in options.adapter]
    for adapter in adapters:
        _say(adapter.path, adapter.notes)
    result = _OPERATIONS[options.op](options, adapters)
    _say(options.output, result.notes)
    if options.r is not None:
        result = _truncated(result, options.r)
    peft_files.write(options.output, result)
    modules = len(result.modules)
    print(f"{options.output}: {options.op} of {len(adapters)}, {modules} modules")
    return 0


def _say(where: str, notes: Sequence[str]) -> None:
    for note in notes:
        print(f"{where}: {note}", flush=True)


def _truncated(adapter: artefact.Adapter, r: int) -> artefact.Adapter:
    """The nearest adapter of rank `r`, with the same copies of the base's own weights."""
    result = algebra.truncated(adapter, r)
    modules = {
        name: {**kinds, **algebra.copies_in(adapter.modules[name])}
        for name, kinds in result.modules.items()
    }
    return dataclasses.replace(result, modules=modules)


def _check(options: Options) -> None:
    """Raises ConfigError for arguments that do not go with the operation."""
    least, most, needed = _NEEDS[options.op]
    count, problems = len(options.adapter), []
    if count < least or (most is not None and count > most):
        what = f"is given {count} times, {options.op} takes {least if most == least else 'several'}"
        problems.append(errors.Problem("--adapter", list(options.adapter), what, ""))
    for name in ("factor", "t", "weight"):
        is_set = getattr(options, name) not in (None, ())
        if is_set != (name == needed):
            what = "has no effect" if is_set else "is missing"
            problems.append(errors.Problem(f"--{name}", None, f"{what} with --op={options.op}", ""))
    if options.op == "truncate" and options.r is None:
        problems.append(errors.Problem("--r", None, "is missing with --op=truncate", ""))
    if options.r is not None and options.r < 1:
        problems.append(errors.Problem("--r", options.r, "must be at least 1", ""))
    if options.weight and len(options.weight) != count:
        what = f"is given {len(options.weight)} times for {count} adapters"
        problems.append(errors.Problem("--weight", list(options.weight), what, "one for each"))
    for name, value in (("factor", options.factor), ("t", options.t)):
        if value is not None and not math.isfinite(value):
            problems.append(errors.Problem(f"--{name}", value, "is not a finite number", ""))
    with errors.collected(problems):
        command_line.numbers("--weight", options.weight)
    if problems:
        raise errors.ConfigError.of(problems)


_Operation = Callable[[Options, Sequence[artefact.Adapter]], artefact.Adapter]


def _scale(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    assert options.factor is not None
    return algebra.scaled(adapters[0], options.factor)


def _add(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    del options
    return algebra.summed(adapters, [1.0] * len(adapters))


def _average(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    del options
    return algebra.summed(adapters, [1 / len(adapters)] * len(adapters))


def _interpolate(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    assert options.t is not None
    return algebra.summed(adapters, [1 - options.t, options.t])


def _concatenate(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    return algebra.summed(adapters, command_line.numbers("--weight", options.weight))


def _keep(options: Options, adapters: Sequence[artefact.Adapter]) -> artefact.Adapter:
    del options
    return dataclasses.replace(adapters[0], notes=())


_OPERATIONS: dict[str, _Operation] = {
    "scale": _scale,
    "add": _add,
    "average": _average,
    "interpolate": _interpolate,
    "concatenate": _concatenate,
    "truncate": _keep,  # `main` truncates whatever comes out, to --r.
}
