"""Counts what the TPU compiler makes of the attention kernels: bundles per pair of blocks.

    python benchmarks/kernel_cycles.py                            # v5p, v6e, tpu7x; minutes
    python benchmarks/kernel_cycles.py --hardware tpu7x --head-dims 128 --blocks 1024 2048x1024
    python benchmarks/kernel_cycles.py --peer --json              # Tokamax's kernels, too

Static figures from the compiler, not hardware timings: no chip is needed, none is used. A kernel
is compiled for a causal row of four blocks in bfloat16, two heads, and read by
`farspan.plan.bundles`. It needs libtpu (`farspan[tpu]`), and for `--peer` Tokamax beside it.

    bundles     instructions that run once per pair of blocks where no pair is masked
    masked      the same where the mask cuts through the blocks
    waits       bundles (not masked) if every matmul waits until its matrix unit is free
    floor       bundles that the FLOPs take at the chip's peak: 2 matmuls forward, 5 backward
    units       bundles that the busiest matrix unit takes for its matmuls; it is more than the
                floor where a head is narrower than the unit
    MXU         part of the bundles in which the matrix units are busy
    fills       vectors that are read back from memory for want of registers
    bound       floor / max(floor, bundles), and with waits: of what the chip can do at most
    cores       cores of the device that work, where the grid can be split between two

`--blocks` are queries x keys, or both. The peer computes 512 keys at a time in forward, which suits
it best, and has a second row, `tokamax+lp`, with its `use_experimental_scheduler`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from provenance import headline, provenance

from farspan.plan.bundles import KernelBundles, compile_kernels
from farspan.plan.compiler import CompileError, compiler_available

SLICES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
KERNELS = {
    "splash": "farspan_attention",
    "tokamax": "splash_mha",
    "tokamax+lp": "splash_mha",
}
"""What the names of a kernel's programs have in common."""

DIRECTIONS = {"forward": ("forward", "fwd"), "backward": ("backward", "dkv")}
MATMULS = {"forward": 2, "backward": 5}
BLOCKS_PER_ROW = 4
HEADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints the table, and returns the exit status."""
    options = _parse(arguments)
    report = provenance()
    print(headline(report))
    print("static figures from the compiler, not hardware timings; bundles per pair of blocks\n")
    line = "{:6} {:10} {:8} {:>4} {:>10}  {:>7} {:>7} {:>7} {:>7} {:>7} {:>4} {:>6} {:>11} {:>5}"
    print(line.format(
        "chip", "kernel", "", "dim", "q x k", "bundles", "masked", "waits", "floor", "units",
        "MXU", "fills", "bound", "cores",
    ))  # fmt: skip
    rows: list[dict[str, Any]] = []
    kernels = list(KERNELS) if options.peer else ["splash"]
    for chip, dim, blocks, kernel in itertools.product(
        options.hardware, options.head_dims, options.blocks, kernels
    ):
        for row in _rows(chip, dim, blocks, kernel):
            rows.append(row)
            print(line.format(*_cells(row)) if "error" not in row else _failure(row), flush=True)
    if options.json:
        print(json.dumps(report | {"static": True, "rows": rows}))
    return 0


def lower(
    devices: Sequence[Any],
    kernel: str,
    head_dim: int,
    query_block: int,
    key_block: int,
    *,
    gradients: bool,
) -> Any:
    """Lowers one attention layer for one device; `farspan.plan.aot` calls it.

    Args:
      devices: Of the slice.
      kernel: One of `KERNELS`.
      head_dim: Of queries, keys and values.
      query_block, key_block: Block sizes.
      gradients: Whether the program yields gradients, too.

    Returns:
      The lowered program.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    length = BLOCKS_PER_ROW * max(query_block, key_block)
    attend = _splash if kernel == "splash" else _tokamax
    attend = attend(length, query_block, key_block, kernel)

    def forward_and_gradients(*operands: Any) -> Any:
        out, pull = jax.vjp(attend, *operands)
        return out, pull(out)

    operand = jax.ShapeDtypeStruct((1, length, HEADS, head_dim), jnp.bfloat16, sharding=sharding)
    function = forward_and_gradients if gradients else attend
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(operand, operand, operand)


def _splash(length: int, query_block: int, key_block: int, kernel: str) -> Any:
    del length, kernel
    from farspan import Causal, attention
    from farspan.kernels.splash import SplashKernel

    chosen = SplashKernel(query_block, key_block, query_block, key_block)
    return lambda query, key, value: attention(query, key, value, mask=Causal(), kernel=chosen)


