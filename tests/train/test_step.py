"""The training step on any split is the step on one device, and holds and sends what it should."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from farspan.context import attention
from farspan.data import Batch
from farspan.kernels import KERNELS, ReferenceKernel
from farspan.masks import Causal
from farspan.models import DecoderConfig, decoder
from farspan.plan.hlo import instructions
from farspan.testing import relative_error
from farspan.testing.model_parity import model_batch, unsplit
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from farspan.train.step import build_setup
from farspan.types import IGNORE_LABEL

SEQ_LEN = 64
CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=96, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
        ffn_dim=64, tie_embeddings=False,
    ),
    data=DataConfig(seq_len=SEQ_LEN),
    parallel=ParallelConfig(context_parallel_strategy="ring", context_parallel_size=4),
    optimizer=OptimizerConfig(warmup_steps=2, clip_norm=0.5, learning_rate=1e-3),
    batch_size=4,
    steps=20,
    kernel="reference",  # quick to compile; kernels have tests of their own
)  # fmt: skip
DOCUMENTS = (7, 30, 5, 16)


def varied(*, model=None, parallel=None, **run):
    config = dataclasses.replace(CONFIG, **run)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **(model or {})),
        parallel=dataclasses.replace(config.parallel, **(parallel or {})),
    )


def batch_of(config, seq_len=SEQ_LEN):
    return model_batch(config.model.vocab_size, config.batch_size, seq_len, DOCUMENTS)


def loss_and_gradients(config, batch=None):
    setup = build_setup(config)
    batch = batch_of(config) if batch is None else batch
    state = setup.init_state()
    found = jax.jit(setup.gradients)(state.params, setup.place(batch))
    return jax.tree.map(np.asarray, found)


def assert_same(found, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) < tolerance


@pytest.fixture(scope="module")
def whole():
    """Loss, count and gradients on one device."""
    return loss_and_gradients(unsplit(CONFIG))


SPLITS = {
    "one device": {"context_parallel_size": 1},
    "ring 4": {"context_parallel_size": 4},
    "data 2 x ring 4": {"context_parallel_size": 4, "data_parallel_size": 2},
    "fsdp 2 x ulysses 2": {
        "context_parallel_strategy": "ulysses", "context_parallel_size": 2,
        "fsdp_parallel_size": 2,
    },
    "usp 2 x 4, striped": {
        "context_parallel_strategy": "usp", "context_parallel_size": 8,
        "context_parallel_ulysses_size": 4, "context_parallel_load_balance": "striped",
    },
    "all_gather 8, contiguous": {
        "context_parallel_strategy": "all_gather", "context_parallel_size": 8,
        "context_parallel_load_balance": "contiguous",
    },
    "data 8": {"context_parallel_size": 1, "data_parallel_size": 4, "fsdp_parallel_size": 1},
    "auto": {"context_parallel_strategy": "auto", "context_parallel_size": 8},
    "ring of rings": {"context_parallel_size": 8, "context_parallel_outer_size": 2},
    "usp 2 x 2, balanced": {
        "context_parallel_strategy": "usp", "context_parallel_ulysses_size": 2,
        "context_parallel_load_balance": "balanced", "data_parallel_size": 2,
    },
    "all_gather 4 in 2 groups of heads": {
        "context_parallel_strategy": "all_gather", "context_parallel_head_groups": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_loss_and_gradients_are_those_of_one_device(whole, name):
    """Nothing is scaled by a degree: gradients are compared, not what Adam makes of them."""
    assert_same(loss_and_gradients(varied(parallel=SPLITS[name])), whole)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_is_the_large_batch(whole, parts):
    """Sum over count of the whole batch, though the parts hold different numbers of labels."""
    config = varied(
        gradient_accumulation_steps=parts, parallel={"context_parallel_load_balance": "balanced"}
    )
    counts = (batch_of(config).labels != IGNORE_LABEL).reshape(parts, -1).sum(1)
    assert len(set(counts.tolist())) > 1
    assert_same(loss_and_gradients(config), whole)


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("remat_policy", ["none", "full", "save_attention"])
def test_recomputation_and_scan_change_nothing(whole, scan_layers, remat_policy):
    model = {"scan_layers": scan_layers, "remat_policy": remat_policy}
    strategy = {"context_parallel_strategy": "ring" if scan_layers else "all_gather"}
    assert_same(loss_and_gradients(varied(model=model, parallel=strategy)), whole)


WINDOWED = {"sliding_window": 9, "sliding_window_pattern": 3, "num_layers": 5}
"""Two windowed layers to one that sees everything, and two windowed layers over."""


@pytest.fixture(scope="module")
def whole_windowed():
    return loss_and_gradients(unsplit(varied(model=WINDOWED)))


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({}, {"remat_policy": "save_attention"}),
        ({"context_parallel_load_balance": "balanced"}, {}),
        (SPLITS["usp 2 x 4, striped"], {"scan_layers": False}),
        (SPLITS["all_gather 8, contiguous"], {"remat_policy": "full", "scan_layers": False}),
    ],
)
def test_windowed_layers_among_others(whole_windowed, parallel, model):
    """On one layout, by halos where it has runs of neighbours, else by the other strategy."""
    assert_same(
        loss_and_gradients(varied(parallel=parallel, model=WINDOWED | model)), whole_windowed
    )


def test_unequal_work_is_said():
    """Four contiguous shards of one causal document work 1 : 3 : 5 : 7."""
    contiguous = {"context_parallel_load_balance": "contiguous"}
    assert (
        "has 1.74 times the mean work; try balanced"
        in build_setup(varied(parallel=contiguous)).split
    )
    assert build_setup(CONFIG).split == "ring 4, zigzag"
    window = {"sliding_window": 4}
    assert "times" not in build_setup(varied(parallel=contiguous, model=window)).split


def test_windowed_layers_receive_only_edges():
    """On the zigzag layout that balances the others; nothing is permuted in between."""
    setup = build_setup(varied(model=WINDOWED))
    assert setup.kinds[None].context.strategy == "ring"
    assert setup.kinds[9].context.strategy == "halo"
    assert (setup.kinds[9].layers, setup.kinds[None].layers) == (4, 1)
    assert setup.kinds[9].context.layout == setup.kinds[None].context.layout == "zigzag"


def test_twenty_packings_compile_once():
    """A balanced layout and the hops of each batch are data."""
    config = varied(parallel={"context_parallel_load_balance": "balanced"}, model={"num_layers": 1})
    setup = build_setup(config)
    state = setup.init_state()
    draw = np.random.default_rng(0)
    orders = set()
    for _ in range(20):
        cuts = np.sort(draw.choice(np.arange(1, SEQ_LEN), draw.integers(1, 7), replace=False))
        documents = np.diff([0, *cuts, SEQ_LEN]).tolist()
        placed = setup.place(model_batch(96, config.batch_size, SEQ_LEN, documents))
        orders.add(np.asarray(placed.placement.token_index).tobytes())
        state, _ = setup.step(state, placed)
    assert len(orders) == 20
    assert setup._step._cache_size() == 1


def test_pads_change_nothing():
    """A row that the layout cannot cut is padded, and loss and count are as on one device."""
    config = varied(data=DataConfig(seq_len=59))
    batch = batch_of(config, 59)
    assert build_setup(config).seq_len == 64
    assert_same(loss_and_gradients(config, batch), loss_and_gradients(unsplit(config), batch))


@pytest.mark.smoke
def test_twenty_steps_agree_with_one_device():
    """Losses, gradient norms (with clipping at work) and final parameters."""
    split = varied(
        parallel={
            "context_parallel_strategy": "usp",
            "context_parallel_size": 4,
            "context_parallel_ulysses_size": 2,
            "data_parallel_size": 2,
        }
    )
    runs = []
    for config in (split, unsplit(CONFIG)):
        setup = build_setup(config)
        state, batch = setup.init_state(), setup.place(batch_of(config))
        history = []
        for _ in range(20):
            state, metrics = setup.step(state, batch)
            history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        runs.append((np.array(history), jax.tree.map(np.asarray, state.params)))
    (found, found_params), (expected, expected_params) = runs
    assert (expected[:, 1] > CONFIG.optimizer.clip_norm).any()
    assert relative_error(found[:, 0], expected[:, 0]) < 1e-4
    assert relative_error(found[:, 1], expected[:, 1]) < 1e-4
    assert expected[-1, 0] < expected[0, 0] - 0.3
    assert_same(found_params, expected_params, 1e-3)


def test_parameters_and_moments_are_split_over_data_and_context():
    """Bytes per device of every matrix and its moments are the whole over the devices."""
    setup = build_setup(varied(parallel={"fsdp_parallel_size": 2, "context_parallel_size": 4}))
    state = setup.init_state()
    matrices = 0
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.size > CONFIG.model.model_dim * CONFIG.model.num_layers:
            matrices += 1
            assert leaf.addressable_shards[0].data.nbytes * 8 == leaf.nbytes
    assert matrices == 3 * 9


EVERYTHING = varied(
    model={"tie_embeddings": True, "remat_policy": "none"},
    parallel={"context_parallel_strategy": "all_gather"},
    optimizer=OptimizerConfig(
        "muon", warmup_steps=2, clip_norm=0.5, learning_rate=1e-3, z_loss=1e-2, ema_decay=0.9
    ),
)
"""Muon, clipping at work, a large z-loss, a running mean, and one table for both ends."""


@pytest.fixture(scope="module")
def whole_step():
    """Set-up, first state, that after a step, the step's outcome, and an evaluation before it."""
    setup = build_setup(unsplit(EVERYTHING))
    initial = jax.tree.map(np.array, setup.init_state())
    jax.tree.map(np.testing.assert_array_equal, setup.init_state(), initial)
    assert setup._first_state._cache_size() == 1
    return setup, initial, *step_of(setup, initial)


