"""Trees of arrays as files take them: flat, on the host, without keys."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np


class Item(NamedTuple):
    """A tree in the form that orbax takes.

    Attributes:
      arrays: by dotted path: keys as their data.
      notes: what that takes away: `key_impls` {path: implementation}.
    """

    arrays: dict[str, np.ndarray]
    notes: dict[str, Any]


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
    return Item(host, {"key_impls": impls})


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
