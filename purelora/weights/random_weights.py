"""Random weights of the shape that a config.json describes, for smoke runs and benchmarks.

Of a `RandomSource` no weights are held: a tensor is drawn when it is read. Its seed is its name, so
it is the same on every machine and in every process, whatever else is read.
"""

import dataclasses
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from purelora.core import errors
from purelora.core.paths import Path
from purelora.formats import files, source
from purelora.models import causal_lm

_STD = 0.02


@dataclasses.dataclass(frozen=True)
class RandomSource:
    """Weights drawn on demand: norms and biases as a fresh model has them, the rest N(0, 0.02²).

    Attributes:
      path: the config.json.
      config: its contents.
      shapes_by_name: shape of every tensor, by Hugging Face name.
      inits: `ParamInfo.init` of every tensor, by the same names.
    """

    path: str
    config: Mapping[str, Any]
    shapes_by_name: Mapping[str, tuple[int, ...]]
    inits: Mapping[str, str]
    identity: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return dict(self.shapes_by_name)

    def read(self, name: str) -> source.Tensor:
        """Draws one tensor, in float32 and in the file's layout.

        Raises:
          ModelError: there is no tensor of that name.
        """
        source.check_name(self.path, name, self.shapes_by_name)
        shape = self.shapes_by_name[name]
        array = _values(shape, self.inits[name], _generator(zlib.crc32(name.encode())))
        return source.Tensor(array, source.digest("F32", shape, array))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one tensor in `box`; all of the tensor is drawn for it."""
        return self.read(name).array[box]


def open_config(path: str) -> RandomSource:
    """Random weights for the config.json at `path`, by the names of its family's files.

    Raises:
      ModelError: the file is missing or damaged, or no family knows its architecture.
    """
    if not path or os.path.isdir(path):
        what, remedy = "is not a file", f"write random:{os.path.join(path, 'config.json')}"
        raise errors.ModelError(f"random:{path}", None, what, remedy)
    config = files.read_json_object(path)
    model = causal_lm.from_hf(config, path, dtype="float32")
    return RandomSource(path, config, model.layout.shapes, _inits(model))


def drawn(config: Mapping[str, Any], *, seed: int) -> dict[str, np.ndarray]:
    """All weights of a small model, by the names of its family's files: drawn one after the other.

    The built-in `tiny` is made so. Its layers follow each other, and the last tensors are those
    behind them.
    """
    model = causal_lm.from_hf(config, "config.json", dtype="float32")
    sections = list(dict.fromkeys(Path(path).first for path in model.flat_infos))
    in_order = sorted(
        (
            (sections.index(Path(leaf).first), part.index[:1], number, part.tensor)
            for number, leaf in enumerate(model.flat_infos)
            for part in model.layout.parts[leaf]
        ),
    )
    inits, generator = _inits(model), _generator(seed)
    names = [name for *_, name in in_order]
    return {name: _values(model.layout.shapes[name], inits[name], generator) for name in names}


def _inits(model: causal_lm.CausalLM) -> dict[str, str]:
    """`ParamInfo.init` of every tensor by its name in files."""
    return {
        part.tensor: model.flat_infos[leaf].init
        for leaf, parts in model.layout.parts.items()
        for part in parts
    }


def _generator(seed: int) -> np.random.RandomState:
    """Only the legacy generator promises the same numbers with every numpy release."""
    return np.random.RandomState(seed)


def _values(shape: tuple[int, ...], init: str, generator: np.random.RandomState) -> np.ndarray:
    if init in ("zeros", "ones"):
        return np.full(shape, float(init == "ones"), np.float32)
    return (_STD * generator.standard_normal(shape)).astype(np.float32)
