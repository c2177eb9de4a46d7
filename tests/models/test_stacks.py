"""Layers in groups of stacks: what is run, in which order, how much is compiled, and names."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from purelora.models import layers, stacks
from tests.support import tiny

MIXED, EXPERTS = "qwen3_moe with plain layers", "gemma4 with experts"


def expanded(runs, times=None):
    """The sequence that runs stand for, or that they do when each is repeated so often."""
    found = []
    for run, count in zip(runs, times or [run.times for run in runs], strict=True):
        for number in range(count):
            is_last = number == run.times - 1
            found += ([run.body] if isinstance(run.body, int)
                      else expanded(run.body, run.last if is_last else None))  # fmt: skip
    return found


def bodies(runs):
    """How many layers are compiled."""
    return sum(1 if isinstance(run.body, int) else bodies(run.body) for run in runs)


@hypothesis.given(st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_runs_are_the_sequence(sequence):
    runs = stacks.runs(sequence)
    assert expanded(runs) == sequence
    counts = [stacks.counts(run) for run in runs]
    assert {s: sum(count[s].real for count in counts if s in count) for s in set(sequence)} == {
        s: sequence.count(s) for s in set(sequence)}  # fmt: skip
    rows = sum(count.rows for each in counts for count in each.values())
    assert rows <= stacks.MOST_ROWS * len(sequence)


@pytest.mark.parametrize(
    ("sequence", "compiled"),
    [("s" * 9, 1), ("sssssf" * 10, 2), ("sssssf" * 3 + "ss", 2), ("dsss" * 5, 2),
     ("sssssf" * 10 + "sssf", 2), ("sssssfsf", 2), ("sssfs", 3),
     ("ddd" + "s" * 40, 2), ("ssssf" * 3 + "SSSSF" * 4, 4), ("sdsdsd", 2), ("sf", 2)],
)  # fmt: skip
def test_what_repeats_is_compiled_once(sequence, compiled):
    runs = stacks.runs([ord(letter) for letter in sequence])
    assert bodies(runs) == compiled


def test_every_layer_is_in_one_stack():
    m = tiny.model(MIXED)
    groups = stacks.of(m.config)
    assert [(stack.path, stack.layers) for stack in groups] == [
        ("layers.dense", (0, 2, 4, 5)), ("layers.sparse", (1, 3))]  # fmt: skip
    assert stacks.numbers(groups) == [0, 1, 0, 1, 0, 0]
    assert [stack.cfg.experts is None for stack in groups] == [True, False]
    assert [stack.path for stack in stacks.of(tiny.model("llama").config)] == ["layers"]


def test_scanned_is_unrolled(monkeypatch):
    """Activations, and the statistics of the layers with experts in their order.

    Masks of dropout go by a layer's number in the model.
    """
    m = tiny.with_lora(tiny.model(EXPERTS))
    assert [stack.layers for stack in stacks.of(m.config)] == [(0, 2), (1, 3)]
    base, adapters, numbers = tiny.weights(m), tiny.adapters(m), []

    def recorded(self, index):
        jax.debug.callback(lambda number: numbers.append(int(number)), index)
        return self

    monkeypatch.setattr(layers.Dropout, "for_layer", recorded)
    dropout = layers.Dropout(jax.random.key(0), jnp.arange(2), 0.0)

    @functools.partial(jax.jit, static_argnums=1)
    def run(adapters, scan):
        bound, inputs = m.bind(base, adapters), tiny.inputs(tiny.tokens(2))
        how = {"dtype": jnp.float32, "scan_layers": scan, "remat": False}
        return m.hidden(bound, inputs, dropout=dropout, **how)

    (want, router), (got, other) = run(adapters, False), run(adapters, True)
    assert router.counts_BE.shape == (4, 2, 5)
    assert np.abs(np.diff(router.probs_BE, axis=0)).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    chex.assert_trees_all_close(other, router, rtol=0, atol=1e-4)
    jax.effects_barrier()
    assert sorted(numbers) == [0, 0, 1, 1, 2, 2, 3, 3]


def compiled_size(periods, rest=()):
    """Operations of the gradient with that many times a plain and two sparse layers."""
    plain = [3 * i for i in range(periods)] + [3 * periods + i for i in rest]
    depth = 3 * periods + len(rest)
    m = tiny.with_lora(
        tiny.model(MIXED, num_hidden_layers=depth, mlp_only_layers=plain, decoder_sparse_step=1)
    )
    shapes = jax.eval_shape(lambda: (tiny.adapters(m), tiny.weights(m)))
    inputs = tiny.inputs(tiny.tokens(1))

    def loss(adapters, base):
        how = {"dtype": jnp.float32, "scan_layers": True, "remat": False}
        return m.hidden(m.bind(base, adapters), inputs, **how)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(*shapes).as_text()
    assert text.count(" = stablehlo.dot_general") > 20
    return text.count(" = ")


def test_what_is_compiled_does_not_grow_with_periods():
    # Not 2 or 4 periods: stacks of the same shape would share functions.
    assert compiled_size(3, rest=(0, 1)) == compiled_size(7, rest=(0, 1))


@pytest.mark.parametrize("remat", [True, False])
def test_no_weights_are_copied(remat):
    """Scans index the frozen weights of whole stacks: they neither slice nor save any."""
    # Six experts: with four, the router would have the shape of an adapter.
    m = tiny.with_lora(tiny.model(MIXED, num_experts=6))
    matrices = {leaf.shape[1:] for leaf in m.flat_infos.values()
                if leaf.is_matrix and leaf.is_stacked}  # fmt: skip
    shapes = jax.eval_shape(lambda: (tiny.adapters(m), tiny.weights(m)))
    inputs = tiny.inputs(tiny.tokens(1))

    def loss(adapters, base):
        bound = m.bind(base, adapters)
        how = {"dtype": jnp.float32, "scan_layers": True, "remat": remat}
        return m.hidden(bound, inputs, **how)[0].sum()

    eqns = jax.make_jaxpr(jax.grad(loss))(*shapes).jaxpr.eqns
    scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    assert len(scans) == 4  # Two runs, forward and backward.
    sizes = {len(stack.layers) for stack in stacks.of(m.config)}
    read = [var.aval.shape for eqn in scans for var in eqn.params["jaxpr"].jaxpr.invars]
    weights = [shape for shape in read if any(shape[-len(w) :] == w for w in matrices)]
    assert len(weights) > 20 and {shape[0] for shape in weights} == sizes
    given = [var.aval.shape for eqn in scans for var in eqn.outvars]
    assert not [shape for shape in given if any(shape[-len(w) :] == w for w in matrices)]


def test_adapters_of_some_layers_by_their_numbers():
    """Names, patterns and `layers_to_transform` count layers in the model, not in a stack."""
    m = tiny.with_lora(
        tiny.model(MIXED), ["q_proj"], layers_to_transform=(2, 3, 5), rank_pattern={"5.*q_proj": 2}
    )
    dense, sparse = (m.adaptation.targets[f"layers.{name}.self_attn.q_proj"]
                     for name in ("dense", "sparse"))  # fmt: skip
    assert (dense.layers, dense.ranks, sparse.layers) == ((1, 3), (4, 2), (1,))
    assert sparse.names == ("model.layers.3.self_attn.q_proj",)
    names = {n for all_names in m.hf_names.values() for n in all_names}
    assert "model.layers.2.mlp.up_proj.weight" in names
    assert "model.layers.3.mlp.up_proj.weight" not in names
    assert all(leaf.shape[0] == len(m.hf_names[path]) for path, leaf in m.flat_infos.items()
               if leaf.is_stacked)  # fmt: skip
