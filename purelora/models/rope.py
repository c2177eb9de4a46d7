"""Rotary frequencies from a Hugging Face config: `default`, `linear` and `llama3`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from purelora import errors

_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def inv_freq(config: Mapping[str, Any], head_dim: int, where: str) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` in float32.

    Reads both spellings: `rope_theta` and `rope_scaling` at the top level, or everything inside
    `rope_parameters`; `type` or `rope_type`.

    Args:
      config: a Hugging Face config.json as a dict.
      head_dim: H.
      where: the file, for messages.

    Raises:
      ModelError: `rope_parameters` without theta or in conflict with `rope_scaling`, an unknown
        type, or a field missing or of a wrong type.
    """
    scaling = _scaling(config, where)
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None and config.get("rope_parameters") is None:
        theta = 10000.0  # What the older format means by leaving it out, as Llama 2's files do.
    theta = _number(theta, f"{where}: rope_theta")
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = _kind(scaling)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise errors.ModelError(
            f"{where}: rope_type", kind, "is not supported", f"supported: {', '.join(_FIELDS)}"
        )
    fields = {
        name: _number(scaling.get(name), f"{where}: rope scaling {kind!r}: {name}")
        for name in _FIELDS[kind]
    }
    if kind == "linear":
        frequencies = frequencies / fields["factor"]
    if kind == "llama3":
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        if low >= high:
            what = f"is not below high_freq_factor = {high}"
            raise errors.ModelError(f"{where}: low_freq_factor", low, what, "")
        frequencies = _llama3(frequencies, **fields)
    return frequencies.astype(np.float32)


def _scaling(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    present = [k for k in ("rope_parameters", "rope_scaling") if config.get(k) is not None]
    for key in present:
        if not isinstance(config[key], Mapping):
            raise errors.ModelError(f"{where}: {key}", config[key], "is not an object", "")
    if len(present) == 2:
        _check_same(config[present[0]], config[present[1]], where)
    return config[present[0]] if present else {}


def _check_same(new: Mapping[str, Any], old: Mapping[str, Any], where: str) -> None:
    """A newer library that wrote an older model leaves both in the file: they must agree."""
    named = {**old, "rope_type": _kind(old)}
    known = {**new, "rope_type": _kind(new)}
    differ = [k for k, v in named.items() if k != "type" and known.get(k) != v]
    if differ:
        raise errors.ModelError(
            f"{where}: rope_scaling",
            old,
            f"and rope_parameters differ in {', '.join(differ)}",
            "delete the one that is wrong",
        )


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _number(value: Any, where: str) -> float:
    if value is None:
        raise errors.ModelError(where, None, "is missing", "take the model's original config.json")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise errors.ModelError(where, value, "is not a positive number", "")
    return float(value)


def _llama3(
    frequencies: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray:
    """Llama 3.1's scaling: long waves slowed by `factor`, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    turns = original_max_position_embeddings / wavelengths
    ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    ramp = np.clip(ramp, 0, 1)
    return frequencies * (ramp + (1 - ramp) / factor)
