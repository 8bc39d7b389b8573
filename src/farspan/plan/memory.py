"""What one device holds during a training step, by kind.

Parameters, optimizer state and gradients are exact: they are counted from the model's own shapes
and the rule that shards them. What forward keeps for backward is read from the traced model
(`plan.trace`). What lives only inside a phase (a layer, the loss, the embedding) is an estimate:
the compiler decides what of it exists at once. Not counted: the padding of small dimensions to a
chip's tiles, and what the compiler itself keeps.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from farspan import schedules
from farspan.dist.sharding import parameter_spec
from farspan.models import decoder
from farspan.ops.cross_entropy import tile_tokens
from farspan.plan import trace
from farspan.plan.workload import Workload, shard_bytes

FLOAT32_BYTES = 4
_COUNTERS_BYTES = 2 * 4
_BATCH_ARRAYS = 4


@dataclasses.dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind on one device.

    Attributes:
      kind: What they hold.
      num_bytes: How many.
      exact: Whether they are counted and not estimated.
      phase: When they are there: "step" for all of it, else the phase that needs them.
      remedy: What would lower them.
    """

    kind: str
    num_bytes: int
    exact: bool
    phase: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """What one device holds.

    Attributes:
      items: By kind.
    """

    items: tuple[MemoryItem, ...]

    @property
    def state_bytes(self) -> int:
        """Parameters and what is kept for them, exact: what is there between steps."""
        return sum(item.num_bytes for item in self.items if item.kind in STATE_KINDS)

    @property
    def phases(self) -> dict[str, int]:
        """Bytes that each phase needs beside what is there for the whole step."""
        found: dict[str, int] = {}
        for item in self.items:
            if item.phase != "step":
                found[item.phase] = found.get(item.phase, 0) + item.num_bytes
        return found

    @property
    def peak_phase(self) -> str:
        """The phase in which most is held."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def peak_bytes(self) -> int:
        """Estimate of the most that is held at once."""
        lasting = sum(item.num_bytes for item in self.items if item.phase == "step")
        return lasting + self.phases[self.peak_phase]

    @property
    def at_peak(self) -> tuple[MemoryItem, ...]:
        """What is held at the peak, largest first."""
        held = [item for item in self.items if item.phase in ("step", self.peak_phase)]
        return tuple(sorted(held, key=lambda item: -item.num_bytes))


STATE_KINDS = ("parameters", "optimizer state")

_MORE_DEVICES = "more devices (fsdp or context), param_dtype bfloat16"
_FEWER_TOKENS = "more context devices, fewer rows at once (gradient accumulation)"


def account(work: Workload) -> MemoryAccount:
    """Says what one device holds during a step.

    Args:
      work: The step.
    """
    parameters = parameter_bytes(work)
    kept = _kept_bytes(work) + _COUNTERS_BYTES
    copies = 1 if work.accumulation == 1 else 2
    saved = trace.saved_bytes_per_token(work.model) * work.part_tokens
    recompute = "" if work.model.remat_policy == "full" else "remat_policy full, "
    items = [
        MemoryItem("parameters", parameters, True, "step", _MORE_DEVICES),
        MemoryItem("optimizer state", kept, True, "step", _MORE_DEVICES),
        MemoryItem("gradients", copies * parameters, True, "step", _MORE_DEVICES),
        MemoryItem("batch", _batch_bytes(work), True, "step", "fewer rows"),
        MemoryItem(
            "saved activations", saved, True, "step", recompute + _FEWER_TOKENS,
        ),
        *_layer_items(work),
        *_loss_items(work),
        *_embedding_items(work),
    ]  # fmt: skip
    return MemoryAccount(tuple(items))


def parameter_bytes(work: Workload) -> int:
    """Bytes of one device's shards of the parameters; exact."""
    shapes = jax.eval_shape(lambda: decoder.init_params(work.model, jax.random.key(0)))
    mesh = work.context.mesh
    specs = jax.tree.map(
        lambda x, axes: parameter_spec(x.shape, axes, mesh),
        shapes,
        decoder.logical_axes(work.model),
    )
    return shard_bytes(shapes, specs, mesh)


