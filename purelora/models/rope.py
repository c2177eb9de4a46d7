"""Rotary frequencies from a Hugging Face config; `_FIELDS` has the types that are known."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from purelora.core import errors

_REMEDY = "take the model's original config.json"
_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
# What yarn's fields mean where a file leaves them out; 0 stands for "not given".
_YARN_OPTIONS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 0.0,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
}


class Rope(NamedTuple):
    """The rotation of queries and keys.

    Attributes:
      inv_freq: inverse frequencies, one for each pair of a head, as float32 holds them.
      attention_factor: factor of both cosine and sine; only yarn has another than 1.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


def read(
    config: Mapping[str, Any], head_dim: int, where: str, *, absent_theta: float | None = None
) -> Rope:
    """The rotation that a config.json describes, if it is the same in all layers.

    Reads both spellings: `rope_theta` and `rope_scaling` at the top level, or everything inside
    `rope_parameters`; `type` or `rope_type`.

    Args:
      config: a Hugging Face config.json as a dict.
      head_dim: H.
      where: the file, for messages.
      absent_theta: what the older format means by leaving `rope_theta` out, if it may.

    Raises:
      ModelError: `rope_parameters` without theta or in conflict with `rope_scaling`, an unknown
        type, or a field missing or of a wrong type.
    """
    scaling = _scaling(config, where)
    _check_theta(config, "rope_theta", scaling, where)
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None and config.get("rope_parameters") is None:
        theta = absent_theta
    return made(scaling, theta, head_dim, where)


def read_nested(
    config: Mapping[str, Any], kind: str, theta: str, head_dim: int, where: str
) -> Rope:
    """The rotation of one kind of layers of a model that has several.

    Args:
      config: a Hugging Face config.json as a dict.
      kind: the kind's name, as in `layer_types`; newer files have its fields in `rope_parameters`.
      theta: the top-level field that holds its theta in older files. There `rope_scaling` is that
        of the kind `full_attention`.
      head_dim: H.
      where: the file, for messages.

    Raises:
      ModelError: as `read`.
    """
    nested = config.get("rope_parameters")
    if nested is not None:
        own = nested.get(kind) if isinstance(nested, Mapping) else None
        if not isinstance(own, Mapping):
            what = "is missing" if own is None else "is not an object"
            raise errors.ModelError(f"{where}: rope_parameters: {kind}", own, what, _REMEDY)
        is_full = kind == "full_attention"
        _check_theta(config, "rope_theta" if is_full else "rope_local_base_freq", own, where)
        if is_full and isinstance(config.get("rope_scaling"), Mapping):
            _check_same(own, config["rope_scaling"], where)
        return made(own, own.get("rope_theta"), head_dim, f"{where}: rope_parameters: {kind}")
    if theta not in config:
        raise errors.ModelError(f"{where}: {theta}", None, "is missing", _REMEDY)
    scaling = _scaling(config, where) if kind == "full_attention" else {}
    return made(scaling, config[theta], head_dim, where)


def made(scaling: Mapping[str, Any], theta: Any, head_dim: int, where: str) -> Rope:
    """The rotation of a scaling (`rope_type` and its fields) and a theta, both checked here."""
    theta = _number(theta, f"{where}: rope_theta")
    kind = _kind(scaling)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise errors.ModelError(
            f"{where}: rope_type", kind, "is not supported", f"supported: {', '.join(_FIELDS)}"
        )
    _check_fields(scaling, kind, where)
    if kind == "proportional":
        return _proportional(scaling, theta, head_dim, where)
    if scaling.get("partial_rotary_factor", 1) != 1:
        value = scaling["partial_rotary_factor"]
        raise errors.ModelError(
            f"{where}: partial_rotary_factor", value, "is not supported", _REMEDY
        )
    fields: dict[str, Any] = {
        name: _number(scaling.get(name), f"{where}: rope scaling {kind!r}: {name}")
        for name in _FIELDS[kind]
    }
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    attention_factor = 1.0
    if kind == "linear":
        frequencies = frequencies / fields["factor"]
    if kind == "llama3":
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        if low >= high:
            what = f"is not below high_freq_factor = {high}"
            raise errors.ModelError(f"{where}: low_freq_factor", low, what, _REMEDY)
        frequencies = _llama3(frequencies, **fields)
    if kind == "yarn":
        if theta <= 1:
            what = "is not above 1, which yarn needs"
            raise errors.ModelError(f"{where}: rope_theta", theta, what, _REMEDY)
        options = _yarn_options(scaling, where)
        frequencies = _yarn(frequencies, theta, **fields, **options)
        attention_factor = _yarn_attention_factor(fields["factor"], options)
    return Rope(tuple(frequencies.astype(np.float32).tolist()), attention_factor)


