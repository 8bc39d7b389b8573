"""Reading the bundles of kernels: a hand-written listing, and small kernels compiled for TPUs."""

from pathlib import Path
from typing import Any

import pytest

from farspan.plan.bundles import compile_kernels, read_kernel
from farspan.plan.compiler import CompileError, compiler_available

needs_compiler = pytest.mark.skipif(
    not compiler_available(), reason="libtpu, the TPU compiler, is not installed"
)

# A loop over a grid: a step that only the first pair takes, then one of two ways to its matmuls.
# The second has masking, nested, and a spill. Comments may break lines, and an empty bundle has no
# mark of its loop.
LISTING = """
= control target key start
LB: loop header

     0   :  { %1 = sld [smem:[#allocation0]] } /* entry :: Start region 1 */
   0x1 LB: > { %2 = sadd.s32 1, %3 } /* Start region 2
 vmatmul.mubr.bf16.gmra.mxu0 in words */
   0x2   : > { %4 = sbr.rel (%p1) target = $region4 }
   0x3   : > { %5 = vst [vmem:[#allocation3]] %v1 }
   0x4 PF: > { %6 = sbr.rel (%p2) target = $region6 } /* Start/End empty region 4 */
   0x5   :  {}
   0x6   : > { %7 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[0].mxu0 %v2 }
   0x7   : > { vmatmul.mubr.bf16.gmra.mrb[4].mxu0 %v3 ;; vmatmul.mubr.bf16.gmra.mrb[0].mxu1 %v4 }
   0x8   : > { %v5 = vpop.f32.mrb[0].mxu0 }
   0x9   : > { %v6 = vpop.f32.mrb[5].mxu0 }
   0xa PF: > { %10 = sbr.rel (%p3) target = $region10 } /* Start/End empty region 6 */
   0xb   : > { %11 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v7 }
   0xc   : > { %12 = sbr.rel (%p4) target = $region9 }
   0xd   : > { %13 = vst [vmem:[#allocation4]] %v8 }
   0xe PF: > { %14 = vmatmul.mubr.bf16.gmra.mrb[0].mxu1 %v9 } /* Start/End empty region 9 */
   0xf   : > { %v10 = vld [vmem:[#allocation5_spill]] }
  0x10   : > { %15 = vst [vmem:[#allocation5_spill]] %v11 }
  0x11   : > { %v12 = vpop.f32.mrb[0].mxu0 }
  0x12 PF: > { %16 = sbr.rel (!%p5) target = $region2 } /* Start/End empty region 10 */
  0x13   :  { %17 = vsyncpa [#allocation1], 1 }
"""
UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
"""


def _utilization() -> str:
    rows = [[0] * 10 for _ in range(0x14)]
    for bundle in (0x6, 0xB, 0xE):
        rows[bundle][0] = 1
    rows[0x7][0] = 2
    for bundle, units in {0x3: (7,), 0xD: (7,), 0xF: (5, 6), 0x10: (7, 8)}.items():
        for unit in units:
            rows[bundle][unit] = 1
    return UTILIZATION + "\n".join(" ".join(map(str, row)) for row in rows) + "\n"


def test_paths_are_the_ways_through_the_loop_that_hold_matmuls():
    kernel = read_kernel("kernel", LISTING, _utilization())
    assert (kernel.name, kernel.bundles, kernel.working_cores) == ("kernel", 0x14, 1)
    assert (kernel.grid, kernel.dimension_semantics) == ((), ())
    whole, masked = kernel.paths
    # Around: 0x1, 0x2, 0x4, 0xa, 0x12; then 0x5 to 0x9, or 0xb to 0x11 without the nested store.
    assert (whole.bundles, masked.bundles) == (5 + 5, 5 + 6)
    assert (whole.matmuls, masked.matmuls) == ((2, 1), (1, 1))
    assert (whole.matmul_bundles, masked.matmul_bundles) == (2 * 8, 8)
    assert (whole.spill_loads, whole.spill_stores) == (0, 0)
    assert (masked.spill_loads, masked.spill_stores) == (1, 1)
    assert whole.used["matrix"] == 3
    assert masked.used["store"] == 1


def test_a_matmul_waits_for_its_unit_and_a_result_for_its_matmul():
    whole, _ = read_kernel("kernel", LISTING, _utilization()).paths
    # Matmuls are bundles 4 and 5 of the path, and a result comes 2 bundles after its matmul. The
    # second waits until its unit is free, at 4 + 8: it is read at 14, and done at 12 + 8.
    assert whole.bundles_with_waits == 12 + 8
    assert whole.bundles == 10


def test_floor_and_fraction():
    kernel = read_kernel("kernel", LISTING, _utilization())
    # One matmul of a 256 x 256 unit: 16 rows; two units share the work.
    floor = kernel.floor_bundles(3.0 * 16 * 2 * 256**2)
    assert floor == 3 * 8 / 2
    assert kernel.paths[0].fraction(floor) == 1
    assert kernel.paths[0].fraction(5.0) == 0.5


def test_a_program_without_matmuls_has_no_paths():
    listing = "     0   :  { %1 = smov 1 }\n   0x1   :  {}\n"
    utilization = UTILIZATION + "0 0 0 0 0 0 0 0 0 1\n" * 2
    assert read_kernel("kernel", listing, utilization).paths == ()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which the compiler's process finds `lower_matmul`."""
    here = Path(__file__)
    monkeypatch.syspath_prepend(str(here.parent))
    return f"{here.stem}:lower_matmul"


