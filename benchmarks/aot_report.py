"""Writes what the TPU compiler says of whole training steps at 64 chips: docs/aot/*.md.

    python benchmarks/aot_report.py                               # every case, minutes each
    python benchmarks/aot_report.py --cases llama3_8b_long-v5p --out docs/aot --json

A case is a recipe with flags on a slice. Its step is lowered for the slice and compiled; no TPU is
needed. A page has the account that `farspan plan` makes beforehand and the compiler's figures
beside it: memory by kind, collectives and what runs over them, kernels. These are facts about the
compiled program; nothing was run, and no time is measured but that of the compiler. Every page ends
with the command, the commit, the versions and the date.

The exit status is 1 if a case does not fit or does not compile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from provenance import headline, provenance

from farspan.cli.plan import Plan, compile_step, make_plan, parse_recipe
from farspan.plan.aot import CompileError, CompileReport
from farspan.plan.memory import binary_size


class Case(NamedTuple):
    """A recipe, flags of `farspan plan`, and what the page is about."""

    recipe: str
    flags: tuple[str, ...]
    title: str


CASES = {
    "llama3_8b_long-v5p": Case(
        "llama3_8b_long", ("--hardware", "v5p:4x4x4"), "Llama 3 8B on rows of 131,072 tokens, v5p"
    ),
    "llama3_8b_long-1m-v5p": Case(
        "llama3_8b_long",
        (
            *("--hardware", "v5p:4x4x4", "--seq-len", "1048576", "--context-parallel-size", "64"),
            *("--fsdp-parallel-size", "1", "--batch-size", "1"),
        ),
        "Llama 3 8B on rows of 1,048,576 tokens, v5p",
    ),
    "llama3_8b_long-tpu7x": Case(
        "llama3_8b_long",
        ("--hardware", "tpu7x:4x4x4", "--context-parallel-size", "16"),
        "Llama 3 8B on rows of 131,072 tokens, TPU7x",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, writes the pages, and returns the exit status."""
    options = _parse(arguments)
    found = provenance() | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    print(headline(found))
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        case = CASES[name]
        _, chosen = parse_recipe(case.recipe, case.flags)
        plan = make_plan(case.recipe, chosen)
        try:
            report = compile_step(chosen.config, plan.hardware.name, _progress(name))
        except CompileError as error:
            rows.append({"case": name, "fits": False, "error": str(error)})
            print(f"{name}: {error}")
            continue
        page = options.out / f"{name}.md"
        page.write_text(_page(case, plan, report, found), encoding="utf-8")
        rows.append({"case": name, "page": str(page), "plan": plan.facts(), **report.to_json()})
        print(f"{name}: {_verdict(report)}; {page}")
    if options.json:
        print(json.dumps(found | {"rows": rows}))
    return 0 if all(row["fits"] for row in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE")
    add("--out", type=Path, default=Path("docs/aot"), help="folder of the pages")
    add("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args(arguments)


def _progress(name: str) -> Any:
    said = ""

    def say(phase: str, seconds: float) -> None:
        nonlocal said
        minute = f"{phase}, {int(seconds // 60)} min"
        if minute != said:
            print(f"{name}: {minute}", file=sys.stderr, flush=True)
        said = minute

    return say


def _verdict(report: CompileReport) -> str:
    if report.memory is None:
        assert report.out_of_memory is not None
        wanted = binary_size(report.out_of_memory.wanted_bytes)
        return f"out of memory, needs {wanted} of {binary_size(report.hbm_bytes)}"
    total = binary_size(report.memory.total_bytes)
    words = "fits" if report.fits else "does not fit"
    return f"{words}, {total} of {binary_size(report.hbm_bytes)} a device"


def _page(case: Case, plan: Plan, report: CompileReport, found: dict[str, Any]) -> str:
    work = plan.work
    mesh = " x ".join(f"{axis} {n}" for axis, n in work.context.mesh.shape.items() if n > 1)
    head = (
        f"{plan.hardware.name}: {plan.hardware.num_chips} chips, {plan.hardware.num_devices} "
        f"devices. Mesh {mesh}; {work.context.split}, {work.context.layout}; {work.rows} rows of "
        f"{work.seq_len:,} tokens; remat_policy {work.model.remat_policy}. Facts of the compiled "
        "program: nothing was run."
    )
    sections = [
        f"# {case.title}",
        head,
        f"**{_verdict(report)}** (estimated beforehand: {binary_size(plan.memory.peak_bytes)}).",
        *_memory(plan, report),
        *_sent(plan, report),
        *_bounds(plan),
        "## How it was made",
        f"`farspan plan {case.recipe} {shlex.join(case.flags)} --compile`, {found['date']}, "
        f"commit {found['commit']}; compiled by "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + f" in {report.compile_seconds:.0f} s.",
    ]
    return "\n\n".join(sections) + "\n"


def _memory(plan: Plan, report: CompileReport) -> list[str]:
    rows: list[Sequence[str]] = [
        (item.kind, binary_size(item.num_bytes), "exact" if item.exact else "estimate", item.phase)
        for item in plan.memory.items
    ]
    sections = ["## Memory of one device", _table(("accounted", "bytes", "", "held during"), rows)]
    memory = report.memory
    if memory is None:
        assert report.out_of_memory is not None
        largest = [
            (buffer.shape, binary_size(buffer.size_bytes), buffer.operator or "-")
            for buffer in report.out_of_memory.largest
        ]
        return [*sections, _table(("largest buffers", "bytes", "made by"), largest)]
    kinds = ("argument", "output", "alias", "temporary")
    compiled = [
        (
            name,
            binary_size(getattr(memory, f"{name}_bytes")),
            binary_size(getattr(memory, f"host_{name}_bytes")),
        )
        for name in kinds
    ]
    compiled.append(("code", binary_size(memory.code_bytes), ""))
    compiled.append(
        ("together", binary_size(memory.total_bytes), binary_size(memory.host_bytes))
    )  # fmt: skip
    return [*sections, _table(("compiled", "device", "host"), compiled)]


def _sent(plan: Plan, report: CompileReport) -> list[str]:
    rows = [
        (
            row.kind,
            f"{row.transfers:,}",
            f"{row.hidden_transfers:,}",
            binary_size(row.sent_bytes),
            binary_size(row.hidden_bytes),
        )
        for row in report.collectives
    ]
    heads = ("collective", "count", "under a kernel", "bytes sent", "of these under a kernel")
    words = (
        f"Accounted: {binary_size(plan.traffic.sent_bytes)}. In the compiled program, loops whose "
        "length the data decides counted once:"
    )
    kernels = [(k.name, f"{k.places:,}", f"{k.launches:,}") for k in report.kernels]
    return [
        "## What one device sends in a step",
        words,
        _table(heads, rows),
        "## Kernels",
        _table(("kernel", "places", "launches"), kernels) if kernels else "None.",
    ]


def _bounds(plan: Plan) -> list[str]:
    bounds = plan.bounds
    rows = [
        ("matrix units at their peak", f"{bounds.compute_seconds:.4g}"),
        ("links, all at full rate", f"{bounds.link_seconds:.4g}"),
        ("memory, state and activations once", f"{bounds.hbm_seconds:.4g}"),
    ]
    flops = (
        f"{plan.flops.model:.4g} model FLOPs and {plan.flops.hardware:.4g} hardware FLOPs a device."
    )
    return [
        "## Lower bounds of a step's time",
        f"{flops} No step can be faster than any of these; none of them is a prediction.",
        _table(("resource", "seconds"), rows),
    ]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
