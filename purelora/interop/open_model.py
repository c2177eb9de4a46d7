"""What `model.path` may name: a purelora run or one of its steps, a MaxText checkpoint, or files.

A run that trains all weights is the model that it has made. A run with adapters is its frozen base,
if its checkpoints hold all of that (`checkpoint.save_base`); `init_adapter` puts its adapters on
top. They do not hold the original of what was trained whole or that adapters were taken out of.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import qwix

from purelora.checkpoint import store
from purelora.config import schema
from purelora.core import errors, param_info, trees
from purelora.formats import source
from purelora.interop import builtin, pip_download
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.maxtext import read as maxtext_read
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.weights import hf_tokenizer
from purelora.weights.hf_folder import read_config, read_unquantised

# The folder in a run's own that holds the tokenizer's files.
TOKENIZER = "tokenizer"


def open_model(
    path: str, *, hf_folder: str | None = None, progress: pip_download.Progress | None = None
) -> builtin.Model:
    """Opens the model that `path` names.

    Args:
      path: a run, a step, a MaxText checkpoint, or what `builtin.open_model` takes.
      hf_folder: for a MaxText checkpoint, the folder that has its config.json and tokenizer.
      progress: told about a download as it goes.

    Raises:
      ModelError, CheckpointError: there is no such model, it is damaged, or of an unknown kind; or
        `hf_folder` does not go with it.
    """
    folder = pathlib.Path(os.path.expanduser(path))
    arrays = maxtext_folder.find(str(folder)) if path not in builtin.NAMES else None
    if arrays is not None:
        return _open_maxtext(path, arrays, hf_folder)
    if hf_folder is not None:  # It would be ignored.
        what = "is only for a MaxText checkpoint; other models bring config.json and tokenizer"
        raise errors.ModelError("model.hf_folder", hf_folder, what, "leave it out")
    if not (is_run(folder) or is_step(folder)):
        return builtin.open_model(path, progress=progress)
    run = folder.parent.parent if is_step(folder) else folder
    opened = RunSource.open(folder)
    if not (run / TOKENIZER).is_dir():
        what = f"has no folder {TOKENIZER} beside its checkpoints"
        raise errors.ModelError(str(run), None, what, "give the whole folder of the run")
    return builtin.Model(opened, hf_tokenizer.open_folder(str(run / TOKENIZER)))


def open_config(path: str, hf_folder: str | None = None) -> Mapping[str, Any]:
    """The config.json of the model at `path`; neither weights nor tokenizer need to be there.

    Args:
      path: a config.json, a folder that has one, or whatever else `model.path` may name.
      hf_folder: `model.hf_folder`; if it is set, the config.json is read from there.

    Raises:
      ModelError: there is none, or it is damaged.
    """
    if hf_folder is not None:
        return read_config(os.path.expanduser(hf_folder))
    file = os.path.expanduser(path)
    if file.endswith(".json") and not path.startswith(builtin.RANDOM):
        return read_unquantised(file)
    is_folder = os.path.isdir(file) and path not in builtin.NAMES
    if is_folder and not is_run(pathlib.Path(file)):
        return read_config(file)
    return open_model(path).source.config


def _open_maxtext(path: str, arrays: str, hf_folder: str | None) -> builtin.Model:
    if hf_folder is None:
        what = "is a MaxText checkpoint, which holds neither config.json nor tokenizer"
        remedy = "set model.hf_folder (of a command: --hf-folder) to a folder that has both"
        raise errors.ModelError(path, None, what, remedy)
    folder = os.path.expanduser(hf_folder)
    model = builtin.Model(
        maxtext_read.open_folder(arrays, folder), hf_tokenizer.open_folder(folder)
    )
    builtin.check_vocabulary(model)
    return model


def is_run(folder: pathlib.Path) -> bool:
    """Whether `folder` is that of a run."""
    return (folder / "checkpoints").is_dir()


def is_step(folder: pathlib.Path) -> bool:
    """Whether `folder` is that of one step of a run."""
    return folder.name.isdecimal() and (folder / "meta").is_dir()


@dataclasses.dataclass(frozen=True)
class RunSource:
    """The weights in a checkpoint, by Hugging Face name; quantised ones come as floats.

    Attributes:
      path: where they are.
      config: the keys of the model's config.json.
      identity: fingerprint of the base that they are, None if they are no base but a new model.
      model: their declarations.
      leaves: the arrays by leaf path; QArrays where they are quantised.
    """

    path: str
    config: Mapping[str, Any]
    identity: str | None
    model: causal_lm.CausalLM
    leaves: Mapping[str, Any]

    @staticmethod
    def open(folder: pathlib.Path) -> "RunSource":
        """Reads the newest whole step of a run, or the step that `folder` is.

        Raises:
          CheckpointError: it is damaged, or holds adapters without the whole of their base.
        """
        checkpoints, step = store.find(folder)
        meta = checkpoints.meta(step)
        hf_config, is_full = meta["model_config"], meta["adaptation"] is None
        if not is_full:
            _check_base(checkpoints, step, meta, str(folder))
        model = causal_lm.from_hf(hf_config, str(folder), dtype="float32")
        if is_full:
            return RunSource(str(folder), hf_config, None, model, checkpoints.trained(step))
        leaves = _joined(checkpoints.leaves(step, "base"), model, meta["config"])
        return RunSource(str(folder), hf_config, meta["base_fingerprint"], model, leaves)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        layout = self.model.layout
        return {
            name: shape
            for name, shape in layout.shapes.items()
            if all(part.leaf in self.leaves for part in layout.contents[name])
        }

    def read(self, name: str) -> source.Tensor:
        """One tensor, in float32."""
        shapes = self.shapes()
        source.check_name(self.path, name, shapes)
        array = np.empty(shapes[name], np.float32)
        for part in self.model.layout.contents[name]:
            leaf = jax.tree.map(lambda values, at=part.index: values[at], self.leaves[part.leaf])
            part.put(array, np.asarray(quant.dequantise(leaf)).astype(np.float32))
        return source.Tensor(array, source.digest("F32", array.shape, array))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of a tensor in `box`, in float32."""
        return self.read(name).array[box]

    def in_layout(self, infos: Mapping[str, Any]) -> dict[str, Any] | None:
        """The leaves as they are, if they all have the declarations `infos` already."""
        if infos.keys() != self.leaves.keys():
            return None
        fits = all(_fits(self.leaves[path], like) for path, like in infos.items())
        return {path: self.leaves[path] for path in infos} if fits else None