def _tokamax(length: int, query_block: int, key_block: int, kernel: str) -> Any:
    import jax
    import numpy as np
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    config = splash_attention_kernel.SplashConfig(
        block_q=query_block,
        block_kv=key_block,
        block_kv_compute=min(key_block, 512),
        block_q_dkv=query_block,
        block_kv_dkv=key_block,
        use_experimental_scheduler=kernel == "tokamax+lp",
    )
    splash = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.CausalMask((length, length)), config=config
    )

    def attend(query: Any, key: Any, value: Any) -> Any:
        scale = np.asarray(query.shape[-1] ** -0.5, query.dtype)
        by_head = (x.swapaxes(1, 2) for x in (query * scale, key, value))
        return jax.vmap(splash)(*by_head).swapaxes(1, 2)

    return attend


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hardware", nargs="+", choices=tuple(SLICES), default=["v5p", "v6e", "tpu7x"])
    add("--head-dims", type=_sizes, nargs="+", default=[64, 128, 256], metavar="D")
    add("--blocks", type=_blocks, nargs="+", default=[(512, 512), (1024, 1024), (2048, 2048)])
    add("--peer", action="store_true", help="Tokamax's kernels beside them")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    if not compiler_available():
        parser.error("the TPU compiler is not installed; pip install 'farspan[tpu]'")
    return options


def _sizes(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return int(text)


def _blocks(text: str) -> tuple[int, int]:
    sizes = [_sizes(part) for part in text.split("x")]
    if len(sizes) > 2 or any(size % 128 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"blocks must be one or two multiples of 128, such as 1024 or 2048x1024, got {text}"
        )
    return sizes[0], sizes[-1]


def _rows(chip: str, dim: int, blocks: tuple[int, int], kernel: str) -> list[dict[str, Any]]:
    """Forward and backward; what does not compile says why."""
    case = {
        "hardware": chip,
        "kernel": kernel,
        "head_dim": dim,
        "query_block": blocks[0],
        "key_block": blocks[1],
    }
    asked = {name: case[name] for name in ("kernel", "head_dim", "query_block", "key_block")}
    found: tuple[KernelBundles, ...] = ()
    error = ""
    for gradients in (True, False):
        try:
            found = compile_kernels(
                "kernel_cycles:lower", asked | {"gradients": gradients}, SLICES[chip],
                kernels=KERNELS[kernel],
            )  # fmt: skip
            break
        except (CompileError, ValueError) as reason:
            error = error or _short(str(reason))
    rows: list[dict[str, Any]] = []
    for direction, words in DIRECTIONS.items():
        one = next((k for k in found if any(word in k.name for word in words)), None)
        row = case | {"direction": direction}
        rows.append(row | (_figures(one, direction, dim, blocks) if one else {"error": error}))
    return rows


def _figures(
    kernel: KernelBundles, direction: str, dim: int, blocks: tuple[int, int]
) -> dict[str, Any]:
    path = kernel.paths[0]
    floor = kernel.floor_bundles(MATMULS[direction] * 2.0 * blocks[0] * blocks[1] * dim)
    occupancy = {
        unit: uses / (path.bundles * kernel.capacity[unit]) for unit, uses in path.used.items()
    }
    return {
        "bundles": path.bundles,
        "masked_bundles": kernel.paths[-1].bundles if len(kernel.paths) > 1 else None,
        "bundles_with_waits": path.bundles_with_waits,
        "floor_bundles": floor,
        "matmul_bundles": path.matmul_bundles,
        "matrix_occupancy": occupancy["matrix"],
        "occupancy": occupancy,
        "spill_loads": path.spill_loads,
        "spill_stores": path.spill_stores,
        "fraction_of_bound": path.fraction(floor),
        "fraction_with_waits": floor / max(floor, path.bundles_with_waits),
        "kernel_bundles": kernel.bundles,
        "grid": kernel.grid,
        "dimension_semantics": kernel.dimension_semantics,
        "working_cores": kernel.working_cores,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    masked = row["masked_bundles"]
    return (
        row["hardware"], row["kernel"], row["direction"], str(row["head_dim"]),
        f"{row['query_block']}x{row['key_block']}",
        f"{row['bundles']:,}", f"{masked:,}" if masked else "", f"{row['bundles_with_waits']:,}",
        f"{row['floor_bundles']:,.0f}", f"{row['matmul_bundles']:,}",
        f"{row['matrix_occupancy']:.2f}", f"{row['spill_loads']:,}",
        f"{row['fraction_of_bound']:.2f} / {row['fraction_with_waits']:.2f}",
        str(row["working_cores"]),
    )  # fmt: skip


def _failure(row: dict[str, Any]) -> str:
    blocks = f"{row['query_block']}x{row['key_block']}"
    return (
        f"{row['hardware']:6} {row['kernel']:10} {row['direction']:8} {row['head_dim']:>4} "
        f"{blocks:>10}  does not compile: {row['error']}"
    )


def _short(message: str) -> str:
    """What a compiler's message comes to."""
    if found := re.search(r"[Ss]coped allocation with size \S+ and limit \S+", message):
        return f"vector memory: {found.group()}"
    return message.strip().splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
