"""Continuations of prompts, token by token, with a cache of keys and values."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import errors, trees
from purelora.models import causal_lm, kv_cache, sampling
from purelora.sharding import host_arrays

# Prompts and caches are padded to this, doubled as often as need be: few shapes are compiled.
_LEAST_BUCKET = 32
# Stands for a token where the logits are not finite.
_UNSOUND = -1


class _Rows(NamedTuple):
    """What one step hands to the next.

    Attributes:
      tokens_B: the newest token of each row.
      positions_B: the position of that token.
      made: how many tokens each row has got.
      keys_B: the random key of each row.
    """

    tokens_B: jax.Array
    positions_B: jax.Array
    made: jax.Array
    keys_B: jax.Array


def stream(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: Sequence[int],
    max_new_tokens: int,
    dtype: Any,
    how: sampling.Sampling = sampling.GREEDY,
    seed: int = 0,
    first_row: int = 0,
) -> Iterator[list[int | None]]:
    """Continues prompts together, one token of each at a time.

    Args:
      model: the declarations, with the targets of the adapter.
      trainable: the leaves of the adapter (or all weights).
      base: the frozen weights.
      prompts: token ids, at least one a prompt.
      end_ids: tokens that end a continuation; the end token is the last of its row.
      max_new_tokens: the largest number of tokens of a continuation.
      dtype: dtype of the computation.
      how: how tokens are chosen.
      seed: seeds the draws.
      first_row: number of the first prompt: with `seed` it decides the draws of a row.

    Yields:
      The next token of each prompt, None once it has ended.

    Raises:
      ModelError: the logits of a prompt that goes on are not finite.
    """
    tokens, lengths = _padded(prompts)
    numbers = np.arange(first_row, first_row + len(prompts), dtype=np.int32)
    static = _Static(model, how, np.dtype(dtype))
    slots = _bucket(tokens.shape[1] + max_new_tokens)
    state, cache = _begin(
        trainable, base, tokens, lengths, numbers, np.uint32(seed), static=static, slots=slots
    )
    is_over = np.zeros(len(prompts), bool)
    for left in reversed(range(max_new_tokens)):
        found = host_arrays.on_host(state.tokens_B)
        _check_sound(found[~is_over])
        yield [None if over else int(t) for over, t in zip(is_over, found, strict=True)]
        is_over |= np.isin(found, end_ids)
        if is_over.all() or not left:
            return
        state, cache = _advance(trainable, base, state, cache, static=static)


def _check_sound(tokens: np.ndarray) -> None:
    if (tokens == _UNSOUND).any():
        remedy = "is an adapter or a weight damaged, or far too large?"
        raise errors.ModelError("logits", None, "are not finite numbers", remedy)


def complete(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[Sequence[int]],
    **options: Any,
) -> list[list[int]]:
    """All new tokens of each prompt, the end token included; for the options see `stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, trainable, base, prompts, **options):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows `[B, T]` with zeros behind them, and their lengths `[B]`."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), _bucket(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _bucket(length: int) -> int:
    bucket = _LEAST_BUCKET
    while bucket < length:
        bucket *= 2
    return bucket


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a step is compiled for, besides shapes."""

    model: causal_lm.CausalLM
    how: sampling.Sampling
    dtype: np.dtype


@functools.partial(jax.jit, static_argnames=("static", "slots"))
def _begin(
    trainable: trees.Tree,
    base: trees.Tree,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    numbers_B: jax.Array,
    seed: jax.Array,
    *,
    static: _Static,
    slots: int,
) -> tuple[_Rows, Any]:
    """Reads the prompts into a new cache of `slots` and chooses the first tokens."""
    model, rows = static.model, tokens_BT.shape[0]
    bound = model.bind(base, trainable)
    cache = kv_cache.empty(model.config, rows, slots, static.dtype)
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    x_BTD, cache = kv_cache.hidden(
        model.family, model.config, bound, tokens_BT, positions_BT, cache, dtype=static.dtype
    )
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers_B)
    x_BD = x_BTD[jnp.arange(rows), lengths_B - 1]
    first_B = _pick(x_BD, bound, keys_B, jnp.int32(0), static)
    return _Rows(first_B, lengths_B, jnp.int32(1), keys_B), cache


@functools.partial(jax.jit, static_argnames="static", donate_argnames="cache")
def _advance(
    trainable: trees.Tree, base: trees.Tree, state: _Rows, cache: Any, *, static: _Static
) -> tuple[_Rows, Any]:
    """Reads one token of each row and chooses the next; the cache is written in place."""
    model = static.model
    bound = model.bind(base, trainable)
    # The prompt's padding lies in slots that the new tokens overwrite before they see them.
    x_BTD, cache = kv_cache.hidden(
        model.family,
        model.config,
        bound,
        state.tokens_B[:, None],
        state.positions_B[:, None],
        cache,
        dtype=static.dtype,
    )
    next_B = _pick(x_BTD[:, 0], bound, state.keys_B, state.made, static)
    return _Rows(next_B, state.positions_B + 1, state.made + 1, state.keys_B), cache


def _pick(
    x_BD: jax.Array, bound: trees.Tree, keys_B: jax.Array, made: jax.Array, static: _Static
) -> jax.Array:
    # In float32: bfloat16 has ties among the largest of so many logits.
    logits_BV = static.model.head_logits(x_BD, bound, jnp.float32)
    is_sound_B = jnp.isfinite(logits_BV.max(axis=-1))  # The maximum of a NaN is one.
    return jnp.where(is_sound_B, sampling.pick(logits_BV, keys_B, made, static.how), _UNSOUND)
