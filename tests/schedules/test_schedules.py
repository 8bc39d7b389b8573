"""Schedules: balance, bytes, and which combinations are possible."""

import itertools

import numpy as np
import pytest

import farspan
from farspan import schedules
from farspan.layouts import get_layout
from farspan.schedules import AttentionShape, Degrees

CAUSAL = farspan.Causal()


def pairs(layout, seq_len, shards, segment_ids=None):
    found = schedules.pairs_per_shard(CAUSAL, get_layout(layout), seq_len, shards, segment_ids)
    return found.tolist()


def test_zigzag_is_equal_and_contiguous_is_not():
    for shards in (2, 4, 8):
        assert len(set(pairs("zigzag", 64 * shards, shards))) == 1
    # In units of the strictly lower triangle of one shard the work is 1 : 3 : ... : 2P - 1.
    length = 4096 // 4
    units = (np.array(pairs("contiguous", 4096, 4)) - length // 2) / (length**2 / 2)
    np.testing.assert_allclose(units, [1, 3, 5, 7])
    np.testing.assert_allclose(
        (np.array(pairs("zigzag", 4096, 4)) - length // 2) / (length**2), 2.0
    )


def test_packed_documents_unbalance_every_fixed_layout():
    documents = np.repeat([1, 2], [4, 12]).astype(np.int32)
    assert pairs("contiguous", 16, 2, documents) == [20, 68]
    assert pairs("zigzag", 16, 2, documents) == [52, 36]
    assert pairs("striped", 16, 2, documents) == [40, 48]


def test_every_pair_is_computed_once():
    documents = np.repeat([1, 2, 0], [20, 37, 7]).astype(np.int32)
    total = farspan.masks.visible_pairs(CAUSAL, 64, documents)
    for layout in ("contiguous", "zigzag", "striped"):
        assert sum(pairs(layout, 64, 4, documents)) == total


@pytest.mark.parametrize("strategy", schedules.STRATEGIES)
def test_steps_bring_every_shard_every_key_once(strategy):
    split = schedules.degrees(strategy, 4, 2)
    assert split.total == 8
    steps = schedules.steps(strategy, split)
    for shard in range(split.sequence):
        sources = [source for step in steps for source in step.sources[shard]]
        assert sorted(sources) == list(range(split.sequence))
    for step, following in itertools.pairwise(steps):
        came = {move.receiver: move for move in step.moves}
        for receiver, sources in enumerate(following.sources):
            move = came[receiver]
            assert sources == (move.keys,) == step.sources[move.sender]
    assert all(move.steps_under == 0 for move in steps[-1].moves)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (32, 8), (16, 1)])
def test_ulysses_beats_the_ring_past_one_plus_group(heads, kv_heads):
    threshold = schedules.ulysses_break_even_degree(heads, kv_heads)
    assert threshold == 1 + heads / kv_heads

    def elements(strategy, degree):
        shape = AttentionShape(1, 1024 * degree, heads, kv_heads, 64, 64, 4)
        split = schedules.degrees(strategy, degree, 1)
        found = schedules.sent_bytes(strategy, split, shape, "forward") / 4
        if strategy == "ulysses":  # the log-sum-exp is not in the published formula
            found -= 1024 * heads * (degree - 1) / degree
        return found

    for degree in (2, 4, 8, 16, 32):
        # Published formulas assume every device gets whole kv heads without copies.
        if kv_heads % degree or heads % degree:
            continue
        assert (elements("ulysses", degree) < elements("ring", degree)) == (degree > threshold)


def test_ring_bytes_are_the_published_formula():
    shape = AttentionShape(1, 4096, 8, 2, 64, 64, 2)
    for degree in (2, 4, 8):
        split = Degrees(degree, 1)
        forward = schedules.sent_bytes("ring", split, shape, "forward")
        assert forward == 2 * 4096 * 2 * 64 * 2 * (degree - 1) // degree
        backward = schedules.sent_bytes("ring", split, shape, "backward")
        assert backward == forward + 2 * 4096 * 2 * 64 * 4 * (degree - 1) // degree


@pytest.mark.parametrize("strategy", schedules.STRATEGIES)
def test_one_device_sends_nothing(strategy):
    shape = AttentionShape(1, 64, 8, 2, 16, 16, 4, segments=True)
    for direction in ("forward", "backward"):
        assert schedules.collectives(strategy, Degrees(1, 1), shape, direction) == ()


def test_auto_picks_what_sends_least():
    assert schedules.choose_strategy(8, 8, 8) == ("ulysses", 8)
    assert schedules.choose_strategy(9, 3, 2) == ("ring", 1)  # 2 does not divide 9
    strategy, ulysses = schedules.choose_strategy(32, 8, 64)
    assert (strategy, 64 % ulysses, 32 % ulysses) == ("usp", 0, 0)
    assert schedules.choose_strategy(8, 2, 1) == ("ulysses", 1)


def check(strategy, ring, ulysses, **sizes):
    split = schedules.degrees(strategy, ring, ulysses)
    schedules.check_combination(strategy, split, get_layout("zigzag"), **sizes)


def test_refusals_give_rule_values_and_remedy():
    with pytest.raises(ValueError, match=r"num_heads=6.*degree=4; use a degree of 1, 2, 3, 6"):
        check("ulysses", 1, 4, num_heads=6, num_kv_heads=6)
    with pytest.raises(ValueError, match="num_heads=6, num_kv_heads=4"):
        check("ring", 4, 1, num_heads=6, num_kv_heads=4)
    with pytest.raises(ValueError, match="num_kv_heads=3, tensor=2; use tensor=1"):
        check("ring", 4, 1, num_heads=6, num_kv_heads=3, tensor=2)
    with pytest.raises(ValueError, match="multiple of 2 \\* 4 shards = 8, got seq_len=12"):
        check("ring", 4, 1, num_heads=8, num_kv_heads=2, seq_len=12)
    with pytest.raises(ValueError, match="seq_len must be a multiple of 24"):
        check("usp", 4, 3, num_heads=6, num_kv_heads=2, seq_len=8)
    with pytest.raises(ValueError, match=r'strategy must be one of.*did you mean "ring"'):
        schedules.degrees("rings", 4, 1)
    check("ulysses", 1, 8, num_heads=8, num_kv_heads=2, seq_len=64)
