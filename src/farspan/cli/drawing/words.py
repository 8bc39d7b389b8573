"""Numbers and transfers in words, as terminal and figures write them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from farspan.cli.drawing.facts import ScheduleFacts, Transfer


def short(count: int) -> str:
    """A count in four characters or five: 950, 1.2K, 33.6M."""
    value, unit = float(count), ""
    for larger in "KMGT":
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"


def size(num_bytes: int) -> str:
    """Bytes with a unit (1 kB is 1000 B)."""
    text = short(num_bytes)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return f"{number} {unit.replace('K', 'k')}B"


def shards(shifts: Sequence[int], num_shards: int) -> str:
    """Receivers that lie so much further in the ring than a sender r."""
    if len(shifts) == num_shards - 1 and num_shards > 2:
        return "every other shard"
    return ", ".join(f"r {'+' if shift > 0 else '-'} {abs(shift)}" for shift in shifts)


def transfers(facts: ScheduleFacts) -> Iterator[str]:
    """What travels before which steps, steps alike in one line."""
    num_shards = facts.split.degrees.sequence
    alike: dict[tuple[Transfer, ...], list[int]] = {}
    for step in range(len(facts.schedule)):
        alike.setdefault(tuple(facts.transfers(step)), []).append(step)
    for found, where in alike.items():
        by_size: dict[tuple[int, int, int, int], list[int]] = {}
        for shift, moves, tokens, sent, under in found:
            by_size.setdefault((moves, tokens, sent, under), []).append(shift)
        for (moves, tokens, sent, under), shifts in by_size.items():
            who = "each shard r" if moves == num_shards else f"{moves} of {num_shards} shards r"
            while_ = {0: "no compute to hide it", 1: "under 1 step"}.get(
                under, f"under {under} steps"
            )
            when = f"step{'s' * (len(where) > 1)} {spans(where)}"
            yield (
                f"for {when}: {who} to {shards(shifts, num_shards)}: "
                f"{tokens:,} tokens, {size(sent)}, {while_}"
            )


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together: 1-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def traffic(facts: ScheduleFacts) -> list[str]:
    """Bytes that leave one device for one layer, a line for each direction."""
    lines: list[str] = []
    for direction, found in facts.collectives.items():
        each = ", ".join(f"{c.count} {c.op} {size(c.sent_bytes)}" for c in found) or "nothing"
        lines.append(f"{direction:<9}{size(facts.sent_bytes(direction)):>9}  {each}")
    return lines


def notes(facts: ScheduleFacts) -> list[str]:
    """The work of the busiest device, what travels, and the bytes of a layer."""
    degrees = facts.split.degrees
    slowest = f"{facts.slowest_over_mean:.2f} if all wait for the slowest at each step"
    lines = [f"work max/mean {facts.max_over_mean:.2f}; {slowest}"]
    if degrees.heads > 1:
        lines.append(
            f"before the first step and after the last, groups of {degrees.heads} devices exchange "
            "heads"
        )
    if facts.split.strategy in ("ring", "usp"):
        hops, way = facts.hops, degrees.sequence - 1
        lines.append(f"hops: {hops.before} before, {hops.after} after; {way} are all the way round")
    lines += transfers(facts)
    lines.append("sent by one device for one layer, bfloat16:")
    return lines + [f"  {line}" for line in traffic(facts)]


def wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Lines of at most so many characters."""
    return [part for line in lines for part in textwrap.wrap(
        line, width, subsequent_indent=" " * 8, drop_whitespace=True, replace_whitespace=False
    )]  # fmt: skip
