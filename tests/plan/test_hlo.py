"""Reading compiled programs: loops are multiplied out and groups are understood."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import farspan
from farspan.plan.hlo import collectives, instructions

NESTED = """
HloModule m

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %s = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %s)
}

%test (p: (s32[], f32[4])) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %w = (s32[], f32[4]{0}) while(%p), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (a: f32[4]) -> f32[8] {
  %w = (s32[], f32[4]{0}) while(%t), condition=%test, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %g = f32[8]{0} all-gather(%x), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}
  %r = bf16[2]{0} reduce-scatter(%x), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %one = f32[8]{0} all-reduce(%x), channel_id=4, replica_groups={{0},{1}}, to_apply=%add
  ROOT %a = f32[8]{0} add(%g, %g)
}
"""  # noqa: E501


def test_nested_loops_and_groups():
    assert collectives(NESTED) == {
        "collective-permute": (15, 15 * 16),
        "all-gather": (1, 16),
        "reduce-scatter": (1, 16),
    }
    permute = next(i for i in instructions(NESTED) if i.op == "collective-permute")
    assert (permute.count, permute.shapes) == (15, (("f32", (4,)),))


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
