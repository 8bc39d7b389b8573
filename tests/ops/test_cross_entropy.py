"""Cross-entropy and z-loss by tiles are those of all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from farspan.ops.cross_entropy import cross_entropy_gradients, cross_entropy_sums, tile_tokens
from farspan.types import IGNORE_LABEL


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_tiled_sums_and_gradients_are_those_of_the_dense_formula_in_float64(
    monkeypatch, tokens, weight
):
    monkeypatch.setattr("farspan.ops.cross_entropy.TILE_ELEMENTS", 19 * 8)
    assert tile_tokens(37, 19) == 8
    hidden, head = draw(tokens, 6), draw(6, 19, seed=1)
    labels = np.random.default_rng(2).integers(0, 19, tokens).astype(np.int32)
    labels[1::3] = IGNORE_LABEL
    kept = labels != IGNORE_LABEL

    def plain(hidden, head):
        logits = hidden @ head
        normalizer = jax.nn.logsumexp(logits, -1)
        loss = normalizer - logits[jnp.arange(tokens), labels * kept]
        return jnp.sum(jnp.where(kept, loss, 0)), jnp.sum(jnp.where(kept, normalizer**2, 0))

    with jax.enable_x64(True):
        expected, pull = jax.vjp(plain, jnp.asarray(hidden), jnp.asarray(head))
        expected_gradients = pull((jnp.float64(0.7), jnp.float64(weight)))
        assert expected[0].dtype == jnp.float64
    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(labels)
    found = cross_entropy_sums(*arrays, squares=weight > 0)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1] if weight else 0, rtol=1e-6)
    gradients = cross_entropy_gradients(
        *arrays, jnp.float32(0.7), jnp.float32(weight) if weight else None
    )
    for x, y in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
