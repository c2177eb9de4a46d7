"""Adapter kinds: what is trained beside a weight, one file and one line here for each.

It may import: core, config, ops, and the types of `lora.targets`.
It may not know models, meshes or files.
"""

from collections.abc import Mapping

from purelora.config import schema
from purelora.core import errors
from purelora.core.paths import Path
from purelora.lora import targets
from purelora.lora.kinds import dora, ia3, loha, lora, token_rows, whole_module
from purelora.lora.kinds.base import Arrays, Bound, Call, Kind, Leaf, Lookup, Tensor

__all__ = ["Arrays", "Bound", "Call", "Kind", "Leaf", "Lookup", "Tensor"]

# The kinds of adapters on modules, by name. Those with a flag come after the one that they refine.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        lora.LoRA(),
        dora.DoRA(),
        ia3.IA3(),
        loha.LoHa(),
    )
}
# What is trained beside them, whatever their kind.
TOKEN_ROWS = token_rows.TokenRows()
WHOLE_MODULE = whole_module.WholeModule()
ALL: tuple[Kind, ...] = (*KINDS.values(), TOKEN_ROWS, WHOLE_MODULE)

_LEAVES = frozenset(leaf for kind in ALL for leaf in kind.leaves)
# Every tensor of PEFT's files, by its name here.
TENSORS: Mapping[str, Tensor] = {
    name: tensor for kind in ALL for name, tensor in kind.tensors.items()
}
PEFT_TYPES: tuple[str, ...] = tuple(dict.fromkeys(kind.peft_type for kind in KINDS.values()))
FLAGGED: tuple[Kind, ...] = tuple(kind for kind in KINDS.values() if kind.flag)


def of_target(target: targets.Target) -> Kind:
    """The kind of a module's adapters."""
    return KINDS[target.kind]


def of_settings(settings: schema.LoraConfig) -> Kind:
    """The kind that `lora.*` chooses.

    Raises:
      ConfigError: there is none of that name, or a setting has no meaning for it.
    """
    name = settings.peft_type
    if name not in KINDS or KINDS[name].flag:
        known = [kind.name for kind in KINDS.values() if not kind.flag]
        what, remedy = "is no kind of adapter", errors.nearest(name, known)
        raise errors.ConfigError("lora.peft_type", name, what, remedy)
    flagged = [kind for kind in FLAGGED if getattr(settings, kind.flag)]
    chosen = KINDS[name]
    unset = {flag.flag: False for flag in FLAGGED if flag.peft_type != chosen.peft_type}
    problems = [
        errors.Problem(
            f"lora.{key}",
            getattr(settings, key),
            f"has no meaning for lora.peft_type={name!r}",
            f"leave it at {value!r}",
        )
        for key, value in {**unset, **chosen.without}.items()
        if getattr(settings, key) != value
    ]
    if problems:
        raise errors.ConfigError.of(problems)
    return flagged[0] if flagged else chosen


def of_peft(peft_type: str, flags: Mapping[str, object]) -> Kind:
    """The kind of an adapter of PEFT's, by its method and the keys that are set."""
    of_type = [kind for kind in KINDS.values() if kind.peft_type == peft_type]
    flagged = [kind for kind in of_type if kind.flag and flags.get(kind.flag)]
    return flagged[0] if flagged else of_type[0]


def is_adapter(path: str) -> bool:
    """Whether the leaf at `path` is part of an adapter; rows of trained tokens count as one."""
    return Path(path).name in _LEAVES


def is_adapted(tensors: Arrays) -> bool:
    """Whether a module with these tensors has an adapter."""
    return any(names[0] in tensors for kind in KINDS.values() for names in kind.sets)


def conflicts(adaptation: targets.Adaptation, *, is_tied: bool) -> list[errors.Problem]:
    """Where one weight would be trained in two ways, or in one that has no meaning."""
    asked = (TOKEN_ROWS, WHOLE_MODULE, *KINDS.values())
    return [p for kind in asked for p in kind.conflicts(adaptation, is_tied=is_tied)]
