"""Models that read images or sound too: what their files say of the text model, which is used.

The text model's config is nested in config.json, and its tensors have a level more in their names,
in one of two spellings. The tensors of the rest are known, and left as they are.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from purelora import errors
from purelora.models import stacks
from purelora.models.reading import Config
from purelora.models.storage import Layout

# Name of the text model in newer files, which is also that of its modules; and in older ones.
PREFIX = "model.language_model"
_OLDER = {f"{PREFIX}.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_BESIDE = (
    "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.",
)  # fmt: skip
_KEYS = re.compile(r".*\blayers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+")
_NESTED = "ForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class Text:
    """The part of a config.json that is of the text model.

    Attributes:
      fields: its keys.
      where: what it is called in messages.
      prefix: what the names of its modules begin with.
    """

    fields: Mapping[str, Any]
    where: str
    prefix: str


def text_of(config: Mapping[str, Any], where: str, absent: Mapping[str, Any]) -> Text:
    """The text model's part of a config.json, which is all of it for a model of text alone.

    Args:
      config: the keys of the file.
      where: its name, for messages.
      absent: what the format means by leaving fields of a nested config out.

    Raises:
      ModelError: the nested config is missing.
    """
    if not config["architectures"][0].endswith(_NESTED):
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
    """Whether a file may hold the tensor `name`, although the text model does not use it.

    It may be of the part that reads images or sound, or of keys and values in a layer that shares
    those of another one.
    """
    if cfg.prefix == PREFIX and name.removeprefix("model.").startswith(_BESIDE):
        return True
    found = _KEYS.fullmatch(name)
    sharing = {n for stack in stacks.of(cfg) if stack.cfg.shares_keys for n in stack.layers}
    return found is not None and int(found[1]) in sharing


def spellings(cfg: Config, layout: Layout) -> dict[str, Layout]:
    """The layout under the names that files may have, by a name for the spelling."""
    if cfg.prefix != PREFIX:
        return {"": layout}
    shapes = {older(name): shape for name, shape in layout.shapes.items()}
    parts = {
        path: tuple(dataclasses.replace(part, tensor=older(part.tensor)) for part in found)
        for path, found in layout.parts.items()
    }
    return {"": layout, " in older files": Layout(shapes, parts)}


def older(name: str) -> str:
    """The name of a tensor in older files."""
    for new, old in _OLDER.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def beside(name: str, tensor: str) -> str:
    """`name` in the spelling of a file that has a tensor called `tensor`."""
    return older(name) if tensor.startswith(tuple(_OLDER.values())) else name
