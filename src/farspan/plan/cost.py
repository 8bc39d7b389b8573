"""FLOPs and bytes of one training step, and the time that no schedule can beat.

FLOPs are those of matrix products, 2 per multiply-add. Model FLOPs are forward and backward of what
the text needs: 6 per matrix parameter and real token, and 12 * head_dim per visible (query, key)
pair, query head and layer, pairs counted exactly (windows and packed documents). Hardware FLOPs are
what the device runs: recomputation, the scores that attention's backward makes anew, and padding.
The pairs that a kernel computes beside the visible ones, in blocks that a mask cuts, are not
counted.

Bytes are those that leave a device, counted by the rules of the strategies
(`schedules.collectives`) and of sharded parameters: each matrix is gathered, in the type of the
computation, where it is used (the output head once for the loss and its backward), and its gradient
is scattered in float32. The optimizer's matrix products and collectives are its own account
(`Workload.update_cost`). A few scalars (the loss, counts, the gradient's norm) are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from farspan import schedules
from farspan.dist.sharding import parameter_spec
from farspan.masks import visible_pairs
from farspan.models import decoder
from farspan.plan import trace
from farspan.plan.hardware import Slice
from farspan.plan.memory import FLOAT32_BYTES, MemoryAccount
from farspan.plan.workload import UpdateCost, Workload
from farspan.schedules import Collective

_BACKWARD_PRODUCTS = 5
"""Matrix products per pair in attention's backward: scores anew, dp, dq, dk, dv."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one step on one device, the mean over devices.

    Attributes:
      matmul_model: Of matrices, forward and backward, real tokens.
      attention_model: Of attention, forward and backward, visible pairs.
      matmul_hardware: Of matrices as they are run.
      attention_hardware: Of attention as it is run.
      updates: Of the optimizer, on the device with the most.
    """

    matmul_model: int
    attention_model: int
    matmul_hardware: int
    attention_hardware: int
    updates: int

    @property
    def model(self) -> int:
        """All model FLOPs."""
        return self.matmul_model + self.attention_model

    @property
    def hardware(self) -> int:
        """All hardware FLOPs."""
        return self.matmul_hardware + self.attention_hardware + self.updates


def flops(work: Workload) -> Flops:
    """Counts the FLOPs of one step on one device.

    Args:
      work: The step.
    """
    model, devices = work.model, work.num_devices
    segment_ids = work.segment_ids()
    pairs = work.rows * sum(
        layers.count * visible_pairs(layers.mask, work.seq_len, segment_ids)
        for layers in work.attention
    )
    per_pair = 2 * model.num_heads * model.head_dim  # of one product
    runs = trace.runs(model)
    again = runs["forward", "attention"] // model.num_layers
    tokens = work.rows * work.seq_len
    head = model.model_dim * model.vocab_size
    per_token = 4 * head  # forward, logits anew, and two products in backward
    for name, size in _matrix_sizes(work).items():
        per_token += size * (runs["forward", name] + 2 * runs["backward", name])
    return Flops(
        matmul_model=6 * model.matmul_parameters * tokens // devices,
        attention_model=6 * per_pair * pairs // devices,
        matmul_hardware=2 * per_token * tokens // devices,
        attention_hardware=(2 * again + _BACKWARD_PRODUCTS) * per_pair * pairs // devices,
        updates=sum(each.flops for each in _update_costs(work)),
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one device in one step.

    Attributes:
      attention: Of attention, forward, recomputation and backward; where the hops of a ring follow
        the documents of a batch, at most.
      parameters: That gather parameters.
      gradients: That sum gradients.
      updates: Of the optimizer.
    """

    attention: tuple[Collective, ...]
    parameters: tuple[Collective, ...]
    gradients: tuple[Collective, ...]
    updates: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(each.sent_bytes for each in self.all)

    @property
    def all(self) -> tuple[Collective, ...]:
        """All of them."""
        return self.attention + self.parameters + self.gradients + self.updates


