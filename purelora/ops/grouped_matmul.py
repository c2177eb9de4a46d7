"""Grouped matmuls: each row times the matrix of its group, as the experts of a mixture compute.

Rows are sorted by group and cut into tiles of equal size. Each group begins a new tile, so that all
rows of a tile have the same matrix. A loop goes over the tiles that are in use. The arithmetic is
that of the rows, and of the padding at the end of each group's last tile. Rows that have no group
(padding tokens) are in no tile.

    ids_A       2 0 2 - 0 2            group of each of A = 6 rows; - is no group
    tiles of 2  [0 0] [2 2] [2 .]      groups_N = 0 2 2, in_use = 3
    sources_R    1 4   0 2   5 A       slots_A = 2 0 3 R 1 4

XLA's `ragged_dot` does the same on a TPU; on CPU and GPU it is lowered to a product of every row
with every matrix.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purelora.ops import quant, quant_matmul

# The padding is at most a quarter of the rows when these are spread evenly; beyond that many rows
# in a tile nothing is gained.
_TILES_PER_GROUP, _LARGEST_TILE = 4, 128


class RowGroups(NamedTuple):
    """The permutation that sorts A rows by group into R padded rows, which are N tiles.

    Attributes:
      slots_A: int32 sorted row of each row; R for a row without a group.
      sources_R: int32 row of each sorted row; A in the padding.
      groups_N: int32 group of each tile.
      sizes_G: int32 sorted rows of each group, padding included.
      in_use: int32 number of tiles that hold rows, the first ones.
    """

    slots_A: jax.Array
    sources_R: jax.Array
    groups_N: jax.Array
    sizes_G: jax.Array
    in_use: jax.Array

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.sources_R.shape[0] // self.groups_N.shape[0]


def tile_size(rows: int, groups: int) -> int:
    """How many rows a tile should have, a power of two, for `rows` rows in `groups` groups."""
    even = max(rows // (_TILES_PER_GROUP * groups), 1)
    return int(min(2 ** (even.bit_length() - 1), _LARGEST_TILE))


def group(ids_A: jax.Array, count: int, tile: int) -> RowGroups:
    """The permutation that sorts rows by their group.

    Args:
      ids_A: group of each row, 0 to count - 1; anything else is no group.
      count: number of groups.
      tile: rows of a tile.
    """
    rows = ids_A.shape[0]
    n_tiles = min(rows, rows // tile + count)
    ids_A = jnp.where((ids_A >= 0) & (ids_A < count), ids_A, count)
    order_A = jnp.argsort(ids_A, stable=True).astype(jnp.int32)
    sizes_H = jnp.zeros(count + 1, jnp.int32).at[ids_A].add(1)  # The last one is of no group.
    tiles_G = -(-sizes_H[:count] // tile)
    ends_G = jnp.cumsum(tiles_G)
    # Of the rows in order: where their group begins, there and among the sorted rows.
    begins_H = jnp.cumsum(sizes_H) - sizes_H
    starts_H = jnp.append((ends_G - tiles_G) * tile, n_tiles * tile)
    sorted_A = ids_A[order_A]
    to_A = starts_H[sorted_A] + jnp.arange(rows, dtype=jnp.int32) - begins_H[sorted_A]
    to_A = jnp.where(sorted_A < count, to_A, n_tiles * tile)
    numbers_NG = jnp.arange(n_tiles)[:, None] >= ends_G[None]
    return RowGroups(
        slots_A=jnp.zeros_like(ids_A).at[order_A].set(to_A),
        sources_R=jnp.full_like(ids_A, rows, shape=n_tiles * tile)
        .at[to_A].set(order_A, mode="drop"),
        groups_N=numbers_NG.sum(axis=1).clip(0, count - 1).astype(jnp.int32),
        sizes_G=tiles_G * tile,
        in_use=ends_G[-1],
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x_TK: jax.Array, groups: RowGroups, copies: int = 1) -> jax.Array:
    """Sorts rows by group: `[A / copies, K] -> [R, K]`, with zeros in the padding.

    Each row of `x_TK` stands for `copies` consecutive rows of A: a token for each of its experts.
    The gradient, here and of `combine`, is a gather by the inverse permutation. Autodiff would make
    it a scatter that adds up rows one by one.
    """
    return _rows(x_TK, groups.sources_R // copies)


def _dispatch_fwd(x_TK: jax.Array, groups: RowGroups, copies: int) -> tuple[jax.Array, RowGroups]:
    return _rows(x_TK, groups.sources_R // copies), groups


def _dispatch_bwd(copies: int, groups: RowGroups, g_RK: jax.Array) -> tuple[jax.Array, None]:
    g_AK = _rows(g_RK, groups.slots_A)
    return g_AK.reshape(-1, copies, g_AK.shape[-1]).sum(axis=1), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine(y_RN: jax.Array, groups: RowGroups) -> jax.Array:
    """Undoes the sorting of `dispatch`: `[R, N] -> [A, N]`; zero for a row without a group."""
    return _rows(y_RN, groups.slots_A)


def _combine_fwd(y_RN: jax.Array, groups: RowGroups) -> tuple[jax.Array, RowGroups]:
    return _rows(y_RN, groups.slots_A), groups


def _combine_bwd(groups: RowGroups, g_AN: jax.Array) -> tuple[jax.Array, None]:
    return _rows(g_AN, groups.sources_R), None


combine.defvjp(_combine_fwd, _combine_bwd)


def _rows(array: jax.Array, numbers: jax.Array) -> jax.Array:
    """`array[numbers]`, with zeros where a number is one past the end."""
    return array.at[numbers].get(mode="fill", fill_value=0)


def of_groups(values_GN: jax.Array, groups: RowGroups) -> jax.Array:
    """Repeats the row of each group for its sorted rows: `[R, N]` float32, zero in the padding.

    Its gradient is summed up tile by tile, in float32.
    """
    values_N1N = values_GN.astype(jnp.float32)[groups.groups_N][:, None]
    is_row = groups.sources_R.reshape(-1, groups.tile, 1) < groups.slots_A.shape[0]
    return jnp.where(is_row, values_N1N, 0).reshape(-1, values_GN.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def frozen_dot(
    x_RK: jax.Array,
    shard: quant.Weight,
    groups: RowGroups,
    gather: quant.Gather,
    contracting: int = -2,
) -> jax.Array:
    """The product of each sorted row with the matrix of its group; differentiable in `x_RK` only.

    As in `quant_matmul.frozen_dot`, the shard is the residual, gathered anew in the backward pass.

    Args:
      x_RK: sorted rows, zero in the padding.
      shard: this device's part of frozen matrices, `[G, K, N]` or `[G, N, K]`.
      groups: of the rows.
      gather: from a shard to the unsharded matrices; hashable.
      contracting: the dimension, counted from the end, that is summed over.

    Returns:
      `[R, N]` in the dtype of `x_RK`, zero in the padding.
    """
    return _frozen(quant_matmul.dot, x_RK, gather(shard), groups, contracting)


def _frozen_dot_fwd(
    x_RK: jax.Array, shard: quant.Weight, groups: RowGroups, gather: quant.Gather, contracting: int
) -> tuple[jax.Array, Any]:
    return _frozen(quant_matmul.dot, x_RK, gather(shard), groups, contracting), (shard, groups)


def _frozen_dot_bwd(
    gather: quant.Gather, contracting: int, saved: Any, g_RN: jax.Array
) -> tuple[jax.Array, None, None]:
    shard, groups = saved
    return (
        _frozen(quant_matmul.dot_transposed, g_RN, gather(shard), groups, contracting),
        None,
        None,
    )


frozen_dot.defvjp(_frozen_dot_fwd, _frozen_dot_bwd)


def _frozen(
    dot: Callable[..., jax.Array],
    x_RK: jax.Array,
    weight: quant.Weight,
    groups: RowGroups,
    contracting: int,
) -> jax.Array:
    """`dot` of `quant_matmul`, for each row with the matrix of its group."""

    def tiles(x_RK: jax.Array, weight: quant.Weight, groups: RowGroups) -> jax.Array:
        def tile_dot(x_MK: jax.Array, number: jax.Array) -> jax.Array:
            return dot(x_MK, _matrix(weight, number), contracting)

        return _over_tiles(tile_dot, x_RK, groups)

    def ragged(x_RK: jax.Array, weight: quant.Weight, groups: RowGroups) -> jax.Array:
        values = quant.dequantise(weight).astype(x_RK.dtype)
        is_swapped = (dot is quant_matmul.dot) == (contracting == -1)
        values = values.swapaxes(-1, -2) if is_swapped else values
        return jax.lax.ragged_dot(x_RK, values, groups.sizes_G)

    out: jax.Array = jax.lax.platform_dependent(x_RK, weight, groups, tpu=ragged, default=tiles)
    return out


@jax.custom_vjp
def dot(x_RK: jax.Array, weight_GKN: jax.Array, groups: RowGroups) -> jax.Array:
    """`[R, N]`: the product of each sorted row with the matrix of its group, in x's dtype.

    Differentiable in both.
    """
    return _frozen(quant_matmul.dot, x_RK, weight_GKN, groups, -2)


def _dot_fwd(x_RK: jax.Array, weight_GKN: jax.Array, groups: RowGroups) -> tuple[jax.Array, Any]:
    return _frozen(quant_matmul.dot, x_RK, weight_GKN, groups, -2), (x_RK, weight_GKN, groups)


def _dot_bwd(saved: Any, g_RN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_RK, weight_GKN, groups = saved
    d_x = _frozen(quant_matmul.dot_transposed, g_RN, weight_GKN, groups, -2)
    return d_x, _outer(x_RK, g_RN, weight_GKN, groups), None


dot.defvjp(_dot_fwd, _dot_bwd)


def _outer(x_RK: jax.Array, g_RN: jax.Array, like_GKN: jax.Array, groups: RowGroups) -> jax.Array:
    """The gradient of the matrices: for each group the sum of `x^T g` over its rows."""

    def add(i: jax.Array, total_GKN: jax.Array) -> jax.Array:
        x_MK, g_MN = (_tile(array, i, groups.tile) for array in (x_RK, g_RN))
        return total_GKN.at[groups.groups_N[i]].add(_products(x_MK, g_MN))

    zeros = jnp.zeros_like(like_GKN, dtype=jnp.float32)
    total_GKN: jax.Array = jax.lax.fori_loop(0, groups.in_use, add, zeros)
    return total_GKN.astype(like_GKN.dtype)


def _products(x_MK: jax.Array, g_MN: jax.Array) -> jax.Array:
    """Sum over the rows of their outer products, `[K, N]` float32."""
    dims = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(x_MK, g_MN, dims, preferred_element_type=jnp.float32)


@jax.custom_vjp
def delta(
    x_RK: jax.Array, a_GKR: jax.Array, b_GRN: jax.Array, scaling: jax.Array, groups: RowGroups
) -> jax.Array:
    """`scaling · (x A) B` of each sorted row, with the adapter of its group, in the dtype of x.

    Differentiable in all but `scaling`. One turn of the loop does both products of a tile, and in
    the backward pass all its gradients; `x A` is small, so it is recomputed and not kept.

    Args:
      x_RK: sorted rows, zero in the padding.
      a_GKR, b_GRN: the adapters; R, here, is their rank.
      scaling: float32 scalar.
      groups: of the rows.
    """

    def tile_dot(x_MK: jax.Array, number: jax.Array) -> jax.Array:
        a_KR, b_RN = (_matrix(array, number).astype(x_MK.dtype) for array in (a_GKR, b_GRN))
        return ((x_MK @ a_KR) * scaling.astype(x_MK.dtype)) @ b_RN

    return _over_tiles(tile_dot, x_RK, groups)


def _delta_fwd(*inputs: Any) -> tuple[jax.Array, Any]:
    return delta(*inputs), inputs


def _delta_bwd(saved: Any, g_RN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    x_RK, a_GKR, b_GRN, scaling, groups = saved
    factor = scaling.astype(g_RN.dtype)

    def body(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_x, d_a, d_b = sums
        number, first = groups.groups_N[i], i * groups.tile
        x_MK, g_MN = (_tile(array, i, groups.tile) for array in (x_RK, g_RN))
        a_KR, b_RN = (_matrix(array, number).astype(g_MN.dtype) for array in (a_GKR, b_GRN))
        g_MR = (g_MN @ b_RN.T) * factor
        d_x = jax.lax.dynamic_update_slice_in_dim(d_x, g_MR @ a_KR.T, first, axis=0)
        d_a = d_a.at[number].add(_products(x_MK, g_MR))
        return d_x, d_a, d_b.at[number].add(_products(x_MK @ a_KR, g_MN) * scaling)

    zeros = [jnp.zeros_like(x_RK), *(jnp.zeros_like(m, jnp.float32) for m in (a_GKR, b_GRN))]
    d_x, d_a, d_b = jax.lax.fori_loop(0, groups.in_use, body, tuple(zeros))
    return d_x, d_a.astype(a_GKR.dtype), d_b.astype(b_GRN.dtype), None, None


delta.defvjp(_delta_fwd, _delta_bwd)


def _over_tiles(
    tile_dot: Callable[[jax.Array, jax.Array], jax.Array], x_RK: jax.Array, groups: RowGroups
) -> jax.Array:
    """`tile_dot(rows, group)` of each tile in use, zeros in the others."""
    like = jax.eval_shape(tile_dot, x_RK[: groups.tile], groups.groups_N[0])
    shape = (x_RK.shape[0], *like.shape[1:])

    def body(i: jax.Array, y_RN: jax.Array) -> jax.Array:
        y_MN = tile_dot(_tile(x_RK, i, groups.tile), groups.groups_N[i])
        return jax.lax.dynamic_update_slice_in_dim(y_RN, y_MN, i * groups.tile, axis=0)

    # Made from x, it varies over the mesh as x does, so that a loop can carry it.
    y_RN: jax.Array = jax.lax.fori_loop(
        0, groups.in_use, body, jnp.zeros_like(x_RK, shape=shape, dtype=like.dtype)
    )
    return y_RN


def _tile(array_RX: jax.Array, i: jax.Array, tile: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array_RX, i * tile, tile, axis=0)


def _matrix(weight: quant.Weight, number: jax.Array) -> quant.Weight:
    """One matrix of a stack, quantised or not."""
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, number, axis=0, keepdims=False), weight
    )
