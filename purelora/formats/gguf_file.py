"""The GGUF container: typed metadata fields and tensors, checked against the file's real size.

The layout is the one of the GGUF specification (versions 2 and 3, little-endian). Every length is
compared with what is left of the file before it is used, so a damaged or hostile header ends in
a `ModelError` and never in a huge allocation; the gguf library's own reader does not do this and
is slow on long token lists. Its block layouts and dequantisation are used as they are.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from purelora.core import errors
from purelora.formats import files, source

_AGAIN = "download the file again"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

# GGUF value types with a fixed size, by their number in the file.
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9

# Tensor types that are read as stored, and those that are dequantised to float32.
PLAIN = ("F32", "F16", "BF16")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class Container:
    """An open GGUF file. Made by `open_container`.

    Attributes:
      path: the file.
      fields: metadata by key; numbers, strings, booleans, and lists of them.
      tensors: the tensors by their GGUF names.
    """

    path: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, files.Entry]

    def field(self, key: str, kind: type, items: type | None = None) -> Any:
        """The metadata at `key`, or None when the file does not hold it.

        Args:
          key: full metadata key.
          kind: `int`, `float`, `str`, `bool` or `list`.
          items: for a list, the type of all its items.

        Raises:
          ModelError: the value has another type.
        """
        value: Any = self.fields.get(key)
        if value is None:
            return None
        wrong = type(value) is not kind
        if not wrong and items is not None:
            wrong = any(type(item) is not items for item in value)
        if wrong:
            wanted = f"list of {items.__name__}" if items else kind.__name__
            raise errors.ModelError(f"{self.path}: {key}", value, f"is not a {wanted}", _AGAIN)
        return value

    def required(self, key: str, kind: type, items: type | None = None) -> Any:
        """The metadata at `key`; a `ModelError` when it is absent or of another type."""
        value = self.field(key, kind, items)
        if value is None:
            raise errors.ModelError(
                self.path, None, f"has no metadata {key!r}", "get a complete GGUF file"
            )
        return value

    def read(self, name: str) -> source.Tensor:
        """One tensor in numpy order, floats as stored and quantised blocks as float32."""
        source.check_name(self.path, name, self.tensors)
        entry = self.tensors[name]
        stored = files.read_range(self.path, entry.start, entry.n_bytes)
        array = _decoded(entry.dtype, entry.shape, stored)
        return source.Tensor(array, source.digest(entry.dtype, entry.shape, stored))

    def read_rows(self, name: str, rows: slice) -> np.ndarray:
        """A range of the first dimension of a tensor, as `read` gives it; reads only that."""
        source.check_name(self.path, name, self.tensors)
        entry = self.tensors[name]
        row_bytes = entry.n_bytes // entry.shape[0]
        count = rows.stop - rows.start
        start = entry.start + rows.start * row_bytes
        stored = files.read_range(self.path, start, count * row_bytes)
        return _decoded(entry.dtype, (count, *entry.shape[1:]), stored)


def _decoded(dtype: str, shape: tuple[int, ...], stored: np.ndarray) -> np.ndarray:
    """The values of stored bytes: floats as they are, quantised blocks as float32."""
    if dtype in PLAIN:
        return stored.view(source.DTYPES[dtype]).reshape(shape)
    rows = stored.reshape(*shape[:-1], -1)
    values: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype])
    return values


def open_container(path: str) -> Container:
    """Reads the header of the GGUF file at `path`; reads no weights.

    Raises:
      ModelError: the file is missing, damaged, truncated, of an unknown version, one part of
        several, or holds a tensor of a type that is not read.
    """
    files.check_readable(path)
    if os.path.getsize(path) == 0:
        raise errors.ModelError(path, None, "is empty", _AGAIN)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(path, data.data)
    n_tensors, n_fields = _read_preamble(cursor)
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        key = cursor.string()
        if key in fields:
            raise errors.ModelError(path, None, f"holds metadata {key!r} twice", _AGAIN)
        fields[key] = cursor.value(cursor.number(4))
    parts = fields.get("split.count", 1)
    if parts not in (0, 1):
        raise errors.ModelError(
            f"{path}: split.count",
            parts,
            "is one part of a model split over several GGUF files, which is not read",
            "join the parts with llama-gguf-split --merge",
        )
    tensors = _read_tensors(cursor, n_tensors, fields.get("general.alignment", _DEFAULT_ALIGNMENT))
    return Container(path, fields, tensors)


@dataclasses.dataclass
class _Cursor:
    """A position in the file that moves on with every value read, and never past the end."""

    path: str
    data: memoryview
    position: int = 0

    def take(self, n_bytes: int) -> memoryview:
        start = self.position
        if n_bytes > len(self.data) - start:
            raise errors.ModelError(
                self.path,
                None,
                f"ends inside its header ({n_bytes} bytes are needed at byte {start})",
                "it is truncated or damaged: " + _AGAIN,
            )
        self.position += n_bytes
        return self.data[start : self.position]

    def number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def string(self) -> str:
        raw = self.take(self.number(8))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            what = f"holds text that is not UTF-8 before byte {self.position}"
            raise errors.ModelError(self.path, None, what, _AGAIN) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number(4), self.number(8))
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind != _STRING:
            return self._scalars(kind, count)
        return [self.string() for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            what = f"holds a metadata value of unknown type {kind} before byte {self.position}"
            raise errors.ModelError(self.path, None, what, _AGAIN)
        dtype = _SCALARS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the numbers of tensors and of metadata fields."""
    magic = bytes(cursor.take(min(4, len(cursor.data))))
    if magic != b"GGUF":
        raise errors.ModelError(
            cursor.path, magic, "does not start with 'GGUF': it is not a GGUF file", _AGAIN
        )
    (version,) = struct.unpack("<I", cursor.take(4))
    if version not in (2, 3):
        big_endian = version & 0xFFFF == 0 and version > 0
        raise errors.ModelError(
            f"{cursor.path}: version",
            version,
            "is big-endian" if big_endian else "is an unknown GGUF version",
            "convert the model to a little-endian GGUF of version 3",
        )
    return cursor.number(8), cursor.number(8)


