"""`farspan plan RECIPE [--flag value ...]`: what a step costs on given TPUs, and if it fits."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farspan.cli.recipe_arguments import StageOptions, parse_stage, recipes_help, split_name
from farspan.train.config import TrainConfig, device_count, to_dict

if TYPE_CHECKING:
    from farspan.plan.aot import CompileReport
    from farspan.plan.compiler import Progress
    from farspan.plan.cost import Flops, TimeBounds, Traffic
    from farspan.plan.hardware import Slice
    from farspan.plan.memory import MemoryAccount
    from farspan.plan.workload import Workload

_PROGRAM = "farspan.train.program:lower_train_step"
_ABOUT = (
    "Say what one training step holds, computes and sends on given TPUs, and whether it fits. "
    "Needs no TPU."
)
_USAGE = "[--hardware v5p:4x4x4] [--compile] [--json] [--flag value ...]"
_UNCERTAIN = 0.6
"""Share by which the compiler's figure may differ from the estimate (docs/planning.md)."""


@dataclass(frozen=True)
class PlanOptions(StageOptions):
    """What is planned.

    Attributes:
      hardware: TPU slice, as chip and shape in chips, such as v5p:4x4x4, v6e:4x4 or tpu7x:2x2x1. A
        chip alone (v4, v5e, v5p, v6e, tpu7x): the smallest usual slice with enough devices.
      document_tokens: Length of the documents in a row; 0: one document fills the row, which is the
        most work.
      compile: Compile the step for that hardware with the TPU compiler, no TPU needed, and say what
        the compiled program holds and sends; minutes for a large model.
      json: Print one JSON object instead of tables.
    """

    hardware: str = "v5p"
    document_tokens: int = 0
    compile: bool = False
    json: bool = False


@dataclass(frozen=True)
class Plan:
    """The account of one step.

    Attributes:
      recipe: Name of the recipe.
      work: The step.
      hardware: The slice.
      memory: What one device holds.
      flops: FLOPs of one device.
      traffic: What one device sends.
      bounds: Times that no schedule can beat.
    """

    recipe: str
    work: Workload
    hardware: Slice
    memory: MemoryAccount
    flops: Flops
    traffic: Traffic
    bounds: TimeBounds

    @property
    def margin_bytes(self) -> int:
        """Memory of a device that the estimate leaves free; negative where it does not fit."""
        return self.hardware.chip.hbm_bytes - self.memory.peak_bytes

    @property
    def is_close(self) -> bool:
        """Whether the estimate is too near the limit for a verdict."""
        return abs(self.margin_bytes) < _UNCERTAIN * self.memory.peak_bytes and self.state_fits

    @property
    def state_fits(self) -> bool:
        """Whether parameters and optimizer state alone fit; exact."""
        return self.memory.state_bytes <= self.hardware.chip.hbm_bytes

    def facts(self) -> dict[str, Any]:
        """The account in JSON values."""
        work, memory = self.work, self.memory
        groups = ("attention", "parameters", "gradients", "updates")
        return {
            "recipe": self.recipe,
            "hardware": {
                "name": self.hardware.name,
                "num_chips": self.hardware.num_chips,
                "num_devices": self.hardware.num_devices,
                "hbm_bytes": self.hardware.chip.hbm_bytes,
                "peak_flops_per_second": self.hardware.chip.peak_flops_per_second,
            },
            "mesh": dict(work.context.mesh.shape),
            "num_devices": work.num_devices,
            "split": work.context.split,
            "layout": work.context.layout,
            "num_parameters": work.model.num_parameters,
            "seq_len": work.seq_len,
            "rows": work.rows,
            "accumulation": work.accumulation,
            "document_tokens": work.document_tokens,
            "memory": {
                "items": [
                    dataclasses.asdict(item) | {"at_peak": item in memory.at_peak}
                    for item in memory.items
                ],
                "state_bytes": memory.state_bytes,
                "peak_bytes": memory.peak_bytes,
                "peak_phase": memory.peak_phase,
                "state_fits": self.state_fits,
                "fits": self.margin_bytes >= 0,
                "close": self.is_close,
                "margin_bytes": self.margin_bytes,
            },
            "flops_per_device": dataclasses.asdict(self.flops)
            | {"model": self.flops.model, "hardware": self.flops.hardware},
            "traffic_per_device": {
                name: [
                    dataclasses.asdict(each) | {"sent_bytes": each.sent_bytes}
                    for each in getattr(self.traffic, name)
                ]
                for name in groups
            }
            | {"sent_bytes": self.traffic.sent_bytes},
            "lower_bounds": dataclasses.asdict(self.bounds)
            | {"step_seconds": self.bounds.step_seconds},
        }


