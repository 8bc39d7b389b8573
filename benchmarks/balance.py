"""Holds the layouts beside one another: how even is the work, and how many bytes must arrive?

    python benchmarks/balance.py                      # every law at cp 8, 64 and 256
    python benchmarks/balance.py --cp 8 64 --law lognormal sliding_window --json
    python benchmarks/balance.py --tokens-per-device 256 --cp 8      # seconds

Nothing is run on devices: orders, work and hops are counted exactly, on the host. A law says what
a row of `cp * tokens per device` tokens holds; lengths grow with the tokens per device, T:

    one_document     one causal document
    lognormal        causal documents, one behind another until the row is full: log-normal lengths
                     with median T / 2 and sigma 1; one row for each of 3 seeds
    short_and_long   causal documents of T / 8 tokens in one half of the row, one document in the
                     other
    sliding_window   one causal document; a token sees the T / 4 - 1 tokens before it, too
    prefix_lm        one document, whose first quarter every token sees

    max / mean   visible pairs of the busiest device over those of the mean; the worst of the rows
    MB received  keys and values that arrive at a device, per layer, in forward, by a ring that
                 makes as many hops as the row needs: 8 kv heads of 128, bfloat16; the rows' mean
    hops         shards whose keys arrive at a device; the rows' mean
    solve s      time to make the order on this machine; the rows' mean
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import headline, provenance

from farspan.layouts import get_layout
from farspan.masks import Causal, Mask, PrefixLM, SlidingWindow, pairs_per_query
from farspan.schedules.balance import balanced_order, imbalance
from farspan.schedules.hops import hops_needed, needed_shards

FIXED_LAYOUTS = ("contiguous", "zigzag", "striped")
LAYOUTS = (*FIXED_LAYOUTS, "balanced")
SEEDS = (0, 1, 2)
BYTES_PER_TOKEN = 2 * 8 * 128 * 2  # keys and values, kv heads, head_dim, bfloat16
BALANCE_TARGET = 1.02
ALIKE = 1.05  # layouts whose max / mean is within 5% of each other

Segments = NDArray[np.int32] | None
Row = tuple[Mask, Segments]


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, prints the table, and returns the exit status."""
    options = _parse(arguments)
    report = provenance() | {
        "tokens_per_device": options.tokens_per_device,
        "bytes_per_token": BYTES_PER_TOKEN,
    }
    print(headline(report))
    print(f"{options.tokens_per_device:,} tokens per device; 8 kv heads of 128, bfloat16\n")
    line = "{:15} {:>4}  {:11} {:>10} {:>12} {:>6} {:>8}"
    print(line.format("law", "cp", "layout", "max / mean", "MB received", "hops", "solve s"))
    rows: list[dict[str, Any]] = []
    for law, cp in itertools.product(options.law, options.cp):
        for layout in LAYOUTS:
            row = _measure(layout, law, cp, options.tokens_per_device)
            rows.append(row)
            numbers = (
                f"{row['max_over_mean']:.3f}", f"{row['bytes_received_per_device'] / 1e6:,.1f}",
                f"{row['hops']:.1f}", f"{row['solve_seconds']:.2f}",
            )  # fmt: skip
            print(line.format(law, cp, layout, *numbers))
    report |= {"rows": rows} | _targets(rows)
    print(f"\nbalanced is at most {BALANCE_TARGET} everywhere: {_yes(report['is_balanced'])}")
    print(
        "balanced receives no more than any layout within 5% of its max / mean: "
        f"{_yes(report['receives_least'])}"
    )
    if options.json:
        print(json.dumps(report))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cp", type=int, nargs="+", default=[8, 64, 256], metavar="P", help="devices")
    add("--law", nargs="+", choices=tuple(LAWS), default=list(LAWS))
    add("--tokens-per-device", type=int, default=4096, metavar="T", help="(default: 4096)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    if options.tokens_per_device < 16 or options.tokens_per_device % 16:
        parser.error("--tokens-per-device must be a positive multiple of 16")
    if min(options.cp) < 1:
        parser.error("--cp must be at least 1")
    return options


def _measure(layout: str, law: str, cp: int, local_tokens: int) -> dict[str, Any]:
    seq_len = cp * local_tokens
    found: list[tuple[float, int, float]] = []
    for mask, segment_ids in LAWS[law](seq_len, local_tokens):
        start = time.perf_counter()
        if layout in FIXED_LAYOUTS:
            order = get_layout(layout).permutation(seq_len, cp)
        else:
            order = balanced_order(mask, seq_len, cp, segment_ids)
        seconds = time.perf_counter() - start
        work = pairs_per_query(mask, seq_len, segment_ids)
        hops = sum(hops_needed(needed_shards(mask, order, cp, segment_ids)))
        found.append((imbalance(work, order, cp), hops, seconds))
    uneven, hops, seconds = np.array(found).T
    return {
        "layout": layout,
        "law": law,
        "cp": cp,
        "max_over_mean": uneven.max(),
        "bytes_received_per_device": hops.mean() * local_tokens * BYTES_PER_TOKEN,
        "hops": hops.mean(),
        "solve_seconds": seconds.mean(),
    }


def _targets(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether balanced is balanced, and receives no more than layouts that are as balanced."""
    is_balanced, receives_least = True, True
    for balanced in (row for row in rows if row["layout"] == "balanced"):
        is_balanced &= bool(balanced["max_over_mean"] <= BALANCE_TARGET)
        for row in rows:
            same_case = (row["law"], row["cp"]) == (balanced["law"], balanced["cp"])
            if same_case and row["max_over_mean"] <= ALIKE * balanced["max_over_mean"]:
                more = balanced["bytes_received_per_device"] > row["bytes_received_per_device"]
                receives_least &= not more
    return {"is_balanced": is_balanced, "receives_least": receives_least}


def _one_document(seq_len: int, local_tokens: int) -> list[Row]:
    del seq_len, local_tokens
    return [(Causal(), None)]


def _lognormal(seq_len: int, local_tokens: int) -> list[Row]:
    rows: list[Row] = []
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        lengths: list[int] = []
        while sum(lengths) < seq_len:
            lengths.append(max(1, round(local_tokens / 2 * float(np.exp(draw.standard_normal())))))
        documents = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:seq_len]
        rows.append((Causal(), documents.astype(np.int32)))
    return rows


def _short_and_long(seq_len: int, local_tokens: int) -> list[Row]:
    documents = np.arange(seq_len, dtype=np.int32) // (local_tokens // 8) + 1
    documents[seq_len // 2 :] = documents[-1]
    return [(Causal(), documents)]


def _sliding_window(seq_len: int, local_tokens: int) -> list[Row]:
    del seq_len
    return [(SlidingWindow(left=local_tokens // 4 - 1, right=0), None)]


def _prefix_lm(seq_len: int, local_tokens: int) -> list[Row]:
    del local_tokens
    return [(PrefixLM(seq_len // 4), None)]


LAWS: dict[str, Callable[[int, int], list[Row]]] = {
    "one_document": _one_document,
    "lognormal": _lognormal,
    "short_and_long": _short_and_long,
    "sliding_window": _sliding_window,
    "prefix_lm": _prefix_lm,
}
"""By name: the rows of a law, from the tokens of a row and of a device."""


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    sys.exit(main())
