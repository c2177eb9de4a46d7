"""Mixtures of experts: routing, the experts, and the losses that keep the routing in balance.

A router gives each token a probability for every expert. The token is sent to the experts with the
largest ones (top-k routing), and its output is the sum of their outputs, each times its routing
weight. Experts have no capacity limit, so no token is dropped. Padding is
sent to no expert and counts in none of the statistics.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from purelora.core import trees
from purelora.models import layers, params
from purelora.models.hf_config import Experts
from purelora.ops import grouped_matmul


class Routing(NamedTuple):
    """Which experts each token is sent to; K, here, is the number of experts of a token.

    Attributes:
      ids_BTK: int32 numbers of the experts; E, the number of no expert, for padding.
      weights_BTK: float32 routing weights, by which the outputs of these experts are multiplied.
    """

    ids_BTK: jax.Array
    weights_BTK: jax.Array


class RouterSums(NamedTuple):
    """Statistics of one layer's routing, summed over the tokens of each row, float32.

    Attributes:
      counts_BE: how many tokens were sent to each expert.
      probs_BE: the router's probabilities.
      squares_B: the square of the log-sum-exp of the router's logits.
    """

    counts_BE: jax.Array
    probs_BE: jax.Array
    squares_B: jax.Array


class RouterLosses(NamedTuple):
    """The router's losses, summed over rows, float32; one value for each layer with experts.

    Attributes:
      balance_L: load-balancing loss, see `losses`.
      z_L: router z-loss, see `losses`. Both are `[1]` if the statistics were pooled.
    """

    balance_L: jax.Array
    z_L: jax.Array


@dataclasses.dataclass(frozen=True)
class RouterLossWeights:
    """How much the router's losses count beside the token losses.

    Attributes:
      balance: coefficient of the load-balancing loss.
      z: coefficient of the router z-loss.
      is_pooled: whether statistics are taken over all layers and rows together, as in transformers.
    """

    balance: float
    z: float
    is_pooled: bool


def losses(sums: RouterSums, is_token_BT: jax.Array, *, is_pooled: bool) -> RouterLosses:
    """The router's losses from the statistics of all layers.

    For each layer and row, f is the share of the row's tokens that were sent to an expert, and p is
    the expert's mean probability. The load-balancing loss is E · Σ f p over the experts (Fedus et
    al. 2021, equations 4 to 6; but f sums to the number of experts of a token, as in transformers).
    Taken by row, it does not depend on which rows are computed together. The z-loss is the mean
    over the row's tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, equation 5).

    Args:
      sums: the statistics of all layers, `[L, B, ...]` each.
      is_token_BT: which positions hold a token, and not padding.
      is_pooled: take f, p and the z-loss as means over the tokens of all layers and rows instead.
        The one loss that this gives is counted once for each row that is not empty.
    """
    tokens_B = is_token_BT.sum(axis=-1).astype(jnp.float32)
    rows = jnp.float32(1)
    if is_pooled:
        n_layers = sums.counts_BE.shape[0]
        rows = (tokens_B > 0).sum().astype(jnp.float32)
        tokens_B = tokens_B.sum(keepdims=True) * n_layers
        sums = jax.tree.map(lambda array: array.sum(axis=(0, 1))[None, None], sums)
    share_LBE, prob_LBE, square_LB = jax.tree.map(
        lambda array: array / jnp.maximum(tokens_B, 1).reshape(1, -1, *[1] * (array.ndim - 2)), sums
    )
    balance_LB = share_LBE.shape[-1] * jnp.sum(share_LBE * prob_LBE, axis=-1)
    return RouterLosses(balance_LB.sum(axis=1) * rows, square_LB.sum(axis=1) * rows)


def objective(found: RouterLosses, weights: RouterLossWeights) -> jax.Array:
    """What the router's losses add to the training loss: a scalar, summed over rows.

    It is the sum of both losses, each a mean over the layers times its coefficient.
    """
    return weights.balance * found.balance_L.mean() + weights.z * found.z_L.mean()


def route(
    x_BTD: jax.Array,
    router: params.Module,
    is_token_BT: jax.Array,
    cfg: Experts,
    dropout: layers.Dropout | None,
) -> tuple[Routing, RouterSums]:
    """Chooses each token's experts by the softmax of the router's logits, in float32.

    Args:
      x_BTD: what the router reads.
      router: its weight, `[D, E]`, and adapter.
      is_token_BT: which positions hold a token, and not padding.
      cfg: how many experts a token has, and whether their weights are made to sum to 1.
      dropout: dropout on the input of the router's adapter.
    """
    logits_BTE = layers.linear(x_BTD, router, dropout).astype(jnp.float32)
    probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    weights_BTK, ids_BTK = jax.lax.top_k(probs_BTE, cfg.per_token)
    if cfg.is_normalised:
        weights_BTK = weights_BTK / weights_BTK.sum(axis=-1, keepdims=True)
    ids_BTK = jnp.where(is_token_BT[..., None], ids_BTK, cfg.count)
    counts_BE = jax.nn.one_hot(ids_BTK, cfg.count, dtype=jnp.float32).sum(axis=(1, 2))
    probs_BE = jnp.where(is_token_BT[..., None], probs_BTE, 0).sum(axis=1)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    squares_B = jnp.where(is_token_BT, squares_BT, 0).sum(axis=1)
    return Routing(ids_BTK, weights_BTK), RouterSums(counts_BE, probs_BE, squares_B)


def experts(
    x_BTD: jax.Array,
    module: trees.Tree,
    routing: Routing,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    cfg: Experts,
) -> jax.Array:
    """The sum of the outputs of each token's experts, times their routing weights: `[B, T, D]`.

    An expert is a gated MLP; `gated` makes one of what `gate_proj` and `up_proj` give. Under expert
    parallelism each device gathers the tokens of all devices, computes those that are sent to its
    own experts, and a reduce-scatter returns to each device the sums of its own tokens. Here A
    counts the pairs of a token and one of its experts, and R the same pairs sorted by expert.
    """
    gate, up, down = (module[name] for name in ("gate_proj", "up_proj", "down_proj"))
    exchange = gate.exchange
    count = cfg.count // exchange.axis_size
    whole_BTD, whole_BTK = exchange.gather(x_BTD), exchange.gather(routing.weights_BTK)
    x_BTD, weights_BTK = gate.parallel.copy_to((whole_BTD, whole_BTK))
    ids_A = exchange.gather(routing.ids_BTK).reshape(-1) - exchange.first(count)
    tile = grouped_matmul.tile_size(ids_A.shape[0], cfg.count)
    groups = grouped_matmul.group(ids_A, count, tile)
    x_RD = grouped_matmul.dispatch(x_BTD.reshape(-1, x_BTD.shape[-1]), groups, cfg.per_token)
    gate_RF = checkpoint_name(_linear(x_RD, gate, groups), "mlp_gate")
    up_RF = checkpoint_name(_linear(x_RD, up, groups), "mlp_up")
    # The routing weights multiply the outputs. As `down` is linear, they may multiply its input
    # instead: then their gradient needs that, and not the output, which would have to be kept.
    weights_R1 = grouped_matmul.dispatch(weights_BTK.reshape(-1, 1), groups).astype(x_BTD.dtype)
    out_RD = _product(gated(gate_RF, up_RF) * weights_R1, down, groups)
    out_AD = grouped_matmul.combine(out_RD, groups)
    out_BTD = out_AD.reshape(*x_BTD.shape[:2], cfg.per_token, -1).sum(axis=2)
    out_BTD = down.parallel.reduce_from(out_BTD)
    if down.bias is not None:
        ids_BTK = ids_A.reshape(whole_BTK.shape)
        out_BTD = out_BTD + _biases(ids_BTK, whole_BTK, down.bias).astype(out_BTD.dtype)
    return exchange.reduce_scatter(out_BTD)


def _biases(ids_BTK: jax.Array, weights_BTK: jax.Array, bias_ED: jax.Array) -> jax.Array:
    """Sum of the biases of each token's experts times their routing weights: `[B, T, D]` float32.

    Not in the sorted rows, where each device that has a part of the sums would add them.
    """
    chosen_BTKE = jax.nn.one_hot(ids_BTK, bias_ED.shape[0], dtype=jnp.float32)
    weights_BTE = jnp.einsum("BTKE,BTK->BTE", chosen_BTKE, weights_BTK)
    return jnp.einsum("BTE,ED->BTD", weights_BTE, bias_ED.astype(jnp.float32))


def _linear(x_RK: jax.Array, module: params.Module, groups: grouped_matmul.RowGroups) -> jax.Array:
    """`x W + b + scaling · (x A) B` of each sorted row, with what is of its expert."""
    y_RN = _product(x_RK, module, groups)
    if module.bias is None:
        return y_RN
    return y_RN + grouped_matmul.of_groups(module.bias, groups).astype(y_RN.dtype)


def _product(x_RK: jax.Array, module: params.Module, groups: grouped_matmul.RowGroups) -> jax.Array:
    """`x W + scaling · (x A) B` of each sorted row, with the matrices of its expert."""
    assert module.contracting == -2, module.name
    if module.frozen:
        shard, gather = module.frozen_operand
        y_RN = grouped_matmul.frozen_dot(x_RK, shard, groups, gather)
    else:
        y_RN = grouped_matmul.dot(x_RK, module.gather(module.weight), groups)
    for adapter in module.adapters:
        y_RN = adapter.kind.grouped_output(adapter, y_RN, x_RK, groups)
    return y_RN