def _kept_bytes(work: Workload) -> int:
    """Bytes of one device's shards of what is kept for each parameter; exact."""
    mesh = work.context.mesh

    def kept(shape: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
        parameter = shard_bytes(shape, parameter_spec(shape.shape, axes, mesh), mesh)
        sizes = [jnp.dtype(kind).itemsize for kind in work.kept_dtypes(axes)]
        return parameter // shape.dtype.itemsize * sum(sizes)

    shapes = jax.eval_shape(lambda: decoder.init_params(work.model, jax.random.key(0)))
    return sum(jax.tree.leaves(jax.tree.map(kept, shapes, decoder.logical_axes(work.model))))


def _batch_bytes(work: Workload) -> int:
    arrays = _BATCH_ARRAYS + (work.context.layout == "balanced")
    return 4 * arrays * work.part_tokens * work.accumulation


def _layer_items(work: Workload) -> list[MemoryItem]:
    """What the backward of one layer needs, its recomputation included."""
    model = work.model
    found = [
        MemoryItem(
            "attention", max(_attention_bytes(work)), False, "layer",
            "strategy ring, head groups, " + _FEWER_TOKENS,
        ),
        MemoryItem(
            "gathered weights", _weights_bytes(work), False, "layer", "a smaller ffn_dim",
        ),
        MemoryItem(
            "gradients of activations", _gradient_bytes(work), False, "layer", _FEWER_TOKENS
        ),
    ]  # fmt: skip
    if model.remat_policy != "none":
        again = trace.round_bytes_per_token(model) * work.part_tokens
        found.append(
            MemoryItem("recomputed activations", again, False, "layer", _FEWER_TOKENS)
        )  # fmt: skip
    return found


def _attention_bytes(work: Workload) -> list[int]:
    """Keys held, their gradients and those of queries in float32, for each kind of layers."""
    shape, model = work.attention_shape(), work.model
    query = work.part_tokens * model.num_heads * model.head_dim
    found: list[int] = []
    for layers in work.attention:
        options = layers.context.traffic_options(
            layers.mask, work.seq_len, places_given=shape.positions
        )
        held = schedules.held_key_bytes(
            layers.context.strategy, layers.context.degrees, shape, options
        )
        gradients = held // work.itemsize * FLOAT32_BYTES
        found.append(held + gradients + query * (FLOAT32_BYTES + work.itemsize))
    return found


def _weights_bytes(work: Workload) -> int:
    """The largest matrix of a layer, whole, with its whole gradient in float32."""
    model = work.model
    largest = model.model_dim * max(model.ffn_dim, model.num_heads * model.head_dim)
    return largest * (work.itemsize + FLOAT32_BYTES)


def _gradient_bytes(work: Workload) -> int:
    """Gradients of the stream and of the feed-forward's two inner activations."""
    model = work.model
    return work.part_tokens * (model.model_dim + 2 * model.ffn_dim) * work.itemsize


def _loss_items(work: Workload) -> list[MemoryItem]:
    """The head, whole, with its gradient, the hidden states' gradient, and tiles of logits."""
    model = work.model
    head = model.model_dim * model.vocab_size * (work.itemsize + FLOAT32_BYTES)
    tile = tile_tokens(work.part_tokens, model.vocab_size) * model.vocab_size
    hidden = work.part_tokens * model.model_dim * work.itemsize
    return [
        MemoryItem("output head", head, False, "loss", "a smaller vocabulary"),
        MemoryItem("logits", 3 * tile * FLOAT32_BYTES, False, "loss", "a smaller vocabulary"),
        MemoryItem("gradient of hidden states", hidden, False, "loss", _FEWER_TOKENS),
    ]


def _embedding_items(work: Workload) -> list[MemoryItem]:
    """The embedding's gradient, whole, and that of the rows looked up, in float32."""
    model = work.model
    table = model.model_dim * model.vocab_size * FLOAT32_BYTES
    rows = work.part_tokens * model.model_dim * FLOAT32_BYTES
    return [
        MemoryItem("gradient of the embedding", table, False, "embedding", "a smaller vocabulary"),
        MemoryItem("gradient of embedded tokens", rows, False, "embedding", _FEWER_TOKENS),
    ]


def binary_size(num_bytes: int) -> str:
    """Bytes in words, such as `1.5 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(4, int(math.log(num_bytes, 1024)))
    return f"{num_bytes / 1024**power:.2f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
