"""Weights from a Hugging Face folder: config.json and one or more safetensors files.

Of quantised weights only those of gpt-oss are read, which is published so; see `mxfp4`.
The index of a sharded model is checked against what the shards really hold.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.formats import files, mxfp4, safetensors_file, source
from purelora.models import hf_config
from purelora.models.families import gpt_oss

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_AGAIN = "download the file again"


@dataclasses.dataclass(frozen=True)
class HFSource:
    """The weights of a Hugging Face folder. Made by `open_folder`.

    Attributes:
      path: the folder.
      config: the keys of its config.json.
      shards: the file of every tensor that is stored as it is, by name.
      packed: the other tensors, by name.
      identity: its fingerprint, if it is not that of the tensors.
    """

    path: str
    config: Mapping[str, Any]
    shards: Mapping[str, safetensors_file.File]
    packed: Mapping[str, mxfp4.Packed]
    identity: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        stored = {name: shard.entries[name].shape for name, shard in self.shards.items()}
        return stored | {name: packed.shape for name, packed in self.packed.items()}

    def read(self, name: str) -> source.Tensor:
        """Reads one tensor in its stored element type, or in bfloat16 if it is packed."""
        if name in self.packed:
            return self.packed[name].read()
        source.check_name(self.path, name, self.shards)
        return self.shards[name].read(name)

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads the values in `box`, and little else."""
        if name in self.packed:
            return self.packed[name].read_part(box)
        source.check_name(self.path, name, self.shards)
        return self.shards[name].read_part(name, box)


def open_folder(path: str) -> HFSource:
    """Opens the folder at `path` and checks that its weights are complete; reads no weights.

    Raises:
      ModelError: a file is missing, damaged or inconsistent, or the weights are quantised in a way
        that is not read.
    """
    if not os.path.isdir(path):
        raise errors.ModelError(path, None, "is not a folder", "give an existing model folder")
    config = read_config(path)
    where = {name: shard for shard in _open_shards(path) for name in shard.entries}
    if not where:
        raise errors.ModelError(path, None, "holds no tensors", _AGAIN)
    if not config.get("quantization_config"):
        return HFSource(path, config, where, {})
    packed = mxfp4.find(where)
    inside = {part for one in packed.values() for part in mxfp4.parts(one)}
    stored = {name: shard for name, shard in where.items() if name not in inside}
    return HFSource(path, config, stored, packed)


def read_config(path: str) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
      ModelError: it is missing or damaged, or says that the weights are quantised in a way that is
        not read.
    """
    file = os.path.join(path, "config.json")
    if not os.path.lexists(file):
        raise errors.ModelError(path, None, "has no config.json", _missing_config(path))
    return read_unquantised(file)


def read_unquantised(file: str) -> dict[str, Any]:
    """Reads a config.json of a model that is not quantised, or as its family is published.

    Raises:
      ModelError: it is damaged, or says that the weights are quantised.
    """
    config = files.read_json_object(file)
    quantisation = files.typed(file, config, "quantization_config", dict)
    if quantisation and not _is_read(config, quantisation):
        raise errors.ModelError(
            f"{file}: quantization_config",
            quantisation.get("quant_method"),
            "the weights are stored quantised, and purelora reads only float safetensors and "
            f"gpt-oss in {mxfp4.METHOD}",
            "use the unquantised model (purelora quantises it itself, see quant.qtype)",
        )
    return config


def _is_read(config: Mapping[str, Any], quantisation: Mapping[str, Any]) -> bool:
    """Whether the weights are quantised in the way that their family is published in."""
    name = hf_config.architecture(config)
    return name in gpt_oss.ARCHITECTURES and quantisation.get("quant_method") == mxfp4.METHOD


def generation_eos(path: str) -> list[int]:
    """The end-of-text ids in generation_config.json and config.json of the folder at `path`."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = os.path.join(path, name)
        if not os.path.lexists(file):
            continue
        value = files.typed(file, files.read_json_object(file), "eos_token_id", (int, list))
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(item, int) or isinstance(item, bool) or item < 0 for item in listed):
            raise errors.ModelError(
                f"{file}: eos_token_id", value, "is not a token id or a list of them", "correct it"
            )
        ids += listed
    return ids


def _missing_config(path: str) -> str:
    gguf_files = sorted(name for name in os.listdir(path) if name.lower().endswith(".gguf"))
    if gguf_files:
        return f"to read a GGUF file give its path: model.path={os.path.join(path, gguf_files[0])}"
    return "give the folder that holds config.json, model.safetensors and tokenizer.json"


def _open_shards(folder: str) -> list[safetensors_file.File]:
    """Opens the single weights file, or every shard that the index lists."""
    if os.path.lexists(os.path.join(folder, SINGLE)):
        return [safetensors_file.open_file(os.path.join(folder, SINGLE))]
    index = os.path.join(folder, INDEX)
    if not os.path.lexists(index):
        raise errors.ModelError(folder, None, "has no safetensors weights", _other_weights(folder))
    weight_map = _read_index(index)
    listed: dict[str, set[str]] = {}
    for tensor, file_name in weight_map.items():
        listed.setdefault(file_name, set()).add(tensor)
    shards = []
    for file_name in sorted(listed):
        file = os.path.join(folder, file_name)
        if not os.path.lexists(file):
            raise errors.ModelError(index, None, f"lists {file_name}, which is missing", _AGAIN)
        shard = safetensors_file.open_file(file)
        _check_listed(index, shard, listed[file_name], weight_map)
        shards.append(shard)
    return shards


def _other_weights(folder: str) -> str:
    """The remedy when no weights were found, by what the folder holds instead."""
    names = sorted(os.listdir(folder))
    if "adapter_config.json" in names:
        return "it holds an adapter: give the folder of its base model"
    if any(name.endswith(".safetensors") for name in names):
        return f"it holds shards but no {INDEX}: download that file too"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return f"it holds only {pickled[0]} (pickle): convert it to {SINGLE}"
    return f"download {SINGLE}, or {INDEX} with its shards"


def _read_index(index: str) -> dict[str, str]:
    """The index's map from tensor to shard, each shard a plain file name."""
    weight_map = files.typed(index, files.read_json_object(index), "weight_map", dict)
    if not weight_map:
        raise errors.ModelError(index, None, "has no weight_map", _AGAIN)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise errors.ModelError(
                f"{index}: {tensor}", shard, "is not the name of a safetensors file", _AGAIN
            )
        if os.path.basename(shard.replace("\\", "/")) != shard:
            raise errors.ModelError(
                f"{index}: {tensor}", shard, "points outside the model folder", _AGAIN
            )
    return weight_map


def _check_listed(
    index: str,
    shard: safetensors_file.File,
    listed: set[str],
    weight_map: Mapping[str, str],
) -> None:
    """Checks that a shard holds exactly the tensors that the index lists for it."""
    missing = sorted(listed - set(shard.entries))
    if missing:
        raise errors.ModelError(
            shard.path, None, f"lacks tensor {missing[0]!r} that {index} lists for it", _AGAIN
        )
    surplus = sorted(set(shard.entries) - listed)
    if not surplus:
        return
    name = surplus[0]
    if name in weight_map:
        what = f"holds tensor {name!r}, which the index puts into {weight_map[name]}"
    else:
        what = f"holds tensor {name!r}, which the index does not list"
    raise errors.ModelError(shard.path, None, what, "get index and shards of one model")
