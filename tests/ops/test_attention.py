"""Attention in blocks, with windows and soft caps, is softmax attention; and what it works on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.ops import attention

pytestmark = pytest.mark.usefixtures("fully_compiled")
LENGTH = 13
SEGMENTS = jnp.array([[1] * 6 + [2] * 5 + [0] * 2, [1] * 13])


def arrays(length: int = LENGTH):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((2, length, n, 8)), jnp.float32) for n in (4, 2, 2, 4)]


def plain_attention(q, k, v, window, softcap, sinks=None):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    back = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    seen = (back >= 0) & (back < (window or LENGTH))
    mask = seen[None] & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    if sinks is not None:
        nothing = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, nothing], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., :LENGTH]
    return jnp.einsum("btns,bsnh->btnh", probs.transpose(0, 2, 1, 3), v)


def with_gradients(attend):
    q, k, v, g = arrays()
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(g)


@pytest.mark.parametrize("block", [4, 5, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (3, 0.5), (20, 0.5)])
def test_blocks_are_softmax_attention(monkeypatch, block, window, softcap):
    """Values and gradients, with groups, segments and padding, in one block and in several."""
    monkeypatch.setattr(attention, "_LEAST_BLOCK", block)

    def blocked(q, k, v):
        return attention.causal_attention(
            q, k, v, SEGMENTS, 0.3, softcap=softcap, windows=(window,)
        )

    want = jax.jit(lambda: with_gradients(lambda *x: plain_attention(*x, window, softcap)))()
    got = jax.jit(lambda: with_gradients(blocked))()
    chex.assert_trees_all_close(got, want, rtol=0, atol=2e-5)


SINKS = jnp.array([-2.0, 0.3, 1.0, 40.0])


@pytest.mark.parametrize(("block", "windows"), [(128, (None,)), (4, (20, 3))])
def test_sinks_are_scores_without_values(monkeypatch, block, windows):
    """Values and gradients, those of the sinks too; one of them is far above all scores."""
    monkeypatch.setattr(attention, "_LEAST_BLOCK", block)
    q, k, v, g = arrays()

    def attend(kind, *inputs):
        *qkv, sinks = inputs
        return attention.causal_attention(
            *qkv, SEGMENTS, 0.3, windows=windows, kind=kind, sinks_N=sinks
        )

    def wanted(*inputs):
        *qkv, sinks = inputs
        return plain_attention(*qkv, windows[-1], None, sinks)

    results = []
    kind = jnp.int32(len(windows) - 1)
    for function in (lambda *x: attend(kind, *x), wanted):
        out, pull = jax.vjp(jax.jit(function), q, k, v, SINKS)
        results.append((out, pull(g)))
    chex.assert_trees_all_close(*results, rtol=0, atol=2e-5)
    assert (np.abs(results[0][1][3]) > 1e-3).tolist() == [True, True, True, False]


def test_sinks_of_a_cache():
    q, k, v, _ = arrays()
    whole = jnp.ones((2, LENGTH), jnp.int32)
    want = attention.causal_attention(q, k, v, whole, 0.3, sinks_N=SINKS)
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))
    got = attention.cached_attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen, 0.3, sinks_N=SINKS
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_a_traced_kind_chooses_the_window():
    windows = (None, 3, 5)

    def run(kind):
        return with_gradients(
            lambda q, k, v: attention.causal_attention(
                q, k, v, SEGMENTS, 0.3, windows=windows, kind=kind
            )
        )

    traced = jax.jit(run)
    for kind in range(3):
        # Compiled whole against one operation at a time: roundings differ by 2e-6 on one processor.
        chex.assert_trees_all_close(traced(jnp.int32(kind)), run(kind), rtol=0, atol=5e-6)


def test_keys_outside_of_the_window_are_not_worked_on(monkeypatch):
    """Of a long row, a block of queries is multiplied with its own keys and a window before."""
    monkeypatch.setattr(attention, "_LEAST_BLOCK", 16)
    q, k, v, g = arrays(128)
    segments = jnp.ones((2, 128), jnp.int32)

    def widest(window):
        def run(q, k, v):
            return attention.causal_attention(q, k, v, segments, 0.3, windows=(window,))

        jaxpr = jax.make_jaxpr(lambda: jax.vjp(run, q, k, v)[1](g))()
        return max(
            var.aval.shape[-1]
            for eqn in equations(jaxpr.jaxpr)
            if eqn.primitive.name == "exp"
            for var in eqn.outvars
            if var.aval.ndim == 5
        )

    assert widest(None) == 128
    assert widest(10) == 16 + 9


def equations(jaxpr):
    """All equations of a jaxpr and of those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(sub, "eqns"):
                yield from equations(sub)
            elif hasattr(sub, "jaxpr"):
                yield from equations(sub.jaxpr)
