"""Weights from a GGUF file, under Hugging Face names and in Hugging Face layout.

An `Arch` of `architectures` says what its files call the tensors, and which of them had their rows
permuted.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.core.paths import Path
from purelora.formats import gguf_file, source
from purelora.interop.gguf import architectures, metadata, rope_scaling

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
    arch: architectures.Arch
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
        path = Path(stored)
        base = path.parent.name
        if base in self.arch.permuted:
            heads = self.config[self.arch.permuted[base]]
            return tensor._replace(array=unpermute_rows(tensor.array, heads))
        if self.arch.norm_offset and base.endswith("norm") and path.name == "weight":
            weight = tensor.array.astype(np.float32) - np.float32(self.arch.norm_offset)
            return tensor._replace(array=weight)
        return tensor

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values in `box`; of a tensor whose rows lie in another order all are read."""
        source.check_name(self.path, name, self.names)
        stored = self.names[name]
        # `read` subtracts the offset of norms; reading a whole vector costs little.
        if len(box) == 1 or Path(stored).parent.name in self.arch.permuted:
            return self.read(name).array[box]
        return self.container.read_rows(stored, box[0])[(slice(None), *box[1:])]


def open_file(path: str) -> GGUFSource:
    """Opens the GGUF file at `path` and translates its metadata; reads no large tensor.

    Raises:
      ModelError: the file is damaged, or its architecture, a setting or a tensor is not known.
    """
    container = gguf_file.open_container(path)
    arch_name = container.required("general.architecture", str)
    archs = architectures.ARCHS
    if arch_name not in archs:
        raise errors.ModelError(
            f"{path}: general.architecture",
            arch_name,
            "is an architecture whose GGUF files are not read",
            f"known: {', '.join(sorted(archs))}; use the model's safetensors folder instead",
        )
    arch = archs[arch_name]
    names = _translate_names(container, arch)
    config = metadata.translate(container, arch_name, arch, names)
    _check_permuted(container, arch, config, names)
    return GGUFSource(container, arch, config, names)


def unpermute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the order of rows of interleaved rotary embeddings: 0, h/2, 1, h/2 + 1, ... of a head.

    llama.cpp rotates neighbouring pairs of rows, Hugging Face rows half a head apart; the
    converter reorders the rows of Q and K to make up for it, and this is the way back.
    """
    split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _translate_names(container: gguf_file.Container, arch: architectures.Arch) -> dict[str, str]:
    """Hugging Face name to GGUF name of every tensor; all unknown tensors in one error."""
    names: dict[str, str] = {}
    unknown = []
    for name in container.tensors:
        stem, kind = Path(name).parent, Path(name).name
        layer = _LAYER_NAME.fullmatch(stem)
        if layer and layer[2] in arch.layer and kind in ("weight", "bias"):
            names[f"model.layers.{int(layer[1])}.{arch.layer[layer[2]]}.{kind}"] = name
        elif stem in arch.top and kind in ("weight", "bias"):
            names[f"{arch.top[stem]}.{kind}"] = name
        elif name != rope_scaling.FACTORS:
            unknown.append(name)
    if unknown:
        raise errors.ModelError(
            container.path,
            None,
            f"holds tensors that {arch.model_type} has no place for: {', '.join(unknown[:8])}",
            "use the model's safetensors folder instead",
        )
    return names


def _check_permuted(
    container: gguf_file.Container,
    arch: architectures.Arch,
    config: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Checks that the rows of each permuted tensor divide into heads of an even size."""
    for name in names.values():
        base = Path(name).parent.name
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
