"""Strategy x layout x mask x heads x degree: every combination equals the dense oracle.

The full product is long, so the default lane walks a covering array: every pair of values of any
two choices occurs in some case. `make test ARGS="-m slow"` walks the full product.
"""

import itertools

import numpy as np
import pytest

import farspan
from farspan.testing import AttentionCase, attention_parity

LENGTH = 64
FLOAT32_ROUNDING = 4e-7
AT_SHARDS = (8,) * 8
"""A document boundary at every shard boundary, for every degree."""
CHOICES = {
    "strategy": ["all_gather", "ulysses", "ring", "usp"],
    "layout": ["contiguous", "zigzag", "striped"],
    "mask": [
        farspan.Causal(),
        farspan.Full(),
        farspan.Causal() & farspan.SlidingWindow(9, 0),
        farspan.SlidingWindow(4, 11) | farspan.Causal(),
    ],
    "heads": [(8, 8), (8, 2), (8, 1), (16, 8)],
    "mesh": [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (2, 4), (8, 1), (1, 8)],
    "rows": [
        {},
        {"documents": AT_SHARDS},
        {"documents": (5, 23, 1, 28)},
        {"documents": (30, 20), "restart_positions": True},
    ],
    "scores": [
        {},
        {"sinks": True},
        {"logits_soft_cap": 3.0, "value_dim": 24},
        {"scale": 0.7, "value_dim": 8, "sinks": True},
    ],
    "dtype": ["float32", "bfloat16"],
}


def covering_array(choices: dict[str, list], seed: int = 0) -> list[dict]:
    """A small set of combinations in which every pair of values of two choices occurs."""
    names = list(choices)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    draw = np.random.default_rng(seed)
    rows = []

    def covers(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)} & missing

    while missing:
        a, i, b, j = min(missing)
        candidates = []
        for _ in range(60):
            row = {name: int(draw.integers(len(choices[name]))) for name in names}
            candidates.append(row | {a: i, b: j})
        best = max(candidates, key=lambda row: len(covers(row)))
        missing -= covers(best)
        rows.append({name: choices[name][best[name]] for name in names})
    return rows


def name_of(row: dict) -> str:
    ring, ulysses = row["mesh"]
    heads = "x".join(map(str, row["heads"]))
    return f"{row['strategy']}-{ring}x{ulysses}-{row['layout']}-{heads}-{row['dtype']}"


def check(row: dict) -> None:
    ring, ulysses = row["mesh"]
    case = AttentionCase(
        mask=row["mask"], seq_len=LENGTH, num_heads=row["heads"][0], num_kv_heads=row["heads"][1],
        dtype=row["dtype"], **row["rows"], **row["scores"],
    )  # fmt: skip
    mesh = farspan.make_mesh(cp_ring=ring, cp_ulysses=ulysses)
    context = farspan.ContextParallel(mesh, row["strategy"], row["layout"])
    for quantity in attention_parity(case, context, farspan.XlaKernel(rows=16, key_block=8)):
        assert quantity.ok, (row, quantity)


PAIRWISE = covering_array(CHOICES)


@pytest.mark.parametrize("row", PAIRWISE, ids=name_of)
def test_pairwise(row):
    check(row)


def test_the_covering_array_covers():
    found = {
        (a, repr(row[a]), b, repr(row[b]))
        for row in PAIRWISE
        for a, b in itertools.combinations(CHOICES, 2)
    }
    for a, b in itertools.combinations(CHOICES, 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            assert (a, repr(x), b, repr(y)) in found


FULL = [
    dict(zip(CHOICES, values, strict=True))
    for values in itertools.product(
        *[CHOICES[n] for n in ("strategy", "layout", "mask", "heads", "mesh")],
        CHOICES["rows"][2:3], CHOICES["scores"][1:2], CHOICES["dtype"][:1],
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=name_of)
def test_full_product(row):
    check(row)


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", CHOICES["strategy"])
def test_each_strategy(strategy):
    """One case for each strategy in the short lane: packed, grouped heads, eight devices."""
    mesh = farspan.make_mesh(cp_ring=4, cp_ulysses=2)
    context = farspan.ContextParallel(mesh, strategy, "zigzag")
    case = AttentionCase(documents=(5, 23, 1, 28), sinks=True)
    for quantity in attention_parity(case, context):
        assert quantity.ok, quantity


def test_data_and_tensor_axes_beside_context():
    mesh = farspan.make_mesh(data=2, cp_ring=2, tensor=2)
    context = farspan.ContextParallel(mesh, "ring", "zigzag")
    case = AttentionCase(documents=(5, 23, 1, 28), sinks=True)
    for quantity in attention_parity(case, context):
        assert quantity.ok, quantity


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_error_does_not_grow_with_the_ring_in_bfloat16(degree):
    """Partial outputs and gradients are merged in float32."""
    case = AttentionCase(dtype="bfloat16", seq_len=512, batch=1, num_heads=4)
    alone = {row.quantity: row.error for row in attention_parity(case, None)}
    context = farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", "zigzag")
    for row in attention_parity(case, context):
        assert row.error <= max(1.5 * alone[row.quantity], FLOAT32_ROUNDING), row
