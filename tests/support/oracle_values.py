"""Reference values in tests/oracles, and what is compared with them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import trees
from purelora.models import causal_lm
from tests.support import tiny

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"


def logits_of(model: causal_lm.CausalLM, base: trees.Tree, ids: list[int]) -> np.ndarray:
    run = jax.jit(lambda b, i: model.logits({}, b, i))
    return np.asarray(run(base, tiny.inputs([ids])))[0]


def nll_of(found: np.ndarray, ids: list[int]) -> np.ndarray:
    """Of each target ids[1:], from the logits of all."""
    log_probs = jax.nn.log_softmax(jnp.asarray(found[:-1]))
    return -np.asarray(log_probs)[np.arange(len(ids) - 1), ids[1:]]
