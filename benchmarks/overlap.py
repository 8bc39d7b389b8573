"""Counts the transfers of attention that the TPU compiler hides under kernels. Needs no TPU.

    python benchmarks/overlap.py                                   # v5p:2x2x2: 6 minutes
    python benchmarks/overlap.py --hardware tpu7x:2x2x1 --strategies ring usp --json

One causal layer of each strategy, one row in layout zigzag, bfloat16, is compiled for the slice,
forward alone and backward alone, and the schedule of the program is read: a transfer is hidden if a
kernel is launched between its start and its end. Nothing is run, and nothing is said of time.

    transfers   how often the program sends, loops multiplied out
    hideable    those that some kernel could run beside: one lies, in the order of the schedule,
                strictly between the last kernel that makes what is sent and the first that needs
                it. The first keys of a ring are, under the step with the device's own; what the
                first kernel needs and what the last one makes are not.
    hidden      those that a kernel does run beside
    sent        MB (1e6 bytes) that leave the device, and how much of it is hidden
    link        MB on the busiest direction of a link of the slice, of what permutes send
    stacked     MB of the largest buffer that holds one part for each device of the ring

    all_gather, ulysses          all devices as one group; `_groups`: heads in groups
    ring, ring_of_rings          all devices in one ring; 2 rings, one in the other
    usp                          rings of pairs that exchange heads
    halo                         the last keys of neighbours only, under a window

Programs are kept in the cache folder of `farspan.plan.aot`. The exit status is 1 if a transfer that
could be hidden is not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import headline, provenance

from farspan.dist import link_bytes, wrapped_axes
from farspan.plan import hlo
from farspan.plan.aot import compile_program, compiler_available
from farspan.plan.dataflow import hideable_transfers
from farspan.plan.hardware import get_slice

_PROGRAM = "farspan.testing.compiled:lower_attention"
DIRECTIONS = ("forward", "backward")
# Ways by the arguments of the program, and the parts of the mesh beside the ring.
WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "ring": ({"strategy": "ring"}, {}),
    "ring_2_streams": ({"strategy": "ring", "ring_streams": 2}, {}),
    "ring_4_streams": ({"strategy": "ring", "ring_streams": 4}, {}),
    "ring_6_streams": ({"strategy": "ring", "ring_streams": 6}, {}),
    "usp": ({"strategy": "usp"}, {"cp_ulysses": 2}),
    "ring_of_rings": ({"strategy": "ring"}, {"cp_ring_outer": 2}),
    "all_gather_groups": ({"strategy": "all_gather", "head_groups": 4}, {}),
    "ulysses_groups": ({"strategy": "ulysses", "head_groups": 4}, {}),
    "all_gather": ({"strategy": "all_gather"}, {}),
    "ulysses": ({"strategy": "ulysses"}, {}),
    "halo": ({"strategy": "halo"}, {}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints the table, and returns the exit status."""
    options = _parse(arguments)
    report = provenance() | {name: getattr(options, name) for name in ("hardware", "seq_len")}
    report["versions"]["libtpu"] = importlib.metadata.version("libtpu")
    print(headline(report))
    print(
        f"{options.hardware}, {options.seq_len:,} tokens, {options.heads} heads, "
        f"{options.kv_heads} kv heads of {options.head_dim}, kernel {options.kernel}"
    )
    print(_LINE.format(*_HEADS))
    rows: list[dict[str, Any]] = []
    for way in options.strategies:
        for direction in options.directions:
            rows.append(_measure(options, way, direction))
            _print_row(rows[-1])
    all_hidden = all(row["hidden_transfers"] >= row["hideable_transfers"] for row in rows)
    print(f"\nall that could be hidden is: {'yes' if all_hidden else 'NO'}")
    if options.json:
        print(json.dumps(report | {"rows": rows, "all_hidden": all_hidden}))
    return 0 if all_hidden else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hardware", default="v5p:2x2x2", metavar="SLICE", help="(default: v5p:2x2x2)")
    add("--strategies", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY")
    add("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    add("--seq-len", type=int, default=16384, metavar="S", help="(default: 16384)")
    add("--heads", type=int, default=32, metavar="H", help="(default: 32)")
    add("--kv-heads", type=int, default=16, metavar="K", help="(default: 16)")
    add("--head-dim", type=int, default=128, metavar="D", help="(default: 128)")
    add("--window", type=int, default=1024, metavar="W", help="of the halo (default: 1024)")
    add("--kernel", default="splash", help="(default: splash)")
    add("--flags", nargs="+", default=[], metavar="FLAG", help="arguments for libtpu, without --")
    add("--no-cache", action="store_true", help="compile even what is kept")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    if not compiler_available():
        parser.error("needs libtpu; pip install 'farspan[tpu]'")
    try:
        devices = get_slice(options.hardware).num_devices
    except ValueError as error:
        parser.error(str(error))
    if devices < 4 or options.seq_len < 1 or options.seq_len % (2 * devices):
        parser.error("needs 4 devices or more, and --seq-len a multiple of twice their number")
    return options


def _measure(options: argparse.Namespace, way: str, direction: str) -> dict[str, Any]:
    """Compiles one program and reads its schedule."""
    fields, parts = WAYS[way]
    devices = get_slice(options.hardware).num_devices
    ring = devices
    for size in parts.values():
        ring //= size
    arguments = fields | {
        "direction": direction,
        "sizes": {"cp_ring": ring} | parts,
        "window": options.window if way == "halo" else 0,
        "kernel": options.kernel,
        "layer": {
            "batch": 1,
            "seq_len": options.seq_len,
            "num_heads": options.heads,
            "num_kv_heads": options.kv_heads,
            "head_dim": options.head_dim,
            "value_dim": options.head_dim,
            "dtype": "bfloat16",
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "program.hlo"
        compiled = compile_program(
            _PROGRAM, arguments, options.hardware,
            flags=[f"--{flag}" for flag in options.flags], use_cache=not options.no_cache,
            keep_hlo=kept, on_progress=_Progress(f"{way} {direction}"),
        )  # fmt: skip
        text = kept.read_text(encoding="utf-8")
    return (
        {"strategy": way, "direction": direction}
        | _counts(text, ring)
        | {
            "busiest_link_bytes": _busiest_link(text, options.hardware, compiled.chips),
            "kernel_launches": sum(kernel.launches for kernel in compiled.kernels),
            "compile_seconds": round(compiled.compile_seconds, 1),
        }
    )


def _counts(text: str, ring: int) -> dict[str, Any]:
    """What the schedule of a program says of its transfers."""
    found = hlo.transfers(text)
    by_kind = hlo.summary(found)
    return {
        "transfers": sum(row.transfers for row in by_kind),
        "hideable_transfers": sum(hideable_transfers(text).values()),
        "hidden_transfers": sum(row.hidden_transfers for row in by_kind),
        "bytes": sum(row.sent_bytes for row in by_kind),
        "hidden_bytes": sum(row.hidden_bytes for row in by_kind),
        "stacked_bytes": hlo.largest_stacked_bytes(text, ring),
        "collectives": {row.kind: [row.transfers, row.hidden_transfers] for row in by_kind},
    }


def _busiest_link(text: str, hardware: str, chips: Sequence[tuple[int, ...]]) -> int:
    """Bytes on the busiest direction of a link, over all runs of all permutes."""
    where = get_slice(hardware)
    wrap = wrapped_axes(where.chip.device_kinds[0], where.shape)
    sends = (
        (chips[source], chips[target], found.count * found.operand_bytes)
        for found in hlo.transfers(text)
        for source, target in found.pairs
    )
    return max(link_bytes(sends, where.shape, wrap).values(), default=0)


class _Progress:
    """Says on standard error what is going on, at each phase and every ten seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._last = what, ("", 0)

    def __call__(self, phase: str, seconds: float) -> None:
        now = phase, int(seconds) // 10
        if now != self._last:
            print(f"{self._what}: {phase} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        self._last = now


_LINE = "{:18} {:8} {:>9} {:>8} {:>7} {:>9} {:>9} {:>8} {:>8} {:>8}  {}"
_SIZES = ("bytes", "hidden_bytes", "busiest_link_bytes", "stacked_bytes")
_HEADS = (
    "strategy", "", "transfers", "hideable", "hidden", "sent", "hidden", "link", "stacked",
    "launches",
    "collectives (hidden)",
)  # fmt: skip


def _print_row(row: dict[str, Any]) -> None:
    sizes = [f"{row[name] / 1e6:,.1f}" for name in _SIZES]
    kinds = (f"{count} {kind} ({hidden})" for kind, (count, hidden) in row["collectives"].items())
    counts = [row[f"{name}transfers"] for name in ("", "hideable_", "hidden_")]
    print(
        _LINE.format(
            row["strategy"], row["direction"], *counts, *sizes, row["kernel_launches"],
            ", ".join(kinds),
        ),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
