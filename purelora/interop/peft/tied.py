"""A tied output head in PEFT's files: what it shares with the embedding is written for both."""

from collections.abc import Collection, Mapping

import numpy as np

from purelora.core.paths import Path
from purelora.interop.peft.checks import Modules
from purelora.lora import targets


def tied_tensors(embedding: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What PEFT stores for an output head that is tied to an embedding with these tensors."""
    tied = {
        tensor: embedding[tensor] for tensor in ("weight", "base_weight") if tensor in embedding
    }
    if "lora_embedding_A" in embedding and "lora_embedding_B" in embedding:
        tied["lora_A"] = embedding["lora_embedding_B"].T
        tied["lora_B"] = embedding["lora_embedding_A"].T
    return tied


def last(modules: Collection[str], name: str) -> str | None:
    """The module whose name ends in the part `name`."""
    return next((module for module in modules if Path(module).name == name), None)


def head_name(embedding: str) -> str:
    """The name of the output head that belongs to an embedding."""
    parts = Path(embedding).parts
    return Path.of([*([] if parts[0] == "model" else parts[:-2]), targets.HEAD])


def without_tied(modules: Modules) -> tuple[Modules, tuple[str, ...]]:
    """The tensors without the head's copies of those of the embedding, and a note on them."""
    embedding, head = last(modules, targets.EMBEDDING), last(modules, targets.HEAD)
    if embedding is None or head is None:
        return modules, ()
    tied = tied_tensors(modules[embedding])
    rest_of_head = {
        tensor: array
        for tensor, array in modules[head].items()
        if not (tensor in tied and np.array_equal(array, tied[tensor]))
    }
    rest = {module: tensors for module, tensors in modules.items() if module != head}
    note = f"{head} is tied to {embedding} (ensure_weight_tying): its copies are left out"
    return rest | ({head: rest_of_head} if rest_of_head else {}), (note,)