def traffic(work: Workload) -> Traffic:
    """Lists what one device sends in one step.

    Args:
      work: The step.
    """
    parts = work.accumulation
    gathered, summed = _parameter_collectives(work)
    return Traffic(
        _merged(_times(each, parts) for each in _attention_collectives(work)),
        _merged(_times(each, parts) for each in gathered),
        _merged(_times(each, parts) for each in summed),
        _merged(each for cost in _update_costs(work) for each in cost.collectives),
    )


def _attention_collectives(work: Workload) -> list[Collective]:
    shape, runs = work.attention_shape(), trace.runs(work.model)
    forward = runs["forward", "attention"] // work.model.num_layers
    found: list[Collective] = []
    for layers in work.attention:
        context, degrees = layers.context, layers.context.degrees
        options = layers.context.traffic_options(
            layers.mask, work.seq_len, places_given=shape.positions
        )
        passes: tuple[tuple[schedules.Direction, int], ...] = (
            ("forward", forward),
            ("backward", 1),
        )
        for direction, times in passes:
            of_layer = schedules.collectives(context.strategy, degrees, shape, direction, options)
            found += [_times(each, times * layers.count) for each in of_layer]
        # A forward that is run anew for backward needs no log-sum-exp: its return is dropped,
        # unless it comes with the output, as it does from groups of heads.
        if options.head_groups == 1:
            returned = work.part_tokens * work.model.num_heads * FLOAT32_BYTES
            dropped = Collective("all-to-all", 1, returned, degrees.heads)
            found.append(_times(dropped, -(forward - 1) * layers.count))
    return found


def _parameter_collectives(work: Workload) -> tuple[list[Collective], list[Collective]]:
    """What gathers parameters, and what sums their gradients, in one part of a step."""
    model, mesh, runs = work.model, work.context.mesh, trace.runs(work.model)
    shapes = jax.eval_shape(lambda: decoder.init_params(model, jax.random.key(0)))
    axes = decoder.logical_axes(model)
    gathered: list[Collective] = []
    summed: list[Collective] = []

    def add(shape: tuple[int, ...], names: tuple[str, ...], itemsize: int, uses: int) -> None:
        spec = parameter_spec(shape, names, mesh)
        gathered.extend(_times(each, uses) for each in _gathers(work, shape, spec, itemsize))

    def add_gradient(shape: tuple[int, ...], names: tuple[str, ...], times: int) -> None:
        spec = parameter_spec(shape, names, mesh)
        summed.extend(_times(each, times) for each in _sums(work, shape, spec))

    for name in decoder.PROJECTIONS:
        shape = getattr(shapes.layers, name).shape[1:]
        names = getattr(axes.layers, name)[1:]
        backward = runs["backward", name]
        add(shape, names, work.itemsize, runs["forward", name] + backward)
        add_gradient(shape, names, backward)
    table = shapes.embedding.shape
    narrow = min(work.itemsize, jnp.dtype(model.param_dtype).itemsize)  # the compiler rounds first
    add(table, axes.embedding, narrow, 1)
    add_gradient(table, axes.embedding, 1)
    head = (model.model_dim, model.vocab_size)
    add(head, decoder.HEAD_AXES, work.itemsize, 1)  # backward of the loss follows its forward
    add_gradient(head, decoder.HEAD_AXES, 1)
    norms = 2 * model.num_layers + 1
    whole = _sums(work, (model.model_dim,), PartitionSpec(None))
    summed += [_times(each, norms) for each in whole]
    return gathered, summed


def _gathers(
    work: Workload, shape: tuple[int, ...], spec: PartitionSpec, itemsize: int
) -> list[Collective]:
    """As `train.sharded` gathers a parameter: one dimension after the other."""
    groups = _groups(work, spec)
    size = math.prod(shape) * itemsize // math.prod(groups)
    found: list[Collective] = []
    for group in groups:
        found.append(Collective("all-gather", 1, size, group))
        size *= group
    return found


