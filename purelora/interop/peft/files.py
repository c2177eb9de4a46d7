"""Adapters on disk as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      key in the file
                     model.layers.0.self_attn.q_proj    lora_A          module and kind here

An adapter is read whole or not at all: every tensor must be understood, belong to what the config
names, and the other way round. Writing goes through the same checks.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

import purelora
from purelora.core import errors
from purelora.formats import atomic_output, files, safetensors_file, source
from purelora.interop.peft import adapter_config, experts_read, experts_write
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft import experts as peft_experts
from purelora.lora import targets

Modules = peft_checks.Modules

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_INDEX = "adapter_model.safetensors.index.json"
_PICKLE = "adapter_model.bin"
_METADATA = "purelora"
_AGAIN = "save or download the adapter again"

# Kinds of tensors, with the end of their key as PEFT writes it. Shapes are PEFT's: lora_A [r, in],
# lora_B [out, r], lora_embedding_A [r, V], lora_embedding_B [D, r], lora_magnitude_vector [out].
KINDS: Mapping[str, str] = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "lora_magnitude_vector": "lora_magnitude_vector",
    # The new values (not differences) of the rows that trainable_token_indices lists.
    "trainable_tokens": "token_adapter.trainable_tokens_delta",
    # A module of modules_to_save.
    "weight": "weight",
    # Of modules_to_save, or trained because of `bias`.
    "bias": "bias",
    # The base's own weight, which PEFT stores beside the LoRA of an embedding or output head, and
    # which it puts into the base when it loads the adapter.
    "base_weight": "base_layer.weight",
}

_PREFIX = "base_model.model."
_PREFIXES = (_PREFIX, "base_model.")
_NAME = r"(?:\.(?P<name>(?!weight$)[^.]+))?"
# Keys as PEFT has ever written them, with or without the adapter's name in them.
_KEYS = tuple(
    (re.compile(rf"(?P<module>.+?)(?P<levels>(?:\.base_layer)*)\.{pattern}"), kind)
    for pattern, kind in (
        (rf"lora_A{_NAME}\.weight", "lora_A"),
        (rf"lora_B{_NAME}\.weight", "lora_B"),
        (rf"lora_embedding_A{_NAME}", "lora_embedding_A"),
        (rf"lora_embedding_B{_NAME}", "lora_embedding_B"),
        (rf"lora_magnitude_vector{_NAME}(?:\.weight)?", "lora_magnitude_vector"),
        (rf"token_adapter\.trainable_tokens_delta{_NAME}", "trainable_tokens"),
        (r"base_layer\.weight", "base_weight"),
        (r"base_layer\.bias", "bias"),
        (r"weight", "weight"),
        (r"bias", "bias"),
    )
)
_SAVED_LEVEL = re.compile(r"\.modules_to_save(?:\.(?P<name>[^.]+)(?=\.[^.]))?(?=\.)")
# No module of a base is called so; a key with one of these that fits no pattern is not understood.
_RESERVED = re.compile(r"(^|\.)(lora_\w+|token_adapter|base_layer|modules_to_save)(\.|$)")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
      path: where it comes from, for messages.
      config: what its adapter_config.json says.
      modules: its tensors by Hugging Face module name and kind (see `KINDS`), in stored types.
      base_fingerprint: `source.fingerprint` of the base that it was trained on, if it says.
      notes: what a user should be told about it.
      interleaved: whether in its files the rows of experts' matrices that are one parameter
        alternate; see `peft_experts`.
    """

    path: str
    config: adapter_config.AdapterConfig
    modules: Modules
    base_fingerprint: str | None
    notes: tuple[str, ...] = ()
    interleaved: bool = False


# ---- reading -----------------------------------------------------------------------------------


