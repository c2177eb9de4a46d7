"""Choosing the next token: the most probable one, or a draw from what the filters leave.

The filters are applied in the order of transformers: temperature, then the `top_k` largest logits,
then the smallest set of tokens whose probabilities sum to `top_p`.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token.
      top_k: how many of the largest logits may be drawn; None for all.
      top_p: probability that the tokens which may be drawn have together; 1 for all.
    """

    temperature: float
    top_k: int | None
    top_p: float


GREEDY = Sampling(temperature=0.0, top_k=None, top_p=1.0)


def filtered(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits divided by the temperature (not 0), and -inf where a token may not be drawn."""
    logits = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        top_k = min(sampling.top_k, logits.shape[-1])
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        probs = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(probs < _least_of_nucleus(probs, sampling.top_p), -jnp.inf, logits)
    return logits


def _least_of_nucleus(probs_BV: jax.Array, top_p: float) -> jax.Array:
    """`[B, 1]`: the largest p such that the probabilities of at least p sum to `top_p`.

    Found bit by bit: floats above 0 have the order of their bits, and 1.0 is 0x3F800000. To sort a
    vocabulary takes the CPU ten times as long.
    """

    def narrow(step: jax.Array, bits_B1: jax.Array) -> jax.Array:
        raised = bits_B1 | (1 << (29 - step))
        least = jax.lax.bitcast_convert_type(raised, jnp.float32)
        mass = jnp.where(probs_BV >= least, probs_BV, 0).sum(axis=-1, keepdims=True)
        return jnp.where(mass >= top_p, raised, bits_B1)

    bits = jax.lax.fori_loop(0, 30, narrow, jnp.zeros((len(probs_BV), 1), jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def pick(logits_BV: jax.Array, keys_B: jax.Array, made: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row, int32.

    Args:
      logits_BV: float32.
      keys_B: a key for each row.
      made: how many tokens the rows have got so far; folded into the keys.
      sampling: how to choose.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, made)
    chosen = jax.vmap(jax.random.categorical)(keys, filtered(logits_BV, sampling))
    return chosen.astype(jnp.int32)
