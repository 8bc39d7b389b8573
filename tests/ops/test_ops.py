"""Operations against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from farspan.ops.linear import linear
from farspan.ops.merge import add_sinks, merge
from farspan.ops.norm import rms_norm
from farspan.ops.rope import apply_rope, rope_tables


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def softmax_of(scores, values):
    """out and lse of one query over some keys; nothing visible gives 0 and -inf."""
    if not len(scores):
        return jnp.zeros((1, 1, 1, values.shape[1])), jnp.full((1, 1, 1), -jnp.inf)
    out = jax.nn.softmax(scores) @ values
    return out[None, None, None], jax.nn.logsumexp(scores)[None, None, None]


@pytest.mark.parametrize("split", [0, 3, 10])
def test_merged_parts_are_the_whole(split):
    scores, values = random(10) * 30, random(10, 4, seed=1)
    parts = softmax_of(scores[:split], values[:split]), softmax_of(scores[split:], values[split:])
    for found, expected in zip(merge(*parts), softmax_of(scores, values), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_nothing_merged_with_nothing_is_nothing():
    nothing = softmax_of(jnp.zeros(0), jnp.zeros((0, 4)))
    out, lse = merge(nothing, nothing)
    assert not out.any()
    assert jnp.isneginf(lse).all()


def test_a_sink_is_one_more_key_of_value_zero():
    scores, values, sink = random(5), random(5, 4, seed=1), jnp.asarray([1.5])
    found = add_sinks(*softmax_of(scores, values), sink)
    joined = softmax_of(jnp.append(scores, sink), jnp.vstack([values, jnp.zeros((1, 4))]))
    for x, y in zip(found, joined, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_linear_sums_the_weights_gradient_in_float32():
    x = random(512, 8).astype(jnp.bfloat16)
    weight = random(8, 3, seed=1)
    out, pull = jax.vjp(lambda x, w: linear("sm,mf->sf", x, w), x, weight)
    assert out.dtype == jnp.bfloat16
    dout = random(512, 3, seed=2).astype(jnp.bfloat16)
    dx, dweight = pull(dout)
    assert (dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.float32)
    exact = np.asarray(x, np.float64).T @ np.asarray(dout, np.float64)
    np.testing.assert_allclose(dweight, exact, rtol=1e-5, atol=1e-4)


def test_rope_turns_by_position_whatever_the_order():
    x = random(1, 6, 2, 8)
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2]])
    turned = apply_rope(x, rope_tables(positions, 8, 100.0))
    np.testing.assert_array_equal(turned[:, [0, 3]], x[:, [0, 3]])
    order = np.array([4, 0, 5, 2, 1, 3])
    permuted = apply_rope(x[:, order], rope_tables(positions[:, order], 8, 100.0))
    np.testing.assert_array_equal(permuted, turned[:, order])
    pairs = np.asarray(x)[0, 1, 0].reshape(2, 4)
    angles = 100.0 ** (-np.arange(4) / 4)
    first = pairs[0] * np.cos(angles) - pairs[1] * np.sin(angles)
    np.testing.assert_allclose(turned[0, 1, 0, :4], first, rtol=1e-5)


def test_rope_scores_depend_on_distance_alone_at_millions_of_tokens():
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def score(start):
        tables = [rope_tables(jnp.asarray([[place]]), 8, 5e5) for place in (start + 7, start)]
        return float((apply_rope(query, tables[0]) * apply_rope(key, tables[1])).sum())

    assert abs(score(0) - score(2**23)) < 0.02


def test_rms_norm_has_unit_mean_square():
    x = random(3, 16) * 7
    found = rms_norm(x, jnp.ones(16), 1e-6)
    np.testing.assert_allclose((found**2).mean(-1), 1, rtol=1e-4)
    assert rms_norm(x.astype(jnp.bfloat16), jnp.ones(16), 1e-6).dtype == jnp.bfloat16
