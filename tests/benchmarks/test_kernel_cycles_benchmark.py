"""The benchmark of the kernels' bundles, on small blocks."""

import json

import pytest

from farspan.plan.compiler import compiler_available

FIGURES = {
    "bundles", "masked_bundles", "bundles_with_waits", "floor_bundles", "matmul_bundles",
    "matrix_occupancy", "spill_loads", "spill_stores", "fraction_of_bound", "working_cores",
}  # fmt: skip


@pytest.mark.skipif(not compiler_available(), reason="libtpu, the TPU compiler, is not installed")
def test_the_kernel_is_counted_in_both_directions(run_benchmark):
    done = run_benchmark(
        "kernel_cycles.py", "--hardware", "tpu7x", "--head-dims", "128", "--blocks", "256", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "not hardware timings" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"rows", "versions", "commit"} <= report.keys()
    rows = report["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row, matmuls in zip(rows, (2, 5), strict=True):
        assert row.keys() >= FIGURES, row
        assert row["floor_bundles"] == matmuls * 2 * 256 * 256 * 128 / 2**19
        assert row["bundles"] >= row["floor_bundles"]
        assert row["masked_bundles"] >= row["bundles"]
        assert 0 < row["fraction_of_bound"] <= 1
        assert 0 < row["matrix_occupancy"] <= 1


@pytest.mark.parametrize("blocks", ["100", "128x128x128", "0"])
@pytest.mark.skipif(not compiler_available(), reason="libtpu, the TPU compiler, is not installed")
def test_blocks_are_multiples_of_128(run_benchmark, blocks):
    done = run_benchmark("kernel_cycles.py", "--blocks", blocks)
    assert done.returncode == 2
    assert "argument --blocks" in done.stderr
