"""Loading a base: tensor by tensor into preallocated stacks, in their final dtype and sharding.

Host memory peaks at the finished base plus one tensor: a stack is allocated once, and each layer
is transposed, cast or quantised and written in place by a small compiled function.

Of several processes each reads what its own devices hold of a tensor, laid out over the mesh as the
leaf is. What a scale needs to know of other shards (the largest absolute value) the compiled
function finds out: a maximum does not depend on the order, so codes are the same on any mesh.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import PartitionSpec as P

from purelora import distributed, errors, factoring, info, placing, quant
from purelora import tree as trees
from purelora.io import source as sources
from purelora.models import causal_lm

Progress = Callable[[int, int], None]


class Loaded(NamedTuple):
    """A base in memory.

    Attributes:
      tree: arrays and QArrays, placed.
      fingerprint: identity of the source tensors, whatever the dtype, quantisation and mesh.
    """

    tree: trees.Tree
    fingerprint: str


def load(
    source: sources.Source,
    model: causal_lm.CausalLM,
    infos: trees.Tree,
    shardings: trees.Tree,
    progress: Progress | None = None,
    split: factoring.WeightSplit | None = None,
) -> Loaded:
    """Reads a whole base.

    Args:
      source: where the tensors are.
      model: the model that they belong to.
      infos: declarations of the result; QArrays of infos where it is quantised.
      shardings: placement of each leaf, parallel to `infos`.
      progress: told (tensors read, tensors in all).
      split: takes adapters out of the weights on the way.

    Raises:
      ModelError: tensors that are missing, surplus or of another shape, all in one error; or a
        damaged one.
    """
    names = model.hf_names
    _check_tensors(source, model, names)
    total, placed = sum(map(len, names.values())), trees.flatten(shardings)
    reader = _Reader(source)
    flat: dict[str, Any] = {}
    done = 0
    for path, like in trees.flatten(infos).items():
        declared = model.flat_infos[path]
        fill = _filler(like, declared.is_transposed, declared.is_stacked, _Hashable(placed[path]))
        spread = _file_sharding(placed[path], declared)
        leaf, finite = _empty(like, placed[path]), {}
        for index, name in enumerate(names[path]):
            place = None if split is None else split.place(path, index)
            if split is not None and place is not None:
                whole = reader.read(name, placing.whole_box(declared.file_shape))
                rest = np.asarray(split(place, _as_kernel(whole), like)).T
                tensor = placing.place(rest, spread)
            else:
                tensor = reader.placed(name, spread)
            leaf, finite[name] = fill(leaf, tensor, index)
            done += 1
            if progress:
                progress(done, total)
        _check_finite(source, finite)
        flat[path] = leaf
    return Loaded(trees.unflatten(flat), reader.fingerprint())


class _Reader:
    """Reads parts of tensors, and hashes whole ones: each process its share of them."""

    def __init__(self, source: sources.Source):
        self._source = source
        self._shapes = source.shapes()
        self._digests: dict[str, bytes] = {}
        self._own: set[str] = set()
        if source.identity is None:
            sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
            shares = even_shares(sizes, distributed.process_count())
            self._own = shares[distributed.process_index()]

    def read(self, name: str, box: placing.Index) -> np.ndarray:
        """The values of a tensor in `box`; a tensor that this process hashes is read whole."""
        if name not in self._own:
            return self._source.read_part(name, box)
        tensor = self._source.read(name)
        self._digests[name] = tensor.digest
        return tensor.array[box]

    def placed(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """A tensor on the devices; each process reads what its own hold."""
        shape = self._shapes[name]
        box = placing.own_box(sharding, shape)
        return placing.from_box(box, self.read(name, box), sharding, shape)

    def fingerprint(self) -> str:
        """Identity of all tensors that were read, the same in all processes."""
        if self._source.identity is not None:
            return self._source.identity
        own = {name: digest.hex() for name, digest in self._digests.items()}
        found: dict[str, bytes] = {}
        for text in distributed.gathered("digests", json.dumps(own)):
            found |= {name: bytes.fromhex(digest) for name, digest in json.loads(text).items()}
        return sources.fingerprint(found)


def even_shares(sizes: Mapping[str, int], count: int) -> list[set[str]]:
    """Splits names into `count` sets whose sizes are about the same."""
    shares: list[set[str]] = [set() for _ in range(count)]
    totals = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = totals.index(min(totals))
        shares[least].add(name)
        totals[least] += sizes[name]
    return shares


def _file_sharding(placed: Any, declared: info.ParamInfo) -> jax.sharding.NamedSharding:
    """How one layer of a leaf lies over the mesh, in the order of dimensions that files have."""
    sharding = placed.qvalue if isinstance(placed, qwix.QArray) else placed
    axes = (*sharding.spec, *[None] * (len(declared.shape) - len(sharding.spec)))
    axes = axes[1:] if declared.is_stacked else axes
    spec = P(*(axes[::-1] if declared.is_transposed else axes))
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def _as_kernel(array: np.ndarray) -> jax.Array:
    """A linear weight as `[K, N]` float32; on disk it is [out, in]."""
    return jnp.asarray(array).astype(jnp.float32).T


def _check_finite(source: sources.Source, finite: Mapping[str, jax.Array]) -> None:
    bad = [name for name, good in finite.items() if not good]
    if bad:
        raise errors.ModelError.of(
            errors.Problem(f"{source.path}: {name}", None, "holds values that are not finite",
                           "fetch the model anew")
            for name in bad
        )  # fmt: skip


def _check_tensors(
    source: sources.Source, model: causal_lm.CausalLM, names: Mapping[str, tuple[str, ...]]
) -> None:
    """Compares names and shapes with the declarations; all problems in one error."""
    shapes = dict(source.shapes())
    problems: list[errors.Problem] = []
    for path, layer_names in names.items():
        wanted = model.flat_infos[path].file_shape
        for name in layer_names:
            found = shapes.pop(name, None)
            if found is None:
                problems.append(errors.Problem(source.path, None, f"holds no tensor {name!r}", ""))
            elif tuple(found) != wanted:
                what = f"has shape {list(found)}, but config.json makes it {list(wanted)}"
                problems.append(errors.Problem(f"{source.path}: {name}", None, what, ""))
    for name in [name for name in shapes if not _is_derived(name, model)]:
        what = f"holds a tensor {name!r} that this architecture does not have"
        problems.append(errors.Problem(source.path, None, what, "is config.json of another model?"))
    if problems:
        raise errors.ModelError.of(errors.first(problems, source.path))
    # It reads two whole tables: once for all processes is enough.
    if "lm_head.weight" in shapes and distributed.is_main():
        _check_tied(source)


def _is_derived(name: str, model: causal_lm.CausalLM) -> bool:
    """Surplus tensors that follow from others: rotary frequencies, and the head if it is tied."""
    tied = name == "lm_head.weight" and "lm_head.weight" not in model.flat_infos
    return tied or name.endswith("rotary_emb.inv_freq")


def _check_tied(source: sources.Source) -> None:
    """A head that is stored although it is tied must be the embedding."""
    head = source.read("lm_head.weight").digest
    if head != source.read("model.embed_tokens.weight").digest:
        raise errors.ModelError(
            f"{source.path}: lm_head.weight",
            None,
            "differs from model.embed_tokens.weight, but config.json ties them",
            "set tie_word_embeddings to false in config.json if the head is its own",
        )


class _Hashable(NamedTuple):
    """A sharding, or a QArray of shardings, as a cache key."""

    value: Any

    def __hash__(self) -> int:
        return hash(tuple(jax.tree.leaves(self.value)))


def _empty(like: Any, sharding: Any) -> Any:
    """A leaf of zeros in its final dtype and place."""

    def zeros() -> Any:
        return jax.tree.map(lambda i: jnp.zeros(i.shape, jnp.dtype(i.dtype)), like)

    return jax.jit(zeros, out_shardings=sharding)()


@functools.lru_cache(maxsize=256)
def _filler(like: Any, transpose: bool, stacked: bool, sharding: _Hashable) -> Callable[..., Any]:
    """The compiled `(leaf, tensor, layer) -> (leaf, is finite)`: writes one layer in place."""

    def fill(leaf: Any, tensor: jax.Array, layer: jax.Array) -> tuple[Any, jax.Array]:
        value = _final(tensor.T if transpose else tensor, like)
        finite = jnp.isfinite(tensor).all()
        if not stacked:
            return value, finite
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
        return jax.tree.map(write, leaf, value), finite

    mesh = jax.tree.leaves(sharding.value)[0].mesh
    everywhere = jax.sharding.NamedSharding(mesh, P())
    return jax.jit(fill, donate_argnums=0, out_shardings=(sharding.value, everywhere))


def _final(weight: jax.Array, like: info.ParamInfo | qwix.QArray) -> Any:
    if isinstance(like, qwix.QArray):
        return quant.quantise(weight, like)
    return weight.astype(jnp.dtype(like.dtype))
