"""Trees of arrays as files take them: flat, on the host, without keys and 4-bit numbers."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Item(NamedTuple):
    """A tree in the form that orbax takes.

    Attributes:
      arrays: by dotted path: keys as their data, 4-bit integers two in a byte.
      notes: what that takes away: `key_impls` {path: implementation} and `packed` {path: {dtype,
        shape}}.
    """

    arrays: dict[str, np.ndarray]
    notes: dict[str, Any]


# numpy gives each a byte of its own, and orbax refuses uint4.
_PACKED = ("int4", "uint4")


def encoded(tree: Any, *, copy: bool) -> Item:
    """A tree on the host.

    Without `copy`, arrays on the CPU stay where they are. jax sees that and does not donate them:
    the next step would hold two states.
    """
    leaves = flat(tree)
    impls = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if _is_key(leaf)}
    plain = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()
    }
    host = {name: np.array(a, copy=copy or None) for name, a in jax.device_get(plain).items()}
    packed = {
        name: {"dtype": a.dtype.name, "shape": list(a.shape)}
        for name, a in host.items()
        if a.dtype.name in _PACKED
    }
    arrays = {name: _nibbles(a) if name in packed else a for name, a in host.items()}
    return Item(arrays, {"key_impls": impls, "packed": packed})


def _nibbles(array: np.ndarray) -> np.ndarray:
    """4-bit integers two in a byte, the first one low."""
    codes = array.astype(np.int8).reshape(-1).view(np.uint8) & 15
    pairs = np.append(codes, np.zeros(codes.size % 2, np.uint8)).reshape(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpacked(nibbles: np.ndarray, *, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """The inverse of `_nibbles`."""
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(-1)
    codes = codes[: int(np.prod(shape, dtype=np.int64))].reshape(shape)
    return codes.astype(np.dtype(dtype))


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path (`opt_state.0.mu.layers.q_proj.lora_a`)."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_of(data: jax.ShapeDtypeStruct, impl: str) -> jax.ShapeDtypeStruct:
    """The abstract key of abstract data."""
    key: jax.ShapeDtypeStruct = jax.eval_shape(
        functools.partial(jax.random.wrap_key_data, impl=impl), data
    )
    return key
