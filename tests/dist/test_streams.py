"""Streams: several orders in which shards go round a ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import farspan
from farspan.dist import Streams, mesh_link_bytes, most_streams, ring_cycles


def test_two_streams_go_both_ways_round_the_ring_of_the_mesh():
    streams = ring_cycles(farspan.make_mesh(cp_ring=4), 2)
    assert streams == Streams(((0, 1, 2, 3), (0, 3, 2, 1)))
    assert set(streams.pairs(0)) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert set(streams.pairs(1)) == {(1, 0), (2, 1), (3, 2), (0, 3)}
    assert set(streams.pairs(0, distance=-1)) == set(streams.pairs(1))
    np.testing.assert_array_equal(streams.visitor(0, 1), [3, 0, 1, 2])
    np.testing.assert_array_equal(streams.visitor(1, 1), [1, 2, 3, 0])
    assert hash(streams) == hash(ring_cycles(farspan.make_mesh(cp_ring=4), 2))


def test_what_visits_is_what_visitor_says_and_every_shard_comes_once():
    mesh = farspan.make_mesh(cp_ring=8)
    assert most_streams(mesh) == 6
    streams = ring_cycles(mesh, 6)

    def go_round(shard, stream, distance):
        def local(shard):
            seen = [shard]
            for _ in range(streams.degree - 1):
                pairs = streams.pairs(stream, distance)
                seen.append(lax.ppermute(seen[-1], "cp_ring", pairs))
            return jnp.stack(seen)

        return jax.shard_map(local, mesh=mesh, in_specs=P("cp_ring"), out_specs=P(None, "cp_ring"))(
            shard
        )

    for stream in range(streams.count):
        for distance in (1, -1):
            seen = np.asarray(go_round(jnp.arange(8), stream, distance))
            expected = [streams.visitor(stream, distance * step) for step in range(8)]
            np.testing.assert_array_equal(seen, expected)
            np.testing.assert_array_equal(np.sort(seen, axis=0), np.arange(8)[:, None] + 0 * seen)


def test_no_two_streams_send_between_the_same_two_devices():
    streams = ring_cycles(farspan.make_mesh(cp_ring=8), 6)
    sent = [pair for stream in range(6) for pair in streams.pairs(stream)]
    assert len(set(sent)) == len(sent) == 48


def test_a_ring_may_go_over_several_axes():
    mesh = farspan.make_mesh(cp_ring_outer=2, cp_ring=2, cp_ulysses=2)
    assert ring_cycles(mesh, 1, ("cp_ring_outer", "cp_ring", "cp_ulysses")).degree == 8
    assert ring_cycles(mesh, 1, ("cp_ring_outer", "cp_ring")).degree == 4


def test_small_rings_have_few_streams():
    assert most_streams(farspan.make_mesh(cp_ring=4)) == 2
    pair = farspan.make_mesh(cp_ring=2)
    assert most_streams(pair) == 1
    assert ring_cycles(pair, 2).pairs(0) == ring_cycles(pair, 2).pairs(1)
    assert ring_cycles(farspan.make_mesh(cp_ring=1), 1).pairs(0) == ((0, 0),)
    with pytest.raises(ValueError, match=r"got 4 with 1 of them over 4 devices; use 2 streams"):
        ring_cycles(farspan.make_mesh(cp_ring=4), 4)
    with pytest.raises(ValueError, match="got 0 with"):
        ring_cycles(pair, 0)
    with pytest.raises(ValueError, match="every index of the ring once"):
        Streams(((0, 1, 1),))


@pytest.mark.parametrize(
    ("name", "sizes", "count", "links"),
    [
        ("v5p:4x4x4", {"cp_ring": 64}, 6, 384),  # every direction of every link
        ("v5p:4x4x8", {"cp_ring": 128}, 6, 768),
        ("tpu7x:4x4x4", {"cp_ring": 128}, 6, 384),
        ("v6e:16x16", {"cp_ring": 256}, 4, 1024),
        ("v5p:4x4x4", {"cp_ring": 16, "cp_ulysses": 4}, 4, 256),
        ("v5p:4x4x4", {"cp_ring": 32, "data": 2}, 4, 256),
        ("v5p:2x2x2", {"cp_ring": 8}, 2, 16),
        ("v6e:4x4", {"cp_ring": 16}, 2, 32),
    ],
)
def test_no_direction_of_a_link_carries_more_than_one_stream(
    name, sizes, count, links, fake_slice, mesh_of
):
    mesh = mesh_of(fake_slice(name), **sizes)
    assert most_streams(mesh) == count
    streams = ring_cycles(mesh, count)
    sends = [(streams.pairs(stream), 10 + stream) for stream in range(count)]
    carried = mesh_link_bytes(mesh, ("cp_ring",), sends)
    assert len(carried) == links
    assert set(carried.values()) == {size_bytes for _, size_bytes in sends}


def test_a_slice_has_no_more_streams_than_links(fake_slice, mesh_of):
    with pytest.raises(ValueError, match="got 4 with 1 of them over 8 devices"):
        ring_cycles(mesh_of(fake_slice("v5p:2x2x2"), cp_ring=8), 4)


def test_devices_in_no_order_of_links_have_the_streams_of_one_ring(fake_slice):
    devices = fake_slice("v5p:4x4x4")
    assert most_streams(farspan.make_mesh(cp_ring=13, devices=devices)) == 2
    assert most_streams(farspan.make_mesh(cp_ring=64, devices=devices)) == 6


def test_rings_in_several_slices_have_streams_and_one_over_both_has_two(fake_slice, mesh_of):
    devices = fake_slice("v5p:4x4x4") + fake_slice("v5p:4x4x4", slice_index=1)
    assert most_streams(mesh_of(devices, data=2, cp_ring=64)) == 6
    assert most_streams(mesh_of(devices, cp_ring=128)) == 2


def test_bytes_on_links_need_a_slice():
    with pytest.raises(ValueError, match="chips of one TPU slice, got cpu"):
        mesh_link_bytes(farspan.make_mesh(cp_ring=8), ("cp_ring",), [])
