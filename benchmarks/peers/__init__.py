"""What `benchmarks/attention.py` measures: one module per implementation.

Each module has `prepare(problem, setting) -> Prepared`, called once in a process of its own (in
`processes` of them, for an implementation whose devices are processes). It makes the inputs and
compiles; `Prepared.step()` then computes output and gradients once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from peers.problem import Problem

TORCH_ALONE, TORCH_RING = "torch flash", "torch ring"
"""The implementations that the others are held against."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
      name: As printed.
      module: Its module in this package.
      needs: Modules that its interpreter must hold.
      alone: Whether it runs on one device.
      split: Whether it runs on several devices.
      process_per_device: Whether each device is a process, or all are threads of one.
      holds_scores: Whether it holds the scores of all pairs at once.
      options: Passed to the module.
    """

    name: str
    module: str
    needs: tuple[str, ...]
    alone: bool = True
    split: bool = False
    process_per_device: bool = False
    holds_scores: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def runs_on(self, devices: int) -> bool:
        """Whether it runs on so many devices."""
        return self.alone if devices == 1 else self.split


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one worker process is told beside the problem.

    Attributes:
      devices: Devices that share the work.
      rank: Which of the processes this is.
      processes: How many there are.
      meeting_place: Path at which the processes may meet; it does not exist yet.
      options: `Implementation.options`.
    """

    devices: int
    rank: int
    processes: int
    meeting_place: str
    options: dict[str, Any]


class Prepared(NamedTuple):
    """A ready implementation.

    Attributes:
      step: Computes `(out, dq, dk, dv)` and waits until they are there.
      to_host: Turns what `step` gave into NumPy arrays `[B, Sl, heads, D]`.
      index: Places in the row of those Sl tokens, or None: all, in order.
    """

    step: Callable[[], Any]
    to_host: Callable[[Any], Sequence[Any]]
    index: Any = None


class Peer(Protocol):
    """What a module of this package provides."""

    def prepare(self, problem: Problem, setting: Setting) -> Prepared:
        """Makes the inputs and compiles."""
        ...


def implementations(strategies: Sequence[str]) -> list[Implementation]:
    """All implementations, with those of farspan's strategies that are asked for."""
    farspan = ("farspan", "jax")
    return [
        Implementation("farspan xla", "farspan_xla", farspan),
        *(
            Implementation(
                f"farspan {strategy}",
                "farspan_xla",
                farspan,
                alone=False,
                split=True,
                options={"strategy": strategy},
            )
            for strategy in strategies
        ),
        Implementation(TORCH_ALONE, "torch_flash", ("torch",)),
        Implementation(
            TORCH_RING, "torch_ring", ("torch",), alone=False, split=True, process_per_device=True
        ),
        Implementation(
            "ringattention", "ringattention_blockwise", ("jax", "ringattention"), split=True
        ),
        Implementation("tokamax chunked", "tokamax_chunked", ("jax", "tokamax")),
        Implementation("jax dense", "jax_dense", ("jax",), holds_scores=True),
    ]
