"""The text model within the files of a model that also reads images or sound.

Only the text model is used. Its config is nested in config.json as `text_config`, and the names of
its tensors have one level more, which newer and older files spell differently. The tensors of the
other parts are recognised by name; they are not loaded, and merging copies them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from purelora.core import errors
from purelora.models import hf_config, stacks
from purelora.models.hf_config import Config
from purelora.models.hf_layout import Layout

# How names of the text model's modules begin; and, by how newer files' names begin, older files'.
PREFIX = "model.language_model"
_OLDER = {f"{PREFIX}.": "language_model.model.", "lm_head.": "language_model.lm_head."}
# How names of the other parts' tensors begin.
_OTHER_PARTS = (
    "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.",
)  # fmt: skip
_KEYS = re.compile(r".*\blayers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+")
_NESTED = "ForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class Text:
    """The part of a config.json that describes the text model.

    Attributes:
      fields: the fields of that part.
      where: its name in messages.
      prefix: how Hugging Face's names of the text model's modules begin.
    """

    fields: Mapping[str, Any]
    where: str
    prefix: str


def text_of(config: Mapping[str, Any], where: str, absent: Mapping[str, Any]) -> Text:
    """The part of a config.json that describes the text model; all of it if there is no other.

    Args:
      config: the contents of the file.
      where: the name of the file, for messages.
      absent: for fields that a nested config may leave out, the value that this means.

    Raises:
      ModelError: the nested config is missing or no object.
    """
    name = hf_config.architecture(config)
    if name is None or not name.endswith(_NESTED):
        return Text(config, where, "model")
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        what = "is missing" if nested is None else "is not an object"
        raise errors.ModelError(
            f"{where}: text_config", nested, what, "take the model's original config.json"
        )
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return Text({**absent, **nested, **tied}, f"{where}: text_config", PREFIX)


def is_left_out(cfg: Config, name: str) -> bool:
    """Whether a file may hold the tensor `name` although the model does not use it.

    That is so for the parts that read images or sound, and for the projections of keys and values
    of a layer that shares those of an earlier layer.
    """
    if cfg.prefix == PREFIX and name.removeprefix("model.").startswith(_OTHER_PARTS):
        return True
    found = _KEYS.fullmatch(name)
    sharing = {n for stack in stacks.of(cfg) if stack.cfg.shares_keys for n in stack.layers}
    return found is not None and int(found[1]) in sharing


def spellings(cfg: Config, layout: Layout) -> dict[str, Layout]:
    """A layout in each spelling that files may have, by what to append to the layout's name."""
    if cfg.prefix != PREFIX:
        return {"": layout}
    shapes = {older(name): shape for name, shape in layout.shapes.items()}
    parts = {
        path: tuple(dataclasses.replace(part, tensor=older(part.tensor)) for part in found)
        for path, found in layout.parts.items()
    }
    return {"": layout, " in older files": Layout(shapes, parts)}


def older(name: str) -> str:
    """The older files' spelling of a tensor's name."""
    for new, old in _OLDER.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def beside(name: str, tensor: str) -> str:
    """`name` in the spelling of a file, of which a tensor's name shows it."""
    return older(name) if tensor.startswith(tuple(_OLDER.values())) else name