def read(path: str, *, interleaved: bool | None = None) -> Adapter:
    """Reads the adapter in the folder at `path`.

    Module names are those of the model that it was trained on; see `place`.

    Args:
      path: the folder.
      interleaved: see `Adapter`; None if the base is not known. Then it is what the file says, and
        PEFT's own files say nothing: not.

    Raises:
      ModelError: a file is missing or damaged, the config asks for what is not supported, or the
        tensors are not those that it names. All problems together, as far as they can be found.
    """
    if not os.path.isdir(path):
        raise errors.ModelError(path, None, "is not a folder", "give the folder of an adapter")
    config_file = os.path.join(path, CONFIG)
    if not os.path.lexists(config_file):
        raise errors.ModelError(path, None, f"has no {CONFIG}", "give the folder of an adapter")
    config, problems, notes = adapter_config.parse(config_file, files.read_json_object(config_file))
    try:
        weights = _open_weights(path)
    except errors.ModelError as error:
        raise errors.ModelError.of([*problems, *error.problems]) from error
    parsed, prefix, key_problems = _parse_keys(weights)
    modules: Modules = _read_modules(weights, parsed)
    tied: tuple[str, ...] = ()
    if config is not None:
        facts = _own_metadata(weights)
        interleaved = facts.get("interleaved", False) if interleaved is None else interleaved
        config, modules, _, expert_problems = experts_read.of_file(
            weights.path, config, modules, facts.get("joined", {}), interleaved=interleaved
        )
        key_problems += expert_problems
    if config is not None and config.ensure_weight_tying:
        modules, tied = _without_tied(modules)
    found = [*problems, *key_problems, *peft_checks.tensor_problems(weights.path, modules)]
    if config is not None:
        found += peft_checks.fit_problems(config_file, config, modules)
    if config is None or found:
        raise errors.ModelError.of(errors.first(found, path))
    fingerprint = _own_metadata(weights).get("base_fingerprint")
    notes += (*_key_notes(prefix, weights.entries), *_tensor_notes(config, modules), *tied)
    if fingerprint is None:
        notes += ("it does not say which base it belongs to, so that is not checked",)
    return Adapter(path, config, modules, fingerprint, notes, bool(interleaved))


def is_own(folder: str) -> bool:
    """Whether `write` made the folder, as far as its metadata tell."""
    try:
        return _METADATA in _open_weights(folder).metadata
    except errors.ModelError:
        return False


def _open_weights(folder: str) -> safetensors_file.File:
    file = os.path.join(folder, WEIGHTS)
    if not os.path.lexists(file):
        remedy = f"give a folder that holds {CONFIG} and {WEIGHTS}"
        for name, how in (
            (_INDEX, f"is split into several files, which is not read: join them into {WEIGHTS}"),
            (_PICKLE, "is a pickle, which can run code: load it in PEFT and save it again"),
        ):
            if os.path.lexists(os.path.join(folder, name)):
                remedy = f"{name} {how}"
        raise errors.ModelError(folder, None, f"has no {WEIGHTS}", remedy)
    weights = safetensors_file.open_file(file)
    if not weights.entries:
        raise errors.ModelError(file, None, "holds no tensors", _AGAIN)
    return weights


def _read_modules(
    weights: safetensors_file.File, parsed: Mapping[str, tuple[str, str]]
) -> dict[str, dict[str, np.ndarray]]:
    """The tensors by module and kind, in the order of the names."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for key in sorted(parsed, key=parsed.__getitem__):
        module, kind = parsed[key]
        modules.setdefault(module, {})[kind] = weights.read(key).array
    return modules


def _own_metadata(weights: safetensors_file.File) -> dict[str, Any]:
    """The metadata that `write` put there; empty if it is not from there.

    Raises:
      ModelError: it is damaged.
    """
    text = weights.metadata.get(_METADATA)
    if text is None:
        return {}
    try:
        facts = json.loads(text)
        stated, joined = facts["base_fingerprint"], facts.get("joined", {})
        interleaved = facts.get("interleaved", False)
        sound = stated is None or isinstance(stated, str)
        sound &= all(type(r) is int and r > 0 for ranks in joined.values() for r in ranks.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        where = f"{weights.path}: metadata {_METADATA!r}"
        raise errors.ModelError(where, text, "does not state a base_fingerprint", _AGAIN)
    return {"base_fingerprint": stated, "joined": joined, "interleaved": interleaved is True}


# ---- keys --------------------------------------------------------------------------------------


def _parse_keys(
    weights: safetensors_file.File,
) -> tuple[dict[str, tuple[str, str]], str, list[errors.Problem]]:
    """Module and kind of every key that can be read, the keys' prefix, and what is wrong."""
    file, keys = weights.path, weights.entries
    prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in keys)), "")
    parsed: dict[str, tuple[str, str]] = {}
    names: dict[str, str] = {}
    problems = []
    for key in sorted(keys):
        found = _parse_key(key.removeprefix(prefix))
        if found is None or found[0].startswith(_PREFIXES):
            what = "is a tensor that is not understood" if found is None else "has another prefix"
            problems.append(errors.Problem(f"{file}: {key}", None, what, _understood(key)))
            continue
        module, kind, name = found
        if (module, kind) in parsed.values():
            what = f"is a second {kind} of {module}"
            problems.append(errors.Problem(f"{file}: {key}", None, what, _AGAIN))
        dtype = keys[key].dtype
        if dtype in source.DTYPES:
            parsed[key] = module, kind
        else:
            problems += source.dtype_error(file, key, dtype).problems
        if name is not None:
            names.setdefault(name, key)
    if len(names) > 1:
        what = f"belong to {len(names)} adapters: {', '.join(sorted(names))}"
        problems.append(errors.Problem(f"{file}: keys", None, what, "save each one by itself"))
    return parsed, prefix, problems