def lower_matmul(devices: Any, semantics: list[str], rows: int, scratch_mib: int = 1) -> Any:
    """A kernel that multiplies blocks of matrices: the program of the tests below."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(left: Any, right: Any, out: Any, _: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def clear() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    block = pl.BlockSpec((rows, rows), lambda i, j: (i, j))
    kernel = pl.pallas_call(
        body,
        grid=(2, 4),
        in_specs=[block, pl.BlockSpec((rows, rows), lambda _, j: (j, 0))],
        out_specs=pl.BlockSpec((rows, rows), lambda i, _: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((2 * rows, rows), jnp.float32),
        scratch_shapes=[pltpu.VMEM((scratch_mib * 2**20,), jnp.int8)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=tuple(semantics)),
        name="test_matmul",
    )
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    left = jax.ShapeDtypeStruct((2 * rows, 4 * rows), jnp.bfloat16, sharding=sharding)
    right = jax.ShapeDtypeStruct((4 * rows, rows), jnp.bfloat16, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(kernel).lower(left, right)


@needs_compiler
@pytest.mark.parametrize(
    ("hardware", "semantics", "cores", "matmuls"),
    [
        ("v5p:2x2x1", ["parallel", "arbitrary"], 2, 256 // 16 * 2 * 2),
        ("v5p:2x2x1", ["arbitrary", "arbitrary"], 1, 256 // 16 * 2 * 2),
        ("tpu7x:2x2x1", ["parallel", "arbitrary"], 1, 256 // 16),
    ],
)
def test_a_compiled_kernel_tells_its_matmuls_its_grid_and_its_cores(
    hardware, semantics, cores, matmuls, program
):
    (kernel,) = compile_kernels(
        program, {"semantics": semantics, "rows": 256}, hardware, kernels="test_matmul"
    )
    assert kernel.name == "test_matmul"
    assert kernel.grid == (2, 4)
    assert kernel.dimension_semantics == tuple(semantics)
    assert kernel.working_cores == cores
    (path,) = kernel.paths
    assert sum(path.matmuls) == matmuls
    floor = kernel.floor_bundles(2.0 * 256**3)
    assert floor <= path.matmul_bundles <= path.bundles_with_waits
    assert path.bundles <= path.bundles_with_waits < kernel.bundles + path.matmul_bundles


@needs_compiler
def test_a_kernel_that_does_not_fit_the_vector_memory_does_not_compile(program):
    with pytest.raises(CompileError, match="vmem"):
        compile_kernels(
            program,
            {"semantics": ["parallel", "arbitrary"], "rows": 256, "scratch_mib": 1024},
            "v5e:2x2",
            kernels="test_matmul",
            timeout_seconds=120.0,
        )
