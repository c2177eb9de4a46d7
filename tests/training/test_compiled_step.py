"""What the compiled step moves and keeps, read off its HLO text on 8 devices.

Codes are gathered, never floats; no gathered weight is kept for the backward pass; the adapters'
gradients are reduced once, outside every loop; the base is neither returned nor donated.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from purelora.analysis import hlo
from purelora.core import trees
from purelora.sharding import collectives, specs
from tests.support import tiny
from tests.support.compiled_steps import FSDP, FSDP_REMAT, KERNELS, compiled
from tests.support.tiny import Case

SHARDED = Case("int8", data=2, fsdp=4, accum=2, sharded=True)
OTHER_SIZES = Case("int8", data=2, fsdp=4, accum=4, layers=2, remat=True, dtype="bfloat16")
INT4 = Case("int4", fsdp=8, accum=2, remat=True)
NF4 = Case("nf4", data=2, fsdp=4, accum=2)
FP8 = Case("fp8", fsdp=4, accum=2, dtype="bfloat16")
CASES = (FSDP, FSDP_REMAT, SHARDED, OTHER_SIZES, INT4, NF4, FP8)


def ids(case: Case) -> str:
    return str(case)


def stored(case: Case) -> tuple[str, int]:
    """HLO's name of the type that codes lie in, and how many of them an element holds."""
    return {"int8": ("s8", 1), "int4": ("u8", 2), "nf4": ("u8", 2), "fp8": ("u8", 1)}[case.qtype]


def kernels(case: Case) -> set[tuple[int, int]]:
    """Shapes of the gathered codes."""
    return {(n_in // stored(case)[1], n_out) for n_in, n_out in KERNELS}


def test_the_reader_finds_reductions_in_loops():
    """The control of the tests below: a psum two calls deep in a scan, and one outside."""

    def inner(total, y):
        return total + collectives.varying(collectives.psum(y * total)), None

    def outer(total, x):
        return jax.lax.scan(inner, total, x)

    def local(x):
        return collectives.psum(jax.lax.scan(lambda t, y: (outer(t, y)[0], None), x[0, 0], x)[0])

    rows = P(None, None, specs.BATCH_AXES)
    step = jax.jit(collectives.shard_step(local, tiny.mesh(2, 4), in_specs=rows, out_specs=P()))
    program = hlo.Program.of(step.lower(jnp.ones((3, 5, 8, 7))).compile().as_text())
    assert len(program.results("all-reduce", looped=True)) == 1
    assert len(program.results("all-reduce", looped=False)) == 1


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_codes_are_gathered_never_floats(case):
    gathered = compiled(case).results("all-gather", looped=True)
    codes, _ = stored(case)
    assert {shape for dtype, shape in gathered if dtype == codes} >= kernels(case)
    scales = {(1, 32), (32, 1)}  # Of the matrices whose output dimension is sharded.
    assert {shape for dtype, shape in gathered if dtype != codes} <= scales
    # Once a step: the adapters, if sharded, and what a compiler moves out of the micro-batch loop.
    once = compiled(case).results("all-gather", looped=False)
    adapters = {(case.layers, *shape) for shape in ((32, 4), (4, 32))} if case.sharded else set()
    assert {shape for dtype, shape in once if dtype != codes} == adapters


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_weights_are_gathered_again_in_the_backward_pass(case):
    """Each kernel once forward and once backward, and with remat once more or not at all."""
    gathered = compiled(case).results("all-gather", looped=True)
    codes = [a for a in gathered if a[0] == stored(case)[0] and a[1] in kernels(case)]
    assert len(codes) >= 2 * 7


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_gathered_base_is_never_stacked(case):
    """Kept for the backward pass, a gathered kernel would be a buffer [L, in, out]."""
    stacked = {(case.layers, *kernel) for kernel in KERNELS | kernels(case)}
    found = {(dtype, shape) for dtype, shape in hlo.arrays(compiled(case).text) if shape in stacked}
    assert not found
    codes, each = stored(case)
    shards = {
        (codes, (case.layers, 32 // each // case.fsdp, 48)),
        (codes, (case.layers, 48 // each, 32 // case.fsdp)),
    }
    assert shards <= set(hlo.arrays(compiled(case).text))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_adapter_gradients_are_reduced_once_outside_every_loop(case):
    program = compiled(case)
    for kind in ("all-reduce", "reduce-scatter"):
        assert program.results(kind, looped=True) == []
    leaves = jax.tree.leaves(tiny.trainer(case).trainable)
    sharded = [a for a in leaves if not a.sharding.is_fully_replicated]
    assert len(sharded) == (7 if case.sharded else 0)
    # A sharded leaf is scattered over fsdp and summed over data; the scalars are sums and norms.
    summed = [a for a in program.results("all-reduce", looped=False) if a[1]]
    assert len(summed) == len(leaves)
    assert len(program.results("reduce-scatter", looped=False)) == len(sharded)
    if not case.sharded:
        assert {shape for _, shape in summed} == {a.shape for a in leaves}


def test_reductions_do_not_grow_with_layers_or_micro_batches():
    def count(case: Case) -> tuple[int, int]:
        program = compiled(case)
        ops = len(list(program.instructions("all-reduce", looped=False)))
        return ops, len(program.results("all-reduce", looped=False))

    assert FSDP.layers != OTHER_SIZES.layers and FSDP.accum != OTHER_SIZES.accum
    assert count(FSDP) == count(OTHER_SIZES)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_base_is_neither_returned_nor_donated(case):
    text = compiled(case).text
    header = text[: text.index("\n")]
    trainer = tiny.trainer(case)
    states = len(jax.tree.leaves(trainer.new_state()))
    aliased = [int(n) for n in re.findall(r"\{\d*\}: \((\d+),", header)]
    assert aliased == list(range(states))
    outputs = hlo.arrays(header.partition("->")[2])
    assert len(outputs) == states + len(("loss", "weight", "grad_norm", "rate", "applied"))
    assert stored(case)[0] not in {dtype for dtype, _ in outputs}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.base))
    assert trees.count(trainer.base) > 0
