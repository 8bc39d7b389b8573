"""Dropout is one function of seed, row, head and pair: unbiased, uncorrelated, one everywhere."""

import jax.numpy as jnp
import numpy as np
import pytest

import farspan
from farspan.kernels import Dropout

SIZE = 512


def pattern(rate=0.1, seed=0, row=0, head=0):
    dropout = Dropout(jnp.uint32(seed), jnp.zeros(1), jnp.zeros(1), rate)
    index = np.arange(SIZE)
    return np.asarray(dropout.keeps(row, head, index[:, None], index), np.float64)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_over_all_and_in_every_query(rate):
    kept = pattern(rate)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation / SIZE
    assert np.abs(kept.mean(1) - (1 - rate)).max() < 5 * deviation / SIZE**0.5
    assert np.abs(kept.mean(0) - (1 - rate)).max() < 5 * deviation / SIZE**0.5


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"row": 1}, {"head": 1}, {"seed": 2**31}, {"head": 7, "row": 3}]
)
def test_seeds_rows_and_heads_are_uncorrelated(other):
    correlation = np.corrcoef(pattern().ravel(), pattern(**other).ravel())[0, 1]
    assert abs(correlation) < 0.01


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 64), (64, 0), (128, 128)])
def test_neighbours_and_shards_are_uncorrelated(shift):
    kept = pattern()
    moved = np.roll(kept, shift, (0, 1))
    assert abs(np.corrcoef(kept.ravel(), moved.ravel())[0, 1]) < 0.01


def test_one_seed_is_one_result_on_every_mesh():
    """And another seed another one; a seed may be traced."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((2, 32, heads, 8), np.float32) for heads in (4, 2, 2))
    options = {"mask": farspan.Causal(), "dropout_rate": 0.5}
    alone = np.asarray(farspan.attention(q, k, v, dropout_seed=3, **options))
    for seed in (jnp.uint32(4), 2**31 + 3, -1):
        other = np.asarray(farspan.attention(q, k, v, dropout_seed=seed, **options))
        assert np.abs(alone - other).max() > 0.1
    for sizes, layout in (
        ({"data": 2, "cp_ring": 2, "tensor": 2}, "zigzag"),
        ({"fsdp": 2, "cp_ring": 4}, "striped"),
    ):
        context = farspan.ContextParallel(farspan.make_mesh(**sizes), "ring", layout)
        placed = farspan.shard_sequence((q, k, v), context)
        out = farspan.attention(*placed, dropout_seed=3, context=context, **options)
        np.testing.assert_allclose(farspan.unshard_sequence(out, context), alone, atol=1e-5)
