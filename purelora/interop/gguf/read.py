"""Weights from a GGUF file, under Hugging Face names and in Hugging Face layout.

What a file format calls things is a property of the architecture: one `Arch` row translates its
tensor names and metadata, and says which tensors had their rows permuted.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.formats import gguf_file, source


@dataclasses.dataclass(frozen=True)
class Arch:
    """How one GGUF architecture translates.

    Attributes:
      model_type: `model_type` of the Hugging Face config.
      architecture: its class name.
      implied: config keys that the architecture's name alone settles.
      top: GGUF names of the tensors outside the layers, without `.weight`, to Hugging Face's.
      layer: the same for the tensors of a layer, without `blk.N.`.
      biases: config keys that say whether all projections of a part of a layer have biases, with
        that part.
      permuted: the tensors whose rows are stored in the order of interleaved rotary embeddings,
        with the config key that holds their number of heads.
      settings: entries like those of `_CONFIG_KEYS` that only this architecture has.
      norm_offset: what is added to Hugging Face's weights of norms in these files.
      derived: from (path of the file, prefix of its metadata, config so far) to the config keys
        that llama.cpp computes from others. Raises ModelError for settings whose meaning in
        llama.cpp and in Hugging Face's model differs.
    """

    model_type: str
    architecture: str
    implied: Mapping[str, Any]
    top: Mapping[str, str]
    layer: Mapping[str, str]
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    permuted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: tuple[tuple[str, type, str], ...] = ()
    norm_offset: float = 0.0
    derived: Callable[[str, str, Mapping[str, Any]], dict[str, Any]] | None = None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp recognises Gemma 3 27B by its number of layers.
_GEMMA3_27B_LAYERS = 62


def _derive_gemma3(path: str, prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of the scores: from the head size H, but in the 27B model from D / N."""
    scaling = config.get("rope_scaling")
    if scaling and scaling != {"rope_type": "linear", "factor": scaling.get("factor")}:
        # The released models have no other; what it would be for layers with a window is not clear.
        what, remedy = "is not read; only linear is", "use the model's safetensors folder instead"
        raise errors.ModelError(f"{path}: {prefix}.rope.scaling", scaling, what, remedy)
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    scalar = config.get("head_dim")
    if config.get("num_hidden_layers") == _GEMMA3_27B_LAYERS and width and heads:
        scalar = width // heads
    return {} if scalar is None else {"query_pre_attn_scalar": scalar}


