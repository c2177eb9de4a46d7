"""Rules: which mesh axis each logical axis of an array goes to, as data that a config holds."""

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from purelora.config import schema
from purelora.core import errors

DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
MESH_AXES = (DATA, FSDP, EXPERT, TENSOR)
BATCH_AXES = (DATA, FSDP, EXPERT)  # The rows of a batch are split over these.
# What is split over these is not gathered for the maths: each device computes with its part.
SPLIT_AXES = (EXPERT, TENSOR)

# What a rule may speak of. Layers are never split: a scan goes over them.
_LOGICAL_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts", "rank")
# By mesh axis: the logical axes along which it can split the maths of a module (`parallel`), beside
# its storage.
_MATHS_AXES = {TENSOR: ("heads", "kv_heads", "mlp", "vocab"), EXPERT: ("experts",)}

# (logical axis, mesh axis) pairs; None keeps the axis whole.
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
      tensor_axes: (module, logical axis) pairs: what `tensor` splits in all arrays of the module;
        None: nothing. See `settled`.
    """

    table: Table
    overrides: tuple[tuple[str, Table], ...] = ()
    tensor_axes: tuple[tuple[str, str | None], ...] = ()

    def of(self, path: str) -> Table:
        """The rules of the leaf at `path`."""
        module = path.rpartition(".")[0]
        own = [pairs for pattern, pairs in self.overrides if _is_named(module, pattern)]
        table: Table = (*itertools.chain(*own), *self.table)
        tensor_axes = dict(self.tensor_axes)
        if module not in tensor_axes:
            return table
        split, rest = tensor_axes[module], tuple(pair for pair in table if pair[1] != TENSOR)
        return rest if split is None else ((split, TENSOR), *rest)

    def settled(
        self, weights: Mapping[str, Sequence[str | None]], tied: Mapping[str, str]
    ) -> "Rules":
        """Rules by which all arrays of a module are split over `tensor` as its weight is.

        A scale, a bias or an adapter has not all axes of the weight: by itself it might follow a
        rule that gave way in the weight, and would not fit the device's part of the matmul.

        Args:
          weights: logical axes of the modules' weights, by tree path of the module.
          tied: modules that use the weight of another one, and that one.
        """
        found: list[tuple[str, str | None]] = []
        for module, axes in weights.items():
            table = self.of(f"{tied.get(module, module)}.weight")
            split = [axes[dim] for dim, to in chosen(table, axes).items() if to == TENSOR]
            found.append((module, split[0] if split else None))
        return dataclasses.replace(self, tensor_axes=tuple(found))

    def check_overrides(self, modules: Mapping[str, Collection[str | None]]) -> None:
        """Raises ConfigError for overrides that would change nothing.

        Args:
          modules: logical axes of all modules, by tree path.
        """
        names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
        problems: list[errors.Problem] = []
        for pattern, pairs in self.overrides:
            named = [axes for module, axes in modules.items() if _is_named(module, pattern)]
            if not named:
                what, remedy = "names no module", f"there are {names}"
                problems.append(errors.Problem("mesh.overrides", pattern, what, remedy))
                continue
            known = {*itertools.chain(*named), "rank"} - {None, "layers"}
            problems += [
                errors.Problem(
                    f"mesh.overrides[{pattern!r}]",
                    axis,
                    "is no axis of these modules",
                    f"they have {', '.join(sorted(map(str, known)))}",
                )
                for axis, _ in pairs
                if axis not in known
            ]
        if problems:
            raise errors.ConfigError.of(problems)

    def of_adapters(self, sharded: bool) -> "Rules":
        """Rules of adapters: the base's own if `sharded`, else only where the maths is split."""
        if sharded:
            return self

        def maths_only(pairs: Table) -> Table:
            return tuple((axis, to) for axis, to in pairs if to in (*SPLIT_AXES, None))

        overrides = tuple((pattern, maths_only(pairs)) for pattern, pairs in self.overrides)
        return dataclasses.replace(self, table=maths_only(self.table), overrides=overrides)


def chosen(table: Table, axes: Sequence[str | None]) -> dict[int, str | None]:
    """By dimension of an array with these logical axes, the mesh axis of the rule that it follows.

    Dimensions for which there is no rule are absent.
    """
    found: dict[int, str | None] = {}
    for axis, mesh_axis in table:
        is_free = mesh_axis is None or mesh_axis not in found.values()
        dims = [i for i, a in enumerate(axes) if a == axis and i not in found]
        if dims and is_free:
            found[dims[0]] = mesh_axis
    return found


def _is_named(module: str, pattern: str) -> bool:
    """Whether an override's pattern is for the module at the tree path `module`."""
    return re.match(schema.MODULE_PATTERN.format(pattern), module) is not None


def parse_rules(rules: Sequence[str], overrides: Mapping[str, str]) -> Rules:
    """Rules as a config holds them: "embed:fsdp", or several with commas between.

    Raises:
      ConfigError: what is no rule, or a rule that cannot be followed.
    """
    problems: list[errors.Problem] = []
    table = _parse_table("mesh.rules", rules, problems)
    own = []
    for pattern, text in overrides.items():
        key = f"mesh.overrides[{pattern!r}]"
        try:
            re.compile(schema.MODULE_PATTERN.format(pattern))
        except re.error as error:
            what = f"is not a regular expression: {error}"
            problems.append(errors.Problem("mesh.overrides", pattern, what, ""))
        own.append((pattern, _parse_table(key, [text], problems)))
    if problems:
        raise errors.ConfigError.of(problems)
    return Rules(table, tuple(own))


def _parse_table(key: str, texts: Sequence[str], problems: list[errors.Problem]) -> Table:
    pairs: list[tuple[str, str | None]] = []
    for rule in itertools.chain(*(text.replace(" ", "").split(",") for text in texts)):
        axis, colon, to = rule.partition(":")
        remedy = (
            f"logical axes: {', '.join(_LOGICAL_AXES)}; mesh axes: {', '.join(MESH_AXES)}, none"
        )
        if not colon or axis not in _LOGICAL_AXES or to not in (*MESH_AXES, "none"):
            what = 'is not a rule "logical axis:mesh axis"'
            problems.append(errors.Problem(key, rule, what, remedy))
        elif axis not in _MATHS_AXES.get(to, _LOGICAL_AXES):
            what = f"cannot be followed: {to} splits the maths along {', '.join(_MATHS_AXES[to])}"
            problems.append(errors.Problem(key, rule, what, f"use {axis}:{FSDP}"))
        pairs.append((axis, None if to == "none" else to))
    return tuple(pairs)


RULES = Rules(
    (
        ("embed", FSDP),
        *((axis, mesh_axis) for mesh_axis in SPLIT_AXES for axis in _MATHS_AXES[mesh_axis]),
    )
)
