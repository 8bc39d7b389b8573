"""Groups of heads, one after the other, make what all heads make at once."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import farspan
from farspan.context import parcels
from farspan.testing import AttentionCase, attention_parity


@pytest.mark.parametrize(
    ("strategy", "sizes", "groups"),
    [
        ("all_gather", {"cp_ring": 2}, 3), ("all_gather", {"cp_ring": 3}, 2),
        ("all_gather", {"cp_ring": 4, "cp_ulysses": 2}, 6), ("ulysses", {"cp_ulysses": 2}, 3),
        ("ulysses", {"cp_ring": 4, "cp_ulysses": 2}, 2),
    ],
)  # fmt: skip
def test_groups_equal_the_oracle(strategy, sizes, groups):
    mesh = farspan.make_mesh(**sizes)
    context = farspan.ContextParallel(mesh, strategy, "zigzag", head_groups=groups)
    heads = 8 * groups if strategy == "ulysses" else 12
    case = AttentionCase(
        seq_len=240, num_heads=heads, num_kv_heads=groups, documents=(5, 90, 1, 28, 70), batch=1
    )
    for quantity in attention_parity(case, context):
        assert quantity.ok, quantity


def test_one_device_in_groups():
    context = farspan.ContextParallel(farspan.make_mesh(), "all_gather", head_groups=2)
    for quantity in attention_parity(AttentionCase(), context):
        assert quantity.ok, quantity


@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32",), ("bfloat16", "int32")])
def test_parcels_keep_every_bit(kinds):
    draw = np.random.default_rng(0)
    arrays = []
    for place, kind in enumerate(kinds):
        itemsize = jnp.dtype(kind).itemsize
        bits = draw.integers(0, 2 ** (8 * itemsize), (2, 5, 3, place + 2), f"uint{8 * itemsize}")
        arrays.append(jnp.asarray(bits).view(kind))
    parcel = parcels.pack(*arrays)
    assert parcel.wire.nbytes == sum(x.nbytes for x in arrays)
    for packed, array in zip(parcels.unpack(parcel), arrays, strict=True):
        assert packed.dtype == array.dtype
        assert packed.tobytes() == array.tobytes()


@pytest.mark.parametrize("length", [1, 7, 64, 1000, 2048, 16384])
@pytest.mark.parametrize("travelling", [0, 5, 7, 14, 126])
def test_pieces_cover_all_rows_and_leave_no_more_than_five_parcels_to_each(length, travelling):
    pieces = parcels.row_pieces(length, travelling)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(stop == first for (_, stop), (first, _) in itertools.pairwise(pieces))
    assert all(first < stop for first, stop in pieces)
    assert len(pieces) == min(length, max(1, -(-travelling // parcels.PERMUTES_IN_FLIGHT)))


def test_pieces_lie_on_whole_blocks():
    assert parcels.row_pieces(16384, 14) == [(0, 5120), (5120, 11264), (11264, 16384)]
