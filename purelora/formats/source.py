"""A source of weights: tensors under their Hugging Face names, whatever file they lie in.

A reader of one more file format implements `Source`. Families see nothing else: they ask for the
shapes, check them against their own declaration, and read one tensor after the other.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from purelora.core import errors

# The element types that are read as they are stored, by their safetensors names.
DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Tensor(NamedTuple):
    """One tensor as read.

    Attributes:
      array: the values in Hugging Face layout (linear weights are [out, in]), in the stored float
        type; block-quantised types are dequantised to float32. It may be read-only.
      digest: hash of the stored type, shape and bytes.
    """

    array: np.ndarray
    digest: bytes


class Source(Protocol):
    """Where a model's weights come from."""

    @property
    def path(self) -> str:
        """Name of the file, folder or built-in model, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of a Hugging Face config.json; what the model's files do not say is absent."""

    @property
    def identity(self) -> str | None:
        """Fingerprint of the base, where its tensors are not those it was made from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""

    def read(self, name: str) -> Tensor:
        """Reads one tensor; only this one is held in memory."""

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one tensor in `box`, a start and a stop for each dimension.

        A format that can read less than the whole tensor does so.
        """


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A source whose tensors are already in memory: a random model, or one made by a test."""

    path: str
    config: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    identity: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: array.shape for name, array in self.arrays.items()}

    def read(self, name: str) -> Tensor:
        """The array called `name`, of any type in `DTYPES`."""
        check_name(self.path, name, self.arrays)
        array = self.arrays[name]
        names = {dtype: dtype_name for dtype_name, dtype in DTYPES.items()}
        if array.dtype not in names:
            raise dtype_error(self.path, name, str(array.dtype))
        return Tensor(array, digest(names[array.dtype], array.shape, array))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of the array called `name` in `box`."""
        check_name(self.path, name, self.arrays)
        return self.arrays[name][box]


def digest(dtype: str, shape: tuple[int, ...], stored: np.ndarray) -> bytes:
    """SHA-256 of a tensor's stored type, shape and bytes."""
    hasher = hashlib.sha256(f"{dtype}{list(shape)}\n".encode())
    hasher.update(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)
    return hasher.digest()


def fingerprint(digests: Mapping[str, bytes]) -> str:
    """Identity of a base: one hash over the names and digests of all its source tensors.

    It does not depend on the order of reading, nor on how the base is kept in memory.
    """
    hasher = hashlib.sha256()
    for name in sorted(digests):
        hasher.update(f"{name}\n".encode() + digests[name])
    return hasher.hexdigest()


def identify(source: Source, names: Iterable[str]) -> str:
    """The fingerprint of a source's tensors `names`; reads them unless it states one."""
    if source.identity is not None:
        return source.identity
    return fingerprint({name: source.read(name).digest for name in names})


def check_name(path: str, name: str, tensors: Mapping[str, object]) -> None:
    """Raises a `ModelError` with near names unless `name` is one of the source's tensors."""
    if name not in tensors:
        raise errors.ModelError(
            path, None, f"holds no tensor {name!r}", errors.nearest(name, sorted(tensors))
        )


def dtype_error(path: str, name: str, dtype: str) -> errors.ModelError:
    """The error for a tensor of an element type that is not read."""
    return errors.ModelError(
        f"{path}: {name}",
        dtype,
        "is an element type that is not read",
        f"convert the model to one of {', '.join(DTYPES)}",
    )
