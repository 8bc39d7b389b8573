"""One training step: what runs on the devices, and how the host hands it a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from farspan import schedules
from farspan.context import ContextParallel, Placement, attention, solve_rows
from farspan.data.batch import Batch
from farspan.dist.sharding import parameter_shardings, parameter_spec
from farspan.masks import Mask, visible_pairs
from farspan.models import decoder
from farspan.schedules import pairs_per_shard
from farspan.train.config import TrainConfig
from farspan.train.optimizer import build_optimizer, learning_rate_schedule
from farspan.train.parallel import LayerKind, layer_kinds, make_context
from farspan.train.sharded import (
    Split,
    sharded_cross_entropy,
    sharded_embedding,
    sharded_linear,
)
from farspan.types import IGNORE_LABEL, PAD_SEGMENT_ID, Leaf

UNBALANCED = 1.05
"""Work of the busiest device over the mean, for a row of one document, that is worth a word."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: all that a checkpoint holds of the model.

    Attributes:
      step: Optimizer steps done, int32 scalar.
      params: Parameters.
      opt_state: State of the optimizer, split like the parameters.
    """

    step: Leaf
    params: decoder.Params
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """A batch in layout order on the devices, int32 `[accumulation, rows, S]` each.

    Attributes as in `farspan.data.Batch`, and where its tokens lie.
    """

    tokens: Leaf
    labels: Leaf
    segment_ids: Leaf
    positions: Leaf
    placement: Placement | None = None


class TrainSetup:
    """A run's mesh, shardings and compiled functions. Built once, by `build_setup`."""

    def __init__(self, config: TrainConfig, context: ContextParallel) -> None:
        self.config = config
        self.context = context
        self.kinds: dict[int | None, LayerKind] = layer_kinds(config.model, context)
        self._optimizer = build_optimizer(config.optimizer, config.steps)
        self._rate = learning_rate_schedule(config.optimizer, config.steps)
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        axes = decoder.logical_axes(config.model)
        self._param_shardings: decoder.Params = parameter_shardings(shapes.params, axes, self.mesh)
        opt_shardings = optax.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            shapes.opt_state,
            self._param_shardings,
            transform_non_params=lambda _: everywhere,
        )
        self._shardings = TrainState(everywhere, self._param_shardings, opt_shardings)
        self._shapes = shapes
        self._step = jax.jit(
            self._step_on_devices,
            donate_argnums=0,
            out_shardings=(self._shardings, everywhere),
        )

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.context.mesh

    @property
    def split(self) -> str:
        """How a row is split over devices, in words, and how unequal the work is, if it is."""
        words = f"{self.context.split}, {self.context.layout}"
        shards = self.context.degrees.sequence
        if shards == 1 or self.context.layout == "balanced":
            return words
        work = sum(
            layers * pairs_per_shard(mask, self.context.layout_object, self.seq_len, shards)
            for mask, layers in self._masks.items()
        )
        busiest = float(np.max(work) / np.mean(work))
        if busiest < UNBALANCED:
            return words
        return f"{words}: the busiest device has {busiest:.2f} times the mean work; try balanced"

    @property
    def seq_len(self) -> int:
        """Tokens per row as placed: padded to what the layout can cut."""
        wanted, multiple = self.config.data.seq_len, self.context.sequence_multiple
        return -(-wanted // multiple) * multiple

    @property
    def tokens_per_step(self) -> int:
        """Token slots in one optimizer step, over the global batch, padding included."""
        return self.config.batch_size * self.config.data.seq_len

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.config.model.num_parameters

    def init_state(self) -> TrainState:
        """Draws the initial parameters right into their shards."""
        init = jax.jit(self._init, out_shardings=self._shardings)
        return init(jax.random.key(self.config.seed))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for restoring a checkpoint."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._shapes,
            self._shardings,
        )

    def place(self, batch: Batch) -> DeviceBatch:
        """Permutes a batch into layout order on the host and puts each slice on its device.

        Args:
          batch: `[batch_size, seq_len]` in the order of the text.

        Returns:
          The batch on the devices, cut into the parts of gradient accumulation.
        """
        padding = self.seq_len - batch.tokens.shape[1]
        orders, hops, masks = solve_rows(self.context, self._masks, batch.segment_ids)
        parts = self.config.gradient_accumulation_steps
        spec = PartitionSpec(None, *self.context.partition_spec(2))
        sharding = NamedSharding(self.mesh, spec)

        def put(rows: NDArray[np.int32], fill: int) -> Array:
            rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=fill)
            return split(np.take_along_axis(rows, orders, axis=1))

        def split(rows: NDArray[np.int32]) -> Array:
            cut = rows.reshape(parts, -1, self.seq_len)
            return jax.make_array_from_callback(cut.shape, sharding, lambda index: cut[index])

        placement = None
        if self._places_rows:
            index = split(orders) if self._orders_rows else None
            repeated = jax.tree.map(lambda x: np.full(parts, x, np.int32), hops)
            placement = self._placement(index, repeated, masks)
        return DeviceBatch(
            tokens=put(batch.tokens, 0),
            labels=put(batch.labels, IGNORE_LABEL),
            segment_ids=put(batch.segment_ids, PAD_SEGMENT_ID),
            positions=put(batch.positions, 0),
            placement=placement,
        )

    def abstract_batch(self) -> DeviceBatch:
        """Shapes, dtypes and shardings of what `place` returns."""
        parts = self.config.gradient_accumulation_steps
        spec = PartitionSpec(None, *self.context.partition_spec(2))
        rows = jax.ShapeDtypeStruct(
            (parts, self.config.batch_size // parts, self.seq_len), jnp.int32,
            sharding=NamedSharding(self.mesh, spec),
        )  # fmt: skip
        placement = None
        if self._places_rows:
            hop = jax.ShapeDtypeStruct((parts,), jnp.int32)
            hops = (schedules.Hops(hop, hop),) * len(self._masks)
            index = rows if self._orders_rows else None
            placement = self._placement(index, hops, tuple(self._masks))
        return DeviceBatch(rows, rows, rows, rows, placement)

    def lower_step(self) -> jax.stages.Lowered:
        """Lowers `step` for the devices of the mesh; nothing is allocated."""
        return self._step.lower(self.abstract_state(), self.abstract_batch())

    def step(self, state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict[str, Array]]:
        """Takes one optimizer step; the old state's buffers are used up.

        Returns:
          The new state, and `loss` (sum over count of the global batch's labelled tokens, nats),
          `grad_norm` (before clipping), `learning_rate` and `valid_tokens`.
        """
        return self._step(state, batch)

    def gradients(
        self, params: decoder.Params, batch: DeviceBatch
    ) -> tuple[Float[Array, ""], Int[Array, ""], decoder.Params]:
        """Mean loss, number of labelled tokens, and gradients of the mean loss (traceable)."""
        run = jax.value_and_grad(self._loss_sum)
        parts = len(batch.tokens)
        if parts == 1:
            total, sums = run(params, jax.tree.map(lambda x: x[0], batch))
        else:

            def accumulate(carry: Any, part: DeviceBatch) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, carry, run(params, part)), None

            nothing = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
            (total, sums), _ = jax.lax.scan(accumulate, nothing, batch)
        count = self._count(batch)
        scale = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        return total * scale, count, jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)

    def flops_per_step(self, batch: Batch) -> int:
        """Model FLOPs of one step, forward and backward, recomputation not counted.

        Counts 6 per matmul parameter and real token, and 12 * head_dim per visible (query, key)
        pair, query head and layer, with the exact number of pairs (packing and windows counted).
        """
        model = self.config.model
        pairs = sum(
            layers * visible_pairs(mask, len(row), row)
            for mask, layers in self._masks.items()
            for row in batch.segment_ids
        )
        tokens = int((batch.segment_ids != PAD_SEGMENT_ID).sum())
        attending = 12 * pairs * model.num_heads * model.head_dim
        return 6 * model.matmul_parameters * tokens + attending

    @property
    def _orders_rows(self) -> bool:
        """Whether the order of a row's tokens comes with the batch."""
        return self.context.layout == "balanced"

    @property
    def _places_rows(self) -> bool:
        """Whether a placement comes with the batch."""
        return self._orders_rows or (self.config.data.packing and self._has_ring)

    def _placement(
        self, index: Any, hops: tuple[schedules.Hops, ...], masks: tuple[Mask, ...]
    ) -> Placement:
        shards = self.context.degrees.sequence
        return Placement(index, hops, masks, self.context.layout, shards, self.seq_len)

    @property
    def _masks(self) -> dict[Mask, int]:
        """Masks and the number of layers that use each."""
        return {kind.mask: kind.layers for kind in self.kinds.values()}

    @property
    def _has_ring(self) -> bool:
        """Whether keys travel round a ring in some layer."""
        return any(kind.has_ring for kind in self.kinds.values())

    def _init(self, rng: Array) -> TrainState:
        params: Any = decoder.init_params(self.config.model, rng)
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

    def _project(self, name: str, x: Array, weight: Array) -> Array:
        stacked: NamedSharding = getattr(self._param_shardings.layers, name)
        split = Split(self.context, PartitionSpec(*stacked.spec[1:]))
        return sharded_linear(split, decoder.PROJECTIONS[name], x, weight)

    def _loss_sum(self, params: decoder.Params, batch: DeviceBatch) -> Array:
        embedding_spec = self._param_shardings.embedding.spec

        def attend(query: Array, key: Array, value: Array, *, window: int | None) -> Array:
            kind = self.kinds[window]
            return attention(
                query, key, value, mask=kind.mask, segment_ids=batch.segment_ids,
                context=kind.context, placement=batch.placement, kernel=self.config.kernel,
            )  # fmt: skip

        runtime = decoder.Runtime(
            attention=attend,
            embed=functools.partial(sharded_embedding, Split(self.context, embedding_spec)),
            project=self._project,
            constrain=self.context.constrain,
        )
        model = self.config.model
        hidden = decoder.forward(params, batch.tokens, batch.positions, model, runtime)
        head = decoder.output_head(params)
        head_spec = parameter_spec(head.shape, decoder.HEAD_AXES, self.mesh)
        return sharded_cross_entropy(Split(self.context, head_spec), hidden, head, batch.labels)

    def _count(self, batch: DeviceBatch) -> Int[Array, ""]:
        return jnp.sum(batch.labels != IGNORE_LABEL, dtype=jnp.int32)

    def _step_on_devices(
        self, state: TrainState, batch: DeviceBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        loss, count, gradients = self.gradients(state.params, batch)
        weights: Any = state.params  # optax's types know arrays and containers, not dataclasses
        sums: Any = gradients
        updates, opt_state = self._optimizer.update(sums, state.opt_state, weights)
        params: Any = optax.apply_updates(weights, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(sums),
            "learning_rate": jnp.asarray(self._rate(state.step), jnp.float32),
            "valid_tokens": count,
        }
        return TrainState(state.step + 1, params, opt_state), metrics


def build_setup(config: TrainConfig, devices: Sequence[Any] | None = None) -> TrainSetup:
    """Builds what a run needs on the devices.

    Args:
      config: The run.
      devices: The devices to choose from; by default those of this machine.

    Returns:
      The set-up; nothing large is allocated or compiled yet.

    Raises:
      ValueError: If the combination of sizes is not possible, or the devices are too few.
    """
    context = make_context(config.parallel, config.model, devices)
    _check_loops_are_ordered(config, context)
    rows = config.batch_size // config.gradient_accumulation_steps
    if rows % context.batch_shards:
        raise ValueError(
            "batch_size / gradient_accumulation_steps must be a multiple of data_parallel_size * "
            f"fsdp_parallel_size, got {config.batch_size} / {config.gradient_accumulation_steps} = "
            f"{rows} rows over {context.batch_shards} groups; use --batch-size "
            f"{config.gradient_accumulation_steps * context.batch_shards}"
        )
    return TrainSetup(config, context)


def _check_loops_are_ordered(config: TrainConfig, context: ContextParallel) -> None:
    """Refuses what XLA's CPU runtime may compute wrongly.

    It orders loops of collectives by their data alone. A ring is such a loop; where layers are
    unscanned and recomputed, the ring of one layer's recomputation and that of another's backward
    share no data, may run side by side, and then receive each other's keys.
    """
    model = config.model
    if context.mesh.devices.flat[0].platform != "cpu" or model.remat_policy == "none":
        return
    kinds = layer_kinds(model, context)
    unscanned = model.windows[: model.num_layers % len(model.windows)]
    for window in unscanned if model.scan_layers else kinds:
        if kinds[window].has_ring:
            raise ValueError(
                "on CPU, a ring needs scanned layers where layers are recomputed, got strategy "
                f"{kinds[window].context.strategy}, scan_layers={model.scan_layers}, "
                f"num_layers={model.num_layers} in rounds of {len(model.windows)}, remat_policy="
                f"{model.remat_policy}; use --scan-layers and whole rounds, --remat-policy none, "
                "or --context-parallel-strategy all_gather"
            )