ARCHS: Mapping[str, Arch] = {
    "llama": Arch(
        model_type="llama",
        architecture="LlamaForCausalLM",
        implied={"hidden_act": "silu"},
        top=_TOP,
        layer=_LAYER,
        biases={"attention_bias": "self_attn", "mlp_bias": "mlp"},
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
    "qwen2": Arch(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        implied={"hidden_act": "silu", "use_sliding_window": False},
        top=_TOP,
        layer=_LAYER,
    ),
    "qwen3": Arch(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        implied={"hidden_act": "silu", "use_sliding_window": False},
        top=_TOP,
        layer=_LAYER | _QK_NORMS,
        biases={"attention_bias": "self_attn"},
    ),
    "gemma3": Arch(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        # The last two are llama.cpp's constants, for files that do not state them.
        implied={
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 1e4,
        },
        top=_TOP,
        layer=_LAYER | _QK_NORMS | _SANDWICH_NORMS,
        biases={"attention_bias": "self_attn"},
        settings=(
            ("attention.sliding_window_pattern", int, "sliding_window_pattern"),
            ("rope.freq_base_swa", float, "rope_local_base_freq"),
            ("final_logit_softcapping", float, "final_logit_softcapping"),
        ),
        norm_offset=1.0,
        derived=_derive_gemma3,
    ),
}

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
_SCALING_KEYS: tuple[tuple[str, type, str], ...] = (
    ("rope.scaling.factor", float, "factor"),
    ("rope.scaling.original_context_length", int, "original_max_position_embeddings"),
    ("rope.scaling.attn_factor", float, "attention_factor"),
    ("rope.scaling.yarn_log_multiplier", float, "mscale_all_dim"),
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
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class GGUFSource:
    """The weights of a GGUF file. Made by `open_file`.

    Attributes:
      container: the open file; the tokenizer is read from it too.
      arch: its architecture.
      config: the metadata as the keys of a Hugging Face config.
      names: Hugging Face name to GGUF name, for every tensor.
    """

    container: gguf_file.Container
    arch: Arch
    config: Mapping[str, Any]
    names: Mapping[str, str]
    identity: str | None = None

    @property
    def path(self) -> str:
        """The file."""
        return self.container.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        return {hf: self.container.tensors[name].shape for hf, name in self.names.items()}

    def read(self, name: str) -> source.Tensor:
        """Reads one tensor into Hugging Face layout."""
        source.check_name(self.path, name, self.names)
        stored = self.names[name]
        tensor = self.container.read(stored)
        base, kind = stored.split(".")[-2:]
        if base in self.arch.permuted:
            heads = self.config[self.arch.permuted[base]]
            return tensor._replace(array=unpermute_rows(tensor.array, heads))
        if self.arch.norm_offset and base.endswith("norm") and kind == "weight":
            weight = tensor.array.astype(np.float32) - np.float32(self.arch.norm_offset)
            return tensor._replace(array=weight)
        return tensor

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values in `box`; of a tensor whose rows lie in another order all are read."""
        source.check_name(self.path, name, self.names)
        stored = self.names[name]
        # `read` subtracts the offset of norms; reading a whole vector costs little.
        if len(box) == 1 or stored.split(".")[-2] in self.arch.permuted:
            return self.read(name).array[box]
        return self.container.read_rows(stored, box[0])[(slice(None), *box[1:])]


def open_file(path: str) -> GGUFSource:
    """Opens the GGUF file at `path` and translates its metadata; reads no large tensor.

    Raises:
      ModelError: the file is damaged, or its architecture, a setting or a tensor is not known.
    """
    container = gguf_file.open_container(path)
    arch_name = container.required("general.architecture", str)
    if arch_name not in ARCHS:
        raise errors.ModelError(
            f"{path}: general.architecture",
            arch_name,
            "is an architecture whose GGUF files are not read",
            f"known: {', '.join(sorted(ARCHS))}; use the model's safetensors folder instead",
        )
    arch = ARCHS[arch_name]
    names = _translate_names(container, arch)
    config = _translate_config(container, arch_name, arch, names)
    _check_permuted(container, arch, config, names)
    return GGUFSource(container, arch, config, names)


def unpermute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved order (0, h/2, 1, h/2 + 1, ...) back to halves.

    llama.cpp rotates neighbouring pairs of rows, Hugging Face rows half a head apart; the
    converter reorders the rows of Q and K to make up for it, and this is the way back.
    """
    split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _translate_names(container: gguf_file.Container, arch: Arch) -> dict[str, str]:
    """Hugging Face name to GGUF name of every tensor; all unknown tensors in one error."""
    names: dict[str, str] = {}
    unknown = []
    for name in container.tensors:
        stem, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(stem)
        if layer and layer[2] in arch.layer and kind in ("weight", "bias"):
            names[f"model.layers.{int(layer[1])}.{arch.layer[layer[2]]}.{kind}"] = name
        elif stem in arch.top and kind in ("weight", "bias"):
            names[f"{arch.top[stem]}.{kind}"] = name
        elif name != _ROPE_FACTORS:
            unknown.append(name)
    if unknown:
        raise errors.ModelError(
            container.path,
            None,
            f"holds tensors that {arch.model_type} has no place for: {', '.join(unknown[:8])}",
            "use the model's safetensors folder instead",
        )
    return names


def _translate_config(
    container: gguf_file.Container, prefix: str, arch: Arch, names: Mapping[str, str]
) -> dict[str, Any]:
    """The metadata as a Hugging Face config; what the file does not say stays absent."""
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
    scaling = _rope_scaling(container, prefix, config)
    if scaling:
        config["rope_scaling"] = scaling
    if arch.derived is not None:
        config |= arch.derived(container.path, prefix, config)
    for key in ("bos_token_id", "eos_token_id"):
        token_id = container.field(f"tokenizer.ggml.{key}", int)
        if token_id is not None:
            config[key] = token_id
    return config


def _check_known_keys(container: gguf_file.Container, prefix: str, arch: Arch) -> None:
    """Refuses settings of the architecture that would be ignored, and mixtures of experts."""
    keys = _CONFIG_KEYS + _SCALING_KEYS + arch.settings
    known = _OTHER_KEYS.union(suffix for suffix, _, _ in keys)
    settings = [key for key in container.fields if key.startswith(prefix + ".")]
    unknown = [key for key in settings if key.removeprefix(prefix + ".") not in known]
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


def _check_permuted(
    container: gguf_file.Container, arch: Arch, config: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Checks that the rows of each permuted tensor divide into heads of an even size."""
    for name in names.values():
        base = name.rpartition(".")[0].rpartition(".")[2]
        if base not in arch.permuted:
            continue
        key = arch.permuted[base]
        heads, rows = config.get(key), container.tensors[name].shape[0]
        if not heads or rows % (2 * heads):
            raise errors.ModelError(
                f"{container.path}: {name}",
                rows,
                f"rows cannot be ordered with {key} = {heads}",
                "get a sound GGUF file",
            )


def _rope_scaling(
    container: gguf_file.Container, prefix: str, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """`rope_scaling` of the config, from metadata or from the tensor of frequency factors."""
    scaling: dict[str, Any] = {}
    kind = container.field(f"{prefix}.rope.scaling.type", str)
    linear = container.field(f"{prefix}.rope.scale_linear", float)
    if kind not in (None, "none"):
        scaling["rope_type"] = kind
        _check_yarn(container, prefix, kind)
        for suffix, value_kind, key in _SCALING_KEYS:
            value = container.field(f"{prefix}.{suffix}", value_kind)
            if value is not None:
                scaling[key] = value
    elif linear not in (None, 1.0):
        scaling = {"rope_type": "linear", "factor": linear}
    if _ROPE_FACTORS not in container.tensors:
        return scaling or None
    where = f"{container.path}: {_ROPE_FACTORS}"
    if scaling:
        raise errors.ModelError(
            where, None, f"comes on top of {prefix}.rope.scaling", "use the safetensors folder"
        )
    return _llama3_scaling(where, container.read(_ROPE_FACTORS).array.reshape(-1), config)


def _check_yarn(container: gguf_file.Container, prefix: str, kind: str) -> None:
    """Refuses settings of yarn that llama.cpp and Hugging Face understand differently."""
    for suffix in ("attn_factor", "yarn_log_multiplier") if kind == "yarn" else ():
        key = f"{prefix}.rope.scaling.{suffix}"
        value = container.field(key, float)
        if value is not None:
            what, remedy = "is not read from GGUF", "use the model's safetensors folder instead"
            raise errors.ModelError(f"{container.path}: {key}", value, what, remedy)


def _llama3_scaling(
    where: str, factors: np.ndarray, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The llama3 scaling whose frequency divisors are `factors`; None when they are all 1.

    Only ratios of low factor, high factor and original context matter to the divisors, so where
    Llama 3.1's own values do not fit, the low factor is taken as 1 and the others are solved for
    from the divisors between the two plateaus. A candidate counts only if it reproduces `factors`.
    """
    if np.all(factors == 1):
        return None
    theta, head_dim = config.get("rope_theta"), config.get("head_dim")
    if theta and head_dim == 2 * factors.size:
        wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        factor = float(factors.max())
        for high, context in _llama3_candidates(factors.astype(np.float64), wavelengths):
            expected = llama3_factors(
                wavelengths, factor=factor, low=1.0, high=high, context=context
            )
            if np.allclose(expected, factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
    raise errors.ModelError(
        where,
        None,
        "holds frequency factors that are not a llama3 scaling of this model's rotary embedding",
        "use the model's safetensors folder instead",
    )


def _llama3_candidates(factors: np.ndarray, wavelengths: np.ndarray) -> list[tuple[float, int]]:
    """Pairs of high factor and original context that may explain `factors` (low factor 1)."""
    candidates = [(4.0, 8192)]
    factor = factors.max()
    between = (factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6))
    if between.sum() >= 2:
        # 1 / divisor = (1 - s) / factor + s  with  s = (context / wavelength - low) / (high - low)
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(1 / wavelengths[between], smooth, 1)
        if slope > 0 > offset:
            high = 1 - 1 / offset
            candidates.append((float(f"{high:.5g}"), round(slope * (high - 1))))
    return candidates


def llama3_factors(
    wavelengths: np.ndarray, *, factor: float, low: float, high: float, context: float
) -> np.ndarray:
    """What llama3 scaling divides each rotary frequency by."""
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
