"""The scaling of rotary embeddings in GGUF files: metadata, or a tensor of frequency factors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.formats import gguf_file

# Metadata `{arch}.{key}`, its type, and the key of `rope_scaling` in a Hugging Face config.
KEYS: tuple[tuple[str, type, str], ...] = (
    ("rope.scaling.factor", float, "factor"),
    ("rope.scaling.original_context_length", int, "original_max_position_embeddings"),
    ("rope.scaling.attn_factor", float, "attention_factor"),
    ("rope.scaling.yarn_log_multiplier", float, "mscale_all_dim"),
)
# The tensor of factors.
FACTORS = "rope_freqs.weight"


def read(
    container: gguf_file.Container, prefix: str, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """`rope_scaling` of the config, from metadata or from the tensor of frequency factors."""
    scaling: dict[str, Any] = {}
    kind = container.field(f"{prefix}.rope.scaling.type", str)
    linear = container.field(f"{prefix}.rope.scale_linear", float)
    if kind not in (None, "none"):
        scaling["rope_type"] = kind
        _check_yarn(container, prefix, kind)
        for suffix, value_kind, key in KEYS:
            value = container.field(f"{prefix}.{suffix}", value_kind)
            if value is not None:
                scaling[key] = value
    elif linear not in (None, 1.0):
        scaling = {"rope_type": "linear", "factor": linear}
    if FACTORS not in container.tensors:
        return scaling or None
    where = f"{container.path}: {FACTORS}"
    if scaling:
        raise errors.ModelError(
            where, None, f"comes on top of {prefix}.rope.scaling", "use the safetensors folder"
        )
    return _llama3_scaling(where, container.read(FACTORS).array.reshape(-1), config)


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
