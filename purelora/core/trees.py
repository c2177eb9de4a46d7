"""Parameter trees: nested dicts whose leaves are anything but dicts.

A leaf may be an array, a `qwix.QArray`, a `ParamInfo` or a PartitionSpec: the functions here walk
dicts only, so one path names the same parameter in every parallel tree. Paths are dotted
(`layers.self_attn.q_proj.weight`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from purelora.core.paths import Path

Tree = dict[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[Any, Any]:
    """`{'a': {'b': 1}}` -> `{'a.b': 1}`, in the tree's own order.

    The keys are `Path`s, below `prefix` if one is given. Their type is left open, because a plain
    string serves as a key too.
    """
    flat: dict[Path, Any] = {}
    for name, value in tree.items():
        path = Path(prefix) / name
        if isinstance(value, Mapping):
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """`{'a.b': 1}` -> `{'a': {'b': 1}}`: the inverse of `flatten`."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = Path(path).parts
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def combine(*trees: Mapping[str, Any]) -> Tree:
    """One tree with the leaves of all `trees`. Raises ValueError when two hold the same path."""
    flat: dict[str, Any] = {}
    for tree in trees:
        for path, value in flatten(tree).items():
            if path in flat:
                raise ValueError(f"{path} is in more than one of the combined trees")
            flat[path] = value
    return unflatten(flat)


def map_leaves(function: Callable[..., Any], tree: Mapping[str, Any], *rest: Any) -> Tree:
    """Applies `function` to each dict-leaf (a QArray counts as one leaf) of parallel trees.

    Raises:
      ValueError: the trees do not have the same paths.
    """
    flats = [flatten(other) for other in rest]
    first = flatten(tree)
    for other in flats:
        if other.keys() != first.keys():
            raise ValueError(f"trees differ at {sorted(other.keys() ^ first.keys())[:5]}")
    return unflatten(
        {p: function(leaf, *(other[p] for other in flats)) for p, leaf in first.items()}
    )


def leaf_bytes(array: Any) -> int:
    """Bytes of one array, or of anything with shape and dtype."""
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def bytes_by_dtype(tree: Any) -> dict[str, int]:
    """Total bytes of a tree's arrays for each dtype name, largest first."""
    totals: dict[str, int] = {}
    for array in jax.tree.leaves(tree):
        name = np.dtype(array.dtype).name
        totals[name] = totals.get(name, 0) + leaf_bytes(array)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def count(tree: Any) -> int:
    """Number of elements of all arrays in `tree`."""
    return sum(int(np.prod(a.shape, dtype=np.int64)) for a in jax.tree.leaves(tree))