def _read_tensors(cursor: _Cursor, count: int, alignment: object) -> dict[str, files.Entry]:
    """The tensor table, with every span checked against the size of the file."""
    if type(alignment) is not int or alignment <= 0:
        raise errors.ModelError(
            f"{cursor.path}: general.alignment", alignment, "is not a positive integer", _AGAIN
        )
    relative: dict[str, files.Entry] = {}
    for _ in range(count):
        name = cursor.string()
        if name in relative:
            raise errors.ModelError(cursor.path, None, f"holds tensor {name!r} twice", _AGAIN)
        relative[name] = _read_entry(cursor, name)
    base = math.ceil(cursor.position / alignment) * alignment
    tensors = {name: entry._replace(start=base + entry.start) for name, entry in relative.items()}
    for name, entry in tensors.items():
        if entry.start + entry.n_bytes > len(cursor.data):
            raise errors.ModelError(
                f"{cursor.path}: {name}",
                None,
                f"ends at byte {entry.start + entry.n_bytes}, past the end of the file",
                "it is truncated or damaged: " + _AGAIN,
            )
    return tensors


def _read_entry(cursor: _Cursor, name: str) -> files.Entry:
    """One row of the tensor table; `start` is still relative to the data section."""
    where = f"{cursor.path}: {name}"
    n_dims = cursor.number(4)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise errors.ModelError(where, n_dims, "is not a possible number of dimensions", _AGAIN)
    # ggml lists the fastest dimension first, numpy last.
    shape = tuple(cursor.number(8) for _ in range(n_dims))[::-1]
    number, start = cursor.number(4), cursor.number(8)
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    dtype = names.get(number, f"type {number}")
    if dtype not in PLAIN + QUANTISED:
        raise errors.ModelError(
            where,
            dtype,
            "is a tensor type that is not read",
            f"convert the model to one of {', '.join(PLAIN + QUANTISED)}",
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    if 0 in shape or shape[-1] % block:
        what = f"has a shape that {dtype} cannot hold (blocks of {block})"
        raise errors.ModelError(where, shape, what, _AGAIN)
    return files.Entry(dtype, shape, start, math.prod(shape) // block * block_bytes)
