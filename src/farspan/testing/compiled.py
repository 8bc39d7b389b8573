"""One attention layer as a compiled program, and what `farspan.schedules` says that it sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from farspan import schedules
from farspan.context import ContextParallel, attention, latent_attention
from farspan.dist import AXES, ContextSizes, make_mesh, order_devices
from farspan.kernels import Kernel
from farspan.masks import Causal, Mask, SlidingWindow


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """An attention layer whose traffic is counted.

    Attributes:
      mask: The mask.
      batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim: Sizes.
      latent: `(rank, rope_dim)`: keys and values come from a latent; `num_kv_heads` is not used.
      metadata: Which of `segment_ids` and `positions` come with the tokens. Key ranges come if the
        mask reads them.
      sinks: Whether the heads have sinks.
      dtype: Type of the arrays.
    """

    mask: Mask = dataclasses.field(default_factory=Causal)
    batch: int = 2
    seq_len: int = 64
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 24
    latent: tuple[int, int] | None = None
    metadata: tuple[str, ...] = ("segment_ids",)
    sinks: bool = False
    dtype: str = "float32"

    def traffic_options(self, context: ContextParallel) -> schedules.Options:
        """What else the bytes depend on under a context."""
        places_given = "positions" in self.metadata
        return context.traffic_options(self.mask, self.seq_len, places_given=places_given)

    def shape(self) -> schedules.AttentionShape:
        """The sizes, as `farspan.schedules` takes them."""
        return schedules.AttentionShape(
            self.batch, self.seq_len, self.num_heads, self.num_kv_heads, self.head_dim,
            self.value_dim, jnp.dtype(self.dtype).itemsize,
            segments="segment_ids" in self.metadata, positions="positions" in self.metadata,
            key_ranges=self.mask.given_ranges, sinks=self.sinks, latent_dims=self.latent or (),
        )  # fmt: skip


def compile_attention(
    context: ContextParallel,
    layer: AttentionLayer,
    *,
    gradients: bool,
    kernel: str | Kernel = "auto",
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles attention for arrays as a model shards them. Nothing is run or allocated.

    Args:
      context: How the sequence is split; its mesh has context axes only.
      layer: The layer.
      gradients: Whether the program yields the gradients, too.
      kernel: As in `farspan.attention`.
      compiler_options: For XLA.

    Returns:
      The program: `(out, lse)`, or these and the gradients of queries, keys and weights.
    """
    forward, operands, labels = _layer_forward(context, layer, kernel)

    def both(operands: dict[str, Any], labels: dict[str, Any], dout: jax.Array) -> Any:
        (out, lse), pull = jax.vjp(lambda x: forward(x, labels), operands)
        return out, lse, pull((dout, jnp.zeros_like(lse)))

    if gradients:
        lowered = jax.jit(both).lower(operands, labels, _dout(context, layer))
    else:
        lowered = jax.jit(forward).lower(operands, labels)
    return lowered.compile(dict(compiler_options or {}))


def lower_attention(
    devices: Sequence[Any],
    *,
    strategy: str,
    direction: schedules.Direction,
    sizes: ContextSizes,
    layer: Mapping[str, Any],
    window: int = 0,
    layout: str = "zigzag",
    head_groups: int = 1,
    ring_streams: int = 1,
    kernel: str | Kernel = "auto",
) -> jax.stages.Lowered:
    """A program of `farspan.plan.aot`: attention in one direction alone.

    Args:
      devices: Devices, at least the product of `sizes`.
      strategy: As in `ContextParallel`.
      direction: `forward` makes `(out, lse)`; `backward` makes the gradients from these, the inputs
        and the gradient of the output, and recomputes nothing of forward.
      sizes: Sizes of the mesh axes that split a row.
      layer: Fields of `AttentionLayer` but for the mask.
      window: Keys that a query sees, itself among them; 0: all before it.
      layout: As in `ContextParallel`.
      head_groups: As in `ContextParallel`.
      ring_streams: As in `ContextParallel`.
      kernel: As in `farspan.attention`.

    Returns:
      The lowered program. Nothing is run or allocated.
    """
    axes: dict[str, Any] = dict.fromkeys(AXES, 1) | dict(sizes)
    mesh = make_mesh(**sizes, devices=order_devices(devices, axes))
    context = ContextParallel(
        mesh, strategy, layout, head_groups=head_groups, ring_streams=ring_streams
    )
    mask = Causal() & SlidingWindow(window - 1, 0) if window else Causal()
    fields: dict[str, Any] = dict(layer) | {"metadata": tuple(layer.get("metadata", ()))}
    attending = AttentionLayer(mask, **fields)
    # Kernels ask the mesh in force for which chip they are.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        forward, operands, labels = _layer_forward(context, attending, kernel)
        if direction == "forward":
            return jax.jit(forward).lower(operands, labels)

        def pull_of(operands: dict[str, Any], labels: dict[str, Any]) -> Any:
            (_, lse), pull = jax.vjp(lambda x: forward(x, labels), operands)
            return lse, pull

        lse, pull = jax.eval_shape(pull_of, operands, labels)
        saved = jax.tree.map(lambda x: _sharded_like(context, x, lse), pull)
        dout = _dout(context, attending)

        def backward(pull: Any, dout: jax.Array) -> Any:
            return pull((dout, jnp.zeros(lse.shape, lse.dtype)))

        return jax.jit(backward).lower(saved, dout)


