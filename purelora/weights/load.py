"""Loading a base: tensor by tensor into preallocated stacks, in their final dtype and sharding.

Host memory peaks at the finished base plus one tensor: a stack is allocated once, and each layer,
or each expert of a layer, is transposed, cast or quantised and written in place by a small compiled
function.

With several processes, each reads only what its own devices hold of a tensor. Where experts are
split over the mesh, one expert of each shard is written at a time. A quantisation scale depends on
the largest absolute value of a tile or column, which may be on several devices; the compiled
function finds it. A maximum does not depend on the order, so codes are the same on any mesh.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import errors, layer_axis, param_info, trees
from purelora.core.param_info import LAYERS
from purelora.formats import source as sources
from purelora.lora import targets, weight_init
from purelora.models import causal_lm, hf_layout, hf_multimodal
from purelora.multihost import runtime
from purelora.ops import quant
from purelora.sharding import host_arrays

Progress = Callable[[int, int], None]
_HEAD = f"{targets.HEAD}.weight"


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
    split: weight_init.WeightSplit | None = None,
) -> Loaded:
    """Reads a whole base.

    Args:
      source: where the tensors are.
      model: the model that they belong to.
      infos: declarations of the result; QArrays of infos where it is quantised.
      shardings: placement of each leaf, parallel to `infos`.
      progress: told (parts of tensors read, parts in all).
      split: takes adapters out of the weights on the way.

    Raises:
      ModelError: tensors that are missing, surplus or of another shape, all in one error; or a
        damaged one.
    """
    layout = model.layout_of(source.shapes())
    _check_tensors(source, model, layout)
    done, total = 0, sum(map(len, layout.parts.values()))
    reader, placed = _Reader(source, layout), trees.flatten(shardings)
    flat: dict[str, Any] = {}
    for path, like in trees.flatten(infos).items():
        declared, is_transposed = model.flat_infos[path], layout.parts[path][0].is_transposed
        spread = _file_sharding(placed[path], declared, is_transposed)
        ways = _expert_ways(placed[path], declared)
        fill = _filler(like, is_transposed, ways, _Hashable(placed[path]))
        leaf, finite = _empty(like, placed[path]), []
        for parts in _together(layout.parts[path], ways):
            layer = parts[0].index[0] if declared.is_stacked else 0
            place = None if split is None else split.place(path, layer)
            if split is None or place is None:
                tensor = reader.placed(parts, spread)
            else:
                whole = reader.read(parts[0], host_arrays.whole_box(parts[0].shape))
                rest = np.asarray(split(place, _as_kernel(whole), like)).T
                tensor = host_arrays.place(rest, spread)
            leaf, is_finite = fill(leaf, tensor, parts[0].index)
            finite += [(part.tensor, is_finite) for part in parts]
            done += len(parts)
            if progress:
                progress(done, total)
        _check_finite(source, finite)
        flat[path] = leaf
    return Loaded(trees.unflatten(flat), reader.fingerprint())


def _together(parts: Sequence[hf_layout.Part], ways: int) -> Iterator[Sequence[hf_layout.Part]]:
    """Groups the parts of a leaf that are written at once: single ones, or an expert of each shard.

    Args:
      parts: all parts of the leaf.
      ways: in how many shards its experts lie.
    """
    if ways == 1:
        yield from ([part] for part in parts)
        return
    layers: dict[int, list[hf_layout.Part]] = {}
    for part in parts:
        layers.setdefault(part.index[0], []).append(part)
    for experts in layers.values():
        step = len(experts) // ways
        yield from (experts[first::step] for first in range(step))


class _Reader:
    """Reads parts of tensors, and hashes whole ones: each process its share of them."""

    def __init__(self, source: sources.Source, layout: hf_layout.Layout):
        self._source = source
        self._digests: dict[str, bytes] = {}
        self._own: set[str] = set()
        self._last: tuple[str, np.ndarray] | None = None
        if source.identity is None:
            sizes = {name: math.prod(shape) for name, shape in layout.shapes.items()}
            shares = even_shares(sizes, runtime.process_count())
            self._own = shares[runtime.process_index()]

    def read(self, part: hf_layout.Part, box: host_arrays.Index) -> np.ndarray:
        """The values of a part in `box`, as the file has them.

        A tensor that this process hashes is read whole, and kept until another one is.
        """
        name, within = part.tensor, part.within(box)
        if self._last is not None and self._last[0] == name:
            values = self._last[1][within]
        elif name in self._own and name not in self._digests:
            values = self._hashed(name)[within]
        else:
            values = self._source.read_part(name, hf_layout.hull(within))[hf_layout.steps(within)]
        return values.reshape(values.shape[values.ndim - len(box) :])

    def _hashed(self, name: str) -> np.ndarray:
        self._last = None  # Never two of them in memory.
        tensor = self._source.read(name)
        self._digests[name], self._last = tensor.digest, (name, tensor.array)
        return tensor.array

    def placed(self, parts: Sequence[hf_layout.Part], sharding: NamedSharding) -> jax.Array:
        """Parts on the devices, experts stacked; each process reads what its own devices hold."""
        shape = parts[0].shape
        if parts[0].expert is None:
            box = host_arrays.own_box(sharding, shape)
            return host_arrays.from_box(box, self.read(parts[0], box), sharding, shape)
        shape = (len(parts), *shape)
        box = host_arrays.own_box(sharding, shape)
        read = np.stack([self.read(part, box[1:]) for part in parts[box[0]]])
        return host_arrays.from_box(box, read, sharding, shape)

    def fingerprint(self) -> str:
        """Identity of all tensors of the model, the same in all processes."""
        if self._source.identity is not None:
            return self._source.identity
        for name in sorted(self._own - self._digests.keys()):  # Those that only others hold.
            self._hashed(name)
        own = {name: digest.hex() for name, digest in self._digests.items()}
        found: dict[str, bytes] = {}
        for text in runtime.gathered("digests", json.dumps(own)):
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


def _file_sharding(
    placed: Any, declared: param_info.ParamInfo, is_transposed: bool
) -> NamedSharding:
    """How one layer of a leaf lies over the mesh, in the order of dimensions that files have."""
    sharding = placed.qvalue if isinstance(placed, qwix.QArray) else placed
    spec, rank = sharding.spec, len(declared.shape)
    if declared.is_stacked:
        spec = layer_axis.remove_scan_axis(spec, declared.axes.index(LAYERS), rank=rank)
        rank -= 1
    if is_transposed:
        spec = layer_axis.move_scan_axis(spec, -1, -2, rank=rank)
    return NamedSharding(sharding.mesh, spec)


def _expert_ways(placed: Any, declared: param_info.ParamInfo) -> int:
    """Over how many shards the experts of a leaf are split; 1 for a leaf without experts."""
    if not declared.has_experts:
        return 1
    sharding = placed.qvalue if isinstance(placed, qwix.QArray) else placed
    dim = declared.axes.index("experts")
    return declared.shape[dim] // int(sharding.shard_shape(declared.shape)[dim])


def _as_kernel(array: np.ndarray) -> jax.Array:
    """A linear weight as `[K, N]` float32; on disk it is [out, in]."""
    return jnp.asarray(array).astype(jnp.float32).T


def _check_finite(source: sources.Source, finite: Sequence[tuple[str, jax.Array]]) -> None:
    bad = dict.fromkeys(name for name, good in finite if not good)
    if bad:
        raise errors.ModelError.of(
            errors.Problem(f"{source.path}: {name}", None, "holds values that are not finite",
                           "fetch the model anew")
            for name in bad
        )  # fmt: skip


def _check_tensors(
    source: sources.Source, model: causal_lm.CausalLM, layout: hf_layout.Layout
) -> None:
    """Compares names and shapes with the declarations; all problems in one error."""
    shapes = dict(source.shapes())
    problems: list[errors.Problem] = []
    for name, wanted in layout.shapes.items():
        found = shapes.pop(name, None)
        if found is None:
            problems.append(errors.Problem(source.path, None, f"holds no tensor {name!r}", ""))
        elif tuple(found) != wanted:
            what = f"has shape {list(found)}, but config.json makes it {list(wanted)}"
            problems.append(errors.Problem(f"{source.path}: {name}", None, what, ""))
    others = {name for one in model.layouts.values() for name in one.shapes}
    derived = {name for name in shapes if _is_derived(name, model)}
    for name in shapes.keys() - derived - set(model.left_out(shapes)):
        what = f"holds a tensor {name!r} that this architecture does not have"
        remedy = "is config.json of another model?"
        if name in others:
            what = f"holds a tensor {name!r}, which in files like this one has another name"
            remedy = "save the model anew: its tensors are named in two ways"
        problems.append(errors.Problem(source.path, None, what, remedy))
    if problems:
        raise errors.ModelError.of(errors.first(problems, source.path))
    # It reads two whole tables: once for all processes is enough.
    table = layout.parts[f"{targets.EMBEDDING}.weight"][0].tensor
    head = hf_multimodal.beside(_HEAD, table)
    if head in shapes and runtime.is_main():
        _check_tied(source, head, table)


def _is_derived(name: str, model: causal_lm.CausalLM) -> bool:
    """Surplus tensors that follow from others: rotary frequencies, and the head if it is tied."""
    is_head = name in (_HEAD, hf_multimodal.older(_HEAD))
    return (is_head and model.is_tied) or name.endswith("rotary_emb.inv_freq")


def _check_tied(source: sources.Source, head: str, table: str) -> None:
    """A head that is stored although it is tied must be the embedding."""
    if source.read(head).digest != source.read(table).digest:
        raise errors.ModelError(
            f"{source.path}: {head}",
            None,
            f"differs from {table}, but config.json ties them",
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
def _filler(like: Any, is_transposed: bool, ways: int, sharding: _Hashable) -> Callable[..., Any]:
    """The compiled `(leaf, tensor, index) -> (leaf, is finite)`: writes one layer in place.

    If the leaf has experts, split over `ways` shards, it writes one expert of each shard: the
    tensor is `[ways, out, in]`, and the index is that of the expert in the first shard.
    """

    def write(leaf: jax.Array, value: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        if len(index) == 1:
            return layer_axis.with_layer(leaf, value, index[0])
        shards = leaf.reshape(leaf.shape[0], ways, -1, *leaf.shape[2:])
        starts: list[Any] = [index[0], 0, index[1], *[0] * (leaf.ndim - 2)]
        shards = jax.lax.dynamic_update_slice(shards, value[None, :, None], starts)
        return shards.reshape(leaf.shape)

    def fill(leaf: Any, tensor: jax.Array, index: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        value = _final(tensor.mT if is_transposed else tensor, like)
        finite = jnp.isfinite(tensor).all()
        if not index:
            return value, finite
        return jax.tree.map(functools.partial(write, index=index), leaf, value), finite

    mesh = jax.tree.leaves(sharding.value)[0].mesh
    everywhere = NamedSharding(mesh, P())
    return jax.jit(fill, donate_argnums=0, out_shardings=(sharding.value, everywhere))


def _final(weight: jax.Array, like: param_info.ParamInfo | qwix.QArray) -> Any:
    if isinstance(like, qwix.QArray):
        return quant.quantise(weight, like)
    return weight.astype(jnp.dtype(like.dtype))
