"""Greedy generation against the plainest loop: whole forward passes, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora import generate, info, lora
from purelora.io import builtin
from purelora.models import causal_lm, layers


@pytest.fixture(scope="module")
def model_and_trees():
    model = causal_lm.from_hf(builtin.tiny().source.config, "tiny", dtype="float32")
    targets = lora.resolve_targets(
        model.modules, r=2, lora_alpha=4, target_modules="all-linear", exclude_modules=()
    )
    model = model.with_targets(targets)
    base = info.initial_tree(model.infos, key=jax.random.key(0))
    adapters = info.initial_tree(model.adapter_infos(), key=jax.random.key(1))
    return model, base, jax.tree.map(lambda leaf: leaf + 0.05, adapters)


def plain_greedy(model, base, adapters, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    logits = jax.jit(lambda inputs: model.logits(adapters, base, inputs))
    length = len(prompt) + count  # One shape: what follows the last token is not looked at.
    for _ in range(count):
        tokens = jnp.asarray(ids + [0] * (length - len(ids)), jnp.int32)[None]
        inputs = layers.Inputs(tokens, jnp.arange(length)[None], jnp.ones_like(tokens))
        ids.append(int(np.asarray(logits(inputs))[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[5], [7, 8, 9, 10, 200, 3], list(range(40))]


def test_rows_of_different_lengths_equal_the_plain_loop(model_and_trees):
    model, base, adapters = model_and_trees
    found = generate.greedy(
        model, adapters, base, PROMPTS, end_ids=(), max_new_tokens=9, dtype=jnp.float32
    )
    assert found == [plain_greedy(model, base, adapters, prompt, 9) for prompt in PROMPTS]


def test_every_end_token_stops_its_own_row_and_is_kept(model_and_trees):
    model, base, adapters = model_and_trees
    free = [plain_greedy(model, base, adapters, prompt, 9) for prompt in PROMPTS]
    ends = (free[0][2], free[1][4])
    found = generate.greedy(
        model, adapters, base, PROMPTS, end_ids=ends, max_new_tokens=9, dtype=jnp.float32
    )
    want = []
    for row in free:
        stops = [i for i, token in enumerate(row) if token in ends]
        want.append(row[: stops[0] + 1] if stops else row)
    assert found == want
    assert len(found[0]) <= 3
