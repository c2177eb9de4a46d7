"""Greedy generation with a key-value cache, as one compiled function a shape."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purelora import tree as trees
from purelora.models import causal_lm, layers

# Prompt lengths are rounded up to a multiple of this, so that few shapes are compiled.
_BUCKET_TOKENS = 32


def greedy(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: Sequence[int],
    max_new_tokens: int,
    dtype: Any,
) -> list[list[int]]:
    """Continues each prompt with the most probable tokens.

    Args:
      model: the model.
      trainable: its adapters (or all its weights).
      base: its frozen weights.
      prompts: token ids, at least one a prompt.
      end_ids: tokens that end a continuation; the end token is the last of the result.
      max_new_tokens: most tokens of a continuation.
      dtype: dtype of the computation.

    Returns:
      The new tokens of each prompt.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lengths.max()) // _BUCKET_TOKENS) * _BUCKET_TOKENS
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    ends = tuple(int(i) for i in end_ids)
    out = _generate(trainable, base, tokens, lengths, model, ends, max_new_tokens, np.dtype(dtype))
    return [_until_end(row.tolist(), ends) for row in np.asarray(out)]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _generate(
    trainable: trees.Tree,
    base: trees.Tree,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    model: causal_lm.CausalLM,
    ends: tuple[int, ...],
    count: int,
    dtype: np.dtype,
) -> jax.Array:
    """`[B, count]` new tokens; what follows an end token means nothing."""
    bound = model.bind(base, trainable)
    family, rows = model.family, tokens_BT.shape[0]

    def forward(ids_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return family.hidden_cached(bound, ids_BT, positions_BT, cache, model.config, dtype=dtype)

    def pick(x_BD: jax.Array) -> jax.Array:
        logits_BV = layers.linear(x_BD, family.head(bound))
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    cache = family.empty_cache(model.config, rows, tokens_BT.shape[1] + count, dtype)
    x_BTD, cache = forward(tokens_BT, positions_BT, cache)
    first_B = pick(x_BTD[jnp.arange(rows), lengths_B - 1])

    def is_going_on(carry: Any) -> jax.Array:
        index, _, done_B, _, _ = carry
        return (index < count) & ~done_B.all()

    def advance(carry: Any) -> Any:
        index, last_B, done_B, out, cache = carry
        # The prompt's padding lies in slots that the new tokens overwrite before they see them.
        x_BTD, cache = forward(last_B[:, None], (lengths_B + index - 1)[:, None], cache)
        next_B = pick(x_BTD[:, 0])
        done_B = done_B | jnp.isin(next_B, jnp.asarray(ends, jnp.int32))
        return index + 1, next_B, done_B, out.at[:, index].set(next_B), cache

    out = jnp.zeros((rows, count), jnp.int32).at[:, 0].set(first_B)
    done_B = jnp.isin(first_B, jnp.asarray(ends, jnp.int32))
    carry = (jnp.int32(1), first_B, done_B, out, cache)
    return jax.lax.while_loop(is_going_on, advance, carry)[3]
