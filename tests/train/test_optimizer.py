"""Optimizer: the schedules' corners, what decays, and clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan.train.config import OptimizerConfig
from farspan.train.optimizer import (
    build_optimizer,
    decay_mask,
    global_norm,
    learning_rate_schedule,
    moment_dtypes,
)


def rates_of(steps: int, **config: object) -> list[float]:
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **config), steps)
    return [float(schedule(i)) for i in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_to_its_peak_then_falls_to_its_fraction_at_the_last_step(
    schedule: str,
) -> None:
    rates = rates_of(20, schedule=schedule, warmup_steps=4, final_learning_rate_fraction=0.25)
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert rates[3] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-2] > rates[-1] == 0.25


def test_cosine_and_line_are_what_their_names_say() -> None:
    place = np.arange(8) / 7
    found = rates_of(8, schedule="cosine", warmup_steps=1, final_learning_rate_fraction=0.2)
    np.testing.assert_allclose(found, 0.2 + 0.4 * (1 + np.cos(np.pi * place)), rtol=1e-6)
    found = rates_of(8, schedule="linear", warmup_steps=1, final_learning_rate_fraction=0.2)
    np.testing.assert_allclose(found, 1 - 0.8 * place, rtol=1e-6)
    assert rates_of(5, schedule="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1]


def test_wsd_keeps_the_peak_until_the_last_steps_then_falls_along_a_line() -> None:
    config = {"schedule": "wsd", "warmup_steps": 2, "final_learning_rate_fraction": 0.0}
    rates = rates_of(10, decay_steps=4, **config)
    np.testing.assert_allclose(rates, [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], atol=1e-7)
    assert rates_of(4, decay_steps=2, **config) == [0.5, 1, 0.5, 0]


@settings(max_examples=12)
@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(0, 12), st.integers(1, 12))
def test_every_step_has_a_positive_rate_no_higher_than_the_peak(
    schedule: str, warmup: int, steps: int
) -> None:
    rates = rates_of(steps, schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[min(max(warmup, 1), steps) - 1] == max(rates)
    if warmup <= 1:
        assert rates[0] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"schedule": "wsd"}, r"decay_steps of at least 1.*got decay_steps=0.*--decay-steps 1,"),
        ({"schedule": "wsd", "decay_steps": 8}, r"warmup_steps=3 and steps=10"),
        ({"decay_steps": 2}, r"wsd alone, got decay_steps=2 with schedule cosine"),
    ],
)
def test_decay_steps_that_would_be_cut_or_ignored_are_refused(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(OptimizerConfig(warmup_steps=3, **config), 10)


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


def test_updates_are_those_of_adamw_at_a_learning_rate_of_one() -> None:
    """Decay moves matrices only, and is not scaled by Adam."""
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip_norm=0.0, beta2=0.9)
    params = {"w": jnp.full((2, 2), 3.0), "norm": jnp.ones((2, 2))}
    gradients = {"w": jnp.asarray([[1.0, -2.0], [0.5, 0.0]]), "norm": jnp.zeros((2, 2))}
    optimizer, known = build_optimizer(config), optax.adamw(1.0, 0.9, 0.9, weight_decay=0.0)
    state, known_state = optimizer.init(params), known.init(params)
    for _ in range(3):
        updates, state = optimizer.update(gradients, state, params)
        expected, known_state = known.update(gradients, known_state, params)
    np.testing.assert_allclose(updates["w"], expected["w"] - 0.5 * params["w"], rtol=1e-6)
    np.testing.assert_allclose(updates["norm"], 0.0)


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 30.0), (3.0, 3.0), (100.0, 30.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_clipped_to_the_norm_and_zero_turns_it_off(
    clip_norm: float, expected: float, dtype: str
) -> None:
    params = {"w": jnp.zeros((3, 3), dtype)}
    optimizer = build_optimizer(OptimizerConfig(clip_norm=clip_norm), None)
    gradients = {"w": jnp.full((3, 3), 10.0, dtype)}
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    mean = optax.tree.get(state, "mu")["w"]
    assert mean.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2.0**-8
    np.testing.assert_allclose(global_norm(mean) / 0.1, expected, rtol=tolerance)


def test_the_norm_of_many_small_numbers_is_exact_in_any_type() -> None:
    tree = {"a": jnp.full((1000, 100), 2.0**-4, "bfloat16"), "b": jnp.ones(()), "c": None}
    np.testing.assert_allclose(global_norm(tree), np.sqrt(1e5 * 2.0**-8 + 1), rtol=1e-6)


def test_copies_on_many_devices_count_once() -> None:
    """Sharded weights, and norms and sinks that every device holds: as on one device."""
    draw = np.random.default_rng(0)
    gradients = {
        "weights": draw.standard_normal((16, 8)).astype(np.float32),
        "norm": draw.standard_normal(8).astype(np.float32),
        "sinks": 5 * draw.standard_normal(4).astype(np.float32),
    }
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "cp"))
    specs = {"weights": PartitionSpec("cp"), "norm": PartitionSpec(), "sinks": PartitionSpec()}
    optimizer = build_optimizer(OptimizerConfig(clip_norm=0.5))

    @jax.jit
    def clipped(gradients):
        _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
        return global_norm(gradients), optax.tree.get(state, "mu")

    norm, found = clipped(
        {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in gradients.items()}
    )
    expected = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in gradients.values()))
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    for name, x in gradients.items():
        np.testing.assert_allclose(found[name] / 0.1, x * (0.5 / expected), rtol=1e-5, atol=1e-7)


def test_muon_keeps_one_moment_of_hidden_matrices() -> None:
    muon, adamw = OptimizerConfig(optimizer="muon"), OptimizerConfig()
    hidden, table = ("layer", "model", "ffn"), ("vocab", "model")
    assert moment_dtypes(muon, "bfloat16", hidden) == ("bfloat16",)
    assert moment_dtypes(muon, "bfloat16", table) == ("bfloat16", "bfloat16")
    assert moment_dtypes(adamw, "float32", hidden) == ("float32", "float32")
    with pytest.raises(ValueError, match="muon needs the place of every parameter"):
        build_optimizer(muon)
