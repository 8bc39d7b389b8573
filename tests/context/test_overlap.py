"""The TPU compiler puts every transfer that a kernel could hide under one, with no option set."""

import pytest

from farspan.plan import hlo
from farspan.plan.aot import compile_program, compiler_available
from farspan.plan.dataflow import hideable_transfers

pytestmark = pytest.mark.skipif(
    not compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'"
)
SLICES = ["v5p:2x2x2", "tpu7x:2x2x1"]
DIRECTIONS = ["forward", "backward"]
# Eight devices. In groups each sends a parcel to seven others: first comes what the first kernel
# needs, last goes what the last one has made.
OTHERS = 7


@pytest.mark.parametrize(
    ("strategy", "ulysses", "hardware", "direction"),
    [
        *(("ring", 1, where, direction) for where in SLICES for direction in DIRECTIONS),
        *(("usp", 2, where, "backward") for where in SLICES),
    ],
)
def test_rings(strategy, ulysses, hardware, direction, tmp_path):
    sizes = {"cp_ring": 8 // ulysses, "cp_ulysses": ulysses}
    _, hideable, hidden = transfers(tmp_path, hardware, direction, strategy=strategy, sizes=sizes)
    assert hidden == hideable > 0


@pytest.mark.parametrize("hardware", SLICES)
@pytest.mark.parametrize(
    ("direction", "parcels", "exposed"),
    # In backward keys come, and their gradients go, those of two devices at a time.
    [("forward", OTHERS, OTHERS), ("backward", 2 * OTHERS, 1 + 2)],
)
def test_all_gather_in_groups(direction, parcels, exposed, hardware, tmp_path):
    every, hideable, hidden = transfers(
        tmp_path, hardware, direction, strategy="all_gather", sizes={"cp_ring": 8}, head_groups=4
    )
    assert every == 4 * parcels
    assert hidden == hideable == every - exposed


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("hardware", "groups"), [(SLICES[0], 4), (SLICES[1], 2)])
def test_ulysses_in_groups(direction, hardware, groups, tmp_path):
    every, hideable, hidden = transfers(
        tmp_path, hardware, direction, strategy="ulysses", sizes={"cp_ulysses": 8},
        head_groups=groups,
    )  # fmt: skip
    assert every == groups * 2 * OTHERS
    assert hidden == hideable == every - 2 * OTHERS


def transfers(scratch, hardware, direction, **way):
    """How many transfers the program has, could hide and does hide."""
    layer = {
        "batch": 1, "seq_len": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
        "value_dim": 128, "dtype": "bfloat16",
    }  # fmt: skip
    kept = scratch / "program.hlo"
    compile_program(
        "farspan.testing.compiled:lower_attention",
        way | {"direction": direction, "layer": layer, "kernel": "splash"},
        hardware, use_cache=False, keep_hlo=kept,
    )  # fmt: skip
    text = kept.read_text(encoding="utf-8")
    found = hlo.transfers(text)
    every, hidden = (sum(x.count for x in some) for some in (found, [x for x in found if x.hidden]))
    return every, sum(hideable_transfers(text).values()), hidden