def _parse_key(key: str) -> tuple[str, str, str | None] | None:
    """Module, kind and adapter name of a key without its prefix; None if it is not understood."""
    level = _SAVED_LEVEL.search(key)
    if level:
        key = key[: level.start()] + key[level.end() :]
    for pattern, kind in _KEYS:
        match = pattern.fullmatch(key)
        if match and not _RESERVED.search(match["module"]):
            if level and kind not in ("weight", "bias"):
                return None
            # Only modules of experts have several adapters, one around the other.
            if match["levels"] and not match["module"].endswith(".experts"):
                return None
            name = match.groupdict().get("name") or (level and level["name"])
            return match["module"] + match["levels"], kind, name
    return None


def _understood(key: str) -> str:
    if re.search(r"\.lora_[AB]\b.*\.bias$", key):
        return "lora_bias is not supported: merge the adapter into its base in PEFT"
    return f"known: {', '.join(KINDS.values())}, after {_PREFIX!r} and the module's name"


def _key_notes(prefix: str, keys: Collection[str]) -> list[str]:
    notes = []
    if prefix != _PREFIX:
        found = f"begin with {prefix!r}" if prefix else "have no prefix"
        notes.append(f"the keys {found}, where PEFT writes {_PREFIX!r}")
    found_names = {_parse_key(key.removeprefix(prefix)) for key in keys}
    names = {found[2] for found in found_names if found} - {None}
    if names:
        notes.append(f"the keys hold the adapter's name {names.pop()!r}, which is left out")
    return notes


def _tensor_notes(config: adapter_config.AdapterConfig, modules: Modules) -> list[str]:
    notes = []
    for module in filter(lambda m: peft_checks.is_adapted(modules[m]), modules):
        # PEFT sorts the keys whenever it saves, so the order may not be that of the training.
        fitting = [k for k in config.alpha_pattern if targets.pattern_key([k], module)]
        if len({config.alpha_pattern[key] for key in fitting}) > 1:
            notes.append(f"alpha_pattern fits {module} by {fitting}: the first counts, as in PEFT")
            break
    dtypes = {array.dtype for kinds in modules.values() for array in kinds.values()}
    stored = [name for name, dtype in source.DTYPES.items() if dtype in dtypes]
    if stored != ["F32"]:
        notes.append(f"its tensors are stored as {' and '.join(stored)}")
    copies = [module for module, kinds in modules.items() if "base_weight" in kinds]
    if copies:
        notes.append(f"it holds the base's own weights of {', '.join(copies)}")
    return notes


# ---- tied embeddings ---------------------------------------------------------------------------


