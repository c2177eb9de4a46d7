"""Trees of arrays as files take them: flat and without keys."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Item(NamedTuple):
    """A tree in the form that orbax takes.

    Attributes:
      arrays: by dotted path: keys as their data. Those of one process are on the host. Those that
        are spread over several stay on the devices, and each process writes its own shards.
      notes: what that takes away: `key_impls` {path: implementation}.
    """

    arrays: dict[str, np.ndarray | jax.Array]
    notes: dict[str, Any]


def encoded(tree: Any, *, copy: bool) -> Item:
    """A tree for files.

    Without `copy`, arrays on the CPU and those of several processes stay where they are. On the CPU
    jax sees that and does not donate them: the next step would hold two states.
    """
    leaves = flat(tree)
    impls = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if _is_key(leaf)}
    plain = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()
    }
    spread = {name: a for name, a in plain.items() if _is_spread(a)}
    on_host = jax.device_get({name: a for name, a in plain.items() if name not in spread})
    arrays: dict[str, np.ndarray | jax.Array] = {
        name: (jnp.copy(spread[name]) if copy else spread[name])
        if name in spread
        else np.array(on_host[name], copy=copy or None)
        for name in plain
    }
    return Item(arrays, {"key_impls": impls})


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


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
