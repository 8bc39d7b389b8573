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
from farspan.context.base import wait_for
from farspan.data.batch import Batch
from farspan.dist.sharding import parameter_shardings, parameter_spec
from farspan.masks import Mask, visible_pairs
from farspan.models import decoder
from farspan.schedules import pairs_per_shard
from farspan.train.config import TrainConfig
from farspan.train.muon import Place
from farspan.train.optimizer import build_optimizer, learning_rate_schedule
from farspan.train.parallel import LayerKind, layer_kinds, make_context
from farspan.train.sharded import (
    Split,
    sharded_cross_entropy,
    sharded_embedding,
    sharded_linear,
    sharded_rms_norm,
)
from farspan.train.state import TrainState, advance, first_state
from farspan.types import IGNORE_LABEL, PAD_SEGMENT_ID, Leaf

UNBALANCED = 1.05
"""Work of the busiest device over the mean, for a row of one document, that is worth a word."""


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
        self._rate = learning_rate_schedule(config.optimizer, config.steps)
        shapes = jax.eval_shape(self._init_params, self._seed)
        axes = decoder.logical_axes(config.model)
        self._param_shardings: decoder.Params = parameter_shardings(shapes, axes, self.mesh)
        places = jax.tree.map(lambda x, names: Place(names, x), self._param_shardings, axes)
        self._optimizer = build_optimizer(config.optimizer, places)
        self._shapes = jax.eval_shape(self._init, self._seed)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._shardings = self._split_state(everywhere)
        self._first_state = jax.jit(self._init, out_shardings=self._shardings)
        self._step = jax.jit(
            self._step_on_devices,
            donate_argnums=0,
            out_shardings=(self._shardings, everywhere),
        )
        self._evaluate = jax.jit(self._evaluate_on_devices, out_shardings=everywhere)

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
        return self._first_state(self._seed)

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
          `z_loss` (what the z-loss adds to it in the objective, its weight included), `grad_norm`
          (before clipping), `learning_rate`, `valid_tokens` and `finite` (0 where the loss or the
          gradient is not finite: then only the number of steps has changed).
        """
        return self._step(state, batch)

    def evaluate(self, state: TrainState, batch: DeviceBatch) -> dict[str, Array]:
        """Computes the loss of a batch; the state is left as it is.

        Returns:
          `loss_sum` (nats, over the global batch's labelled tokens), `valid_tokens`, and
          `ema_loss_sum`, that of the running mean of the parameters, where there is one.
        """
        loss, count = self._evaluate(state.params, batch)
        found = {"loss_sum": loss, "valid_tokens": count}
        if state.ema is not None:
            found["ema_loss_sum"], _ = self._evaluate(state.ema, batch)
        return found

    def gradients(
        self, params: decoder.Params, batch: DeviceBatch
    ) -> tuple[Float[Array, ""], Int[Array, ""], decoder.Params]:
        """Mean of the objective, number of labelled tokens, and gradients of the mean (traceable).

        The objective is the loss and, where it has a weight, the z-loss.
        """
        loss, z_loss, count, gradients = self._mean_gradients(params, batch)
        return loss + z_loss, count, gradients

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
        return self._orders_rows or (self.config.data.packs and self._has_ring)

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

    @property
    def _seed(self) -> np.uint32:
        """Handed to `_init`: as a constant in it, the compiler would draw parameters itself."""
        return np.uint32(self.config.seed)

    def _init_params(self, seed: Any) -> Any:
        return decoder.init_params(self.config.model, jax.random.key(seed))

    def _init(self, seed: Any) -> TrainState:
        params = self._init_params(seed)
        return first_state(params, self._optimizer, self.config.optimizer)

    def _split_state(self, everywhere: NamedSharding) -> TrainState:
        """Shardings of the state: what has the parameters' shapes is split like them."""
        opt_state = optax.tree_map_params(
            self._optimizer,
            lambda x, sharding: x if isinstance(x, optax.MaskedNode) else sharding,
            self._shapes.opt_state,
            self._param_shardings,
            transform_non_params=lambda _: everywhere,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        ema = None if self._shapes.ema is None else self._param_shardings
        return TrainState(everywhere, self._param_shardings, opt_state, ema)

    def _project(self, name: str, x: Array, weight: Array) -> Array:
        stacked: NamedSharding = getattr(self._param_shardings.layers, name)
        split = Split(self.context, PartitionSpec(*stacked.spec[1:]))
        return sharded_linear(split, decoder.PROJECTIONS[name], x, weight)

    def _loss_sums(
        self, params: decoder.Params, batch: DeviceBatch, *, squares: bool = False
    ) -> tuple[Array, Array]:
        """Sums as of `sharded_cross_entropy`, for one part of a batch."""
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
            norm=functools.partial(sharded_rms_norm, Split(self.context, PartitionSpec(None))),
            constrain=self.context.constrain,
        )
        model = self.config.model
        hidden = decoder.forward(params, batch.tokens, batch.positions, model, runtime)
        head = decoder.output_head(params)
        head_spec = parameter_spec(head.shape, decoder.HEAD_AXES, self.mesh)
        split = Split(self.context, head_spec)
        return sharded_cross_entropy(split, squares, hidden, head, batch.labels)

    def _mean_gradients(
        self, params: decoder.Params, batch: DeviceBatch
    ) -> tuple[Array, Array, Array, decoder.Params]:
        """Mean loss, mean z-loss times its weight, labelled tokens, gradients of both means."""
        weight = self.config.optimizer.z_loss
        count, batch = self._count(batch)

        def objective(params: decoder.Params, part: DeviceBatch) -> tuple[Array, Any]:
            losses, squares = self._loss_sums(params, part, squares=weight > 0)
            z_losses = weight * squares
            return losses + z_losses, (losses, z_losses)

        run = jax.value_and_grad(objective, has_aux=True)
        if len(batch.tokens) == 1:
            (_, sums), gradients = run(params, jax.tree.map(lambda x: x[0], batch))
        else:

            def accumulate(carry: Any, part: DeviceBatch) -> tuple[Any, None]:
                (_, sums), gradients = run(params, part)
                return jax.tree.map(jnp.add, carry, (sums, gradients)), None

            zero = jnp.zeros((), jnp.float32)
            nothing = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
            (sums, gradients), _ = jax.lax.scan(accumulate, nothing, batch)
        scale = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)
        return sums[0] * scale, sums[1] * scale, count, gradients

    def _evaluate_on_devices(
        self, params: decoder.Params, batch: DeviceBatch
    ) -> tuple[Array, Array]:
        count, batch = self._count(batch)

        def add(total: Array, part: DeviceBatch) -> tuple[Array, None]:
            return total + self._loss_sums(params, part)[0], None

        total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), batch)
        return total, count

    def _count(self, batch: DeviceBatch) -> tuple[Int[Array, ""], DeviceBatch]:
        """Labelled tokens, and the batch, not to be used before they are counted."""
        count = jnp.sum(batch.labels != IGNORE_LABEL, dtype=jnp.int32)
        if self.context.orders_collectives:
            batch = dataclasses.replace(batch, tokens=wait_for(batch.tokens, count))
        return count, batch

    def _step_on_devices(
        self, state: TrainState, batch: DeviceBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        loss, z_loss, count, gradients = self._mean_gradients(state.params, batch)
        rate = jnp.asarray(self._rate(state.step), jnp.float32)
        state, outcome = advance(
            state, gradients, loss + z_loss, rate,
            optimizer=self._optimizer, config=self.config.optimizer,
        )  # fmt: skip
        return state, {"loss": loss, "z_loss": z_loss, "valid_tokens": count, **outcome}


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
    if not context.orders_collectives or model.remat_policy == "none":
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
