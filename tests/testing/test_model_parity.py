"""Model parity: hard rows, the gradients of the training step itself, and fair tolerances."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from farspan.models.config import DecoderConfig
from farspan.testing import relative_error
from farspan.testing.model_parity import (
    BF16_EPSILON,
    ModelRun,
    document_lengths,
    in_float32,
    initial_state,
    is_float32,
    model_batch,
    model_parity,
    repetition,
    rounded_model_parity,
    run_model,
    unsplit,
)
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from farspan.train.step import build_setup

SEQ_LEN = 32
CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=32,
        num_layers=1,
        model_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=32,
    ),
    data=DataConfig(seq_len=SEQ_LEN),
    parallel=ParallelConfig(context_parallel_strategy="ring", context_parallel_size=2),
    optimizer=OptimizerConfig(warmup_steps=1, clip_norm=0.25),
    kernel="reference",
    batch_size=3,
)


def edges(lengths: tuple[int, ...]) -> set[int]:
    return set(np.cumsum(lengths).tolist())


@pytest.mark.parametrize(("seq_len", "pieces"), [(8, 2), (64, 16), (96, 8), (512, 16)])
def test_documents_end_at_every_edge_or_cross_every_edge(seq_len: int, pieces: int) -> None:
    lengths = document_lengths(seq_len, pieces)
    interior = set(range(seq_len // pieces, seq_len, seq_len // pieces))
    assert min(lengths) > 0
    assert seq_len - seq_len // pieces < sum(lengths) < seq_len
    assert interior <= edges(lengths)
    assert not interior & edges((*lengths[1:], *lengths[:1]))


def test_rows_take_turns_between_packed_whole_and_rotated() -> None:
    batch = model_batch(50, 4, SEQ_LEN, (3, 20), seed=1)
    lengths = [np.unique(row, return_counts=True)[1].tolist() for row in batch.segment_ids]
    assert lengths == [[9, 3, 20], [32], [9, 20, 3], [9, 3, 20]]
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < 50
    assert not (batch.tokens == model_batch(50, 4, SEQ_LEN, (3, 20), seed=2).tokens).all()


def test_gradients_are_those_of_the_loss_and_runs_repeat_bit_for_bit() -> None:
    batch = model_batch(32, 3, SEQ_LEN, document_lengths(SEQ_LEN, 4))
    config = unsplit(CONFIG)
    initial = initial_state(CONFIG)
    run, again = run_model(config, batch, initial, repeats=2)
    assert [row.error for row in repetition(run, again)] == [0, 0]

    setup = build_setup(config)
    with jax.default_matmul_precision("highest"):
        loss, _, gradients = jax.jit(setup.gradients)(initial.params, setup.place(batch))
    norm = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(gradients)))
    assert norm > CONFIG.optimizer.clip_norm
    assert relative_error(run.losses[0], loss) < 1e-6
    assert relative_error(run.grad_norms[0], norm) < 1e-5
    for path, expected in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path).removeprefix(".")
        assert relative_error(run.gradients[name], expected) < 1e-5, name
    assert run.losses[-1] < run.losses[0]


def test_variants_of_a_run() -> None:
    model = dataclasses.replace(CONFIG.model, dtype="bfloat16", param_dtype="bfloat16")
    config = dataclasses.replace(CONFIG, model=model)
    assert in_float32(config) == CONFIG
    assert is_float32(CONFIG)
    assert not is_float32(config)
    assert unsplit(config).parallel.context_parallel_size == 1
    assert unsplit(config).model == model


def run_with(loss: float, gradient: list[float]) -> ModelRun:
    steps = np.array([loss, loss])
    return ModelRun(steps, np.array([1.0, 1.0]), {"w": np.array(gradient)}, {"w": str(gradient)})


def test_float32_gradients_may_err_as_attention_in_each_pass_through_a_layer() -> None:
    whole = run_with(2.0, [1.0, -4.0])
    rows = {row.quantity: row for row in model_parity(run_with(2.0001, [1.0, -4.0002]), whole, 3)}
    assert list(rows) == [
        *("loss", "gradient of w", "losses of 5 steps", "gradient norms of 5 steps"),
    ]
    assert rows["gradient of w"].error == pytest.approx(5e-5)
    assert rows["gradient of w"].tolerance == pytest.approx(6e-5)
    assert {name: row.ok for name, row in rows.items()} == {
        "loss": False,
        "gradient of w": True,
        "losses of 5 steps": True,
        "gradient norms of 5 steps": True,
    }
    assert not model_parity(run_with(float("nan"), [1.0, -4.0]), whole, 3)[0].ok


def test_bfloat16_may_err_twice_as_much_as_one_device_and_at_least_one_rounding() -> None:
    exact, whole = run_with(2.0, [1.0, -4.0]), run_with(2.0, [1.0, -4.1])
    for error, ok in ((0.19, True), (0.21, False)):
        rows = rounded_model_parity(run_with(2.0, [1.0, -4.0 - error]), whole, exact)
        assert rows[0].tolerance == BF16_EPSILON
        assert rows[1].tolerance == pytest.approx(0.05)
        assert rows[1].ok is ok


def test_repetition_counts_what_differs() -> None:
    first, second = run_with(2.0, [1.0]), run_with(2.5, [3.0])
    assert [(row.error, row.ok) for row in repetition(first, second)] == [(2, False), (1, False)]
    assert all(row.ok for row in repetition(first, first))
