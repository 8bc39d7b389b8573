"""What works with what, as data: the choices, their values, and which pairs are refused.

The conformance suite walks it, and the table in the README is made from it:

    python -m farspan.testing.support README.md
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from farspan import schedules
from farspan.context import ContextParallel
from farspan.dist import ContextSizes, make_mesh
from farspan.kernels import Kernel, XlaKernel, get_kernel
from farspan.layouts import get_layout
from farspan.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Full,
    KeyRanges,
    PrefixLM,
    SlidingWindow,
)
from farspan.testing.cases import AttentionCase

SEQ_LEN = 64
START, STOP = "<!-- support table -->", "<!-- end of support table -->"


@dataclasses.dataclass(frozen=True)
class Value:
    """One value of a choice, in the terms of a small problem.

    Attributes:
      case: Fields of `AttentionCase`.
      context: Fields of `ContextParallel`.
      mesh: Arguments of `make_mesh`.
    """

    case: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    mesh: ContextSizes = dataclasses.field(default_factory=ContextSizes)


Selection = Mapping[str, str]
"""Name of the chosen value, for every choice."""


def _mesh(outer: int, ring: int, ulysses: int) -> Value:
    return Value(mesh={"cp_ring_outer": outer, "cp_ring": ring, "cp_ulysses": ulysses})


def _mask(mask: Any, **case: Any) -> Value:
    return Value({"mask": mask, **case})


CHOICES: dict[str, dict[str, Value]] = {
    "strategy": {name: Value(context={"strategy": name}) for name in schedules.STRATEGIES},
    "mask": {
        "causal": _mask(Causal()),
        "full": _mask(Full()),
        "sliding window": _mask(Causal() & SlidingWindow(9, 0)),
        "window both ways": _mask(SlidingWindow(7, 11)),
        "chunked": _mask(Causal() & Chunked(12)),
        "union": _mask(SlidingWindow(4, 11) | Causal()),
        "block causal": _mask(BlockCausal(6)),
        "prefix": _mask(PrefixLM(21)),
        "prefix of each document": _mask(Causal() | KeyRanges(1), given="prefix"),
        "shared prefix": _mask(Causal() & KeyRanges(2), given="shared_prefix"),
    },
    "layout": {
        name: Value(context={"layout": name})
        for name in ("contiguous", "zigzag", "striped", "balanced")
    },
    "heads": {
        "MHA": Value({"num_heads": 8, "num_kv_heads": 8}),
        "GQA": Value({"num_heads": 8, "num_kv_heads": 2}),
        "GQA, 16 heads": Value({"num_heads": 16, "num_kv_heads": 8}),
        "MQA": Value({"num_heads": 8, "num_kv_heads": 1}),
        "MLA latent": Value({"num_heads": 8, "num_kv_heads": 8, "latent": (12, 4)}),
    },
    "documents": {
        "one, unmarked": Value(),
        "packed, at shards' edges": Value({"documents": (8,) * 8}),
        "packed, with padding": Value({"documents": (5, 23, 1, 28)}),
        "packed, positions restart": Value({"documents": (30, 20), "restart_positions": True}),
    },
    "scores": {
        "plain": Value(),
        "sinks": Value({"sinks": True}),
        "soft cap": Value({"logits_soft_cap": 3.0, "value_dim": 24}),
        "ALiBi": Value({"alibi": True, "scale": 0.7, "value_dim": 8}),
        "dropout": Value({"dropout_rate": 0.3, "sinks": True}),
    },
    "head groups": {str(n): Value(context={"head_groups": n}) for n in (1, 2)},
    "ring streams": {str(n): Value(context={"ring_streams": n}) for n in (1, 2)},
    "mesh": {
        "ring 2 x ulysses 2": _mesh(1, 2, 2),
        "ring 4": _mesh(1, 4, 1),
        "ring 4 x ulysses 2": _mesh(1, 4, 2),
        "ulysses 8": _mesh(1, 1, 8),
        "rings 2 x 2": _mesh(2, 2, 1),
        "rings 2 x 2 x ulysses 2": _mesh(2, 2, 2),
    },
    "dtype": {name: Value({"dtype": name}) for name in ("float32", "bfloat16")},
    "kernel": {"xla": Value(), "reference": Value(), "splash": Value()},
}
USUAL = {
    "mask": "causal", "layout": "zigzag", "heads": "GQA", "documents": "packed, with padding",
    "scores": "plain", "head groups": "1", "ring streams": "1", "mesh": "ring 2 x ulysses 2",
    "dtype": "float32", "kernel": "xla",
}  # fmt: skip
"""What is chosen where nothing else is said."""


def usual(strategy: str, **chosen: str) -> Selection:
    """The usual selection for a strategy, with some values changed."""
    window = {"mask": "sliding window"} if strategy == "halo" else {}
    return {"strategy": strategy} | USUAL | window | chosen


def case_of(selection: Selection) -> AttentionCase:
    """The attention problem of a selection."""
    fields: dict[str, Any] = {"seq_len": SEQ_LEN}
    for choice, name in selection.items():
        fields.update(CHOICES[choice][name].case)
    if fields.get("given"):
        fields.setdefault("documents", (SEQ_LEN,))
    return AttentionCase(**fields)


def context_of(selection: Selection) -> ContextParallel:
    """Mesh, strategy and layout of a selection. Needs the devices."""
    fields: dict[str, Any] = {}
    for choice, name in selection.items():
        fields.update(CHOICES[choice][name].context)
    return ContextParallel(make_mesh(**CHOICES["mesh"][selection["mesh"]].mesh), **fields)


def kernel_of(selection: Selection) -> Kernel:
    """The kernel of a selection, with blocks that a small problem has several of."""
    blocks = XlaKernel(rows=16, key_block=8)
    return blocks if selection["kernel"] == blocks.name else get_kernel(selection["kernel"])


@functools.cache
def _refusal(selection: tuple[tuple[str, str], ...]) -> str | None:
    chosen = dict(selection)
    case, strategy = case_of(chosen), chosen["strategy"]
    layout = get_layout(chosen["layout"])
    degrees = schedules.degrees(strategy, **CHOICES["mesh"][chosen["mesh"]].mesh)
    try:
        schedules.check_combination(
            strategy, degrees, layout, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads,
            seq_len=case.seq_len, mask=case.mask, head_groups=int(chosen["head groups"]),
            ring_streams=int(chosen["ring streams"]), latent=case.latent is not None,
            places_given=case.restart_positions,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None


def refusal(selection: Selection) -> str | None:
    """The error with which a selection is refused, or None if it is computed."""
    return _refusal(tuple(sorted(selection.items())))


def covering_array(strength: int = 2, seed: int = 0) -> list[Selection]:
    """A small set of selections in which all values of any `strength` choices meet.

    Combinations of values that no selection can have are left out: each of them is refused.

    Args:
      strength: 2: every pair of values of two choices; 3: every triple.
      seed: Of the search.

    Returns:
      Selections that are computed, not refused.
    """
    names = list(CHOICES)
    values = {name: list(CHOICES[name]) for name in names}
    missing = {
        tuple(zip(some, chosen, strict=True))
        for some in itertools.combinations(names, strength)
        for chosen in itertools.product(*(values[name] for name in some))
    }
    draw = np.random.default_rng(seed)
    found: list[Selection] = []
    while missing:
        wanted = min(missing)
        candidates = _complete(dict(wanted), values, draw)
        if not candidates:
            missing.remove(wanted)
            continue
        met = [
            {
                tuple((name, candidate[name]) for name in some)
                for some in itertools.combinations(names, strength)
            }
            for candidate in candidates
        ]
        best = max(range(len(candidates)), key=lambda n: len(met[n] & missing))
        missing -= met[best]
        found.append(candidates[best])
    return found


def _complete(
    part: dict[str, str], values: dict[str, list[str]], draw: np.random.Generator
) -> list[dict[str, str]]:
    """Random selections that contain a part and are not refused; empty if there seem to be none."""
    found: list[dict[str, str]] = []
    for _ in range(400):
        drawn = {name: some[int(draw.integers(len(some)))] for name, some in values.items()}
        selection = drawn | part
        if refusal(selection) is None:
            found.append(selection)
            if len(found) == 40:
                break
    return found


def cells() -> dict[tuple[str, str, str], str | None]:
    """The table: `(choice, value, strategy)` to None (exact) or the refusal, with its remedy."""
    return {
        (choice, value, strategy): refusal(usual(strategy, **{choice: value}))
        for choice in CHOICES
        if choice not in ("strategy", "dtype", "mesh", "kernel")
        for value in CHOICES[choice]
        for strategy in CHOICES["strategy"]
    }


def support_table() -> str:
    """The table as Markdown, with a note for every refusal."""
    found = cells()
    strategies = list(CHOICES["strategy"])
    lines = ["| choice | value | " + " | ".join(f"`{name}`" for name in strategies) + " |"]
    lines.append("|" + "---|" * (len(strategies) + 2))
    notes: dict[str, int] = {}
    shown = ""
    for choice, value in dict.fromkeys((choice, value) for choice, value, _ in found):
        marks: list[str] = []
        for strategy in strategies:
            message = found[choice, value, strategy]
            if message is None:
                marks.append("exact")
            else:
                remedy = message.rsplit(";", 1)[1].strip()
                marks.append(f"[{notes.setdefault(remedy, len(notes) + 1)}]")
        lines.append(f"| {choice if choice != shown else ''} | {value} | {' | '.join(marks)} |")
        shown = choice
    lines += ["", "Refused before the first step, with the rule, the values and the remedy:", ""]
    lines += [f"- [{number}] {remedy}" for remedy, number in notes.items()]
    return "\n".join(lines)


def main() -> None:
    """Writes the table into the files named on the command line, between its two marks."""
    for path in map(Path, sys.argv[1:]):
        before, _, rest = path.read_text().partition(START)
        _, _, after = rest.partition(STOP)
        path.write_text(f"{before}{START}\n{support_table()}\n{STOP}{after}")


if __name__ == "__main__":
    main()
