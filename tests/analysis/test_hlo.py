"""The reader of HLO text, against text written by hand and programs whose collectives are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from purelora.analysis import hlo
from purelora.sharding import collectives, specs
from tests.support import tiny

WRITTEN = """\
HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=8, entry_computation_layout=\
{(f32[4]{0})->f32[4]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %v = f32[4]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %codes = s8[8,6]{1,0} all-gather(%v), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %v)
}

%condition (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%helper (h: f32[4]) -> f32[4] {
  %h = f32[4]{0} parameter(0)
  ROOT %moved = f32[4]{0} collective-permute(%h), channel_id=2, source_target_pairs={{0,1},{1,0}}
}

%outer_body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[], f32[4]{0}) parameter(0)
  %w = (s32[], f32[4]{0}) while(%q), condition=%condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"5"}}
  %u = f32[4]{0} get-tuple-element(%w), index=1
  %j = s32[] get-tuple-element(%w), index=0
  %called = f32[4]{0} call(%u), to_apply=%helper
  ROOT %r = (s32[], f32[4]{0}) tuple(%j, %called)
}

%unused (z: f32[4]) -> f32[4] {
  %z = f32[4]{0} parameter(0)
  ROOT %never = f32[4]{0} all-reduce(%z), replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="while(all-reduce(x))"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[4]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"3"}}
  %out = f32[4]{0} get-tuple-element(%loop), index=1
  %both = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%out, %b), channel_id=3, \
replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}, to_apply=%add
  %part = f32[2]{0} reduce-scatter(%out), replica_groups={{0,1,2,3},{4,5,6,7}}, \
