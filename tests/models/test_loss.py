"""The chunked loss equals optax's cross-entropy on whole logits, and never holds them."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from purelora.core import param_info
from purelora.lora import kinds
from purelora.models import layers, loss, params
from purelora.ops import quant
from purelora.sharding import parallel

B, T, D, V, R = 3, 7, 16, 40, 4
CHUNKS = (1, 8, 100)  # Of 21 tokens: 8 does not divide them.


@pytest.fixture(scope="module")
def data():
    """x [B, T, D], head [V, D], adapters, targets and uneven weights."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, D), (V, D), (D, R), (R, V))
    x, table, a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.choice([0.0, 0.5, 1.0, 2.0], (B, T)), jnp.float32)
    return x, table, (a, b), targets, weights


def head(table, adapters=None, frozen=True, gather=parallel.whole) -> params.Module:
    adapter = ()
    if adapters is not None:
        kind = kinds.KINDS["lora"]
        adapter = (kinds.Bound((*adapters, jnp.float32(2.0)), kind, kind.order),)
    return params.Module(
        weight=table,
        bias=None,
        adapters=adapter,
        name="lm_head",
        gather=gather,
        keep_gathered=False,
        parallel=parallel.WHOLE,
        exchange=parallel.ALONE,
        contracting=-1,
        frozen=frozen,
    )


def plain_sum(x, table, adapters, targets, weights, softcap=None):
    logits = x.astype(jnp.float32) @ table.T
    if adapters is not None:
        logits = logits + 2.0 * (x.astype(jnp.float32) @ adapters[0] @ adapters[1])
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (nll * weights).sum()