def main(arguments: list[str]) -> int:
    """Plans a recipe.

    Args:
      arguments: The recipe's name, then flags.

    Returns:
      0, also where the recipe does not fit.

    Raises:
      ValueError: The arguments or the configuration do not fit together or with the hardware, or
        there is no compiler.
      CompileError: The compiler failed for another reason than memory.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(recipes_help("plan", _USAGE, _ABOUT))
        return 0
    name, options = parse_recipe(*split_name("plan", arguments))
    if options.compile:
        _check_compiler()
    plan = make_plan(name, options)
    if not options.json:
        from farspan.cli import plan_tables

        plan_tables.print_plan(plan)
    report = _compile(plan, options.config) if options.compile else None
    if options.json:
        compiled = None if report is None else report.to_json()
        sys.stdout.write(json.dumps(plan.facts() | {"compiled": compiled}) + "\n")
    elif report is not None:
        from farspan.cli import plan_tables

        plan_tables.print_compiled(plan, report)
    return 0


def parse_recipe(name: str, flags: Sequence[str]) -> tuple[str, PlanOptions]:
    """Reads the flags of a recipe.

    Args:
      name: As `get_recipe` takes it.
      flags: Flags as typed.

    Returns:
      The recipe's own name, and what is planned.

    Raises:
      ValueError: There is no such recipe or flag, or a field is out of range.
    """
    return parse_stage("plan", name, flags, PlanOptions, _ABOUT)


def _check_compiler() -> None:
    from farspan.plan import aot

    if not aot.compiler_available():
        raise ValueError(
            "--compile needs the TPU compiler, libtpu, got none; pip install 'farspan[tpu]', or "
            "leave --compile out"
        )


def _compile(plan: Plan, config: TrainConfig) -> CompileReport:
    """Compiles the step; says meanwhile how long it takes."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def show(phase: str, seconds: float) -> None:
            status.update(f"{phase} for {plan.hardware.name} ({seconds:.0f} s)")

        return compile_step(config, plan.hardware.name, show)


def compile_step(config: TrainConfig, hardware: str, on_progress: Progress) -> CompileReport:
    """Compiles the training step of a run for a slice; see `farspan.plan.aot.compile_program`."""
    from farspan.plan import aot

    return aot.compile_program(
        _PROGRAM, {"config": to_dict(config)}, hardware, on_progress=on_progress
    )


def make_plan(name: str, options: PlanOptions) -> Plan:
    """Accounts for a step of a recipe.

    Args:
      name: The recipe's name.
      options: The run and the hardware.

    Raises:
      ValueError: If the sizes of the run are not possible, or the slice has too few devices.
    """
    from farspan.plan import cost, memory
    from farspan.plan.hardware import get_slice, smallest_slice
    from farspan.train.fit import make_workload

    needed = device_count(options.config)
    if ":" in options.hardware:
        hardware = get_slice(options.hardware)
    else:
        hardware = smallest_slice(options.hardware, needed)
    if needed > hardware.num_devices:
        raise ValueError(
            f"the mesh needs {needed} devices, got {hardware.name} with {hardware.num_devices}; "
            f"use --hardware {smallest_slice(hardware.chip.name, needed).name}, or smaller "
            "parallel sizes"
        )
    work = make_workload(options.config, options.document_tokens)
    held, computed, sent = memory.account(work), cost.flops(work), cost.traffic(work)
    return Plan(
        recipe=name,
        work=work,
        hardware=hardware,
        memory=held,
        flops=computed,
        traffic=sent,
        bounds=cost.time_bounds(computed, sent, held, hardware),
    )
