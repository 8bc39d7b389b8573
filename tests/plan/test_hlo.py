"""Reading compiled programs: loops are multiplied out, groups and schedules are understood."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import farspan
from farspan.plan.dataflow import hideable_transfers
from farspan.plan.hlo import (
    KernelLaunches,
    Overlap,
    collectives,
    instructions,
    kernel_launches,
    largest_stacked_bytes,
    overlap,
    transfers,
)

NESTED = """
HloModule m

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %s = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %s)
}

%test (q: (s32[], f32[4])) -> pred[] {
  %q = (s32[], f32[4]{0}) parameter(0)
  %a = s32[] get-tuple-element(%q), index=0
  ROOT %c = pred[] compare(%a, %a), direction=LT
}

%outer (r: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = (s32[], f32[4]{0}) parameter(0)
  ROOT %w = (s32[], f32[4]{0}) while(%r), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (a: f32[4], b: bf16[8]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %b = bf16[8]{0} parameter(1)
  %n = s32[] constant(0)
  %t = (s32[], f32[4]{0}) tuple(%n, %a)
  %w = (s32[], f32[4]{0}) while(%t), condition=%test, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %x = f32[4]{0} get-tuple-element(%w), index=1
  %g = f32[8]{0} all-gather(%x), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}
  %r = bf16[2]{0} reduce-scatter(%b), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %one = f32[8]{0} all-reduce(%g), channel_id=4, replica_groups={{0},{1}}, to_apply=%add
  ROOT %z = f32[8]{0} add(%g, %g)
}
"""  # noqa: E501

# A ring of four on TPU, in the compiler's ways: the loop's length is in its condition alone, and a
# kernel is skipped where it has nothing to do.
RING = """
HloModule jit_ring, is_scheduled=true, num_partitions=4

%limit (s: (s32[], bf16[8,128], f32[8,128], s32[])) -> pred[] {
  %s = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%s), index=0
  %end = s32[] get-tuple-element(%s), index=3
  ROOT %less = pred[]{:T(512)} compare(%at, %end), direction=LT
}

%skip (k0: (bf16[8,128], f32[8,128])) -> (f32[8,128]) {
  %k0 = (bf16[8,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %o0 = f32[8,128]{1,0} get-tuple-element(%k0), index=1
  ROOT %t0 = (f32[8,128]{1,0}) tuple(%o0)
}

%meet (k1: (bf16[8,128], f32[8,128])) -> (f32[8,128]) {
  %k1 = (bf16[8,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %v1 = bf16[8,128]{1,0} get-tuple-element(%k1), index=0
  %o1 = f32[8,128]{1,0} get-tuple-element(%k1), index=1
  %attend.2 = f32[8,128]{1,0} custom-call(%v1), custom_call_target="tpu_custom_call", metadata={op_name="jit(ring)/while/body/cond/branch_1_fun/attend/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzvUjoB"}}
  %sum = f32[8,128]{1,0} add(%o1, %attend.2)
  ROOT %t1 = (f32[8,128]{1,0}) tuple(%sum)
}

%step (s: (s32[], bf16[8,128], f32[8,128], s32[])) -> (s32[], bf16[8,128], f32[8,128], s32[]) {
  %s = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%s), index=0
  %keys = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%s), index=2
  %end = s32[] get-tuple-element(%s), index=3
  %send = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%keys), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %one = s32[] constant(1)
  %next = s32[]{:T(128)} add(%at, %one)
  %pair = (bf16[8,128]{1,0}, f32[8,128]{1,0}) tuple(%keys, %out)
  %met = (f32[8,128]{1,0}) conditional(%at, %pair, %pair), branch_computations={%skip, %meet}
  %new = f32[8,128]{1,0} get-tuple-element(%met), index=0
  %came = bf16[8,128]{1,0:T(8,128)(2,1)} collective-permute-done(%send)
  ROOT %t = (s32[], bf16[8,128]{1,0}, f32[8,128]{1,0}, s32[]) tuple(%next, %came, %new, %end)
}

ENTRY %main.1_spmd (k: bf16[8,128]) -> bf16[8,128] {
  %k = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %nothing = f32[8,128]{1,0} broadcast(%zero), dimensions={}
  %start = (s32[], bf16[8,128]{1,0}, f32[8,128]{1,0}, s32[]) tuple(%zero, %k, %nothing, %three)
  %ring = (s32[], bf16[8,128]{1,0}, f32[8,128]{1,0}, s32[]) while(%start), condition=%limit, body=%step
  %last = bf16[8,128]{1,0} get-tuple-element(%ring), index=1
  %found = f32[8,128]{1,0} get-tuple-element(%ring), index=2
  %attend.3 = f32[8,128]{1,0} custom-call(%last, %found), custom_call_target="tpu_custom_call", metadata={op_name="jit(ring)/attend/pallas_call"}
  %home = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[], u32[]) collective-permute-start(%attend.3), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %end = f32[8,128]{1,0} collective-permute-done(%home)
}
"""  # noqa: E501

# The ways to write an asynchronous collective other than those above.
ASYNC = """
HloModule jit_async, is_scheduled=true

