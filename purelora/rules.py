"""Rules: which mesh axis each logical axis of an array goes to, as data that a config holds."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from purelora import errors

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
MESH_AXES = (DATA, FSDP, TENSOR)
BATCH_AXES = (DATA, FSDP)  # The rows of a batch are split over both.

# What a rule may speak of. Layers are never split: a scan goes over them.
_LOGICAL_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts", "rank")
# Where the maths of a module is split between devices (`parallel`), and not just its storage.
_TENSOR_AXES = ("heads", "kv_heads", "mlp", "vocab")

Table = tuple[tuple[str, str | None], ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """From logical axes to mesh axes, as data.

    For one array the rules are gone through in order: the first for a logical axis whose mesh axis
    is still free wins, so a mesh axis is used once an array. `None` keeps an axis whole.

    Attributes:
      table: (logical axis, mesh axis) pairs.
      overrides: (regular expression, pairs): pairs that come before the table in the modules whose
        path it matches from a dot on.
    """

    table: Table
    overrides: tuple[tuple[str, Table], ...] = ()

    def of(self, path: str) -> Table:
        """The rules of the leaf at `path`."""
        module = path.rpartition(".")[0]
        own = [pairs for pattern, pairs in self.overrides if _is_named(module, pattern)]
        return sum(own, ()) + self.table

    def check_overrides(self, modules: Sequence[str]) -> None:
        """Raises ConfigError for overrides that name none of the `modules` (tree paths)."""
        names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
        problems = [
            errors.Problem("mesh.overrides", pattern, "names no module", f"there are {names}")
            for pattern, _ in self.overrides
            if not any(_is_named(module, pattern) for module in modules)
        ]
        if problems:
            raise errors.ConfigError.of(problems)

    def of_adapters(self, sharded: bool) -> "Rules":
        """Rules of adapters: the base's own if `sharded`, else only where the maths is split."""
        if sharded:
            return self

        def tensor_only(pairs: Table) -> Table:
            return tuple((axis, to) for axis, to in pairs if to in (TENSOR, None))

        overrides = tuple((pattern, tensor_only(pairs)) for pattern, pairs in self.overrides)
        return Rules(tensor_only(self.table), overrides)


def _is_named(module: str, pattern: str) -> bool:
    """Whether an override's pattern is for the module at the tree path `module`."""
    return re.fullmatch(rf"(.*\.)?(?:{pattern})", module) is not None


def parse_rules(rules: Sequence[str], overrides: Mapping[str, str]) -> Rules:
    """Rules as a config holds them: "embed:fsdp"; in overrides several, with commas between.

    Raises:
      ConfigError: what is no rule, or a rule that cannot be followed.
    """
    problems: list[errors.Problem] = []
    table = _parse_table("mesh.rules", rules, problems)
    own = []
    for pattern, text in overrides.items():
        key = f"mesh.overrides[{pattern!r}]"
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"is not a regular expression: {error}"
            problems.append(errors.Problem("mesh.overrides", pattern, what, ""))
        own.append((pattern, _parse_table(key, text.replace(" ", "").split(","), problems)))
    if problems:
        raise errors.ConfigError.of(problems)
    return Rules(table, tuple(own))


def _parse_table(key: str, rules: Sequence[str], problems: list[errors.Problem]) -> Table:
    pairs: list[tuple[str, str | None]] = []
    for rule in rules:
        axis, colon, to = rule.partition(":")
        remedy = (
            f"logical axes: {', '.join(_LOGICAL_AXES)}; mesh axes: {', '.join(MESH_AXES)}, none"
        )
        if not colon or axis not in _LOGICAL_AXES or to not in (*MESH_AXES, "none"):
            what = 'is not a rule "logical axis:mesh axis"'
            problems.append(errors.Problem(key, rule, what, remedy))
        elif to == TENSOR and axis not in _TENSOR_AXES:
            what = f"cannot be followed: {TENSOR} splits matmuls along {', '.join(_TENSOR_AXES)}"
            problems.append(errors.Problem(key, rule, what, f"use {axis}:{FSDP}"))
        pairs.append((axis, None if to == "none" else to))
    return tuple(pairs)


RULES = Rules((("embed", FSDP), *((axis, TENSOR) for axis in _TENSOR_AXES)))
