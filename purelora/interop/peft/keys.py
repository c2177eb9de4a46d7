"""Keys of PEFT's files: which tensor of which module each one is.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      key in the file
                 model.layers.0.self_attn.q_proj    lora_A          module and tensor here
"""

import re
from collections.abc import Collection
from typing import NamedTuple

from purelora.core import errors
from purelora.formats import safetensors_file, source
from purelora.lora import kinds

_AGAIN = "save or download the adapter again"
PREFIX = "base_model.model."
_PREFIXES = (PREFIX, "base_model.")
_NAME = r"(?:\.(?P<name>(?!weight$)[^.]+))?"


def _pattern(tensor: kinds.Tensor) -> str:
    """A key as PEFT has ever written it, with or without the adapter's name in it."""
    key, end = tensor.key, rf"(?:{re.escape(tensor.older_end)})?" if tensor.older_end else ""
    if key in ("weight", "bias", "base_layer.weight"):
        return re.escape(key)
    stem = key.removesuffix(".weight")
    return re.escape(stem) + _NAME + (r"\.weight" if key != stem else end)


# Of several that fit, the first counts: a bare weight or bias last.
_PATTERNS = sorted(
    [
        *((_pattern(tensor), name) for name, tensor in kinds.TENSORS.items()),
        (r"base_layer\.bias", "bias"),
    ],
    key=lambda pair: pair[0] in ("weight", "bias"),
)
_KEYS = tuple(
    (re.compile(rf"(?P<module>.+?)(?P<levels>(?:\.base_layer)*)\.{pattern}"), name)
    for pattern, name in _PATTERNS
)
_SAVED_LEVEL = re.compile(r"\.modules_to_save(?:\.(?P<name>[^.]+)(?=\.[^.]))?(?=\.)")
# No module of a base is called so; a key with one of these that fits no pattern is not understood.
_ADAPTERS = "|".join(
    sorted(
        {
            re.escape(t.key.partition(".")[0])
            for k in kinds.KINDS.values()
            for t in k.tensors.values()
        }
    )
)
_RESERVED = re.compile(
    rf"(^|\.)(lora_\w+|{_ADAPTERS}|token_adapter|base_layer|modules_to_save)(\.|$)"
)


class Key(NamedTuple):
    """A key without its prefix: module, tensor, and the adapter's name if it holds one."""

    module: str
    tensor: str
    adapter: str | None


class Parsed(NamedTuple):
    """The keys of a file.

    Attributes:
      places: module and tensor of every key that can be read.
      prefix: what all keys begin with.
      problems: what is wrong with the keys.
    """

    places: dict[str, tuple[str, str]]
    prefix: str
    problems: list[errors.Problem]


def parse_all(weights: safetensors_file.File) -> Parsed:
    """Module and tensor of every key of a file."""
    file, entries = weights.path, weights.entries
    prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in entries)), "")
    places: dict[str, tuple[str, str]] = {}
    names: dict[str, str] = {}
    problems = []
    for key in sorted(entries):
        parsed = parse(key.removeprefix(prefix))
        if parsed is None or parsed.module.startswith(_PREFIXES):
            what = "is a tensor that is not understood" if parsed is None else "has another prefix"
            problems.append(errors.Problem(f"{file}: {key}", None, what, _understood(key)))
            continue
        if parsed[:2] in places.values():
            what = f"is a second {parsed.tensor} of {parsed.module}"
            problems.append(errors.Problem(f"{file}: {key}", None, what, _AGAIN))
        dtype = entries[key].dtype
        if dtype in source.DTYPES:
            places[key] = parsed.module, parsed.tensor
        else:
            problems += source.dtype_error(file, key, dtype).problems
        if parsed.adapter is not None:
            names.setdefault(parsed.adapter, key)
    if len(names) > 1:
        what = f"belong to {len(names)} adapters: {', '.join(sorted(names))}"
        problems.append(errors.Problem(f"{file}: keys", None, what, "save each one by itself"))
    return Parsed(places, prefix, problems)


def parse(key: str) -> Key | None:
    """A key without its prefix taken apart; None if it is not understood."""
    level = _SAVED_LEVEL.search(key)
    if level:
        key = key[: level.start()] + key[level.end() :]
    for pattern, tensor in _KEYS:
        match = pattern.fullmatch(key)
        if match and not _RESERVED.search(match["module"]):
            if level and tensor not in ("weight", "bias"):
                return None
            # Only modules of experts have several adapters, one around the other.
            if match["levels"] and not match["module"].endswith(".experts"):
                return None
            name = match.groupdict().get("name") or (level and level["name"])
            return Key(match["module"] + match["levels"], tensor, name)
    return None


def _understood(key: str) -> str:
    if re.search(r"\.lora_[AB]\b.*\.bias$", key):
        return "lora_bias is not supported: merge the adapter into its base in PEFT"
    known = ", ".join(tensor.key for tensor in kinds.TENSORS.values())
    return f"known: {known}, after {PREFIX!r} and the module's name"


def notes(prefix: str, keys: Collection[str]) -> list[str]:
    """What a user should be told about the keys of a file."""
    result = []
    if prefix != PREFIX:
        begin = f"begin with {prefix!r}" if prefix else "have no prefix"
        result.append(f"the keys {begin}, where PEFT writes {PREFIX!r}")
    parsed = [parse(key.removeprefix(prefix)) for key in keys]
    names = {key.adapter for key in parsed if key is not None} - {None}
    if names:
        result.append(f"the keys hold the adapter's name {names.pop()!r}, which is left out")
    return result


def write(module: str, tensor: str, *, is_adapted: bool) -> str:
    """The key as PEFT writes it."""
    # PEFT wraps an adapted module, so the bias of the module itself lies a level deeper.
    level = "base_layer." if tensor == "bias" and is_adapted else ""
    return f"{PREFIX}{module}.{level}{kinds.TENSORS[tensor].key}"
