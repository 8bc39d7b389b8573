"""From a run's parallel sizes to the mesh and the context-parallel choice."""

from __future__ import annotations

from farspan import schedules
from farspan.context import ContextParallel
from farspan.dist import ensure_devices, make_mesh
from farspan.layouts import get_layout
from farspan.models import DecoderConfig
from farspan.train.config import ParallelConfig


def context_degrees(parallel: ParallelConfig, model: DecoderConfig) -> tuple[str, int, int]:
    """Resolves the strategy and splits the context-parallel size over its two axes.

    Args:
      parallel: Parallel sizes.
      model: The decoder; its heads bound the Ulysses degree.

    Returns:
      `(strategy, cp_ring, cp_ulysses)`.

    Raises:
      ValueError: If the Ulysses size does not divide the context-parallel size, or is given for a
        strategy that has no use for it.
    """
    strategy, size = parallel.context_parallel_strategy, parallel.context_parallel_size
    ulysses = parallel.context_parallel_ulysses_size
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
    if strategy == "usp":
        return strategy, size // ulysses, ulysses
    return (strategy, 1, size) if strategy == "ulysses" else (strategy, size, 1)


def make_context(parallel: ParallelConfig, model: DecoderConfig) -> ContextParallel:
    """Builds the mesh and checks that the combination is possible, before anything is compiled.

    Args:
      parallel: Parallel sizes; their product is the number of devices used.
      model: The decoder.

    Returns:
      The context-parallel choice with its mesh.

    Raises:
      ValueError: If the combination is not possible or there are too few devices.
    """
    strategy, cp_ring, cp_ulysses = context_degrees(parallel, model)
    schedules.check_combination(
        strategy,
        schedules.degrees(strategy, cp_ring, cp_ulysses),
        get_layout(parallel.context_parallel_load_balance),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
    )
    ensure_devices(cp_ring * cp_ulysses * parallel.data_parallel_size * parallel.fsdp_parallel_size)
    mesh = make_mesh(
        data=parallel.data_parallel_size,
        fsdp=parallel.fsdp_parallel_size,
        cp_ring=cp_ring,
        cp_ulysses=cp_ulysses,
    )
    return ContextParallel(mesh, strategy, parallel.context_parallel_load_balance)
