"""Arrays that another program saved with orbax, read in parts.

    <folder>/_METADATA          JSON: the path of every leaf, and which zarr version (2 or 3) it has
            /manifest.ocdbt …   either all arrays in one OCDBT store,
            /<path>/ …          or each in a folder of its own

Opening reads shapes and dtypes only. purelora's own checkpoints are read by `checkpoint`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore

from purelora.core import errors
from purelora.formats import files

METADATA = "_METADATA"
NOTES = "_CHECKPOINT_METADATA"
_AGAIN = "copy the folder again: it is damaged or was not finished"


@dataclasses.dataclass(frozen=True)
class Store:
    """Opened arrays of a folder. Made by `open_store`.

    Attributes:
      path: the folder.
      arrays: the `tensorstore.TensorStore` of each array, by its dotted path in the saved tree.
    """

    path: str
    arrays: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one array."""
        return tuple(self.arrays[name].shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type of one array."""
        dtype: np.dtype[Any] = self.arrays[name].dtype.numpy_dtype
        return dtype

    def chunk(self, name: str) -> tuple[int, ...]:
        """Shape of a chunk, the least part of an array that can be read from the disk."""
        return tuple(self.arrays[name].chunk_layout.read_chunk.shape)

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """The values of one array in `box`, a slice for each dimension.

        Raises:
          ModelError: they cannot be read.
        """
        with _explained(f"{self.path}: {name}"):
            values: np.ndarray = self.arrays[name][box].read().result()
        return values


def is_store(folder: str) -> bool:
    """Whether orbax has written arrays to `folder`, by the presence of its metadata."""
    return os.path.isfile(os.path.join(folder, METADATA))


def leaves(folder: str) -> dict[str, tuple[str, ...]]:
    """The names of the arrays in `folder`, each with its path in the saved tree as a tuple of keys.

    Raises:
      ModelError: the folder is damaged, or its metadata is not of orbax's known form.
    """
    file = os.path.join(folder, METADATA)
    metadata = files.read_json_object(file)
    tree = files.typed(file, metadata, "tree_metadata", dict)
    if not tree:
        raise errors.ModelError(file, None, "has no tree_metadata", _AGAIN)
    keys_by_name: dict[str, tuple[str, ...]] = {}
    try:
        for leaf in tree.values():
            if not leaf["value_metadata"]["skip_deserialize"]:  # True for None and empty dicts.
                keys = tuple(str(item["key"]) for item in leaf["key_metadata"])
                keys_by_name[".".join(keys)] = keys
    except (KeyError, TypeError) as error:
        what = f"does not list arrays as orbax does ({error!r})"
        raise errors.ModelError(file, None, what, _AGAIN) from error
    return keys_by_name


def open_store(folder: str, names: Collection[str]) -> Store:
    """Opens the arrays `names` of `folder`; reads no values.

    Raises:
      ModelError: one is missing or damaged.
    """
    file = os.path.join(folder, METADATA)
    metadata = files.read_json_object(file)
    is_zarr3 = bool(files.typed(file, metadata, "use_zarr3", bool))
    # Only a writer that leaves out chunks of zeros makes missing ones; otherwise they are damage.
    key = "store_array_data_equal_to_fill_value"
    is_whole = bool(files.typed(file, metadata, key, bool))
    one_store = os.path.lexists(os.path.join(folder, "manifest.ocdbt"))
    root, context = os.path.abspath(folder), tensorstore.Context()
    opening = {}
    for name in names:
        one_folder = {"driver": "file", "path": f"{root}/{name}/"}
        shared = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
        spec = {
            "driver": "zarr3" if is_zarr3 else "zarr",
            "kvstore": shared if one_store else one_folder,
            "fill_missing_data_reads": not is_whole,
        }
        opening[name] = tensorstore.open(spec, read=True, open=True, context=context)
    arrays = {}
    for name, future in opening.items():
        with _explained(f"{folder}: {name}"):
            arrays[name] = future.result()
    return Store(folder, arrays)


def notes(step: str) -> Mapping[str, Any]:
    """The custom metadata that the writer saved with the step in folder `step`; {} if none.

    Raises:
      ModelError: the metadata's file is damaged.
    """
    file = os.path.join(step, NOTES)
    if not os.path.lexists(file):
        return {}
    metadata = files.typed(file, files.read_json_object(file), "custom_metadata", dict)
    return metadata or {}


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turns exceptions of tensorstore into a ModelError about `where`."""
    try:
        yield
    except (ValueError, OSError) as error:
        reason = str(error).partition(" [")[0][:300]
        raise errors.ModelError(where, None, f"cannot be read ({reason})", _AGAIN) from error
