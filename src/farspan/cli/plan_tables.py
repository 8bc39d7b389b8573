"""The account of a step as tables in the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from farspan.cli.plan import Plan
from farspan.plan.aot import CompileReport, Memory, OutOfMemory
from farspan.plan.memory import binary_size
from farspan.schedules import Collective

_PLAIN_WIDTH = 100
_SMALL = 0.005
_MOST_BUFFERS = 10
_COMPILED_KINDS = {
    "argument": "given: state and batch",
    "output": "returned",
    "alias": "of that, in the place of what was given",
    "temporary": "held in between",
}


def print_plan(plan: Plan) -> None:
    """Prints the account on standard output."""
    console = _console()
    _print_head(console, plan)
    _print_memory(console, plan)
    _print_verdict(console, plan)
    _print_flops(console, plan)
    _print_traffic(console, plan)
    _print_bounds(console, plan)
    sys.stdout.flush()


def print_compiled(plan: Plan, report: CompileReport) -> None:
    """Prints what the compiler says of the step on standard output."""
    console = _console()
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"\n[bold]Compiled for {report.hardware}[/bold], by {versions}")
    console.print(
        f"lowered in {report.lower_seconds:.0f} s, compiled in {report.compile_seconds:.0f} s"
    )
    if report.out_of_memory is not None:
        _print_out_of_memory(console, report.out_of_memory)
        return
    assert report.memory is not None
    _print_compiled_memory(console, plan, report, report.memory)
    _print_overlap(console, report)
    _print_kernels(console, report)
    sys.stdout.flush()


def _print_out_of_memory(console: Console, lack: OutOfMemory) -> None:
    console.print(
        f"[bold red]out of memory[/bold red]: it needs {binary_size(lack.wanted_bytes)} of "
        f"{binary_size(lack.available_bytes)}"
    )
    if not lack.largest:
        return
    table = _table("largest buffers", "bytes", "made by")
    for buffer in lack.largest[:_MOST_BUFFERS]:
        table.add_row(buffer.shape, binary_size(buffer.size_bytes), buffer.operator or "-")
    console.print(table)


def _print_compiled_memory(
    console: Console, plan: Plan, report: CompileReport, memory: Memory
) -> None:
    total, limit = memory.total_bytes, report.hbm_bytes
    verdict = (
        "[bold green]fits[/bold green]" if report.fits else "[bold red]does not fit[/bold red]"
    )
    console.print(
        f"{verdict}: {binary_size(total)} of {binary_size(limit)}, {(limit - total) / limit:.0%} "
        f"free; the estimate was {binary_size(plan.memory.peak_bytes)}"
    )
    table = _table("memory", "device", "host")
    kept = ("argument", "output", "alias", "temporary")
    for name in kept:
        device, host = getattr(memory, f"{name}_bytes"), getattr(memory, f"host_{name}_bytes")
        table.add_row(_COMPILED_KINDS[name], binary_size(device), binary_size(host))
    table.add_row("the program itself", binary_size(memory.code_bytes), "")
    table.add_row("together", binary_size(total), binary_size(memory.host_bytes))
    console.print(table)


def _print_overlap(console: Console, report: CompileReport) -> None:
    console.print("\n[bold]Collectives of one device[/bold], loops whose length data decides once")
    table = _table("collective", "count", "under a kernel", "bytes sent", "hidden under a kernel")
    for row in report.collectives:
        table.add_row(
            row.kind,
            f"{row.transfers:,}",
            f"{row.hidden_transfers:,}",
            binary_size(row.sent_bytes),
            binary_size(row.hidden_bytes),
        )
    console.print(table)


def _print_kernels(console: Console, report: CompileReport) -> None:
    if not report.kernels:
        return
    console.print("\n[bold]Kernels[/bold]")
    table = _table("kernel", "places", "launches")
    for kernel in report.kernels:
        table.add_row(kernel.name, f"{kernel.places:,}", f"{kernel.launches:,}")
    console.print(table)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _print_head(console: Console, plan: Plan) -> None:
    work, hardware = plan.work, plan.hardware
    mesh = " x ".join(f"{axis} {n}" for axis, n in work.context.mesh.shape.items() if n > 1)
    spare = hardware.num_devices - work.num_devices
    documents = f"documents of {work.document_tokens:,} tokens" if work.document_tokens else (
        "one document a row"
    )  # fmt: skip
    parts = f" in {work.accumulation} parts" if work.accumulation > 1 else ""
    console.print(f"[bold]{plan.recipe} on {hardware.name}[/bold]")
    console.print(
        f"{hardware.num_chips} chips, {hardware.num_devices} devices of "
        f"{binary_size(hardware.chip.hbm_bytes)}"
        + (f", {spare} of them unused" if spare else "")
    )  # fmt: skip
    console.print(f"mesh: {mesh or 'one device'}; {work.context.split}, {work.context.layout}")
    console.print(
        f"{work.model.num_parameters:,} parameters; {work.rows} row{'s' * (work.rows > 1)} of "
        f"{work.seq_len:,} tokens{parts}, {documents}"
    )


def _print_memory(console: Console, plan: Plan) -> None:
    console.print("\n[bold]Memory of one device[/bold]")
    table = _table("kind", "bytes", "", "held during")
    for item in plan.memory.items:
        peak = " (peak)" if item.phase == plan.memory.peak_phase else ""
        table.add_row(
            item.kind,
            binary_size(item.num_bytes),
            "exact" if item.exact else "estimate",
            f"{item.phase}{peak}",
        )
    console.print(table)


def _print_verdict(console: Console, plan: Plan) -> None:
    memory, limit = plan.memory, plan.hardware.chip.hbm_bytes
    state, peak = binary_size(memory.state_bytes), binary_size(memory.peak_bytes)
    if plan.is_close:
        console.print(
            f"[bold yellow]close[/bold yellow]: this estimate is {peak} of {binary_size(limit)}, "
            "too near to say; --compile asks the compiler"
        )
    elif plan.margin_bytes >= 0:
        console.print(
            f"[bold green]fits[/bold green] by this estimate: {peak} of {binary_size(limit)}, "
            f"{binary_size(plan.margin_bytes)} ({plan.margin_bytes / limit:.0%}) free; --compile "
            "asks the compiler"
        )
        return
    elif plan.state_fits:
        console.print(
            f"[bold red]does not fit[/bold red] by this estimate: {peak} of {binary_size(limit)}"
        )
    else:
        console.print(
            f"[bold red]does not fit[/bold red]: parameters and optimizer state alone take {state} "
            f"of {binary_size(limit)}"
        )
    console.print("what takes the memory at the peak, and what lowers it:")
    for item in memory.at_peak:
        share = item.num_bytes / memory.peak_bytes
        if share >= _SMALL:
            console.print(
                f"  {share:4.0%}  {item.kind}, {binary_size(item.num_bytes)}: {item.remedy}"
            )


def _print_flops(console: Console, plan: Plan) -> None:
    flops = plan.flops
    console.print("\n[bold]FLOPs of one device and step[/bold]")
    table = _table("", "model", "hardware", "recomputed and padded")
    rows = (
        ("matrices", flops.matmul_model, flops.matmul_hardware),
        ("attention", flops.attention_model, flops.attention_hardware),
        ("updates", 0, flops.updates),
        ("together", flops.model, flops.hardware),
    )
    for name, model, hardware in rows:
        if model:
            table.add_row(name, f"{model:.3e}", f"{hardware:.3e}", f"{hardware / model - 1:.0%}")
        elif hardware:
            table.add_row(name, "0", f"{hardware:.3e}", "")
    console.print(table)


def _print_traffic(console: Console, plan: Plan) -> None:
    traffic = plan.traffic
    console.print("\n[bold]Sent by one device in a step[/bold]")
    table = _table("for", "collective", "count", "devices", "bytes")
    groups: dict[str, tuple[Collective, ...]] = {
        "attention": traffic.attention,
        "parameters": traffic.parameters,
        "gradients": traffic.gradients,
        "updates": traffic.updates,
    }
    for name, found in groups.items():
        for each in found:
            table.add_row(
                name, each.op, f"{each.count:,}", f"{each.group}", binary_size(each.sent_bytes)
            )
    table.add_row("together", "", "", "", binary_size(traffic.sent_bytes))
    console.print(table)


def _print_bounds(console: Console, plan: Plan) -> None:
    bounds = plan.bounds
    console.print("\n[bold]Lower bounds of a step's time, not predictions[/bold]")
    table = _table("resource", "seconds")
    table.add_row("matrix units at their peak", f"{bounds.compute_seconds:.4g}")
    table.add_row("links, all at full rate", f"{bounds.link_seconds:.4g}")
    table.add_row("memory, state and activations once", f"{bounds.hbm_seconds:.4g}")
    console.print(table)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for n, head in enumerate(heads):
        number = n > 0 and head not in ("", "held during", "collective")
        table.add_column(head, justify="right" if number else "left")
    return table