def step_of(setup, initial):
    state = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), initial, setup.abstract_state()
    )
    batch = setup.place(batch_of(setup.config))
    found = setup.evaluate(state, batch)
    state, outcome = setup.step(state, batch)
    assert setup._evaluate._cache_size() == setup._step._cache_size() == 1
    return state, *({name: float(x) for name, x in d.items()} for d in (outcome, found))


@pytest.mark.parametrize(
    ("parallel", "parts"),
    [
        ({"data_parallel_size": 2, "context_parallel_size": 4}, 1),
        ({"fsdp_parallel_size": 2, "context_parallel_size": 4}, 2),
    ],
)
def test_a_whole_step_is_that_of_one_device(whole_step, parallel, parts):
    """Norm before clipping, clipped gradients (in the moments), each loss, updates, mean."""
    config = dataclasses.replace(
        EVERYTHING,
        parallel=dataclasses.replace(EVERYTHING.parallel, **parallel),
        gradient_accumulation_steps=parts,
    )
    _, initial, expected, expected_outcome, expected_evaluation = whole_step
    state, outcome, evaluation = step_of(build_setup(config), initial)
    assert expected_outcome["grad_norm"] > EVERYTHING.optimizer.clip_norm
    assert expected_outcome["z_loss"] > 0.1
    assert_same(outcome, expected_outcome)
    assert_same(evaluation, expected_evaluation)
    assert_same(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, expected))


