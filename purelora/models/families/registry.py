"""The table of families, and which of them a config.json is of."""

from collections.abc import Mapping
from typing import Any

from purelora.core import errors
from purelora.models import decoder, hf_config
from purelora.models.families import (
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)

FAMILIES: tuple[decoder.Family, ...] = (
    llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3, gemma4,
    gpt_oss,
)  # fmt: skip


def family_of(config: Mapping[str, Any], where: str) -> decoder.Family:
    """The family of the model that a Hugging Face config.json describes.

    Args:
      config: the file's contents.
      where: the file, for messages.

    Raises:
      ModelError: an architecture that no family knows, or a `model_type` of another one.
    """
    name = hf_config.architecture(config)
    for family in FAMILIES:
        if name in family.ARCHITECTURES:
            _check_type(config, name, where)
            return family
    known = ", ".join(a for family in FAMILIES for a in family.ARCHITECTURES)
    what = "is not a list of one model that purelora knows"
    value = config.get("architectures")
    raise errors.ModelError(f"{where}: architectures", value, what, f"known: {known}")


def _check_type(config: Mapping[str, Any], architecture: str, where: str) -> None:
    """A `model_type`, which transformers goes by, must be of the architecture.

    The names follow from each other: Qwen3MoeForCausalLM is qwen3_moe, Gemma3ForCausalLM
    gemma3_text, and that nested in the gemma3 of Gemma3ForConditionalGeneration as well.
    """
    family = architecture.partition("For")[0].lower()
    nested = config.get("text_config")
    for part, fields in (("", config), ("text_config: ", nested)):
        found = fields.get("model_type") if isinstance(fields, Mapping) else None
        if found is not None and str(found).replace("_", "").removesuffix("text") != family:
            what, remedy = f"is not that of {architecture}", "take the model's original config.json"
            raise errors.ModelError(f"{where}: {part}model_type", found, what, remedy)