def layer_collectives(
    context: ContextParallel, layer: AttentionLayer, direction: schedules.Direction
) -> tuple[schedules.Collective, ...]:
    """Lists what one device sends for the layer in one direction, by the formulas."""
    return schedules.collectives(
        context.strategy, context.degrees, layer.shape(), direction, layer.traffic_options(context)
    )


def expected_collectives(
    context: ContextParallel, layer: AttentionLayer, directions: Iterable[schedules.Direction]
) -> dict[str, tuple[int, int]]:
    """Says what a compiled program of the layer should send.

    Args:
      context: As in `compile_attention`.
      layer: The layer.
      directions: `forward`, `backward` or both.

    Returns:
      By opcode, count and operand bytes: what `farspan.plan.hlo.collectives` finds.
    """
    totals: dict[str, tuple[int, int]] = {}
    for direction in directions:
        for found in layer_collectives(context, layer, direction):
            count, size = totals.get(found.op, (0, 0))
            totals[found.op] = (count + found.count, size + found.operand_bytes)
    return totals


def _layer_forward(
    context: ContextParallel, layer: AttentionLayer, kernel: str | Kernel
) -> tuple[Callable[..., tuple[jax.Array, jax.Array]], dict[str, Any], dict[str, Any]]:
    """`(out, lse)` as a function of what is differentiated and of what is not; and these."""
    operands = _operands(context, layer)
    labels = {name: _rows(context, layer, dtype="int32") for name in layer.metadata}
    if layer.mask.given_ranges:
        labels["key_ranges"] = _rows(context, layer, layer.mask.given_ranges, 2, dtype="int32")
    attend: Any = attention if layer.latent is None else latent_attention

    def forward(operands: dict[str, Any], labels: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return attend(
            operands["query"], *operands["keys"], sinks=operands.get("sinks"), mask=layer.mask,
            context=context, return_lse=True, kernel=kernel, **labels,
        )  # fmt: skip

    return forward, operands, labels


def _dout(context: ContextParallel, layer: AttentionLayer) -> jax.ShapeDtypeStruct:
    return _rows(context, layer, layer.num_heads, layer.value_dim)


def _sharded_like(context: ContextParallel, saved: Any, lse: Any) -> jax.ShapeDtypeStruct:
    """What forward leaves for backward, as it lies: rows first, or as the log-sum-exp does."""
    batch, sequence = context.partition_spec(2)
    spec = PartitionSpec()
    if saved.shape == lse.shape:
        spec = PartitionSpec(batch, None, sequence)
    elif saved.shape[:2] == (lse.shape[0], lse.shape[2]):
        spec = context.partition_spec(saved.ndim)
    sharding = NamedSharding(context.mesh, spec)
    return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)


def _operands(context: ContextParallel, layer: AttentionLayer) -> dict[str, Any]:
    """What is differentiated: queries, keys and values or what they are made from, sinks."""
    everywhere = NamedSharding(context.mesh, PartitionSpec())
    if layer.latent is None:
        keys = [
            _rows(context, layer, layer.num_kv_heads, dim)
            for dim in (layer.head_dim, layer.value_dim)
        ]
    else:
        rank, rope = layer.latent
        keys = [_rows(context, layer, rank), _rows(context, layer, rope)]
        keys += [
            jax.ShapeDtypeStruct((rank, layer.num_heads, width), layer.dtype, sharding=everywhere)
            for width in (layer.head_dim - rope, layer.value_dim)
        ]
    operands = {"query": _rows(context, layer, layer.num_heads, layer.head_dim), "keys": keys}
    if layer.sinks:
        operands["sinks"] = jax.ShapeDtypeStruct(
            (layer.num_heads,), jnp.float32, sharding=everywhere
        )
    return operands


def _rows(
    context: ContextParallel, layer: AttentionLayer, *dims: int, dtype: str | None = None
) -> jax.ShapeDtypeStruct:
    """An array `[B, S, *dims]`, split as a model splits it."""
    shape = (layer.batch, layer.seq_len, *dims)
    return jax.ShapeDtypeStruct(shape, dtype or layer.dtype, sharding=context.sharding(len(shape)))
