"""Holds the formulas of what attention sends beside the compiled programs of known models.

    python benchmarks/communication.py                # every model, S = 131,072 at cp 8: 6 minutes
    python benchmarks/communication.py --models llama-3.1-8b --strategies ring ulysses --json
    python benchmarks/communication.py --models gemma-3-27b --seq-len 1048576 --cp 16

One attention layer of each kind that a model has, one row of S tokens with segment ids, layout
zigzag, on virtual CPU devices. Programs are compiled and read, none is run, so S adds little time.
float32: XLA for CPU widens collectives of bfloat16, which a TPU sends as they are. MB are 1e6
bytes, of one device and one layer.

    formula   bytes that the device puts into collectives (`farspan.schedules.collectives`)
    HLO       the same, as found in the compiled program; backward is the program of both passes
              less that of forward
    equal     whether count and bytes agree for each kind of collective
    sent      bytes that leave the device, by the formula: of float32, and of bfloat16
    held      keys and values on the device at once in forward (`farspan.schedules.held_key_bytes`)
    temp      temporary bytes that the compiled program needs, beside arguments and results; for
              backward those of both passes together

    all_gather, ulysses        all devices as one group; `_groups`: heads in 4 groups
    ring, ring_of_rings        8 in one ring; 2 rings, one in the other; under a window with only
                               the hops that it needs
    usp                        rings of pairs that exchange heads
    halo                       the last keys of neighbours only: for windows

`deepseek-v3-expanded` sends the keys and values that `deepseek-v3` makes from latents on arrival.
The exit status is 1 if any formula differs from its program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from provenance import headline, provenance

from farspan import schedules
from farspan.context import ContextParallel
from farspan.dist import ensure_devices, make_mesh
from farspan.masks import Causal, SlidingWindow
from farspan.plan.hlo import collectives
from farspan.testing.compiled import (
    AttentionLayer,
    compile_attention,
    expected_collectives,
    layer_collectives,
)

Totals = dict[str, tuple[int, int]]

# Machine code is never run, so LLVM need not improve it; XLA's program is the same.
_COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_DIRECTIONS: tuple[schedules.Direction, ...] = ("forward", "backward")


def _layer(heads: int, kv_heads: int, dim: int, window: int = 0, **more: Any) -> AttentionLayer:
    """A causal layer; a query sees `window` tokens, itself among them, or all."""
    mask = Causal() & SlidingWindow(window - 1, 0) if window else Causal()
    more = {"value_dim": dim} | more
    return AttentionLayer(mask, 1, 0, heads, kv_heads, dim, **more)


# From the `config.json` beside the weights of each model on Hugging Face.
MODELS: dict[str, dict[str, AttentionLayer]] = {
    # meta-llama/Llama-3.1-8B and -70B: num_attention_heads, num_key_value_heads, head_dim
    "llama-3.1-8b": {"global": _layer(32, 8, 128)},
    "llama-3.1-70b": {"global": _layer(64, 8, 128)},
    # The heads with which AI-Hypercomputer/tpu-recipes trains Llama-3.1-8B on long contexts.
    "llama-3.1-8b-16x256": {"global": _layer(16, 4, 256)},
    # deepseek-ai/DeepSeek-V3: qk_nope_head_dim + qk_rope_head_dim, v_head_dim, kv_lora_rank
    "deepseek-v3": {"global": _layer(128, 128, 128 + 64, value_dim=128, latent=(512, 64))},
    "deepseek-v3-expanded": {"global": _layer(128, 128, 128 + 64, value_dim=128)},
    # google/gemma-3-27b-it, text_config: sliding_window 1024, 5 such layers to 1 global
    "gemma-3-27b": {"global": _layer(32, 16, 128), "window": _layer(32, 16, 128, window=1024)},
    # openai/gpt-oss-120b: sliding_window 128 in every other layer
    "gpt-oss-120b": {
        "global": _layer(64, 8, 64, sinks=True),
        "window": _layer(64, 8, 64, window=128, sinks=True),
    },
}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to communicate: a strategy, groups of heads, and the mesh axes it is given."""

    strategy: str
    head_groups: int = 1
    outer: int = 1
    ulysses: int = 1

    def context(self, cp: int) -> ContextParallel:
        """It on `cp` devices."""
        ring = cp // (self.outer * self.ulysses)
        mesh = make_mesh(cp_ring_outer=self.outer, cp_ring=ring, cp_ulysses=self.ulysses)
        return ContextParallel(mesh, self.strategy, "zigzag", head_groups=self.head_groups)


