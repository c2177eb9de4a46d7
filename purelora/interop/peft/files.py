"""Adapters on disk as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

An adapter is read whole or not at all: every tensor must be understood, belong to what the config
names, and the other way round. Writing goes through the same checks.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import purelora
from purelora.core import errors
from purelora.formats import atomic_output, files, safetensors_file, source
from purelora.interop.peft import (
    adapter_config,
    config_keys,
    experts_read,
    experts_write,
    keys,
    tied,
)
from purelora.interop.peft import checks as peft_checks
from purelora.interop.peft.artefact import Adapter
from purelora.interop.peft.checks import Modules
from purelora.lora import kinds, targets

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_INDEX = "adapter_model.safetensors.index.json"
_PICKLE = "adapter_model.bin"
_METADATA = "purelora"
_AGAIN = "save or download the adapter again"

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
    config, problems, notes = config_keys.parse(config_file, files.read_json_object(config_file))
    try:
        weights = _open_weights(path)
    except errors.ModelError as error:
        raise errors.ModelError.of([*problems, *error.problems]) from error
    parsed, prefix, key_problems = keys.parse_all(weights)
    modules: Modules = _read_modules(weights, parsed)
    tied_notes: tuple[str, ...] = ()
    if config is not None:
        facts = _own_metadata(weights)
        interleaved = facts.get("interleaved", False) if interleaved is None else interleaved
        config, modules, _, expert_problems = experts_read.of_file(
            weights.path, config, modules, facts.get("joined", {}), interleaved=interleaved
        )
        key_problems += expert_problems
    if config is not None and config.ensure_weight_tying:
        modules, tied_notes = tied.without_tied(modules)
    all_problems = [*problems, *key_problems, *peft_checks.tensor_problems(weights.path, modules)]
    if config is not None:
        all_problems += peft_checks.fit_problems(config_file, config, modules)
    if config is None or all_problems:
        raise errors.ModelError.of(errors.first(all_problems, path))
    fingerprint = _own_metadata(weights).get("base_fingerprint")
    notes += (*keys.notes(prefix, weights.entries), *_tensor_notes(config, modules), *tied_notes)
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
    """The tensors by module and tensor, in the order of the names."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for key in sorted(parsed, key=parsed.__getitem__):
        module, tensor = parsed[key]
        modules.setdefault(module, {})[tensor] = weights.read(key).array
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


def _tensor_notes(config: adapter_config.AdapterConfig, modules: Modules) -> list[str]:
    notes = []
    for module in filter(lambda m: kinds.is_adapted(modules[m]), modules):
        # PEFT sorts the keys whenever it saves, so the order may not be that of the training.
        fitting = [k for k in config.alpha_pattern if targets.pattern_key([k], module)]
        if len({config.alpha_pattern[key] for key in fitting}) > 1:
            notes.append(f"alpha_pattern fits {module} by {fitting}: the first counts, as in PEFT")
            break
    dtypes = {array.dtype for tensors in modules.values() for array in tensors.values()}
    stored = [name for name, dtype in source.DTYPES.items() if dtype in dtypes]
    if stored != ["F32"]:
        notes.append(f"its tensors are stored as {' and '.join(stored)}")
    copies = [module for module, tensors in modules.items() if "base_weight" in tensors]
    if copies:
        notes.append(f"it holds the base's own weights of {', '.join(copies)}")
    return notes


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
    saved = tuple(sorted(m for m, tensors in adapter.modules.items() if "weight" in tensors))
    _check_written(folder, adapter)
    config = dataclasses.replace(adapter.config, modules_to_save=saved)
    config, in_file, joined, _ = experts_write.to_file(
        folder, config, adapter.modules, interleaved=adapter.interleaved
    )
    modules = dict(in_file)
    embedding = tied.last(modules, targets.EMBEDDING)
    if config.ensure_weight_tying and embedding is not None:
        head = tied.head_name(embedding)
        shared = tied.tied_tensors(modules[embedding]) | dict(modules.get(head, {}))
        modules |= {head: shared} if shared else {}
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
            json.dump(config_keys.to_json(config), file, indent=2)
        for name, content in (files or {}).items():
            with open(os.path.join(partial, name), "wb") as extra:
                extra.write(content)
        path = os.path.join(partial, WEIGHTS)
        safetensors_file.write_file(path, dict(_specs(modules)), metadata)


def _check_written(folder: str, adapter: Adapter) -> None:
    file = os.path.join(folder, CONFIG)
    in_file = experts_write.to_file(folder, adapter.config, adapter.modules).config
    problems = [
        *config_keys.parse(file, config_keys.to_json(in_file)).problems,
        *_dtype_problems(folder, adapter.modules),
    ]
    if not problems:
        problems += peft_checks.tensor_problems(folder, adapter.modules)
        problems += peft_checks.fit_problems(file, adapter.config, adapter.modules)
    if problems:
        raise errors.ModelError.of(errors.first(problems, folder))


def _dtype_problems(where: str, modules: Modules) -> Iterator[errors.Problem]:
    for module, tensors in modules.items():
        for tensor, array in tensors.items():
            if tensor not in kinds.TENSORS or array.dtype not in source.DTYPES.values():
                known, types = ", ".join(kinds.TENSORS), ", ".join(source.DTYPES)
                what = f"is not one of {known} of type {types}"
                yield errors.Problem(f"{where}: {module} {tensor}", str(array.dtype), what, "")


def _specs(modules: Modules) -> Iterator[tuple[str, safetensors_file.LazyTensor]]:
    """The tensors by PEFT's keys."""
    for module, tensors in modules.items():
        adapted = kinds.is_adapted(tensors)
        for tensor, array in tensors.items():
            key = keys.write(module, tensor, is_adapted=adapted)
            yield key, safetensors_file.LazyTensor.of(array)
