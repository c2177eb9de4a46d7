"""Single safetensors files: the checked table of tensors, reading one of them, and writing.

The safetensors library checks each header (offsets inside the file, no overlap, no gap, span equal
to shape times element size, header size) before anything is read; here its errors get the file's
name and a remedy. Tensors are read and written one at a time, so a file may be larger than memory.
Ranges are read by hand, since the library maps the file, and mapped pages count as memory.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors

from purelora.core import errors
from purelora.formats import files, source

_AGAIN = "download the file again"
_NAMES = {dtype: name for name, dtype in source.DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class File:
    """An open safetensors file. Made by `open_file`.

    Attributes:
      path: the file.
      entries: its tensors by name.
      metadata: the texts that the writer put beside them.
    """

    path: str
    entries: Mapping[str, files.Entry]
    metadata: Mapping[str, str]

    def read(self, name: str) -> source.Tensor:
        """Reads one tensor in its stored element type.

        Raises:
          ModelError: there is no such tensor, or its element type is not read.
        """
        entry = self._entry(name)
        stored = files.read_range(self.path, entry.start, entry.n_bytes)
        array = stored.view(source.DTYPES[entry.dtype]).reshape(entry.shape)
        return source.Tensor(array, source.digest(entry.dtype, entry.shape, stored))

    def read_part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads the values in `box`, a start and a stop for each dimension, and nothing else.

        Raises:
          ModelError: as for `read`.
        """
        entry = self._entry(name)
        return self._read_box(entry.start, source.DTYPES[entry.dtype], entry.shape, box)

    def read_codes(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads the bytes in `box` of a tensor of type U8, such as blocks and scales of MXFP4."""
        entry = self.entries[name]
        return self._read_box(entry.start, np.dtype(np.uint8), entry.shape, box)

    def _read_box(
        self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...], box: tuple[slice, ...]
    ) -> np.ndarray:
        """Reads `box` of a tensor of `shape` whose values begin at the byte `start`."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        first, count = box[0].start, box[0].stop - box[0].start
        start += first * row_bytes
        sizes = tuple(one.stop - one.start for one in box[1:])
        if sizes == shape[1:]:
            stored = files.read_range(self.path, start, count * row_bytes)
        elif len(shape) == 2:
            start += box[1].start * dtype.itemsize
            width_bytes = sizes[0] * dtype.itemsize
            stored = files.read_rows(self.path, start, width_bytes, row_bytes, count)
        else:
            starts = range(start, start + count * row_bytes, row_bytes)
            return np.stack([self._read_box(at, dtype, shape[1:], box[1:]) for at in starts])
        return stored.view(dtype).reshape(count, *sizes)

    def _entry(self, name: str) -> files.Entry:
        source.check_name(self.path, name, self.entries)
        entry = self.entries[name]
        if entry.dtype not in source.DTYPES:
            raise source.dtype_error(self.path, name, entry.dtype)
        return entry


def open_file(path: str) -> File:
    """Opens the file at `path` and checks its table of tensors; reads no tensor.

    Raises:
      ModelError: it cannot be read or is damaged.
    """
    files.check_readable(path)
    try:
        # The library checks the header against the file; the tensors are read without its mapping,
        # whose pages would count as memory until the file is closed.
        with safetensors.safe_open(path, framework="numpy"):
            return _read_table(path)
    except (safetensors.SafetensorError, OSError) as error:
        what = f"is not a sound safetensors file ({error}); is it truncated?"
        raise errors.ModelError(path, None, what, _AGAIN) from error


def _read_table(path: str) -> File:
    """The table of a safetensors file that the library has found sound."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", None) or {}
    entries = {
        name: files.Entry(item["dtype"], tuple(item["shape"]), 8 + length + begin, end - begin)
        for name, item in header.items()
        for begin, end in [item["data_offsets"]]
    }
    return File(path, entries, metadata)


class LazyTensor(NamedTuple):
    """A tensor that is to be written: its element type and shape, and how to get its values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, array: np.ndarray) -> "LazyTensor":
        """One whose values are already in memory."""
        return cls(array.dtype, array.shape, lambda: array)


def write_file(path: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> None:
    """Writes a new safetensors file, one tensor in memory at a time.

    Args:
      path: where; what is there is replaced.
      tensors: by name, of the types in `source.DTYPES`.
      metadata: texts beside them.

    Raises:
      OSError: the disk is full, for example.
      ValueError: a tensor turns out to have another type or shape than announced.
    """
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        span = [position, position + tensors[name].n_bytes]
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": span}
        position = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(_checked(name, tensors[name]).data)


def _checked(name: str, tensor: LazyTensor) -> np.ndarray:
    """The bytes of a tensor's values."""
    array = tensor.load()
    if (array.dtype, array.shape) != (tensor.dtype, tensor.shape):
        raise ValueError(f"{name}: {array.dtype}{array.shape} was announced as {tensor[:2]}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
