"""Holds farspan's CPU kernel beside the peers that are installed, in one run.

    python benchmarks/attention.py                    # S = 4,096 and 16,384, alone and on 4 devices
    python benchmarks/attention.py --peer-python .venv-peers/bin/python      # torch lives there
    python benchmarks/attention.py --seq-lens 8192 --only farspan torch --json
    python benchmarks/attention.py --quick            # seconds: S = 512, on 1 and 2 devices

Causal attention, float32, forward and backward, on the same seeded inputs. Every implementation
lives in processes of its own, and they take turns: one iteration each in every round, so that a
machine whose speed drifts is unfair to none. An implementation runs in the first interpreter that
holds what it needs: this one, then those given with `--peer-python`.

    CPU s      CPU-seconds of an iteration, all threads and processes: the median of the rounds
    wall s     time of an iteration, likewise; other load on the machine counts in full
    / alone    CPU-seconds over those of `torch flash`, which runs on one device
    / ring     CPU-seconds over those of `torch ring`, on as many devices
    peak MiB   the highest memory over that of the inputs, libraries and compiled programs, all
               processes together
    error      the greatest of out, dq, dk, dv: max|found - float64 reference| / max|reference|

`torch ring` is ours, around PyTorch's kernel: no public PyTorch call runs a ring on a CPU. See
`peers/` for how each implementation is called. PyTorch: `requirements/peers.txt`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import TORCH_ALONE, TORCH_RING, implementations
from peers.interpreters import find_interpreters
from peers.problem import Problem
from peers.side_by_side import Entry, enter, run_side_by_side
from provenance import headline, provenance

PEER_PYTHONS = "FARSPAN_PEER_PYTHONS"
STRATEGIES = ("ring", "all_gather", "ulysses", "usp")
_SHAPE = [field for field in dataclasses.fields(Problem) if field.name != "seq_len"]
_MIB = 1024**2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and returns the exit status."""
    options = _parse(arguments)
    interpreters = find_interpreters(options.peer_python)
    shape = {field.name: getattr(options, field.name) for field in _SHAPE}
    origin, machine = provenance(interpreters), _machine()  # before we load it ourselves
    entries: list[Entry] = []
    for seq_len in options.seq_lens:
        problem = Problem(seq_len, **shape)
        of_problem = [
            enter(each, problem, devices, interpreters)
            for devices in options.devices
            for each in implementations(options.strategies)
            if each.runs_on(devices) and _wanted(each.name, options.only)
        ]
        run_side_by_side(of_problem, options.rounds, options.max_seconds)
        entries += of_problem
    report = {
        "rows": _rows(entries),
        "not_measured": [
            _place(each) | {"reason": each.refusal} for each in entries if each.refusal
        ],
        "problem": shape,
        "machine": machine,
        **origin,
    }
    _print_table(report, options.details)
    if options.json:
        print(json.dumps(report))
    ours_refused = any(x["implementation"].startswith("farspan") for x in report["not_measured"])
    return 1 if ours_refused or not report["rows"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seq-lens", type=int, nargs="+", default=[4096, 16384], metavar="S")
    add("--devices", type=int, nargs="+", default=[1, 4], metavar="N", help="1: alone")
    add("--strategies", nargs="+", choices=STRATEGIES, default=["ring"], help="of farspan")
    add("--only", nargs="+", metavar="WORD", help="implementations whose name holds a WORD")
    add("--rounds", type=int, default=5, help="iterations of each (default: 5)")
    add("--max-seconds", type=float, default=120.0, help="stop one after so long (default: 120)")
    for field in _SHAPE:
        add(f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N")
    add(
        "--peer-python", "--torch-python", action="append", metavar="PATH",
        help=f"a further interpreter (or in {PEER_PYTHONS}, separated as in PATH)",
    )  # fmt: skip
    add("--quick", action="store_true", help="S = 512 on 1 and 2 devices, 2 rounds")
    add("--details", action="store_true", help="list the error of each output and gradient")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seq_lens, options.devices, options.rounds = [512], [1, 2], 2
    if options.peer_python is None:
        options.peer_python = [x for x in os.environ.get(PEER_PYTHONS, "").split(os.pathsep) if x]
    if min(options.rounds, *options.devices, *options.seq_lens) < 1:
        parser.error("--rounds, --devices and --seq-lens must be at least 1")
    return options


def _wanted(name: str, words: Sequence[str] | None) -> bool:
    return words is None or any(word in name for word in words)


def _place(entry: Entry) -> dict[str, Any]:
    return {
        "implementation": entry.implementation.name,
        "seq_len": entry.problem.seq_len,
        "devices": entry.devices,
    }


def _rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """What was measured, each row with its ratio to PyTorch alone and as a ring of its size."""
    rows = []
    for entry in entries:
        if entry.cost is None or entry.interpreter is None:
            continue
        row = _place(entry) | entry.cost._asdict()
        row |= {"error": max(entry.errors.values()), "errors": entry.errors}
        row |= {"rounds": entry.rounds, "python": entry.interpreter.versions["python"]}
        rows.append(row)
    seconds = {(x["implementation"], x["seq_len"], x["devices"]): x["cpu_seconds"] for x in rows}

    def ratio(row: dict[str, Any], other: str, devices: int) -> float | None:
        yardstick = seconds.get((other, row["seq_len"], devices))
        return None if yardstick is None else row["cpu_seconds"] / yardstick

    for row in rows:
        row["cpu_over_torch_flash"] = ratio(row, TORCH_ALONE, 1)
        row["cpu_over_torch_ring"] = ratio(row, TORCH_RING, row["devices"])
    return rows


def _print_table(report: dict[str, Any], details: bool) -> None:
    machine = report["machine"]
    shape = ", ".join(f"{name} {value}" for name, value in report["problem"].items())
    print(headline(report))
    print(f"{machine['cpu']}, {machine['cpus']} CPUs, load {machine['load']} before the run")
    print(f"causal, float32, forward + backward; {shape}\n")
    heads = ("implementation", "S", "devices", "CPU s", "wall s", "/ alone", "/ ring", "peak MiB")
    line = "{:18} {:>7} {:>7} {:>8} {:>8} {:>7} {:>7} {:>8}  {}"
    print(line.format(*heads, "error"))
    for row in report["rows"]:
        ratios = (row["cpu_over_torch_flash"], row["cpu_over_torch_ring"])
        errors = ", ".join(f"{name} {error:.0e}" for name, error in row["errors"].items())
        print(
            line.format(
                row["implementation"], f"{row['seq_len']:,}", row["devices"],
                f"{row['cpu_seconds']:.3f}", f"{row['wall_seconds']:.3f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{row['peak_bytes'] / _MIB:.1f}",
                f"{row['error']:.1e}" + (f" ({errors})" if details else ""),
            )
        )  # fmt: skip
    for row in report["not_measured"]:
        place = line.format(row["implementation"], f"{row['seq_len']:,}", row["devices"], *[""] * 6)
        print(f"{place.rstrip()}  {row['reason']}")


def _machine() -> dict[str, Any]:
    name = platform.processor()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return {"cpu": name, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"error: {error}")
