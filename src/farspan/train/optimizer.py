"""Optimizers and learning rates: AdamW or Muon, clipped by the global norm, decayed by a mask.

The learning rate is no part of an optimizer: whoever takes the step multiplies with it
(`farspan.train.state.advance`). So it follows the steps of the run, whatever the optimizer counts.

Sources: arXiv:1711.05101 (decoupled weight decay), arXiv:2404.06395 (warm-up, stable, decay).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from farspan.plan.workload import UpdateCost
from farspan.train import muon
from farspan.train.config import OptimizerConfig, check_decay

_UNDECAYED = ("norm", "bias", "sink")


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of steps done.

    It rises linearly over `warmup_steps` (step 0 already moves) to its peak, at step
    `warmup_steps - 1`. From there `cosine` and `linear` fall to `final_learning_rate_fraction` of
    the peak at step `steps - 1`, the last; `wsd` keeps the peak until the last `decay_steps` steps
    and then falls linearly to that fraction; `constant` stays. A run that is shorter than its
    warm-up only rises.

    Args:
        config: schedule, peak, warm-up, decay and fraction.
        steps: optimizer steps of the whole run.

    Returns:
        A function of the step (0 for the first), an int or an int32 array.

    Raises:
        ValueError: `decay_steps` does not fit the schedule or the number of steps.
    """
    check_decay(config, steps)
    peak, fraction = config.learning_rate, config.final_learning_rate_fraction
    risen = max(0, config.warmup_steps - 1)
    falling = max(1, steps - 1 - risen)
    parts = [optax.linear_schedule(peak / max(1, config.warmup_steps), peak, risen)]
    boundaries = [risen]
    if config.schedule == "cosine":
        parts.append(optax.cosine_decay_schedule(peak, falling, fraction))
    elif config.schedule == "linear":
        parts.append(optax.linear_schedule(peak, fraction * peak, falling))
    elif config.schedule == "constant":
        parts.append(optax.constant_schedule(peak))
    else:
        parts.append(optax.constant_schedule(peak))
        parts.append(optax.linear_schedule(peak, fraction * peak, config.decay_steps))
        boundaries.append(steps - 1 - config.decay_steps)
    return optax.join_schedules(parts, boundaries)


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay acts on: True for matrices, False for norms, biases and sinks.

    Names decide, as well as rank: in stacked layers a norm's weight has two axes.
    """

    def decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return leaf.ndim > 1 and not any(word in name for word in _UNDECAYED)

    return jax.tree_util.tree_map_with_path(decayed, params)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Norm of all elements of all arrays together, in float32 whatever their types."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def build_optimizer(config: OptimizerConfig, places: Any = None) -> optax.GradientTransformation:
    """The optimizer of a run: clip by the global norm, AdamW or Muon, decoupled weight decay.

    Its updates are those of learning rate 1. With Muon, `beta1` is the decay of its momentum
    (Nesterov's), too; its updates are scaled so that their elements are as large as AdamW's, which
    lets the learning rate and weight decay of AdamW carry over (`farspan.train.muon`).

    Args:
        config: the optimizer, its betas, decay and clipping.
        places: tree like the parameters of a `farspan.train.muon.Place` each. Muon needs it.

    Returns:
        A transformation over the parameters; its state mirrors their shapes.

    Raises:
        ValueError: Muon was not told where the parameters lie.
    """
    return optax.chain(
        _clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        _direction(config, places),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale(-1.0),
    )


def moment_dtypes(
    config: OptimizerConfig, param_dtype: str, axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Types of the arrays of a parameter's shape that the optimizer keeps for it.

    Args:
        config: the optimizer.
        param_dtype: type of the parameter.
        axes: names of its axes.
    """
    once = config.optimizer == "muon" and muon.is_hidden_matrix(axes)
    return (param_dtype,) if once else (param_dtype, param_dtype)


def update_cost(
    config: OptimizerConfig,
    param_dtype: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    splits: tuple[int, ...],
) -> UpdateCost:
    """What the update of a parameter costs one device, beside work on single elements.

    Args:
        config: the optimizer.
        param_dtype: type of the parameter.
        shape: its shape.
        axes: names of its axes.
        splits: over how many devices each axis is split.
    """
    if config.optimizer == "adamw":
        return UpdateCost()
    return muon.update_cost(shape, axes, splits, jnp.dtype(param_dtype).itemsize)


def _direction(config: OptimizerConfig, places: Any) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.beta1, config.beta2)
    if config.optimizer == "adamw":
        return adam
    if places is None:
        raise ValueError(
            "muon needs the place of every parameter, got none; hand over the tree of places"
        )
    hidden = optax.chain(optax.trace(config.beta1, nesterov=True), muon.orthogonalize(places))
    labels = jax.tree.map(lambda place: "muon" if place.is_hidden_matrix else "adamw", places)
    return optax.partition({"muon": hidden, "adamw": adam}, labels)


def _clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """As optax's, with a norm in float32 for any type of gradients."""

    def clip(updates: Any, _: Any) -> Any:
        norm = global_norm(updates)
        return jax.tree.map(
            lambda x: jnp.where(norm < most, x, (x / norm * most).astype(x.dtype)), updates
        )

    return optax.stateless(clip)