dimensions={0}, to_apply=%add
  %begun = (s8[2]{0}, s8[8]{0}) all-gather-start(%c), replica_groups=mesh['data'=2,'fsdp'=4] \
{'fsdp'}, dimensions={0}
  %ended = s8[8]{0} all-gather-done(%begun)
  ROOT %done = f32[4]{0} copy(%out)
}
"""


def program() -> hlo.Program:
    return hlo.Program.of(WRITTEN)


def test_computations_and_instructions():
    read = program()
    assert read.entry == "main" and read.devices == 8
    assert list(read.computations) == [
        "add", "inner_body", "condition", "helper", "outer_body", "unused", "main"
    ]  # fmt: skip
    kinds = [i.kind for i in read.computations["main"]]
    assert kinds == ["parameter", "constant", "tuple", "while", "get-tuple-element", "all-reduce",
                     "reduce-scatter", "all-gather", "all-gather-done", "copy"]  # fmt: skip
    assert read.computations["add"][2].name == "sum"


def test_trip_counts_multiply_through_loops_and_calls():
    assert program().runs == {
        "main": 1, "outer_body": 3, "helper": 3, "inner_body": 15, "condition": 4 + 3 * 6,
        "add": 2, "unused": 0,
    }  # fmt: skip
    assert program().looped == {"outer_body", "inner_body", "condition", "helper"}
    assert program().unknown_loops == ()
    assert hlo.Program.of(WRITTEN.replace('{"n":"5"}', "{}")).unknown_loops == ("w",)


def test_collectives_with_their_groups_and_bytes():
    f32 = hlo.Array("f32", (4,))
    found = {c.kind + ("*" if c.in_loop else ""): c for c in program().collectives()}
    assert len(found) == len(program().collectives())
    assert found == {
        "all-gather*": hlo.Collective("all-gather", (hlo.Array("s8", (8, 6)),), 2, 15, True),
        "collective-permute*": hlo.Collective("collective-permute", (f32,), 2, 3, True),
        "all-reduce": hlo.Collective("all-reduce", (f32, hlo.Array("bf16", (2, 3))), 8, 1, False),
        "reduce-scatter": hlo.Collective("reduce-scatter", (hlo.Array("f32", (2,)),), 4, 1, False),
        "all-gather": hlo.Collective("all-gather", (hlo.Array("s8", (8,)),), 4, 1, False),
    }
    received = {name: c.received_bytes for name, c in found.items()}
    assert received == {
        "all-gather*": 24,  # The half that it has not.
        "collective-permute*": 16,
        "all-reduce": 2 * 28 * 7 // 8,
        "reduce-scatter": 3 * 8,  # From each of the others, their part of its sum.
        "all-gather": 6,
    }
    assert found["all-reduce"].dtypes == ("f32", "bf16")


def test_sums_that_the_compiler_has_widened():
    text = WRITTEN.replace("to_apply=%add\n  %part", "to_apply=%add.clone_promoted\n  %part")
    (found,) = (c for c in hlo.Program.of(text).collectives() if c.kind == "all-reduce")
    assert found.dtypes == ("bf16",) and found.received_bytes == 2 * (8 + 12) * 7 // 8


def test_traffic_adds_up_what_is_alike():
    rows = {(row.kind, row.group_size): row for row in program().traffic()}
    assert rows["all-gather", 2] == hlo.Traffic("all-gather", ("s8",), 2, 15, 15 * 24)
    assert rows["all-reduce", 8].runs == 1
    sizes = [row.received_bytes for row in program().traffic()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("all-reduce(%x), replica_groups={{0,1,2},{3,4,5}}", 3),
        ("all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("all-reduce(%x), replica_groups=[8]<=[8]", 8),
        ("all-gather(%x), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp','tensor'}", 4),
        ("all-gather(%x), replica_groups=mesh['fsdp'=8] {'fsdp':(1)4}", 4),
        ("all-reduce(%x), replica_groups={}", 8),
        ("all-reduce(%x), channel_id=1", 8),
    ],
)
def test_group_sizes_in_every_spelling(text, ways):
    assert hlo.group_size(text, 8) == ways


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,4]{1,0}", 48), ("pred[5]", 5), ("bf16[]", 2), ("s4[5]", 3), ("f8e4m3fn[2,2]", 4),
        ("c64[2]", 16), ("token[]", 0), ("f32[0,7]", 0),
    ],
)  # fmt: skip
def test_bytes_of_arrays(text, size):
    (array,) = hlo.arrays(text)
    assert array.bytes == size


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no HLO text"):
        hlo.Program.of("module @jit_f {\n}")


def test_collectives_of_a_compiled_program():
    """A psum in nested scans, a gather in the outer one, and two psums at the end that combine."""

    def inner(total, y):
        return total + collectives.psum((y * total).sum()), None

    def outer(total, x):
        codes = jax.lax.all_gather(x[0].astype(jnp.int8), "fsdp", tiled=True)
        total, _ = jax.lax.scan(inner, total, x)
        return total + collectives.psum(codes.astype(jnp.float32).sum()), None

    def local(x, y):
        total, _ = jax.lax.scan(outer, collectives.psum(x[0, 0, 0] * 0), x)
        return jax.lax.psum((x[0], y), "data"), total

    rows, by_fsdp = P(None, None, specs.BATCH_AXES), P(None, "fsdp")
    mapped = jax.shard_map(
        local, mesh=tiny.mesh(2, 4), in_specs=(rows, P()), out_specs=((by_fsdp, P()), P()),
        check_vma=False,
    )  # fmt: skip
    text = jax.jit(mapped).lower(jnp.ones((3, 5, 16)), jnp.ones(7)).compile().as_text()
    read = hlo.Program.of(text)
    assert read.unknown_loops == () and read.devices == 8
    inside = [c for c in read.collectives() if c.in_loop]
    assert {(c.kind, c.group_size, c.arrays[0], c.runs) for c in inside} == {
        ("all-gather", 4, hlo.Array("s8", (8,)), 3),
        ("all-reduce", 8, hlo.Array("f32", ()), 15),
        ("all-reduce", 8, hlo.Array("f32", ()), 3),
    }
    (last,) = [c for c in read.collectives() if not c.in_loop and c.group_size == 2]
    assert set(last.arrays) == {hlo.Array("f32", (5, 2)), hlo.Array("f32", (7,))}
    assert last.runs == 1 and last.received_bytes == 4 * (10 + 7)