def _sums(work: Workload, shape: tuple[int, ...], spec: PartitionSpec) -> list[Collective]:
    """As `train.sharded` sums a parameter's gradient into its shards, in float32."""
    groups = _groups(work, spec)
    size = math.prod(shape) * FLOAT32_BYTES
    found: list[Collective] = []
    for group in groups:
        found.append(Collective("reduce-scatter", 1, size, group))
        size //= group
    rest = work.num_devices // math.prod(groups)
    if rest > 1:
        found.append(Collective("all-reduce", 1, size, rest))
    return found


def _update_costs(work: Workload) -> list[UpdateCost]:
    """What the update of each parameter costs."""

    def one(shape: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> UpdateCost:
        spec = parameter_spec(shape.shape, axes, work.context.mesh)
        return work.update_cost(shape.shape, axes, _splits(work, spec))

    shapes = jax.eval_shape(lambda: decoder.init_params(work.model, jax.random.key(0)))
    return jax.tree.leaves(jax.tree.map(one, shapes, decoder.logical_axes(work.model)))


def _groups(work: Workload, spec: PartitionSpec) -> list[int]:
    """Devices over which each split dimension is split."""
    return [devices for devices in _splits(work, spec) if devices > 1]


def _splits(work: Workload, spec: PartitionSpec) -> tuple[int, ...]:
    """Devices over which each dimension is split."""
    shape = work.context.mesh.shape
    names = [(n,) if isinstance(n, str) else tuple(n or ()) for n in spec]
    return tuple(math.prod(shape[axis] for axis in axes) for axes in names)


def _matrix_sizes(work: Workload) -> dict[str, int]:
    """Elements of the matrices of one layer."""
    shapes = jax.eval_shape(lambda: decoder.init_params(work.model, jax.random.key(0)))
    return {name: getattr(shapes.layers, name).size // work.model.num_layers
            for name in decoder.PROJECTIONS}  # fmt: skip


def _times(each: Collective, times: int) -> Collective:
    return dataclasses.replace(
        each, count=each.count * times, operand_bytes=each.operand_bytes * times
    )


def _merged(found: Iterable[Collective]) -> tuple[Collective, ...]:
    """Adds up those of one kind and group."""
    totals: dict[tuple[str, int], Collective] = {}
    for each in found:
        key = each.op, each.group
        if key in totals:
            count = totals[key].count + each.count
            operand_bytes = totals[key].operand_bytes + each.operand_bytes
            each = dataclasses.replace(each, count=count, operand_bytes=operand_bytes)  # noqa: PLW2901
        totals[key] = each
    return tuple(each for each in totals.values() if each.group > 1 and each.count)


@dataclasses.dataclass(frozen=True)
class TimeBounds:
    """Times below which no step can be, each by one resource alone.

    Attributes:
      compute_seconds: Hardware FLOPs at the peak of bfloat16.
      link_seconds: Bytes sent, over every link of the chip at once at its full rate. Of what the
        devices of one chip send, the share that one of them sends must leave it.
      hbm_seconds: Optimizer and saved activations, read and written once.
    """

    compute_seconds: float
    link_seconds: float
    hbm_seconds: float

    @property
    def step_seconds(self) -> float:
        """The greatest of them."""
        return max(self.compute_seconds, self.link_seconds, self.hbm_seconds)


def time_bounds(
    step_flops: Flops, sent: Traffic, memory: MemoryAccount, hardware: Slice
) -> TimeBounds:
    """Bounds the time of a step from below.

    Args:
      step_flops: From `flops`.
      sent: From `traffic`.
      memory: From `memory.account`.
      hardware: The slice.
    """
    chip = hardware.chip
    sizes = {item.kind: item.num_bytes for item in memory.items}
    parameters, state = sizes["parameters"], memory.state_bytes
    moved = 2 * state + 2 * parameters + 2 * sizes["saved activations"]
    links = hardware.links_per_chip * chip.link_bytes_per_second
    return TimeBounds(
        compute_seconds=step_flops.hardware / chip.peak_flops_per_second,
        link_seconds=sent.sent_bytes / links if links else 0.0,
        hbm_seconds=moved / chip.hbm_bytes_per_second,
    )