def test_an_evaluation_is_the_loss_of_the_step_without_its_z_loss(whole_step):
    *_, outcome, found = whole_step
    assert found["valid_tokens"] == outcome["valid_tokens"]
    assert found["loss_sum"] / found["valid_tokens"] == pytest.approx(outcome["loss"], rel=1e-6)
    assert found["ema_loss_sum"] == found["loss_sum"]  # the mean begins at the parameters


def test_the_z_loss_is_the_mean_square_of_the_normaliser(whole_step):
    setup, initial, _, outcome, _ = whole_step
    batch = setup.place(batch_of(CONFIG))

    def attend(query, key, value, *, window):
        assert window is None
        ids = batch.segment_ids[0]
        return attention(query, key, value, mask=Causal(), segment_ids=ids, kernel="reference")

    params = jax.tree.map(jnp.asarray, initial.params)
    arrays = (batch.tokens[0], batch.positions[0], EVERYTHING.model, decoder.Runtime(attend))
    logits = decoder.forward(params, *arrays) @ decoder.output_head(params)
    normalizer = np.asarray(jax.nn.logsumexp(logits, -1), np.float64)
    labelled = np.asarray(batch.labels[0]) != IGNORE_LABEL
    assert outcome["z_loss"] == pytest.approx(1e-2 * (normalizer[labelled] ** 2).mean(), rel=1e-6)


def test_a_step_that_is_not_finite_changes_only_the_count(whole_step):
    """In the program that trains: every array that is neither is as before, bit for bit."""
    setup, _, state, *_ = whole_step
    broken = state.params.embedding.at[3, 0].set(jnp.inf)
    state = dataclasses.replace(state, params=dataclasses.replace(state.params, embedding=broken))
    before = jax.tree.map(np.array, state)
    after, outcome = setup.step(jax.tree.map(jnp.copy, state), setup.place(batch_of(CONFIG)))
    assert int(outcome["finite"]) == 0
    assert int(after.step) == int(before.step) + 1
    after = dataclasses.replace(after, step=before.step)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def compiled_step(config):
    setup = build_setup(config)
    placed = setup.place(batch_of(config))
    return jax.jit(setup.gradients).lower(setup.abstract_state().params, placed).compile()


def test_no_activation_of_the_whole_row_is_gathered():
    """Rows were permuted on the host; in the step only parameters and metadata are gathered."""
    config = varied(model={"model_dim": 24, "ffn_dim": 40}, batch_size=1)
    text = compiled_step(config).as_text()
    gathered = [i for i in instructions(text) if i.op in ("all-gather", "all-to-all")]
    assert gathered
    for found in gathered:
        for dtype, dims in found.shapes:
            assert SEQ_LEN not in dims or dtype == "s32", (found.op, dims)
    # The gradient of a parameter is reduced straight into its shard.
    kinds = {i.op for i in instructions(text)}
    assert "reduce-scatter" in kinds
    for found in instructions(text):
        if found.op == "all-reduce":
            assert found.result_bytes <= 4 * 2 * 24, found


