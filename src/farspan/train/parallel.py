"""From a run's parallel sizes to the mesh and the context-parallel choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from farspan import schedules
from farspan.context import ContextParallel
from farspan.dist import AXES, ContextSizes, ensure_devices, make_mesh, order_devices
from farspan.layouts import get_layout
from farspan.masks import Causal, Mask, SlidingWindow
from farspan.models import DecoderConfig
from farspan.train.config import ParallelConfig


def context_degrees(parallel: ParallelConfig, model: DecoderConfig) -> tuple[str, ContextSizes]:
    """Resolves the strategy and splits the context-parallel size over its axes.

    Args:
      parallel: Parallel sizes.
      model: The decoder; its heads bound the Ulysses degree.

    Returns:
      The strategy, and the sizes of the mesh axes.

    Raises:
      ValueError: If a size does not divide the one it is a part of, or is given for a strategy that
        has no use for it.
    """
    strategy, size = parallel.context_parallel_strategy, parallel.context_parallel_size
    ulysses, outer = parallel.context_parallel_ulysses_size, parallel.context_parallel_outer_size
    if ulysses and strategy != "usp":
        raise ValueError(
            "context_parallel_ulysses_size belongs to strategy usp alone, got "
            f"context_parallel_ulysses_size={ulysses}, context_parallel_strategy={strategy}; "
            "leave it 0 or use --context-parallel-strategy usp"
        )
    if ulysses and size % ulysses:
        raise ValueError(
            "context_parallel_ulysses_size must divide context_parallel_size, got "
            f"{ulysses} and {size}"
        )
    if strategy == "auto":
        strategy, ulysses = schedules.choose_strategy(model.num_heads, model.num_kv_heads, size)
    elif strategy == "usp" and not ulysses:
        ulysses = schedules.choose_ulysses_degree(model.num_heads, model.num_kv_heads, size)
    elif strategy == "ulysses":
        ulysses = size
    ring = size // max(1, ulysses)
    if outer > 1 and (strategy not in ("ring", "usp") or ring % outer):
        raise ValueError(
            "context_parallel_outer_size must divide the ring of strategy ring or usp, got "
            f"context_parallel_outer_size={outer}, strategy {strategy} with a ring of {ring}; use 1"
        )
    sizes = ContextSizes(cp_ring_outer=outer, cp_ring=ring // outer, cp_ulysses=max(1, ulysses))
    return strategy, sizes


def make_context(
    parallel: ParallelConfig, model: DecoderConfig, devices: Sequence[Any] | None = None
) -> ContextParallel:
    """Builds the mesh and checks that the combination is possible, before anything is compiled.

    Args:
      parallel: Parallel sizes; their product is the number of devices used.
      model: The decoder.
      devices: The devices to choose from; by default those of this machine.

    Returns:
      The context-parallel choice with its mesh.

    Raises:
      ValueError: If the combination is not possible or there are too few devices.
    """
    strategy, sizes = context_degrees(parallel, model)
    schedules.check_combination(
        strategy,
        schedules.degrees(strategy, **sizes),
        get_layout(parallel.context_parallel_load_balance),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_groups=parallel.context_parallel_head_groups,
        ring_streams=parallel.context_parallel_ring_streams,
    )
    data, fsdp = parallel.data_parallel_size, parallel.fsdp_parallel_size
    if devices is None:
        ensure_devices(parallel.context_parallel_size * data * fsdp)
    else:
        axes: dict[str, Any] = {"data": data, "fsdp": fsdp, **sizes}
        devices = order_devices(devices, dict.fromkeys(AXES, 1) | axes)
    return ContextParallel(
        make_mesh(data=data, fsdp=fsdp, **sizes, devices=devices),
        strategy,
        parallel.context_parallel_load_balance,
        parallel.context_parallel_head_groups,
        parallel.context_parallel_ring_streams,
    )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Attention of the layers that have one window.

    Attributes:
      mask: Which keys a query sees, within its document.
      context: How keys and values meet queries; all kinds share one layout.
      layers: Number of such layers.
    """

    mask: Mask
    context: ContextParallel
    layers: int

    @property
    def has_ring(self) -> bool:
        """Whether keys travel round a ring."""
        return self.context.strategy in ("ring", "usp") and self.context.degrees.sequence > 1


def layer_kinds(model: DecoderConfig, context: ContextParallel) -> dict[int | None, LayerKind]:
    """Says how the layers of each window attend, by window.

    Windowed layers exchange halos where the layout lets them, whatever the strategy of the others.
    """
    found: dict[int | None, LayerKind] = {}
    for layer in range(model.num_layers):
        window = model.windows[layer % len(model.windows)]
        mask: Mask = Causal()
        of_window = context
        if window is not None:
            mask = Causal() & SlidingWindow(window - 1, 0)
            name = schedules.window_strategy(context.strategy, context.layout_object)
            if name != context.strategy:
                of_window = dataclasses.replace(
                    context, strategy=name, head_groups=1, ring_streams=1
                )
        layers = found[window].layers if window in found else 0
        found[window] = LayerKind(mask, of_window, layers + 1)
    return found
