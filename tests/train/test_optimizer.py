"""Optimizer: the schedule's corners, what decays, and clipping."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from farspan.train.config import OptimizerConfig
from farspan.train.optimizer import build_optimizer, decay_mask, learning_rate_schedule


def test_the_rate_rises_to_its_peak_then_falls_to_a_tenth() -> None:
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 20)
    np.testing.assert_allclose([schedule(i) for i in range(4)], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    rates = [float(schedule(i)) for i in range(3, 21)]
    assert rates == sorted(rates, reverse=True)
    np.testing.assert_allclose(schedule(20), 0.1, rtol=1e-6)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 10), (1, 10), (10, 3), (10, 10)])
def test_every_step_has_a_positive_rate_no_higher_than_the_peak(warmup: int, steps: int) -> None:
    schedule = learning_rate_schedule(OptimizerConfig(2.0, warmup_steps=warmup), steps)
    rates = [float(schedule(i)) for i in range(steps)]
    assert all(0 < rate <= 2.0 for rate in rates)
    if warmup <= 1:
        assert rates[0] == 2.0


def test_norms_biases_and_vectors_do_not_decay_even_when_stacked() -> None:
    params = {
        "embedding": jnp.ones((4, 2)),
        "layers": {"attention_norm": jnp.ones((3, 2)), "wq": jnp.ones((3, 2, 2))},
        "q_bias": jnp.ones((3, 2)),
        "scale": jnp.ones(2),
    }
    assert decay_mask(params) == {
        "embedding": True,
        "layers": {"attention_norm": False, "wq": True},
        "q_bias": False,
        "scale": False,
    }


def test_decay_moves_matrices_only() -> None:
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    params = {"w": jnp.ones((2, 2)), "norm": jnp.ones((2, 2))}
    optimizer = build_optimizer(config, 10)
    zeros = {"w": jnp.zeros((2, 2)), "norm": jnp.zeros((2, 2))}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1 * 0.5)
    np.testing.assert_allclose(updates["norm"], 0.0)


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 30.0), (3.0, 3.0), (100.0, 30.0)])
def test_gradients_are_clipped_to_the_norm_and_zero_turns_it_off(
    clip_norm: float, expected: float
) -> None:
    params = {"w": jnp.zeros((3, 3))}
    optimizer = build_optimizer(OptimizerConfig(clip_norm=clip_norm), 10)
    _, state = optimizer.update({"w": jnp.full((3, 3), 10.0)}, optimizer.init(params), params)
    mean = optax.tree.get(state, "mu")["w"]
    np.testing.assert_allclose(jnp.linalg.norm(mean) / 0.1, expected, rtol=1e-5)
