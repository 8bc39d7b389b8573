"""A training set-up small enough for tests of the loop, and a helper for configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan.data import Batch
from farspan.train.config import TrainConfig, device_count
from farspan.train.optimizer import build_optimizer, learning_rate_schedule
from farspan.train.step import TrainSetup
from farspan.types import IGNORE_LABEL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeState:
    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: Any


class FakeSetup(TrainSetup):
    """Learns the logits of a unigram model; every device holds a slice of them."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        devices = np.array(jax.devices()[: device_count(config)])
        self._mesh = Mesh(devices, ("cp_ring",))
        self._optimizer = build_optimizer(config.optimizer, config.steps)
        self._schedule = learning_rate_schedule(config.optimizer, config.steps)
        self._sharded = NamedSharding(self.mesh, PartitionSpec("cp_ring"))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._step = jax.jit(self._update, donate_argnums=0)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def split(self) -> str:
        return "fake"

    def init_state(self) -> FakeState:
        logits = jax.random.normal(jax.random.key(self.config.seed), (264,))
        params = {"logits": jax.device_put(logits, self._sharded)}
        step = jax.device_put(jnp.int32(0), self._replicated)
        return FakeState(step, params, self._place_like(self._optimizer.init(params)))

    def abstract_state(self) -> FakeState:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.init_state(),
        )

    def place(self, batch: Batch) -> Any:
        return jax.device_put(batch.labels, self._replicated)

    def step(self, state: FakeState, device_batch: Any) -> tuple[FakeState, dict[str, jax.Array]]:
        return self._step(state, device_batch)

    def flops_per_step(self, batch: Batch) -> int:
        return 10 * batch.tokens.size

    def _place_like(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, self._sharded if leaf.ndim else self._replicated),
            tree,
        )

    def _update(
        self, state: FakeState, labels: jax.Array
    ) -> tuple[FakeState, dict[str, jax.Array]]:
        valid = labels != IGNORE_LABEL

        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            log_p = jax.nn.log_softmax(params["logits"])[jnp.where(valid, labels, 0)]
            return -jnp.where(valid, log_p, 0).sum() / valid.sum()

        loss, gradient = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradient),
            "learning_rate": self._schedule(state.step),
            "valid_tokens": valid.sum(),
        }
        params = optax.apply_updates(state.params, updates)
        return FakeState(state.step + 1, params, opt_state), metrics


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
