"""Parity of a split training run with the same run on one device: gradients, losses, repetition.

The gradients are those that the training step itself used: after one step from a zero state,
Adam's first moment is `1 - beta1` times the (clipped) gradient, and Muon's momentum is the gradient
itself. So one compiled program is checked, the one that trains, and not a second one that only
resembles it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from farspan.data import Batch, Piece, build_batch
from farspan.testing.parity import BF16_FACTOR, F32_TOLERANCE, Parity, relative_error
from farspan.train.config import OptimizerConfig, TrainConfig
from farspan.train.state import TrainState
from farspan.train.step import TrainSetup, build_setup

STEPS = 5
"""Optimizer steps of a run."""
STEPS_TOLERANCE = 1e-4
"""Relative error allowed to float32 losses and gradient norms along a run. Above that of a single
gradient: Adam divides by the gradient's own size, so that where a gradient is nearly 0 its rounding
error turns into a whole step."""
BF16_EPSILON = 2.0**-8
"""Rounding step of bfloat16. A loss is a single number whose error may by chance be far below what
its type can promise, so twice that error alone would be no fair bound."""


class ModelRun(NamedTuple):
    """What came of a few steps on one batch.

    Attributes:
      losses: Loss before each step, float64 `[steps]`.
      grad_norms: Global norm of each step's gradient, before clipping, float64 `[steps]`.
      gradients: First step's gradient of each parameter, by name, on the host.
      digests: Hash of each array of the final training state, by name.
    """

    losses: NDArray[np.float64]
    grad_norms: NDArray[np.float64]
    gradients: dict[str, Any]
    digests: dict[str, str]

    def quantities(self) -> dict[str, Any]:
        """What parity is asked of: the loss, each gradient, then losses and norms along the run."""
        return {
            "loss": self.losses[0],
            **{f"gradient of {name}": gradient for name, gradient in self.gradients.items()},
            f"losses of {STEPS} steps": self.losses,
            f"gradient norms of {STEPS} steps": self.grad_norms,
        }


def document_lengths(seq_len: int, pieces: int) -> tuple[int, ...]:
    """Lengths of documents that make a packed row hard to split.

    Args:
      seq_len: Tokens in the row, a multiple of `pieces` and at least 4 per piece.
      pieces: Equal pieces that devices hold; at least 2.

    Returns:
      Lengths with which a document ends at every edge of a piece, and padding fills half of the
      last piece. Rotated by one (first length last), a document crosses every edge instead.
    """
    length = seq_len // pieces
    first = length // 3
    return (first, length - first, *[length] * (pieces - 2), length - length // 2)


def model_batch(
    vocab_size: int,
    rows: int,
    seq_len: int,
    documents: Sequence[int],
    *,
    seed: int = 0,
) -> Batch:
    """Draws a batch of random tokens that takes turns between three kinds of rows.

    Args:
      vocab_size: Tokens are uniform below this.
      rows: Rows of the batch.
      seq_len: Tokens per row.
      documents: Lengths of the documents of a row, padding after them.
      seed: Of the tokens.

    Returns:
      int32 `[rows, seq_len]`, in the order of the text: rows of `documents`, of a single document
      without padding, and of `documents` with the first put last.
    """
    draw = np.random.default_rng(seed)
    kinds = (tuple(documents), (seq_len,), (*documents[1:], *documents[:1]))
    texts: list[NDArray[np.int32]] = []
    batch: list[list[Piece]] = []
    for row in range(rows):
        lengths = kinds[row % len(kinds)]
        batch.append([Piece(len(texts) + i, 0, length) for i, length in enumerate(lengths)])
        texts += [draw.integers(vocab_size, size=n, dtype=np.int32) for n in lengths]
    return build_batch(batch, texts, seq_len)


def unsplit(config: TrainConfig) -> TrainConfig:
    """The same run on one device, where all-gather is ordinary attention."""
    parallel = dataclasses.replace(
        config.parallel,
        context_parallel_strategy="all_gather",
        context_parallel_size=1,
        context_parallel_ulysses_size=0,
        context_parallel_outer_size=1,
        context_parallel_head_groups=1,
        context_parallel_ring_streams=1,
        context_parallel_load_balance="contiguous",
        data_parallel_size=1,
        fsdp_parallel_size=1,
    )
    return dataclasses.replace(config, parallel=parallel)


def in_float32(config: TrainConfig) -> TrainConfig:
    """The same run with float32 activations and parameters."""
    model = dataclasses.replace(config.model, dtype="float32", param_dtype="float32")
    return dataclasses.replace(config, model=model)


def is_float32(config: TrainConfig) -> bool:
    """Whether activations and parameters are float32."""
    return config == in_float32(config)


def initial_state(config: TrainConfig) -> TrainState:
    """Draws the state that all runs of a comparison start from: on one device, then on the host.

    Args:
      config: The run; its sizes and its seed count.

    Returns:
      NumPy arrays, parameters float32.
    """
    return jax.tree.map(np.asarray, build_setup(in_float32(unsplit(config))).init_state())


def run_model(
    config: TrainConfig, batch: Batch, initial: TrainState, *, repeats: int = 1
) -> list[ModelRun]:
    """Trains on one batch for `STEPS` steps.

    float32 products are computed in full float32, whatever the platform's default: on accelerators
    that default rounds their operands, and a deviation could no longer be told from rounding.

    Args:
      config: The run; `batch_size` rows of `seq_len` tokens.
      batch: Trained on in every step.
      initial: From `initial_state`.
      repeats: How often to do so, with one compiled program.

    Returns:
      A result per repeat.

    Raises:
      ValueError: If the configuration is not possible.
    """
    setup = build_setup(config)
    exact = jax.default_matmul_precision("highest") if is_float32(config) else nullcontext()
    with exact:
        return [_run_once(setup, batch, initial) for _ in range(repeats)]


def model_parity(split: ModelRun, whole: ModelRun, num_layers: int) -> list[Parity]:
    """Holds a float32 run on many devices against the same on one.

    Args:
      split: The run on many devices.
      whole: The run on one.
      num_layers: Layers of the decoder. The loss may err as attention may; a gradient passes
        through every layer forward and backward, and may err as much in each pass.

    Returns:
      A row for the loss, for the gradient of each parameter, and for losses and gradient norms
      along the steps.
    """
    gradients = [2 * num_layers * F32_TOLERANCE] * len(split.gradients)
    limits = [F32_TOLERANCE, *gradients, STEPS_TOLERANCE, STEPS_TOLERANCE]
    expected = whole.quantities()
    return [
        Parity(name, relative_error(value, expected[name]), limit)
        for (name, value), limit in zip(split.quantities().items(), limits, strict=True)
    ]


def rounded_model_parity(split: ModelRun, whole: ModelRun, exact: ModelRun) -> list[Parity]:
    """Holds a bfloat16 run on many devices against the same on one.

    Args:
      split: The run on many devices.
      whole: The run on one.
      exact: The run on one in float32: what both others round.

    Returns:
      Rows as of `model_parity`; errors are against `exact`, and those of `split` may be twice those
      of `whole`, or one rounding step of bfloat16.
    """
    unsplit_run, expected = whole.quantities(), exact.quantities()
    rows: list[Parity] = []
    for name, value in split.quantities().items():
        inherent = relative_error(unsplit_run[name], expected[name])
        limit = max(BF16_FACTOR * inherent, BF16_EPSILON)
        rows.append(Parity(name, relative_error(value, expected[name]), limit))
    return rows


def repetition(first: ModelRun, second: ModelRun) -> list[Parity]:
    """Counts what differs, be it by one bit, between two runs of one program: nothing may."""
    numbers = sum(
        int((one != two).sum())
        for one, two in ((first.losses, second.losses), (first.grad_norms, second.grad_norms))
    )
    arrays = sum(digest != second.digests[name] for name, digest in first.digests.items())
    return [
        Parity("differing losses and norms", float(numbers), 0.0),
        Parity("differing arrays of the state", float(arrays), 0.0),
    ]


def _run_once(setup: TrainSetup, batch: Batch, initial: TrainState) -> ModelRun:
    def put(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(x.astype(like.dtype), like.sharding)

    placed = setup.place(batch)
    state: TrainState = jax.tree.map(put, initial, setup.abstract_state())
    metrics: list[dict[str, Any]] = []
    gradients: dict[str, Any] = {}
    for step in range(STEPS):
        state, found = setup.step(state, placed)
        metrics.append(found)
        if step == 0:
            norm = float(found["grad_norm"])
            gradients = _first_gradients(state.opt_state, setup.config.optimizer, norm)
    return ModelRun(
        losses=np.array([float(found["loss"]) for found in metrics]),
        grad_norms=np.array([float(found["grad_norm"]) for found in metrics]),
        gradients=gradients,
        digests={
            name: hashlib.blake2b(np.asarray(x).tobytes()).hexdigest() for name, x in _named(state)
        },
    )


def _first_gradients(
    opt_state: Any, optimizer: OptimizerConfig, grad_norm: float
) -> dict[str, Any]:
    """The gradients before clipping, by name, from the optimizer's state after one step."""
    clipped = 0 < optimizer.clip_norm <= grad_norm
    scale = grad_norm / optimizer.clip_norm if clipped else 1.0
    factors = {"mu": scale / (1 - optimizer.beta1), "trace": scale}
    return {
        name: np.asarray(x).astype(np.float64) * factor
        for moment, factor in factors.items()
        for _, found in optax.tree_utils.tree_get_all_with_path(opt_state, moment)
        for name, x in _named(found)
    }


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path).removeprefix("."), leaf) for path, leaf in leaves]
