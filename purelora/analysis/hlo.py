"""Compiled programs as text: their instructions, how often each runs, and what collectives move.

A pure reader of the HLO text that `compiled.as_text()` gives. The text is one device's program, so
all shapes are those of a device. Loops are followed through every call, and the trip counts that
XLA knows are multiplied.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_ARRAY = re.compile(r"\b(pred|token|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_CALLED = re.compile(
    r"\b(condition|body|to_apply|calls|called_computations|branch_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
# XLA's CPU compiler adds 16-bit numbers in all-reduces as 32-bit ones, and names the sum so.
_PROMOTED = re.compile(r"\bto_apply=\S*_promoted\b")
_NARROW = {"f32": "bf16", "s32": "s16", "u32": "u16"}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(
    r"\breplica_groups=(?:(?P<mesh>mesh\[(?P<sizes>[^\]]*)\][^{]*\{(?P<axes>[^}]*)\})"
    r"|(?P<iota>\[(?P<shape>[\d,]+)\]<=)|\{\{(?P<first>[\d,]+)\})"
)
_MESH_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_AXIS_NAME = re.compile(r"'([\w.-]+)'(?::\(\d+\)(\d+))?")


class Array(NamedTuple):
    """Dtype and shape of an array in HLO: `f32[3,4]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size; elements of less than a byte are packed."""
        if self.dtype == "token":
            return 0
        bits = re.search(r"\d+", self.dtype)
        return -(-math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8)


def arrays(text: str) -> list[Array]:
    """All `f32[3,4]` in a text, in its order."""
    return [
        Array(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(text)
    ]


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: without the `%`.
      kind: its opcode, without the `-start` of an asynchronous one.
      result: the arrays of its result; a tuple has several.
      line: all of its text.
    """

    name: str
    kind: str
    result: tuple[Array, ...]
    line: str

    @property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, name) of the computations it runs: `("body", "region_1.2")`."""
        return tuple(
            (role, name)
            for role, names in _CALLED.findall(self.line)
            for name in re.findall(r"[\w.-]+", names)
        )

    @property
    def trips(self) -> int | None:
        """How often a while loop runs its body; None where XLA does not know."""
        match = _TRIPS.search(self.line)
        return int(match[1]) if match else None


class Collective(NamedTuple):
    """One collective instruction of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      arrays: its results on a device: several where the compiler has combined several. A bfloat16
        sum that XLA's CPU compiler has widened to float32 is given as the bfloat16 that it is.
      group_size: how many devices take part in one group of it.
      runs: how often it runs.
      in_loop: whether it stands inside a loop.
    """

    kind: str
    arrays: tuple[Array, ...]
    group_size: int
    runs: int
    in_loop: bool

    @property
    def received_bytes(self) -> int:
        """What a device receives each time, by the algorithms that move the least (rings).

        Of the n parts of a gathered array it has one already; to scatter a sum, n - 1 parts
        the size of the result arrive; to reduce is to scatter and then to gather.
        """
        size, others = sum(array.bytes for array in self.arrays), self.group_size - 1
        if self.kind == "reduce-scatter":
            return size * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return size
        return (2 if self.kind == "all-reduce" else 1) * size * others // self.group_size

    @property
    def dtypes(self) -> tuple[str, ...]:
        """HLO's names of the element types that it moves, each once."""
        return tuple(dict.fromkeys(array.dtype for array in self.arrays))


class Traffic(NamedTuple):
    """The collectives of one kind in a run of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      dtypes: HLO's names of the element types.
      group_size: how many devices take part in one group.
      runs: how many run; several combined into one count once.
      received_bytes: what a device receives in all of them.
    """

    kind: str
    dtypes: tuple[str, ...]
    group_size: int
    runs: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      text: all of it.
      entry: name of the computation that it begins with.
      computations: the instructions of each computation, by its name.
    """

    text: str
    entry: str
    computations: dict[str, list[Instruction]]

    @classmethod
    def of(cls, text: str) -> "Program":
        """Reads the text of a program. Raises ValueError if it has no entry."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header:
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif current is not None and _INSTRUCTION.match(line):
                current.append(_instruction(line.strip()))
        if entry is None:
            raise ValueError("no HLO text: it has no ENTRY computation")
        return cls(text, entry, computations)

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs when the program does; 0 for what nothing calls.

        Of a conditional every branch counts as taken, and a loop whose trip count is not known
        (`unknown_loops`) as run once.
        """
        counts = dict.fromkeys(self.computations, 0)
        counts[self.entry] = 1
        for name in self._callers_first:
            for instruction in self.computations[name]:
                for role, callee in instruction.called:
                    if callee in counts:
                        counts[callee] += counts[name] * _times(instruction, role)
        return counts

    @functools.cached_property
    def looped(self) -> frozenset[str]:
        """Names of all computations that a while loop runs, directly or through calls."""
        looped: set[str] = set()
        for name in self._callers_first:
            for instruction in self.computations[name]:
                if name in looped or instruction.kind == "while":
                    looped.update(callee for _, callee in instruction.called)
        return frozenset(looped & self.computations.keys())

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Names of the while loops that contain collectives but have no known trip count."""
        return tuple(
            instruction.name
            for name, instructions in self.computations.items()
            for instruction in instructions
            if instruction.kind == "while"
            and instruction.trips is None
            and self.runs[name]
            and any(callee in self._communicating for _, callee in instruction.called)
        )

    @functools.cached_property
    def _communicating(self) -> frozenset[str]:
        """Names of the computations that contain collectives or call one that does."""
        communicating: set[str] = set()
        for name in reversed(self._callers_first):
            for instruction in self.computations[name]:
                called = any(callee in communicating for _, callee in instruction.called)
                if called or instruction.kind in COLLECTIVES:
                    communicating.add(name)
        return frozenset(communicating)

    def instructions(self, kind: str, *, looped: bool | None = None) -> Iterator[Instruction]:
        """The instructions with an opcode, all or only those inside (outside) loops."""
        for name, body in self.computations.items():
            if looped is None or (name in self.looped) == looped:
                yield from (instruction for instruction in body if instruction.kind == kind)

    def results(self, kind: str, *, looped: bool | None = None) -> list[Array]:
        """The result arrays of these `instructions`, those of tuples one by one."""
        return [
            a for instruction in self.instructions(kind, looped=looped) for a in instruction.result
        ]

    def collectives(self) -> list[Collective]:
        """All collectives that run, in the order of the text."""
        return [
            Collective(
                instruction.kind,
                _unpromoted(instruction),
                group_size(instruction.line, self.devices),
                self.runs[name],
                name in self.looped,
            )
            for name, body in self.computations.items()
            for instruction in body
            if instruction.kind in COLLECTIVES and self.runs[name]
        ]

    def traffic(self) -> list[Traffic]:
        """The collectives that move anything, by kind, those that move most first."""
        totals: dict[tuple[str, tuple[str, ...], int], tuple[int, int]] = {}
        for c in self.collectives():
            key = (c.kind, c.dtypes, c.group_size)
            runs, size = totals.get(key, (0, 0))
            totals[key] = (runs + c.runs, size + c.runs * c.received_bytes)
        rows = [Traffic(*key, runs, size) for key, (runs, size) in totals.items() if size]
        return sorted(rows, key=lambda row: -row.received_bytes)

    @functools.cached_property
    def devices(self) -> int:
        """How many devices run the program together."""
        header = self.text[: self.text.find("\n")]
        return math.prod(
            int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
        )

    @functools.cached_property
    def _callers_first(self) -> list[str]:
        """All computations, each after everything that calls it."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen or name not in self.computations:
                return
            seen.add(name)
            for instruction in self.computations[name]:
                for _, callee in instruction.called:
                    visit(callee)
            order.append(name)

        for name in self.computations:
            visit(name)
        return order[::-1]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    match = _OPCODE.search(f" {rest}")
    opcode = match[1] if match else ""
    result = tuple(arrays(rest[: match.start()] if match else rest))
    if opcode.endswith("-start"):
        opcode = opcode.removesuffix("-start")
        result = _arrived(opcode, result)
    return Instruction(name.removeprefix("%"), opcode, result, line)


def _arrived(opcode: str, result: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results among what an asynchronous start gives: (operands, results, contexts)."""
    if opcode == "all-gather":
        return result[len(result) // 2 :]
    return result[1:2] if opcode == "collective-permute" else result


def _unpromoted(instruction: Instruction) -> tuple[Array, ...]:
    """The results of a collective in the dtypes that it had before they were widened."""
    if not _PROMOTED.search(instruction.line):
        return instruction.result
    return tuple(a._replace(dtype=_NARROW.get(a.dtype, a.dtype)) for a in instruction.result)


def _times(instruction: Instruction, role: str) -> int:
    """How often one run of an instruction runs a computation that it names."""
    if instruction.kind != "while":
        return 1
    trips = 1 if instruction.trips is None else instruction.trips
    # The condition is asked once more than it holds.
    return trips if role == "body" else trips + 1


def group_size(line: str, devices: int) -> int:
    """How many devices take part in one group of a collective of a program on so many devices.

    It reads all three spellings: `{{0,1},{2,3}}`, `[2,4]<=[8]`, and
    `mesh['data'=2,'fsdp'=4] {'fsdp'}`; `{}` is all devices. In a collective-permute each device
    receives from one other.
    """
    if "source_target_pairs=" in line:
        return 2
    match = _GROUPS.search(line)
    if match is None:
        return devices
    if match["iota"]:
        return int(match["shape"].rpartition(",")[2])
    if match["mesh"]:
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match["sizes"])}
        used = _AXIS_NAME.findall(match["axes"])
        return math.prod(int(part) if part else sizes[name] for name, part in used)
    return match["first"].count(",") + 1
