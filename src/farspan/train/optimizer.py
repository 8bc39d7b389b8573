"""AdamW with warm-up, cosine decay, clipping by the global norm and a decay mask.

Source: arXiv 1711.05101 (decoupled weight decay).
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from farspan.train.config import OptimizerConfig

FINAL_LEARNING_RATE_FRACTION = 0.1
_UNDECAYED = ("norm", "bias", "sink")


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of steps done.

    It rises linearly over `warmup_steps` (step 0 already moves), then follows a cosine to a tenth
    of the peak at `steps`. A run that is shorter than its warm-up only rises.

    Args:
        config: peak and warm-up.
        steps: optimizer steps of the whole run.

    Returns:
        A function of the step (0 for the first), an int or an int32 array.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / max(1, warmup),
        peak_value=peak,
        warmup_steps=max(0, warmup - 1),
        decay_steps=max(steps, warmup + 1),
        end_value=FINAL_LEARNING_RATE_FRACTION * peak,
    )


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay acts on: True for matrices, False for norms, biases and sinks.

    Names decide, as well as rank: in stacked layers a norm's weight has two axes.
    """

    def decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return leaf.ndim > 1 and not any(word in name for word in _UNDECAYED)

    return jax.tree_util.tree_map_with_path(decayed, params)


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run: clip by global norm, AdamW, schedule.

    Args:
        config: rates, betas, decay and clipping.
        steps: optimizer steps of the whole run, which shape the schedule.

    Returns:
        A transformation over any parameter pytree; its state mirrors the parameters' shapes.
    """
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.clip_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