def _scaling(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    present = [k for k in ("rope_parameters", "rope_scaling") if config.get(k) is not None]
    for key in present:
        if not isinstance(config[key], Mapping):
            raise errors.ModelError(f"{where}: {key}", config[key], "is not an object", _REMEDY)
    if len(present) == 2:
        _check_same(config[present[0]], config[present[1]], where)
    return config[present[0]] if present else {}


def _check_theta(
    config: Mapping[str, Any], name: str, scaling: Mapping[str, Any], where: str
) -> None:
    """A theta that stands at the top level `name` too must be that of the rotation."""
    outer, inner = config.get(name), scaling.get("rope_theta")
    if None not in (outer, inner) and outer != inner:
        what = f"and the rotation's own rope_theta = {inner!r} differ"
        raise errors.ModelError(f"{where}: {name}", outer, what, "delete the one that is wrong")


def _check_fields(scaling: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuses what a type of rotation does not read: its type may be missing, or be another."""
    other = scaling.get("type", kind)
    if other != kind:
        what = f"and rope_type = {kind!r} differ"
        raise errors.ModelError(f"{where}: rope type", other, what, "delete the one that is wrong")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_FIELDS[kind]}
    known |= {"yarn": {*_YARN_OPTIONS, "truncate"}, "proportional": {"factor"}}.get(kind, set())
    unknown = {k: v for k, v in scaling.items() if k not in known and v is not None}
    if unknown:
        what = f"have no meaning for rope_type {kind!r}"
        raise errors.ModelError(f"{where}: rope fields", unknown, what, _REMEDY)


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
        raise errors.ModelError(where, None, "is missing", _REMEDY)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise errors.ModelError(where, value, "is not a positive number", _REMEDY)
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


def _proportional(scaling: Mapping[str, Any], theta: float, head_dim: int, where: str) -> Rope:
    """Partial rotation: the first pairs of a head have their usual frequencies, the others 0.

    Without `partial_rotary_factor` all pairs are rotated, without `factor` none is slowed.
    """
    part, factor = (
        1.0
        if scaling.get(name) is None
        else _number(scaling[name], f"{where}: rope scaling 'proportional': {name}")
        for name in ("partial_rotary_factor", "factor")
    )
    if part > 1:
        raise errors.ModelError(f"{where}: partial_rotary_factor", part, "is more than 1", _REMEDY)
    pairs = int(part * head_dim // 2)
    frequencies = np.zeros(head_dim // 2)
    frequencies[:pairs] = 1.0 / theta ** (np.arange(0, 2 * pairs, 2, dtype=np.float64) / head_dim)
    return Rope(tuple((frequencies / factor).astype(np.float32).tolist()))


def _yarn_options(scaling: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: absent
        if scaling.get(name) is None
        else _number(scaling[name], f"{where}: rope scaling 'yarn': {name}")
        for name, absent in _YARN_OPTIONS.items()
    }
    found["truncate"] = scaling.get("truncate", True)
    if not isinstance(found["truncate"], bool):
        name = f"{where}: rope scaling 'yarn': truncate"
        raise errors.ModelError(name, found["truncate"], "is neither true nor false", _REMEDY)
    return found


def _yarn(
    frequencies: np.ndarray,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    **_: float,
) -> np.ndarray:
    """Waves that turn `beta_fast` times within the original context are kept, those that turn
    `beta_slow` times slowed by `factor`, with a ramp over the pairs between (Peng et al. 2023)."""
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        ratio = original_max_position_embeddings / (turns * 2 * math.pi)
        return pairs * math.log(ratio) / math.log(theta)

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    return frequencies * (1 - ramp + ramp / factor)


def _yarn_attention_factor(factor: float, options: Mapping[str, float]) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if options["attention_factor"]:
        return options["attention_factor"]
    if options["mscale"] and options["mscale_all_dim"]:
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)
