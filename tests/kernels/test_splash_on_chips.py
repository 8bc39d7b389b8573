"""What the TPU compiler makes of the kernel: both cores of a chip work, for one row as well."""

import pytest

from farspan.plan.bundles import compile_kernels
from farspan.plan.compiler import compiler_available

pytestmark = pytest.mark.skipif(
    not compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'"
)


@pytest.mark.parametrize(
    ("direction", "kv_heads", "head_dim", "grid"),
    [
        ("forward", 1, 256, (1, 2, 1)),  # row, query head, block of queries
        ("backward", 2, 128, (1, 1, 2, 1)),  # part of the queries, row, kv head, block of keys
        ("backward", 1, 64, (2, 1, 1, 1)),
    ],
)
def test_both_cores_of_a_chip_work(direction, kv_heads, head_dim, grid):
    (kernel,) = compile_kernels(
        "farspan.testing.compiled:lower_attention",
        {
            "strategy": "ring",
            "direction": direction,
            "sizes": {"cp_ring": 1},
            "kernel": "splash",
            "layer": {
                "batch": 1,
                "seq_len": 512,
                "num_heads": 2,
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "value_dim": head_dim,
                "dtype": "bfloat16",
            },
        },
        "v5p:2x2x1",
        kernels="farspan_attention",
    )
    assert kernel.name == f"farspan_attention_{direction}"
    assert kernel.grid == grid
    assert kernel.working_cores == 2