def _check_base(
    checkpoints: store.Checkpoints, step: int, meta: Mapping[str, Any], where: str
) -> None:
    base_path = meta["config"]["model.path"]
    if "base" not in checkpoints.extras(step):
        what = "holds adapters without their base"
        remedy = f"set model.path={base_path} and init_adapter={where}"
        raise errors.CheckpointError(where, None, what, remedy)
    if meta["config"]["lora.init_lora_weights"] in schema.FACTORED_INITS:
        init = meta["config"]["lora.init_lora_weights"]
        what = f"holds a base that its initial adapters were taken out of ({init})"
        raise errors.CheckpointError(where, None, what, f"set model.path={base_path}")
    full = sorted(meta["adaptation"]["full"])
    if full:
        named = ", ".join(full[:3]) + (f" and {len(full) - 3} more" if full[3:] else "")
        what = f"holds a base without the weights that were trained whole ({named})"
        remedy = f"set model.path={base_path} and init_adapter={where}"
        raise errors.CheckpointError(where, None, what, remedy)


def _joined(
    arrays: Mapping[str, np.ndarray], model: causal_lm.CausalLM, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Leaves of a base from saved arrays; `.qvalue` and `.scale` of a weight make one QArray."""
    qtype, tile_size = settings["quant.qtype"], settings["quant.tile_size"]
    infos = quant.quantised_infos(
        model.infos, qtype=qtype, tile_size=tile_size, skip=settings["quant.skip"]
    )
    leaves: dict[str, Any] = {}
    for path, like in trees.flatten(infos).items():
        if isinstance(like, qwix.QArray) and f"{path}.qvalue" in arrays:
            parts = [arrays[f"{path}.qvalue"], arrays[f"{path}.scale"]]
            leaves[path] = jax.tree.unflatten(jax.tree.structure(like), parts)
        elif path in arrays:
            leaves[path] = arrays[path]
    return leaves


def _fits(leaf: Any, like: Any) -> bool:
    if isinstance(leaf, qwix.QArray) != isinstance(like, qwix.QArray):
        return False
    arrays, infos = jax.tree.leaves(leaf), jax.tree.leaves(like)
    return all(
        isinstance(i, param_info.ParamInfo) and a.shape == i.shape and a.dtype == np.dtype(i.dtype)
        for a, i in zip(arrays, infos, strict=True)
    )
