"""The metadata of a GGUF file as the keys of a Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from purelora.core import errors
from purelora.formats import gguf_file
from purelora.interop.gguf import architectures, rope_scaling

# Metadata `{arch}.{key}` that carries over to the Hugging Face config under another name.
_CONFIG_KEYS: tuple[tuple[str, type, str], ...] = (
    ("embedding_length", int, "hidden_size"),
    ("feed_forward_length", int, "intermediate_size"),
    ("block_count", int, "num_hidden_layers"),
    ("attention.head_count", int, "num_attention_heads"),
    ("attention.head_count_kv", int, "num_key_value_heads"),
    ("attention.key_length", int, "head_dim"),
    ("attention.layer_norm_rms_epsilon", float, "rms_norm_eps"),
    ("attention.sliding_window", int, "sliding_window"),
    ("context_length", int, "max_position_embeddings"),
    ("rope.freq_base", float, "rope_theta"),
)
# Read elsewhere in this module, or without effect on the weights' meaning.
_OTHER_KEYS = frozenset(
    (
        "attention.value_length",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.finetuned",
        "rope.scale_linear",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "tensor_data_layout",
    )
)


def translate(
    container: gguf_file.Container, prefix: str, arch: architectures.Arch, names: Mapping[str, str]
) -> dict[str, Any]:
    """The metadata as a Hugging Face config.json; keys that the file does not state are absent."""
    _check_known_keys(container, prefix, arch)
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "architectures": [arch.architecture],
        **arch.implied,
        "tie_word_embeddings": "lm_head.weight" not in names,
        **{
            key: any(name.endswith("_proj.bias") and f".{part}." in name for name in names)
            for key, part in arch.biases.items()
        },
    }
    for suffix, kind, key in _CONFIG_KEYS + arch.settings:
        value = container.field(f"{prefix}.{suffix}", kind)
        if value is not None:
            config[key] = value
    if "num_attention_heads" in config:
        # The format defines an absent head_count_kv as one key and value head per query head.
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= _sizes(container, prefix, config, names)
    scaling = rope_scaling.read(container, prefix, config)
    if scaling:
        config["rope_scaling"] = scaling
    if arch.derived is not None:
        config |= arch.derived(container.path, prefix, config)
    for key in ("bos_token_id", "eos_token_id"):
        token_id = container.field(f"tokenizer.ggml.{key}", int)
        if token_id is not None:
            config[key] = token_id
    return config


def _check_known_keys(
    container: gguf_file.Container, prefix: str, arch: architectures.Arch
) -> None:
    """Refuses settings of the architecture that would be ignored, and mixtures of experts."""
    keys = _CONFIG_KEYS + rope_scaling.KEYS + arch.settings
    suffixes = _OTHER_KEYS.union(suffix for suffix, _, _ in keys)
    settings = [key for key in container.fields if key.startswith(prefix + ".")]
    unknown = [key for key in settings if key.removeprefix(prefix + ".") not in suffixes]
    if unknown:
        raise errors.ModelError(
            container.path,
            None,
            f"holds settings that are not understood: {', '.join(unknown[:8])}",
            "use the model's safetensors folder instead",
        )
    experts = container.field(f"{prefix}.expert_count", int)
    if experts:
        raise errors.ModelError(
            f"{container.path}: {prefix}.expert_count",
            experts,
            "is a mixture of experts, which is not read from GGUF",
            "use the model's safetensors folder instead",
        )


def _sizes(
    container: gguf_file.Container, prefix: str, config: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, int]:
    """`vocab_size` and `head_dim`, which may lie in several places that must agree."""
    sizes: dict[str, int] = {}
    vocab_size = container.field(f"{prefix}.vocab_size", int)
    embeddings = names.get("model.embed_tokens.weight")
    rows = container.tensors[embeddings].shape[0] if embeddings else None
    if vocab_size is not None and rows is not None and vocab_size != rows:
        raise errors.ModelError(
            f"{container.path}: {prefix}.vocab_size",
            vocab_size,
            f"differs from the {rows} rows of {embeddings}",
            "get a sound GGUF file",
        )
    if vocab_size is not None or rows is not None:
        sizes["vocab_size"] = vocab_size if rows is None else rows
    head_dim = config.get("head_dim")
    for suffix in ("rope.dimension_count", "attention.value_length"):
        size = container.field(f"{prefix}.{suffix}", int)
        head_dim = size if head_dim is None else head_dim
        if size is not None and size != head_dim:
            raise errors.ModelError(
                f"{container.path}: {prefix}.{suffix}",
                size,
                f"differs from the head size {head_dim}, which is not read",
                "use the model's safetensors folder instead",
            )
    return sizes if head_dim is None else sizes | {"head_dim": head_dim}
