"""Adapters from where they may be: a run, one of its steps, a PEFT folder, a MaxText checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from purelora.checkpoint import store
from purelora.config import schema
from purelora.core import errors
from purelora.interop.maxtext import adapter as maxtext_adapter
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.peft import files as peft_files
from purelora.interop.peft import record
from purelora.interop.peft.artefact import Adapter
from purelora.interop.peft.unroll import unrolled
from purelora.models import causal_lm


def open_adapter(
    path: str, base: Mapping[str, Any] | None = None, *, lora_alpha: float | None = None
) -> Adapter:
    """Reads an adapter from a PEFT folder, a run's folder, a step's folder or a MaxText checkpoint.

    Args:
      path: the folder.
      base: the config.json of its base; without it a MaxText checkpoint cannot be read, nor PEFT's
        adapters on the experts of gpt-oss.
      lora_alpha: used for a MaxText checkpoint that does not state its own; without it, such a
        checkpoint is an error.

    Raises:
      ModelError, CheckpointError: there is none, it is damaged, or it asks for what is not
        supported.
    """
    folder = pathlib.Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        raise errors.ModelError(path, None, "is not a folder", "give a run or a PEFT folder")
    if any((folder / name).exists() for name in (peft_files.CONFIG, peft_files.WEIGHTS)):
        model = base and causal_lm.from_hf(base, "the base's config.json", dtype="float32")
        return peft_files.read(str(folder), interleaved=model.is_interleaved if model else None)
    arrays = maxtext_folder.find(str(folder))
    if arrays is not None and base is None:
        what = "is a MaxText checkpoint, whose adapters are nothing without their base"
        remedy = "generate and merge take it with --model, and a run as init_adapter"
        raise errors.ModelError(path, None, what, remedy)
    if arrays is not None and base is not None:
        return maxtext_adapter.read(arrays, base, "the base's config.json", lora_alpha=lora_alpha)
    checkpoints, step = store.find(folder)
    return of_checkpoint(checkpoints, step, where=f"{path} (step {step})")


def of_checkpoint(checkpoints: store.Checkpoints, step: int, *, where: str) -> Adapter:
    """The adapter of one step; `where` names it in messages.

    Raises:
      CheckpointError: it is damaged, or the run trains all weights.
    """
    meta = checkpoints.meta(step)
    if meta["adaptation"] is None:
        what = "is of a run that trains all weights: it holds no adapter"
        raise errors.CheckpointError(where, None, what, "use it as model.path")
    has_initial = meta["config"]["lora.init_lora_weights"] in schema.FACTORED_INITS
    qtype, tile_size = (meta["config"][f"quant.{key}"] for key in ("qtype", "tile_size"))
    tiles = "" if tile_size is None else f" in tiles of {tile_size}"
    adapter = unrolled(
        checkpoints.trained(step),
        record.from_json(meta["adaptation"]),
        path=where,
        base_fingerprint=meta["base_fingerprint"],
        initial=checkpoints.leaves(step, "initial") if has_initial else None,
    )
    notes = (f"it was trained on a base of quant.qtype={qtype!r}{tiles}",)
    return dataclasses.replace(adapter, notes=notes)
