"""Muon's orthogonal updates of matrices that are stacked by layer and split over devices.

A stack `[L, ...]` holds a matrix for each layer, in any number of axes; each is made orthogonal by
itself, the matrix of a projection of all heads as one. For that, devices trade shards of all layers
for whole matrices of few layers, and back: with P devices along the split axis, each device makes
ceil(L / P) matrices of every kind orthogonal, and sends and receives as many, twice a step.

Sources: https://kellerjordan.github.io/posts/muon (Newton-Schulz, Nesterov momentum);
arXiv:2502.16982 (updates scaled to the size of AdamW's).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Inexact

from farspan.plan.workload import UpdateCost
from farspan.schedules import Collective

_ADAMW_SIZE = 0.2
"""Root mean square of the elements of AdamW's usual update."""
_STEPS = 5  # of Newton and Schulz


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one parameter lies.

    Attributes:
      axes: Names of its axes.
      sharding: How it is split over devices.
    """

    axes: tuple[str, ...]
    sharding: NamedSharding

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether its update is made orthogonal."""
        return is_hidden_matrix(self.axes)


def is_hidden_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter with these axes is a stack of matrices, a layer's input or output."""
    return axes[0] == "layer" and "model" in axes


def orthogonalize(places: Any) -> optax.GradientTransformation:
    """Makes the updates of hidden matrices orthogonal.

    Args:
      places: Tree of `Place`, like the parameters. The updates of others must be masked.

    Returns:
      A transformation without state.
    """

    def update(updates: Any, _: Any) -> Any:
        return jax.tree.map(
            lambda place, x: orthogonal(x, place) if place.is_hidden_matrix else x, places, updates
        )

    return optax.stateless(update)


def orthogonal(x: Inexact[Array, "L ..."], place: Place) -> Inexact[Array, "L ..."]:
    """Makes the matrix of each layer nearly orthogonal, and scales it.

    Args:
      x: A stack of matrices between the model's axis and all others, which are taken as one.
      place: Names of its axes, and how it is split.

    Returns:
      Matrices with the singular vectors of those of `x`, whose singular values are near
      `0.2 * sqrt(max(rows, columns))`; of x's type, split like x.

    Cost:
      With P devices along the split axis and `m` by `n` matrices, `m <= n`: each device sends and
      receives `2 ceil(L / P) m n` elements, and computes `ceil(L / P) (20 m m n + 10 m m m)` FLOPs.
    """
    model = place.axes.index("model")
    others = tuple(axis for axis in range(1, x.ndim) if axis != model)
    run = jax.shard_map(
        functools.partial(
            _orthogonal_shard,
            axis=model,
            others=others,
            names=place.sharding.spec[model] or (),
        ),
        mesh=place.sharding.mesh,
        in_specs=place.sharding.spec,
        out_specs=place.sharding.spec,
        check_vma=False,
    )
    larger = max(x.shape[model], math.prod(x.shape[axis] for axis in others))
    return run(x) * (_ADAMW_SIZE * larger**0.5)


def update_cost(
    shape: tuple[int, ...], axes: tuple[str, ...], splits: tuple[int, ...], itemsize: int
) -> UpdateCost:
    """What `orthogonal` costs one device; nothing for a parameter that is no hidden matrix.

    Args:
      shape: Of the stack.
      axes: Names of its axes.
      splits: Over how many devices each axis is split.
      itemsize: Bytes of an element.
    """
    if not is_hidden_matrix(axes):
        return UpdateCost()
    model = axes.index("model")
    layers = -(-shape[0] // splits[model])
    size = math.prod(shape[1:])
    short, long = sorted((shape[model], size // shape[model]))
    products = 2 * short * short * long + short**3
    traded = 2 * layers * size * itemsize
    return UpdateCost(
        flops=2 * _STEPS * layers * products,
        collectives=(Collective("all-to-all", 2, traded, splits[model]),),
    )


def _orthogonal_shard(
    shard: Array, *, axis: int, others: tuple[int, ...], names: str | tuple[str, ...]
) -> Array:
    """On one device: its part, along `axis`, of the matrices between `axis` and `others`."""
    # With a decay of 0 its momentum is the update itself, and nothing is to be kept.
    newton_schulz = optax.contrib.scale_by_muon(
        ns_steps=_STEPS,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers((axis,), others),
    )
    layers, devices = len(shard), lax.axis_size(names) if names else 1
    padding = [(0, -layers % devices), *[(0, 0)] * (shard.ndim - 1)]
    whole = jnp.pad(shard, padding)  # matrices of 0 stay so
    if names:
        whole = lax.all_to_all(whole, names, 0, axis, tiled=True)
    found: Any = newton_schulz.update(whole, newton_schulz.init(whole))[0]
    if names:
        found = lax.all_to_all(found, names, axis, 0, tiled=True)
    return found[:layers]
