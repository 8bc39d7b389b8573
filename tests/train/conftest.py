"""A training set-up small enough for tests of the loop, and a helper for configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan.data import Batch
from farspan.train.config import TrainConfig, device_count
from farspan.train.muon import Place
from farspan.train.optimizer import build_optimizer, learning_rate_schedule
from farspan.train.state import TrainState, advance, first_state
from farspan.train.step import TrainSetup
from farspan.types import IGNORE_LABEL


class FakeSetup(TrainSetup):
    """Learns the logits of a unigram model; every device holds a slice of them."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        devices = np.array(jax.devices()[: device_count(config)])
        self._mesh = Mesh(devices, ("cp_ring",))
        self._sharded = NamedSharding(self.mesh, PartitionSpec("cp_ring"))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        places = {"logits": Place(("vocab",), self._sharded)}
        self._optimizer = build_optimizer(config.optimizer, places)
        self._schedule = learning_rate_schedule(config.optimizer, config.steps)
        self._step = jax.jit(self._update, donate_argnums=0)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def split(self) -> str:
        return "fake"

    def init_state(self) -> TrainState:
        params = {"logits": jax.random.normal(jax.random.key(self.config.seed), (264,))}
        state = first_state(params, self._optimizer, self.config.optimizer)
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, self._sharded if leaf.ndim else self._replicated),
            state,
        )

    def abstract_state(self) -> TrainState:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.init_state(),
        )

    def place(self, batch: Batch) -> Any:
        return jax.device_put(batch.labels, self._replicated)

    def step(self, state: TrainState, device_batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._step(state, device_batch)

    def evaluate(self, state: TrainState, device_batch: Any) -> dict[str, jax.Array]:
        found = {
            "loss_sum": _unigram_loss(state.params, device_batch),
            "valid_tokens": (device_batch != IGNORE_LABEL).sum(),
        }
        if state.ema is not None:
            found["ema_loss_sum"] = _unigram_loss(state.ema, device_batch)
        return found

    def flops_per_step(self, batch: Batch) -> int:
        return 10 * batch.tokens.size

    def _update(
        self, state: TrainState, labels: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        count = (labels != IGNORE_LABEL).sum()
        loss, gradient = jax.value_and_grad(
            lambda params: _unigram_loss(params, labels) / jnp.maximum(count, 1)
        )(state.params)
        rate = jnp.asarray(self._schedule(state.step), jnp.float32)
        state, outcome = advance(
            state, gradient, loss, rate,
            optimizer=self._optimizer, config=self.config.optimizer,
        )  # fmt: skip
        return state, {"loss": loss, "z_loss": jnp.float32(0), "valid_tokens": count, **outcome}


def _unigram_loss(params: dict[str, jax.Array], labels: jax.Array) -> jax.Array:
    valid = labels != IGNORE_LABEL
    log_p = jax.nn.log_softmax(params["logits"])[jnp.where(valid, labels, 0)]
    return -jnp.where(valid, log_p, 0).sum()


def _change(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Sets fields by their flat names, wherever they are nested."""
    for name, value in changes.items():
        sections = ("model", "data", "parallel", "optimizer")
        for section in sections:
            part = getattr(config, section)
            if name in {field.name for field in dataclasses.fields(part)}:
                part = dataclasses.replace(part, **{name: value})
                config = dataclasses.replace(config, **{section: part})
                break
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


@pytest.fixture
def change() -> Callable[..., TrainConfig]:
    """`change(config, seq_len=64, ...)`: a copy with these fields, wherever they are nested."""
    return _change


@pytest.fixture
def fake_setup() -> type[FakeSetup]:
    """The class of the small set-up."""
    return FakeSetup
