"""What training changes, and how a gradient changes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from farspan.train.config import OptimizerConfig
from farspan.train.optimizer import global_norm
from farspan.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: all that a checkpoint holds of the model.

    Attributes:
      step: Optimizer steps done, those skipped included, int32 scalar.
      params: Parameters.
      opt_state: State of the optimizer, split like the parameters.
      ema: Running mean of the parameters, float32, split like them; None without one.
    """

    step: Leaf
    params: Any
    opt_state: Any
    ema: Any = None


def first_state(
    params: Any, optimizer: optax.GradientTransformation, config: OptimizerConfig
) -> TrainState:
    """The state before the first step.

    Args:
      params: Initial parameters, with which the running mean begins, too.
      optimizer: From `build_optimizer`.
      config: What it was built from.
    """
    ema = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params) if config.ema_decay else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema)


def advance(
    state: TrainState,
    gradients: Any,
    loss: Float[Array, ""],
    rate: Float[Array, ""],
    *,
    optimizer: optax.GradientTransformation,
    config: OptimizerConfig,
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one step.

    Where the loss or the norm of the gradients is not finite, the parameters, the state of the
    optimizer and the running mean stay as they are, bit for bit; the step is counted all the same.

    Args:
      state: Before the step.
      gradients: Tree like the parameters.
      loss: What the gradients are of.
      rate: Learning rate of this step.
      optimizer: From `build_optimizer`.
      config: What it was built from.

    Returns:
      The state after the step, and `grad_norm` (before clipping), `learning_rate` and `finite`
      (int32, 1 or 0).
    """
    norm = global_norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def move(x: Array, update: Array) -> Array:
        return (x.astype(jnp.float32) + rate * update.astype(jnp.float32)).astype(x.dtype)

    def follow(mean: Array, x: Array) -> Array:
        return mean + (1 - config.ema_decay) * (x.astype(jnp.float32) - mean)

    def change(old: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        params, opt_state, ema = old
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = jax.tree.map(move, params, updates)
        return params, opt_state, None if ema is None else jax.tree.map(follow, ema, params)

    # A choice between branches, not between arrays: those of both would exist at once.
    old = state.params, state.opt_state, state.ema
    params, opt_state, ema = jax.lax.cond(finite, change, lambda old: old, old)
    outcome = {"grad_norm": norm, "learning_rate": rate, "finite": finite.astype(jnp.int32)}
    return TrainState(state.step + 1, params, opt_state, ema), outcome
