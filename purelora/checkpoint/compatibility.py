"""Whether a checkpoint belongs to a run: compares settings, fingerprints and leaves, strictly."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from purelora.checkpoint import document
from purelora.config import schema
from purelora.core import errors

_FINGERPRINTS = {
    "base_fingerprint": "the base is not the one that this run was started with",
    "data_fingerprint": "the training data is not that which this run was started with",
}


def setting_problems(
    saved: Mapping[str, Any], now: Mapping[str, Any], resumable: Sequence[str]
) -> list[errors.Problem]:
    """What keeps a run from continuing a checkpoint.

    Args:
      saved: the checkpoint's meta: its settings (`config`, flat, by dotted key) and facts, see
        `document`. Of the facts, adaptation, config.json and versions are not compared: what was
        made of the first two is.
      now: the same of the present run.
      resumable: the config keys that may differ.
    """
    before, after = _settings(saved), _settings(now)
    return [
        _changed(key, before, after)
        for key in dict.fromkeys([*after, *before])
        if key not in resumable
        and (key not in before or key not in after or before[key] != after[key])
    ]


def leaf_problems(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[errors.Problem]:
    """Leaves by dotted path that differ in path, shape or dtype."""
    for name in dict.fromkeys([*wanted, *saved]):
        has = _describe(saved[name]) if name in saved else "absent"
        wants = _describe(wanted[name]) if name in wanted else "absent"
        if has != wants:
            yield errors.Problem(name, None, f"saved {has}, wanted {wants}", "")


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All that is compared, in the form that JSON gives it back."""
    named = {
        **schema.LATER_KEYS,
        **meta["config"],
        **{name: meta[name] for name in _FINGERPRINTS if name in meta},
        **{f"{document.SIZE}{name}": v for name, v in meta.get("model_sizes", {}).items()},
        **{f"{document.SCALINGS}{path}": v for path, v in meta.get("adapter_scalings", {}).items()},
    }
    settings: dict[str, Any] = json.loads(json.dumps(named))
    return settings


def _changed(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> errors.Problem:
    if key not in before:
        what = "is not in the checkpoint, which another version of purelora wrote"
        remedy = "continue with that version, or choose another workdir"
        return errors.Problem(key, after[key], what, remedy)
    if key not in after:
        what = "is in the checkpoint, but is no key of this version of purelora"
        remedy = "continue with the version that wrote it, or choose another workdir"
        return errors.Problem(key, before[key], what, remedy)
    if key in _FINGERPRINTS:
        remedy = f"bring back that of fingerprint {before[key]!r}, or choose another workdir"
        return errors.Problem(key, after[key], _FINGERPRINTS[key], remedy)
    what = f"was {before[key]!r} when this run was started"
    return errors.Problem(key, after[key], what, "set it back, or choose another workdir")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