def test_logits_of_all_tokens_never_exist():
    config = varied(model={"vocab_size": 32_000}, data=DataConfig(seq_len=8192), batch_size=1)
    setup = build_setup(config)
    batch = setup.place(batch_of(config, 8192))
    text = jax.jit(setup.gradients).lower(setup.abstract_state().params, batch).compile().as_text()
    local_logits = 8192 // 4 * 32_000
    assert all(np.prod(d) < local_logits for i in instructions(text) for _, d in i.shapes)
    assert any(32_000 in d for i in instructions(text) for _, d in i.shapes)


@pytest.mark.parametrize(
    ("remat_policy", "kernel_forwards"), [("none", 1), ("full", 2), ("save_attention", 1)]
)
def test_attention_runs_forward_as_often_as_the_policy_says(
    monkeypatch, remat_policy, kernel_forwards
):
    class Counting(ReferenceKernel):
        name = "counting"

        def forward(self, *arguments):
            out, lse = super().forward(*arguments)
            return jax.lax.tan(out), lse  # an operation that nothing else in the program uses

    monkeypatch.setitem(KERNELS, "counting", Counting())
    model = {"remat_policy": remat_policy}
    setup = build_setup(varied(model=model, parallel=SPLITS["one device"], kernel="counting"))
    placed = setup.place(batch_of(CONFIG))
    lowered = jax.jit(setup.gradients).lower(setup.abstract_state().params, placed)
    assert len(re.findall(r"\.tan\b", lowered.as_text())) == kernel_forwards


def test_flops_count_every_visible_pair_once_for_any_mesh():
    model = CONFIG.model
    ids = np.repeat(np.array([1, 2, 0], np.int32), [30, 20, 14])[None]
    zeros = np.zeros_like(ids)
    batch = Batch(zeros, zeros, ids, zeros)
    pairs = 30 * 31 // 2 + 20 * 21 // 2
    expected = 6 * model.matmul_parameters * 50 + 12 * pairs * 4 * 8 * 2
    for parallel in (SPLITS["ring 4"], SPLITS["data 2 x ring 4"]):
        assert build_setup(varied(parallel=parallel)).flops_per_step(batch) == expected
    windowed = build_setup(varied(model={"sliding_window": 5, "sliding_window_pattern": 2}))
    in_window = (30 * 5 - 10) + (20 * 5 - 10)
    attending = 12 * (in_window + pairs) * 4 * 8
    assert windowed.flops_per_step(batch) == 6 * model.matmul_parameters * 50 + attending


def test_rings_that_the_cpu_runtime_could_mix_up_are_refused():
    unscanned = {"scan_layers": False, "remat_policy": "full"}
    with pytest.raises(ValueError, match=r"a ring needs scanned layers.*use --scan-layers"):
        build_setup(varied(model=unscanned))
    build_setup(varied(model=unscanned, parallel=SPLITS["one device"]))
    build_setup(varied(model={"scan_layers": False}))
    leftover = {"sliding_window": 9, "sliding_window_pattern": 2, "num_layers": 3}
    balanced = {"context_parallel_load_balance": "balanced"}
    with pytest.raises(ValueError, match="num_layers=3 in rounds of 2"):
        build_setup(varied(model=leftover | {"remat_policy": "full"}, parallel=balanced))
    build_setup(varied(model=leftover | {"remat_policy": "full"}))  # halos are no loops


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"4 / 4 = 1 rows over 2 groups; use --batch-size 8"):
        build_setup(varied(parallel={"data_parallel_size": 2}, gradient_accumulation_steps=4))
    with pytest.raises(ValueError, match="belongs to strategy usp alone"):
        build_setup(varied(parallel={"context_parallel_ulysses_size": 2}))
    with pytest.raises(ValueError, match="degree of 1, 2, 4, or strategy ring"):
        build_setup(
            varied(parallel={"context_parallel_strategy": "ulysses", "context_parallel_size": 8})
        )
    with pytest.raises(ValueError, match=r"must divide the ring.*with a ring of 4; use 1"):
        build_setup(varied(parallel={"context_parallel_outer_size": 3}))
    with pytest.raises(ValueError, match=r"head_groups.*use head_groups=1"):
        build_setup(varied(parallel={"context_parallel_head_groups": 2}))
    with pytest.raises(ValueError, match="need 16 devices, but there are 8"):
        build_setup(varied(parallel={"context_parallel_size": 16}))


def test_labels_to_ignore_leave_the_loss_finite():
    batch = batch_of(CONFIG)
    labels = np.full_like(batch.labels, IGNORE_LABEL)
    labels[0, 3] = 5
    loss, count, gradients = loss_and_gradients(CONFIG, dataclasses.replace(batch, labels=labels))
    assert count == 1
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