WAYS = {
    "all_gather": Way("all_gather"),
    "all_gather_groups": Way("all_gather", head_groups=4),
    "ulysses": Way("ulysses"),
    "ulysses_groups": Way("ulysses", head_groups=4),
    "ring": Way("ring"),
    "usp": Way("usp", ulysses=2),
    "ring_of_rings": Way("ring", outer=2),
    "halo": Way("halo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints the tables, and returns the exit status."""
    options = _parse(arguments)
    report = provenance() | {"cp": options.cp, "seq_len": options.seq_len}
    jax.config.update("jax_platforms", "cpu")
    ensure_devices(options.cp)
    print(headline(report))
    print(f"cp {options.cp}, {options.seq_len:,} tokens, float32; MB of one device and one layer")
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for model, name in ((x, y) for x in options.models for y in MODELS[x]):
        layer = dataclasses.replace(MODELS[model][name], seq_len=options.seq_len)
        print(f"\n{model}, {name}: {_words(layer)}")
        print(_LINE.format(*_HEADS))
        for way in options.strategies:
            place = {"model": model, "layer": name, "strategy": way}
            context = WAYS[way].context(options.cp)
            if reason := _refusal(context, layer):
                refused.append(place | {"reason": reason})
                print(f"{way:17} refused: {reason}")
                continue
            start = time.perf_counter()
            for row in _measure(context, layer):
                rows.append(place | row)
                _print_row(rows[-1])
            seconds = f"{time.perf_counter() - start:.1f} s"
            print(*place.values(), seconds, file=sys.stderr, flush=True)
    all_equal = all(row["equal"] for row in rows)
    print(f"\nformulas and programs are equal: {'yes' if all_equal else 'NO'}")
    if options.json:
        print(json.dumps(report | {"rows": rows, "refused": refused, "all_equal": all_equal}))
    return 0 if all_equal and rows else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="MODEL")
    add("--strategies", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY")
    add("--seq-len", type=int, default=131072, metavar="S", help="(default: 131072)")
    add("--cp", type=int, default=8, metavar="P", help="devices (default: 8)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    if options.cp < 4 or options.cp % 2:
        parser.error("--cp must be even and at least 4")
    if options.seq_len < 1 or options.seq_len % (2 * options.cp):
        parser.error("--seq-len must be a positive multiple of 2 * cp, the chunks of zigzag")
    return options


def _refusal(context: ContextParallel, layer: AttentionLayer) -> str | None:
    """Why farspan refuses the combination; None if it does not."""
    try:
        schedules.check_combination(
            context.strategy, context.degrees, context.layout_object, num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads, seq_len=layer.seq_len, mask=layer.mask,
            head_groups=context.head_groups, latent=layer.latent is not None,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None


def _measure(context: ContextParallel, layer: AttentionLayer) -> list[dict[str, Any]]:
    """Compiles the layer, and says what it sends: a row for each direction."""
    programs = [
        compile_attention(context, layer, gradients=gradients, compiler_options=_COMPILER_OPTIONS)
        for gradients in (False, True)
    ]
    forward, both = (collectives(program.as_text()) for program in programs)
    held = schedules.held_key_bytes(
        context.strategy, context.degrees, layer.shape(), layer.traffic_options(context)
    )
    narrow = dataclasses.replace(layer, dtype="bfloat16")
    rows: list[dict[str, Any]] = []
    for direction, found, program in zip(
        _DIRECTIONS, (forward, _less(both, forward)), programs, strict=True
    ):
        formula = expected_collectives(context, layer, (direction,))
        rows.append(
            {
                "direction": direction,
                "formula_bytes": sum(size for _, size in formula.values()),
                "hlo_bytes": sum(size for _, size in found.values()),
                "equal": formula == found,
                "sent_bytes": _sent(context, layer, direction),
                "sent_bytes_bfloat16": _sent(context, narrow, direction),
                "held_key_bytes": held if direction == "forward" else None,
                "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                "formula": formula,
                "hlo": found,
            }
        )
    return rows


def _less(both: Totals, forward: Totals) -> Totals:
    """What `both` has beside `forward`, by opcode."""
    rest: Totals = {}
    for op in both | forward:
        (count, size), (less_count, less_size) = both.get(op, (0, 0)), forward.get(op, (0, 0))
        rest[op] = (count - less_count, size - less_size)
    return {op: counted for op, counted in rest.items() if counted != (0, 0)}


def _sent(context: ContextParallel, layer: AttentionLayer, direction: schedules.Direction) -> int:
    return sum(each.sent_bytes for each in layer_collectives(context, layer, direction))


_LINE = "{:17} {:8} {:>11} {:>11} {:>5} {:>9} {:>9} {:>9} {:>9}  {}"
_HEADS = (
    "strategy", "", "formula", "HLO", "equal", "sent", "bfloat16", "held", "temp", "collectives",
)  # fmt: skip


def _print_row(row: dict[str, Any]) -> None:
    sizes = [
        "-" if row[name] is None else f"{row[name] / 1e6:,.1f}"
        for name in ("sent_bytes", "sent_bytes_bfloat16", "held_key_bytes", "temp_bytes")
    ]
    formula, hlo = row["formula"], row["hlo"]
    listed = [f"{count} {op}" for op, (count, _) in sorted(hlo.items())]
    for op in sorted(formula | hlo):
        if formula.get(op) != hlo.get(op):
            (count, size), (hlo_count, hlo_size) = (x.get(op, (0, 0)) for x in (formula, hlo))
            listed.append(f"{op} {hlo_count} of {hlo_size:,} B but formula {count} of {size:,} B")
    print(
        _LINE.format(
            row["strategy"], row["direction"], f"{row['formula_bytes'] / 1e6:,.3f}",
            f"{row['hlo_bytes'] / 1e6:,.3f}", "yes" if row["equal"] else "NO", *sizes,
            ", ".join(listed),
        ),
        flush=True,
    )  # fmt: skip


def _words(layer: AttentionLayer) -> str:
    if layer.latent is None:
        keys = f"{layer.num_kv_heads} kv heads, {layer.head_dim} and {layer.value_dim} wide"
    else:
        keys = f"latents of {layer.latent[0]} + {layer.latent[1]}"
    left, _ = layer.mask.reach()
    window = "" if left is None else f", window {left + 1:,}"
    return f"{layer.num_heads} heads, {keys}{window}{', sinks' if layer.sinks else ''}"


if __name__ == "__main__":
    sys.exit(main())