def test_soft_cap(data):
    """Of the whole logits, base and adapters together; values and all gradients."""
    x, table, adapters, targets, weights = data

    def chunked(x, adapters):
        own = head(table, adapters)
        return loss.xent_sum(x, own, targets, weights, chunk_tokens=8, softcap=3.0)

    def plain(x, adapters):
        return plain_sum(x, table, adapters, targets, weights, softcap=3.0)

    got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(x, adapters)
    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(x, adapters)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_frozen_head(data, chunk):
    x, table, _, targets, weights = data

    def chunked(x):
        return loss.xent_sum(x, head(table), targets, weights, chunk_tokens=chunk)

    got = jax.value_and_grad(lambda x: 3.0 * chunked(x))(x)  # A cotangent other than 1.
    want = jax.value_and_grad(lambda x: 3.0 * plain_sum(x, table, None, targets, weights))(x)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(chunked(x), want[0] / 3, rtol=1e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_adapted_and_trained_head(data, chunk, frozen):
    x, table, adapters, targets, weights = data

    def chunked(x, table, adapters):
        module = head(table, adapters, frozen)
        return loss.xent_sum(x, module, targets, weights, chunk_tokens=chunk)

    def whole(*args):
        return plain_sum(*args, targets, weights)

    got, grads = jax.value_and_grad(chunked, (0, 1, 2))(x, table, adapters)
    want, exact = jax.value_and_grad(whole, (0, 1, 2))(x, table, adapters)
    if frozen:  # A frozen table gets no gradient.
        exact = (exact[0], jnp.zeros_like(table), exact[2])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    chex.assert_trees_all_close(grads, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tile", [None, 4])
def test_int8_head(data, tile):
    x, table, adapters, targets, weights = data
    like = {"w": param_info.ParamInfo((V, D), "float32", ("vocab", "embed"), contracting=-1)}
    like = quant.quantised_infos(like, qtype="int8", tile_size=tile, skip=())["w"]
    q = quant.quantise(table, like)
    full = quant.dequantise(q)

    def chunked(x, adapters):
        return loss.xent_sum(x, head(q, adapters), targets, weights, chunk_tokens=8)

    got = jax.value_and_grad(chunked, (0, 1))(x, adapters)
    want = jax.value_and_grad(plain_sum, (0, 2))(x, full, adapters, targets, weights)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=2e-5)


def test_dropout_is_on_the_input_of_the_adapters_alone(data):
    x, table, (a, b), targets, weights = data
    dropout = layers.Dropout(jax.random.key(0), jnp.arange(B), 0.5)

    def chunked(x, a):
        return loss.xent_sum(
            x, head(table, (a, b)), targets, weights, chunk_tokens=8, dropout=dropout
        )

    def whole(x, a):
        logits = x @ table.T + 2.0 * (dropout(x, head(table)) @ a @ b)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (nll * weights).sum()

    got = jax.value_and_grad(chunked, (0, 1))(x, a)
    chex.assert_trees_all_close(got, jax.value_and_grad(whole, (0, 1))(x, a), rtol=1e-5, atol=2e-5)
    assert not np.allclose(got[0], plain_sum(x, table, (a, b), targets, weights), rtol=1e-2)


def test_bfloat16_activations(data):
    """Logits are formed in bfloat16 and summed in float32; x gets its gradient in bfloat16."""
    x, table, adapters, targets, weights = data
    low = (0.3 * x).astype(jnp.bfloat16)

    def chunked(x, adapters):
        return loss.xent_sum(x, head(table, adapters), targets, weights, chunk_tokens=8)

    value, (dx, d_adapters) = jax.value_and_grad(chunked, (0, 1))(low, adapters)
    args = (low.astype(jnp.float32), table, adapters, targets, weights)
    want, (exact, exact_adapters) = jax.value_and_grad(plain_sum, (0, 2))(*args)
    assert (value.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(value, want, rtol=0.01)
    for a, b in zip((dx, *d_adapters), (exact, *exact_adapters), strict=True):
        a, b = np.ravel(a.astype(jnp.float32)), np.ravel(b)
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
        np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=0.02)
    assert d_adapters[0].dtype == jnp.float32


def test_no_token_weight_is_zero_and_finite(data):
    x, table, adapters, targets, weights = data

    def chunked(x):
        module = head(table, adapters)
        return loss.xent_sum(x, module, targets, 0 * weights, chunk_tokens=8)

    value, grad = jax.value_and_grad(chunked)(x)
    assert value == 0 and not grad.any()


def test_a_gathered_head_sends_its_gradient_back_through_the_gather(data):
    """A trained shard's gradient is the transpose of its gather: here, of a doubling."""
    x, table, _, targets, weights = data

    def chunked(half):
        module = head(half, frozen=False, gather=doubled)
        return loss.xent_sum(x, module, targets, weights, chunk_tokens=8)

    got = jax.grad(chunked)(table[: V // 2])
    want = jax.grad(lambda h: plain_sum(x, doubled(h), None, targets, weights))(table[: V // 2])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def doubled(weight):
    return jnp.concatenate([weight, weight])


@pytest.mark.parametrize("frozen", [True, False])
def test_whole_logits_never_exist(data, frozen):
    x, table, adapters, targets, weights = data

    def text(chunk: int) -> str:
        def value(x, table, adapters):
            module = head(table, adapters, frozen)
            return loss.xent_sum(x, module, targets, weights, chunk_tokens=chunk)

        step = jax.jit(jax.value_and_grad(value, (0, 2)))
        return step.lower(x, table, adapters).compile().as_text()

    def logits(text: str) -> set[str]:
        shapes = re.findall(rf"\b(?:f|bf)\d+\[([\d,]*)\b{V}[\d,]*\]", text)
        return {s for s in shapes if np.prod([int(n) for n in s.split(",") if n]) >= B * T}

    assert logits(text(100))  # The control: in one chunk they do.
    assert not logits(text(7))


def test_token_nll_is_stable():
    logits = jnp.array([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]])
    nll = loss.token_nll(logits, jnp.array([0, 2]))
    np.testing.assert_allclose(nll, [0.0, np.log(3)], rtol=1e-6)