%called (c: f32[8]) -> f32[32] {
  %c = f32[8]{0} parameter(0)
  ROOT %g.1 = f32[32]{0} all-gather(%c), replica_groups=mesh['x'=4,'y'=2] {'x'}, dimensions={0}
}

%begin (b: f32[8]) -> (f32[8], f32[32]) {
  %b = f32[8]{0} parameter(0)
  %g.2 = f32[32]{0} all-gather(%b), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %m = (f32[8]{0}, f32[32]{0}) custom-call(%g.2), custom_call_target="AsyncCollectiveStart"
}

%go_on (d: f32[8], e: f32[16,16]) -> (f32[8], f32[32], f32[16,16]) {
  %d = f32[8]{0} parameter(0)
  %e = f32[16,16]{1,0} parameter(1)
  %g.3 = f32[32]{0} all-gather(%d), replica_groups=[2,4]<=[8], dimensions={0}
  %y = f32[16,16]{1,0} convolution(%e, %e), dim_labels=bf_io->bf
  ROOT %n = (f32[8]{0}, f32[32]{0}, f32[16,16]{1,0}) tuple(%d, %g.3, %y)
}

%finish (f: f32[8]) -> f32[32] {
  %f = f32[8]{0} parameter(0)
  %g.4 = f32[32]{0} all-gather(%f), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %o = f32[32]{0} custom-call(%g.4), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (h: f32[32]) -> f32[8] {
  %h = f32[32]{0} parameter(0)
  %r = f32[32]{0} all-reduce(%h), replica_groups={{0,1,2,3}}, to_apply=%add
  %u = s32[] constant(0)
  ROOT %part = f32[8]{0} dynamic-slice(%r, %u), dynamic_slice_sizes={8}
}

ENTRY %main (p: f32[8], w: f32[16,16]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %w = f32[16,16]{1,0} parameter(1)
  %a-start = ((), (), s32[1]) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %first = f32[16,16]{1,0} custom-call(%w), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/early/pallas_call"}
  %a-update = ((f32[8]{0}), f32[32]{0}) call-update(%a-start, %p)
  %late.7 = f32[16,16]{1,0} custom-call(%first), custom_call_target="tpu_custom_call"
  %a-done = f32[32]{0} call-done(%a-update)
  %f-start = (f32[8]{0}, f32[32]{0}) fusion(%p), kind=kCustom, calls=%begin
  %f0 = f32[8]{0} get-tuple-element(%f-start), index=0
  %f-on = (f32[8]{0}, f32[32]{0}, f32[16,16]{1,0}) fusion(%f0, %late.7), kind=kOutput, calls=%go_on
  %f1 = f32[8]{0} get-tuple-element(%f-on), index=0
  %f-done = f32[32]{0} fusion(%f1), kind=kCustom, calls=%finish
  %buffer = f32[16,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %copy-start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%p)
  %copy-done = f32[8]{0} copy-done(%copy-start)
  ROOT %scattered = f32[8]{0} fusion(%f-done), kind=kCustom, calls=%all-reduce-scatter.1
}
"""  # noqa: E501

# A transfer that starts in one trip of a loop and ends in the next.
CARRIED = """
HloModule jit_carried, is_scheduled=true

%more (s: ((f32[8], f32[8], u32[], u32[]), pred[])) -> pred[] {
  %s = ((f32[8]{0}, f32[8]{0}, u32[], u32[]), pred[]) parameter(0)
  ROOT %go = pred[] get-tuple-element(%s), index=1
}

%step (s: ((f32[8], f32[8], u32[], u32[]), pred[])) -> ((f32[8], f32[8], u32[], u32[]), pred[]) {
  %s = ((f32[8]{0}, f32[8]{0}, u32[], u32[]), pred[]) parameter(0)
  %way = (f32[8]{0}, f32[8]{0}, u32[], u32[]) get-tuple-element(%s), index=0
  %go = pred[] get-tuple-element(%s), index=1
  KERNEL %came = f32[8]{0} collective-permute-done(%way)
  %onward = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%came), source_target_pairs={{0,1},{1,0}}
  ROOT %t = ((f32[8]{0}, f32[8]{0}, u32[], u32[]), pred[]) tuple(%onward, %go)
}

