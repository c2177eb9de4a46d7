"""What a step says beside its arrays: the schema of its JSON, and the one reader of older ones.

    {"format": 3,
     "settings": {"lora.r": 16, …},           every key of the configuration, by dotted name
     "facts": {"base_fingerprint": …, …},     what else the run is made of: `Facts`
     "progress": {"step": 10, "eval_loss": 2.3}}    what is of this step alone

In memory it is one dict: the settings under "config", and beside them the facts and the progress.

Format 2 had the facts and the progress side by side, and model sizes and scalings among the
settings, under names with a space. It is read as if it were of the present format.
"""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

# Of a step's files and of this document. A version that reads others has another number.
FORMAT = 3
OLDER_FORMAT = 2
# How a size of the model and the scalings of a module are named in a message, and in format 2.
SIZE, SCALINGS = "config.json: ", "lora: ranks and scalings of "


class Facts(TypedDict):
    """What a run is made of beside its settings, the same in all of its steps.

    Attributes:
      base_fingerprint: SHA-256 of the tensors that the base was read from.
      data_fingerprint: SHA-256 of the training data.
      model_config: the keys of the model's config.json.
      model_sizes: what was made of them, by field of `hf_config.Config`.
      adapter_scalings: by module path [rank of each layer, scaling of each layer].
      adaptation: what is adapted, as `interop.peft` records it; None if all weights are trained.
      versions: of purelora and jax.
    """

    base_fingerprint: str
    data_fingerprint: str
    model_config: Mapping[str, Any]
    model_sizes: Mapping[str, Any]
    adapter_scalings: Mapping[str, Any]
    adaptation: Mapping[str, Any] | None
    versions: Mapping[str, str]


FACTS = frozenset(Facts.__annotations__)


def to_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a step, in the form that JSON gives it back: tuples are lists."""
    facts = {name: value for name, value in meta.items() if name in FACTS}
    progress = {k: v for k, v in meta.items() if k not in FACTS and k != "config"}
    sections = {"settings": meta.get("config"), "facts": facts, "progress": progress}
    document: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **sections}))
    return document


def is_readable(document: object) -> bool:
    """Whether this version reads it."""
    return isinstance(document, dict) and document.get("format") in (OLDER_FORMAT, FORMAT)


def from_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_json` was given, out of a document that `is_readable`.

    Raises:
      LookupError, TypeError: a section is missing, or is none.
    """
    if document["format"] == OLDER_FORMAT:
        return _from_format_2(document)
    return {**document["progress"], **document["facts"], "config": {**document["settings"]}}


def _from_format_2(document: Mapping[str, Any]) -> dict[str, Any]:
    settings, sizes, scalings = {}, {}, {}
    for name, value in document["config"].items():
        if name.startswith(SIZE):
            sizes[name.removeprefix(SIZE)] = value
        elif name.startswith(SCALINGS):
            scalings[name.removeprefix(SCALINGS)] = value
        else:
            settings[name] = value
    meta = {name: value for name, value in document.items() if name != "format"}
    facts = {"model_sizes": sizes, "adapter_scalings": scalings} if sizes else {}
    return {**meta, **facts, "config": settings}
