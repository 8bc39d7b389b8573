"""Rings on grids and tori of chips, and the bytes on their links."""

import itertools
import math

import pytest

from farspan.dist import (
    complete_cycles,
    hamiltonian_cycles,
    hop_length,
    hop_lengths,
    link_bytes,
    ring_order,
    wrapped_axes,
)

SHAPES = [
    shape
    for dimensions, longest in ((1, 8), (2, 5), (3, 4))
    for shape in itertools.product(range(1, longest + 1), repeat=dimensions)
]
PUBLISHED = {
    "TPU v4": ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "4x4x12"],
    "TPU v5": ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"],
    "TPU7x": ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"],
    "TPU v5 lite": ["2x2x1", "2x4x1", "4x4x1", "4x8x1", "8x8x1", "8x16x1", "16x16x1"],
    "TPU v6 lite": ["2x2x1", "2x4x1", "4x4x1", "4x8x1", "8x8x1", "8x16x1", "16x16x1"],
}


def sides(name):
    return tuple(map(int, name.split("x")))


def links_of(cycle):
    return {frozenset(link) for link in zip(cycle, (*cycle[1:], cycle[0]), strict=True)}


def test_slices_wrap_as_published():
    assert wrapped_axes("TPU v5", (4, 4, 8)) == (True, True, True)
    assert wrapped_axes("TPU7x", (2, 4, 4)) == (False, False, False)
    assert wrapped_axes("TPU v5 lite", (8, 16, 1)) == (False, True, False)
    assert wrapped_axes("TPU v6 lite", (4, 4, 1)) == (False, False, False)
    assert wrapped_axes("some other chip", (4, 4, 4)) == (False, False, False)


def test_a_hop_takes_the_shorter_way_round_where_there_is_one():
    assert hop_length((0, 0), (3, 1), (4, 4), (True, False)) == 2
    assert hop_length((0, 0), (3, 1), (4, 4), (False, False)) == 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_ring_has_the_shortest_hops_there_can_be(shape):
    nodes, long_axes = math.prod(shape), sum(size > 1 for size in shape)
    for wrap in itertools.product((False, True), repeat=len(shape)):
        ring = ring_order(shape, wrap)
        assert sorted(ring) == sorted(itertools.product(*map(range, shape)))
        hops = hop_lengths(ring, shape, wrap)
        if nodes == 1:
            continue
        if nodes % 2 == 0 and (long_axes > 1 or nodes == 2):
            assert set(hop_lengths(ring, shape, (False,) * len(shape))) == {1}
        elif any(w and size > 2 for w, size in zip(wrap, shape, strict=True)):
            assert set(hops) == {1}
        elif long_axes > 1:
            assert hops == {1: nodes - 1, 2: 1}
        else:
            assert hops == {1: 2, 2: nodes - 2}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in PUBLISHED.items() for name in names]
)
def test_every_published_slice_has_a_ring_of_single_links_that_needs_no_wrap_links(kind, name):
    shape = sides(name)
    ring = ring_order(shape, wrapped_axes(kind, shape))
    assert hop_lengths(ring, shape, (False, False, False)) == {1: math.prod(shape)}


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("TPU v5", "4x4x4", 3),
        ("TPU v5", "4x4x8", 3),
        ("TPU v5", "4x8x8", 3),
        ("TPU7x", "8x8x8", 3),
        ("TPU v4", "4x4x12", 3),
        ("TPU v6 lite", "16x16x1", 2),
        ("TPU v5 lite", "8x16x1", 1),
        ("TPU v6 lite", "4x4x1", 1),
        ("TPU v5", "2x2x2", 1),
        ("TPU v5", "2x4x4", 1),
        ("TPU v5", "2x1x1", 0),
    ],
)
def test_slices_have_as_many_rings_apart_as_their_links_allow(kind, name, count):
    shape = sides(name)
    wrap = wrapped_axes(kind, shape)
    cycles = hamiltonian_cycles(shape, wrap, 3)
    assert len(cycles) == count
    assert cycles == hamiltonian_cycles(list(shape), list(wrap), 3)
    for cycle in cycles:
        assert len(set(cycle)) == math.prod(shape)
        assert set(hop_lengths(cycle, shape, wrap)) == {1}
    assert len(set().union(*map(links_of, cycles))) == count * math.prod(shape)


def test_blocks_of_a_torus_keep_the_rings_of_their_whole_sides():
    assert len(hamiltonian_cycles((2, 4, 4), (False, True, True), 3)) == 2
    assert len(hamiltonian_cycles((2, 2, 4), (False, False, True), 3)) == 2
    assert len(hamiltonian_cycles((3, 4, 5), (True, True, True), 3)) == 3
    assert hamiltonian_cycles((3, 3), (False, False), 2) == ()


@pytest.mark.parametrize("nodes", [3, 4, 7, 8, 12, 15])
def test_nodes_that_are_all_linked_have_every_ring_there_can_be(nodes):
    cycles = complete_cycles(nodes)
    assert len(cycles) == (nodes - 1) // 2
    assert cycles[0] == tuple(range(nodes))
    assert all(sorted(cycle) == list(range(nodes)) for cycle in cycles)
    assert len(set().union(*map(links_of, cycles))) == nodes * len(cycles)


def test_bytes_go_axis_by_axis_and_the_shorter_way_round():
    carried = link_bytes([((0, 0), (3, 2), 10), ((0, 0), (0, 1), 5)], (4, 4), (True, False))
    assert carried == {((0, 0), (3, 0)): 10, ((3, 0), (3, 1)): 10, ((3, 1), (3, 2)): 10,
                       ((0, 0), (0, 1)): 5}  # fmt: skip
    opposite = link_bytes([((3,), (1,), 1), ((2,), (2,), 9)], (4,), (True,))
    assert opposite == {((3,), (0,)): 1, ((0,), (1,)): 1}
