"""A step changes everything or, where a number is not finite, nothing but the count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from farspan.train.config import OptimizerConfig
from farspan.train.optimizer import build_optimizer
from farspan.train.state import TrainState, advance, first_state

CONFIG = OptimizerConfig(ema_decay=0.75, weight_decay=0.0, clip_norm=1.0)
OPTIMIZER = build_optimizer(CONFIG)


@jax.jit
def step(state: TrainState, gradients: Any, loss: Any) -> Any:
    return advance(state, gradients, loss, jnp.float32(0.5), optimizer=OPTIMIZER, config=CONFIG)


def start() -> TrainState:
    params = {"w": jnp.asarray([1.0, -2.0, 3.0], jnp.bfloat16), "b": jnp.ones(2)}
    return first_state(params, OPTIMIZER, CONFIG)


GRADIENTS = {"w": jnp.asarray([1.0, -1.0, 0.0], jnp.bfloat16), "b": jnp.ones(2)}


def test_parameters_move_by_the_rate_and_the_mean_follows_in_float32() -> None:
    state = start()
    assert jax.tree.map(lambda x: x.dtype.name, state.ema) == {"w": "float32", "b": "float32"}
    found, outcome = step(state, GRADIENTS, jnp.float32(1))
    np.testing.assert_allclose(found.params["b"], 0.5, rtol=1e-5)  # Adam's first update is 1
    np.testing.assert_allclose(found.ema["b"], 0.75 * 1 + 0.25 * 0.5, rtol=1e-5)
    assert found.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(found.params["w"].astype(np.float32), [0.5, -1.5, 3], rtol=1e-2)
    values = {name: float(x) for name, x in outcome.items()}
    assert values == {"grad_norm": 2.0, "learning_rate": 0.5, "finite": 1.0}


def test_old_and_new_are_never_held_at_once() -> None:
    """Beside what is given and returned in its place, no more than the clipped gradients."""
    params = {f"w{index}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for index in range(4)}
    state = jax.eval_shape(lambda: first_state(zeros(params), OPTIMIZER, CONFIG))
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, params, scalar).compile()
    size = 4 * 256 * 256 * 4
    held = compiled.memory_analysis()
    assert held.alias_size_in_bytes >= 4 * size  # parameters, two moments, the mean
    assert held.temp_size_in_bytes < size + 4096


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@pytest.mark.parametrize(
    ("loss", "gradient"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, np.inf), (1.0, 3e38)]
)
def test_what_is_not_finite_changes_only_the_count_of_steps(loss: float, gradient: float) -> None:
    """Of the last gradient, only the norm is not. The next good step is as if there was none."""
    before, _ = step(start(), GRADIENTS, jnp.float32(1))
    poisoned = GRADIENTS | {"b": jnp.asarray([0.0, gradient], jnp.float32)}
    after, outcome = step(before, poisoned, jnp.float32(loss))
    assert int(outcome["finite"]) == 0
    assert int(after.step) == 2
    same = (before.params, before.opt_state, before.ema)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
        same, (after.params, after.opt_state, after.ema),
    )  # fmt: skip
    resumed, _ = step(after, GRADIENTS, jnp.float32(1))
    unbroken, _ = step(before, GRADIENTS, jnp.float32(1))
    jax.tree.map(np.testing.assert_array_equal, resumed.params, unbroken.params)


def test_without_a_mean_there_is_none() -> None:
    assert first_state({"b": jnp.ones(2)}, OPTIMIZER, OptimizerConfig()).ema is None