def _tied_kinds(embedding: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What PEFT stores for an output head that is tied to an embedding with these tensors."""
    tied = {kind: embedding[kind] for kind in ("weight", "base_weight") if kind in embedding}
    if "lora_embedding_A" in embedding and "lora_embedding_B" in embedding:
        tied["lora_A"] = embedding["lora_embedding_B"].T
        tied["lora_B"] = embedding["lora_embedding_A"].T
    return tied


def _last(modules: Collection[str], name: str) -> str | None:
    """The module whose name ends in the part `name`."""
    return next((module for module in modules if module.rpartition(".")[2] == name), None)


def _head_name(embedding: str) -> str:
    """The name of the output head that belongs to an embedding."""
    parts = embedding.split(".")
    return ".".join([*([] if parts[0] == "model" else parts[:-2]), targets.HEAD])


def _without_tied(modules: Modules) -> tuple[Modules, tuple[str, ...]]:
    """The tensors without the head's copies of those of the embedding, and a note on them."""
    embedding, head = _last(modules, targets.EMBEDDING), _last(modules, targets.HEAD)
    if embedding is None or head is None:
        return modules, ()
    tied = _tied_kinds(modules[embedding])
    own = {
        kind: array
        for kind, array in modules[head].items()
        if not (kind in tied and np.array_equal(array, tied[kind]))
    }
    rest = {module: kinds for module, kinds in modules.items() if module != head}
    note = f"{head} is tied to {embedding} (ensure_weight_tying): its copies are left out"
    return rest | ({head: own} if own else {}), (note,)


# ---- writing -----------------------------------------------------------------------------------


def write(
    folder: str,
    adapter: Adapter,
    *,
    extra_metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes an adapter as a new folder that PEFT loads.

    In the config, modules_to_save lists the full names of the modules that have a full weight:
    PEFT compares bare endings, by which `norm` would name every `input_layernorm` too.

    Args:
      folder: where; it must not exist, or be empty. It appears complete or not at all.
      adapter: what to write; its `path` and `notes` are not.
      extra_metadata: JSON values to keep in the file's metadata beside the base's fingerprint.
      files: contents of further files of the folder, by name.

    Raises:
      ModelError: `read` would refuse the result, or the folder is taken or cannot be written.
    """
    saved = tuple(sorted(m for m, kinds in adapter.modules.items() if "weight" in kinds))
    _check_written(folder, adapter)
    config = dataclasses.replace(adapter.config, modules_to_save=saved)
    config, found, joined, _ = experts_write.to_file(
        folder, config, adapter.modules, interleaved=adapter.interleaved
    )
    modules = dict(found)
    embedding = _last(modules, targets.EMBEDDING)
    if config.ensure_weight_tying and embedding is not None:
        head = _head_name(embedding)
        tied = _tied_kinds(modules[embedding]) | dict(modules.get(head, {}))
        modules |= {head: tied} if tied else {}
    facts = {
        "base_fingerprint": adapter.base_fingerprint,
        "purelora_version": purelora.__version__,
        **({"joined": joined} if joined else {}),
        **({"interleaved": True} if joined and adapter.interleaved else {}),
        **(extra_metadata or {}),
    }
    metadata = {"format": "pt", _METADATA: json.dumps(facts)}
    with atomic_output.new_folder(folder) as partial:
        with open(os.path.join(partial, CONFIG), "w", encoding="utf-8") as file:
            json.dump(adapter_config.to_json(config), file, indent=2)
        for name, content in (files or {}).items():
            with open(os.path.join(partial, name), "wb") as extra:
                extra.write(content)
        path = os.path.join(partial, WEIGHTS)
        safetensors_file.write_file(path, dict(_specs(modules)), metadata)


def _check_written(folder: str, adapter: Adapter) -> None:
    file = os.path.join(folder, CONFIG)
    in_file = experts_write.to_file(folder, adapter.config, adapter.modules).config
    problems = [
        *adapter_config.parse(file, adapter_config.to_json(in_file)).problems,
        *_dtype_problems(folder, adapter.modules),
    ]
    if not problems:
        problems += peft_checks.tensor_problems(folder, adapter.modules)
        problems += peft_checks.fit_problems(file, adapter.config, adapter.modules)
    if problems:
        raise errors.ModelError.of(errors.first(problems, folder))


def _dtype_problems(where: str, modules: Modules) -> Iterator[errors.Problem]:
    for module, kinds in modules.items():
        for kind, array in kinds.items():
            if kind not in KINDS or array.dtype not in source.DTYPES.values():
                what = f"is not one of {', '.join(KINDS)} of type {', '.join(source.DTYPES)}"
                yield errors.Problem(f"{where}: {module} {kind}", str(array.dtype), what, "")


def _specs(modules: Modules) -> Iterator[tuple[str, safetensors_file.LazyTensor]]:
    """The tensors by PEFT's keys."""
    for module, kinds in modules.items():
        adapted = peft_checks.is_adapted(kinds)
        for kind, array in kinds.items():
            # PEFT wraps an adapted module, so the bias of the module itself lies a level deeper.
            level = "base_layer." if kind == "bias" and adapted else ""
            yield f"{_PREFIX}{module}.{level}{KINDS[kind]}", safetensors_file.LazyTensor.of(array)


# ---- names of another wrapping -----------------------------------------------------------------

_LEVELS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def place(adapter: Adapter, names: Collection[str]) -> Adapter:
    """The adapter under the module names of a base, with one level of difference allowed.

    The level (a leading `model.`, a `language_model.`) must be the same for all names that are not
    those of the base already. If names change, the config is rewritten to name every module in
    full, so that its patterns mean what they meant.

    Args:
      adapter: an adapter with the names of the model that it was trained on.
      names: all module names of the base.

    Raises:
      ModelError: modules that the base has not, whatever the level.
    """
    known = frozenset(names)
    tries = [_renamed(adapter.modules, known, old, new) for old in _LEVELS for new in _LEVELS]
    tries = [names for names in tries if len(set(names.values())) == len(names)]
    best = max(tries, key=lambda new_names: sum(name in known for name in new_names.values()))
    surplus = [old for old, new in best.items() if new not in known]
    if surplus:
        problems = [
            errors.Problem(
                f"{adapter.path}: {name}",
                None,
                "is no module of the base",
                errors.nearest(best[name], sorted(known)),
            )
            for name in surplus
        ]
        raise errors.ModelError.of(errors.first(problems, adapter.path))
    changed = {old: new for old, new in best.items() if old != new}
    if not changed:
        return adapter
    old = next(iter(changed))
    return dataclasses.replace(
        adapter,
        config=_explicit(adapter.config, adapter.modules, best),
        modules={best[module]: kinds for module, kinds in adapter.modules.items()},
        notes=(*adapter.notes, f"its {old} is taken as {changed[old]}, and so on"),
    )


def _renamed(
    modules: Collection[str], known: Collection[str], old: str, new: str
) -> dict[str, str]:
    """New name of every module, with the level `new` in place of `old` where that is a name."""
    return {
        module: new + module[len(old) :]
        if module not in known and module.startswith(old)
        else module
        for module in modules
    }


def _explicit(
    config: adapter_config.AdapterConfig, modules: Modules, names: Mapping[str, str]
) -> adapter_config.AdapterConfig:
    """The config of an adapter whose modules get other names, with no pattern in it."""
    adapted = [m for m, kinds in modules.items() if peft_checks.is_adapted(kinds)]
    parameters = peft_experts.parameters([config], modules)
    ranks = {names[m]: adapter_config.rank(config, m) for m in adapted}
    alphas = {names[m]: adapter_config.alpha(config, m) for m in adapted}
    tokens = {
        names[m]: ids
        for name, ids in config.trainable_token_indices.items()
        for m, kinds in modules.items()
        if "trainable_tokens" in kinds and m.endswith(name)
    }
    return dataclasses.replace(
        config,
        target_modules=tuple(sorted(names[m] for m in adapted if m not in parameters)),
        target_parameters=tuple(sorted({targets.parameter_name(names[m]) for m in parameters})),
        exclude_modules=(),
        rank_pattern={name: r for name, r in ranks.items() if r != config.r},
        alpha_pattern={name: a for name, a in alphas.items() if a != config.lora_alpha},
        layers_to_transform=None,
        layers_pattern=(),
        modules_to_save=tuple(sorted(names[m] for m in modules if "weight" in modules[m])),
        trainable_token_indices=tokens,
    )