ENTRY %main (a: f32[8], b: pred[]) -> pred[] {
  %a = f32[8]{0} parameter(0)
  %b = pred[] parameter(1)
  %first = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %t = ((f32[8]{0}, f32[8]{0}, u32[], u32[]), pred[]) tuple(%first, %b)
  %w = ((f32[8]{0}, f32[8]{0}, u32[], u32[]), pred[]) while(%t), condition=%more, body=%step
  ROOT %end = pred[] get-tuple-element(%w), index=1
}
"""  # noqa: E501
IN_FLIGHT_KERNEL = '%k = f32[8]{0} custom-call(), custom_call_target="tpu_custom_call"\n '


def test_nested_loops_and_groups():
    assert collectives(NESTED) == {
        "collective-permute": (15, 15 * 16),
        "all-gather": (1, 16),
        "reduce-scatter": (1, 16),
    }
    permute = next(i for i in instructions(NESTED) if i.op == "collective-permute")
    assert (permute.count, permute.shapes) == (15, (("f32", (4,)),))


def test_a_ring_that_is_hidden_but_for_the_way_home():
    onward, home = transfers(RING)[::-1]
    assert (onward.loops, onward.count, onward.operand_bytes) == ((3,), 3, 8 * 128 * 2)
    assert onward.pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert (onward.asynchronous, onward.kernels) == (True, ("attend",))
    assert (home.asynchronous, home.kernels, home.count) == (True, (), 1)
    keys, out = 3 * 8 * 128 * 2, 8 * 128 * 4
    assert overlap(RING) == (
        Overlap("collective-permute", 4, 3, 0, keys + out, keys + out, keys, 0),
    )
    assert kernel_launches(RING) == (KernelLaunches("attend", 2, 1, 4),)
    # Keys that arrive are for the next kernel; what goes home is made by the last.
    assert hideable_transfers(RING) == {("step", "send"): 3}
    assert largest_stacked_bytes(RING, 8) == 8 * 128 * 4
    assert largest_stacked_bytes(RING, 4) == 0


def test_a_transfer_that_ends_before_the_kernel_is_hideable_but_not_hidden():
    done = "  %came = bf16[8,128]{1,0:T(8,128)(2,1)} collective-permute-done(%send)\n"
    early = RING.replace(done, "").replace("  %pair = ", f"{done}  %pair = ")
    onward = transfers(early)[-1]
    assert onward.asynchronous
    assert not onward.hidden
    assert hideable_transfers(early) == {("step", "send"): 3}


def test_every_way_to_write_an_asynchronous_collective():
    called, fused, scattered = transfers(ASYNC)
    # The update brings the operands, so what lies before it hides nothing.
    assert (called.kind, called.group, called.kernels) == ("all-gather", 4, ("late",))
    assert (called.operand_bytes, called.sent_bytes) == (32, 96)
    assert (fused.kind, fused.kernels, fused.matmuls) == ("all-gather", (), 1)
    assert fused.asynchronous
    assert (scattered.kind, scattered.operand_bytes) == ("reduce-scatter", 128)
    assert not scattered.asynchronous
    assert {row.kind: (row.hidden_transfers, row.matmul_transfers) for row in overlap(ASYNC)} == {
        "all-gather": (1, 1),
        "reduce-scatter": (0, 0),
    }
    assert [row.name for row in kernel_launches(ASYNC)] == ["early", "late"]
    assert collectives(ASYNC) == {"all-gather": (2, 64), "reduce-scatter": (1, 128)}


@pytest.mark.parametrize("kernel", [True, False])
def test_a_transfer_that_the_next_trip_ends(kernel):
    text = CARRIED.replace("KERNEL", IN_FLIGHT_KERNEL if kernel else "")
    first, onward = transfers(text)
    assert onward.loops == (None,), "data decides how often the loop runs"
    assert onward.count == 1
    assert (first.hidden, onward.hidden) == (False, kernel)


def test_a_program_of_this_jax():
    mesh = farspan.make_mesh(cp_ring=4)

    def local(x):
        def hop(x, _):
            return lax.ppermute(x, "cp_ring", [(i, (i + 1) % 4) for i in range(4)]), None

        x, _ = lax.scan(hop, x, length=6)
        return lax.psum_scatter(lax.all_gather(x, "cp_ring", tiled=True), "cp_ring", tiled=True)

    run = jax.shard_map(local, mesh=mesh, in_specs=P("cp_ring"), out_specs=P("cp_ring"))
    text = jax.jit(run).lower(jnp.zeros(64)).compile().as_text()
    assert collectives(text) == {
        "collective-permute": (6, 6 * 64),
        "all-gather": (1, 64),
        "reduce-scatter": (1, 256),
    }
    assert not any(found.asynchronous for found in transfers(text))
