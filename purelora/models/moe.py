"""Mixtures of experts: routing, the experts, and the losses that keep the routing in balance.

A router gives each token a probability for every expert; the token goes to the few most probable
ones, and its output is the sum of theirs, each times its factor. No token is dropped. Padding goes
nowhere: it is in no expert's group and in none of the statistics.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from purelora import grouped, params
from purelora import tree as trees
from purelora.models import layers
from purelora.models.reading import Experts


class Routing(NamedTuple):
    """Where the tokens go; K, here, is the experts of a token.

    Attributes:
      ids_BTK: int32 numbers of the experts; E, which is none, in the padding.
      factors_BTK: float32 factors of their outputs.
    """

    ids_BTK: jax.Array
    factors_BTK: jax.Array


class RouterSums(NamedTuple):
    """Statistics of one layer's routing, summed over the tokens of each row, float32.

    Attributes:
      counts_BE: how many tokens went to each expert.
      probs_BE: the router's probabilities.
      squares_B: squares of the log of the sum of the exponents of its logits.
    """

    counts_BE: jax.Array
    probs_BE: jax.Array
    squares_B: jax.Array


class RouterLosses(NamedTuple):
    """Losses of the routing, summed over rows, float32.

    Attributes:
      balance_L: load-balancing loss, one for each layer with experts; see `losses`.
      z_L: router z-loss, likewise.
    """

    balance_L: jax.Array
    z_L: jax.Array


@dataclasses.dataclass(frozen=True)
class RouterLossWeights:
    """How the losses of the routing count beside the token losses.

    Attributes:
      balance: coefficient of the load-balancing loss.
      z: coefficient of the router z-loss.
      is_pooled: take the statistics over all layers and rows together, as transformers does.
    """

    balance: float
    z: float
    is_pooled: bool


def losses(sums: RouterSums, is_token_BT: jax.Array, *, is_pooled: bool) -> RouterLosses:
    """The losses of the routing from the statistics of all layers, `[L, B, ...]` each.

    In each layer and row, with f the share of the row's tokens that went to an expert and p its
    mean probability, the load-balancing loss is E · Σ f p over the experts (Fedus et al. 2021,
    equations 4 to 6; here f sums to the experts of a token, as in transformers). It does not depend
    on which rows are computed together. The z-loss is the mean over the tokens of the squared log
    of the sum of the exponents of the logits (Zoph et al. 2022, equation 5).

    Pooled, f and p are means over all layers and tokens, whose one loss counts for each row.
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
    """The part of the loss, summed over rows: coefficients times the means over the layers."""
    return weights.balance * found.balance_L.mean() + weights.z * found.z_L.mean()


def route(
    x_BTD: jax.Array,
    router: params.Module,
    is_token_BT: jax.Array,
    cfg: Experts,
    dropout: layers.Dropout | None,
) -> tuple[Routing, RouterSums]:
    """The best experts of each token by the softmax of the router's logits, in float32."""
    logits_BTE = layers.linear(x_BTD, router, dropout).astype(jnp.float32)
    probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    factors_BTK, ids_BTK = jax.lax.top_k(probs_BTE, cfg.per_token)
    if cfg.is_normalised:
        factors_BTK = factors_BTK / factors_BTK.sum(axis=-1, keepdims=True)
    ids_BTK = jnp.where(is_token_BT[..., None], ids_BTK, cfg.count)
    counts_BE = jax.nn.one_hot(ids_BTK, cfg.count, dtype=jnp.float32).sum(axis=(1, 2))
    probs_BE = jnp.where(is_token_BT[..., None], probs_BTE, 0).sum(axis=1)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    squares_B = jnp.where(is_token_BT, squares_BT, 0).sum(axis=1)
    return Routing(ids_BTK, factors_BTK), RouterSums(counts_BE, probs_BE, squares_B)


def experts(
    x_BTD: jax.Array,
    module: trees.Tree,
    routing: Routing,
    activation: Callable[[jax.Array], jax.Array],
    cfg: Experts,
) -> jax.Array:
    """Sum of the outputs of each token's experts, gated MLPs, times their factors: `[B, T, D]`.

    Where devices hold different experts, each gets the tokens of all, computes what goes to its
    own, and gets back the sums of its own tokens.
    """
    gate, up, down = (module[name] for name in ("gate_proj", "up_proj", "down_proj"))
    exchange = gate.exchange
    count = cfg.count // exchange.ways
    x_BTD, factors_BTK = gate.parallel.spread(
        (exchange.gather(x_BTD), exchange.gather(routing.factors_BTK))
    )
    ids_A = exchange.gather(routing.ids_BTK).reshape(-1) - exchange.first(count)
    tile = grouped.tile_size(ids_A.shape[0], cfg.count)
    groups = grouped.group(ids_A, count, tile)
    x_RD = grouped.dispatch(x_BTD.reshape(-1, x_BTD.shape[-1]), groups, cfg.per_token)
    gate_RF = checkpoint_name(_linear(x_RD, gate, groups), "mlp_gate")
    up_RF = checkpoint_name(_linear(x_RD, up, groups), "mlp_up")
    # The factors of the outputs, put before the last product, which is linear: the gradient of a
    # factor then needs no output, which would have to be kept or computed again.
    factors_R1 = grouped.dispatch(factors_BTK.reshape(-1, 1), groups).astype(x_BTD.dtype)
    out_RD = _linear(activation(gate_RF) * up_RF * factors_R1, down, groups)
    out_AD = grouped.collect(out_RD, groups)
    out_BTD = out_AD.reshape(*x_BTD.shape[:2], cfg.per_token, -1).sum(axis=2)
    return exchange.sum_scatter(down.parallel.collect(out_BTD))


def _linear(x_RK: jax.Array, module: params.Module, groups: grouped.Groups) -> jax.Array:
    """`x W + scaling · (x A) B` of each sorted row, with the matrices of its expert."""
    assert module.contracting == -2, module.name
    if module.frozen:
        shard, gather = module.frozen_operand
        y_RN = grouped.frozen_dot(x_RK, shard, groups, gather)
    else:
        y_RN = grouped.dot(x_RK, module.gather(module.weight), groups)
    if module.lora_a is None or module.lora_b is None or module.scaling is None:
        return y_RN
    return y_RN + grouped.delta(x_RK, module.lora_a, module.lora_b, module.scaling, groups)
