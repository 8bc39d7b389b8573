"""FLOPs by hand and by the trainer, bytes by the compiled step, and bounds of time."""

import dataclasses

import jax
import numpy as np
import pytest

from farspan.data import Batch
from farspan.models import DecoderConfig
from farspan.plan import cost, memory
from farspan.plan.hardware import get_slice
from farspan.plan.hlo import collectives
from farspan.recipes import get_recipe
from farspan.testing.model_parity import model_batch
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from farspan.train.fit import make_workload
from farspan.train.step import build_setup

SEQ_LEN = 64
CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=96, num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
        ffn_dim=64, tie_embeddings=False,
    ),
    data=DataConfig(seq_len=SEQ_LEN, packing="none"),
    parallel=ParallelConfig(context_parallel_strategy="ring", context_parallel_size=4),
    batch_size=4,
    kernel="reference",
)  # fmt: skip


def varied(*, model=None, parallel=None, **run):
    config = dataclasses.replace(CONFIG, **run)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **(model or {})),
        parallel=dataclasses.replace(config.parallel, **(parallel or {})),
    )


def by_hand(config, *, pairs, layer_forwards, down_forwards, attention_forwards):
    """FLOPs of all devices: (model, hardware)."""
    model, layers = config.model, config.model.num_layers
    tokens = config.batch_size * config.data.seq_len
    heads = model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    down = model.model_dim * model.ffn_dim
    others = model.model_dim * (2 * heads + 2 * kv_heads) + 2 * down
    head = model.model_dim * model.vocab_size
    products = config.batch_size * layers * pairs * 2 * heads
    model_flops = tokens * 6 * (layers * (others + down) + head) + 6 * products
    forwards = others * layer_forwards + down * down_forwards
    matrices = layers * (forwards + 2 * (others + down)) + 4 * head
    hardware = 2 * tokens * matrices + (2 * attention_forwards + 5) * products
    return model_flops, hardware


@pytest.mark.parametrize(
    ("policy", "counts"), [("none", (1, 1, 1)), ("full", (2, 1, 2)), ("save_attention", (2, 1, 1))]
)
def test_flops_by_hand(policy, counts):
    config = varied(model={"remat_policy": policy})
    found = cost.flops(make_workload(config))
    pairs = SEQ_LEN * (SEQ_LEN + 1) // 2
    names = ("layer_forwards", "down_forwards", "attention_forwards")
    model, hardware = by_hand(config, pairs=pairs, **dict(zip(names, counts, strict=True)))
    assert (found.model, found.hardware) == (model // 4, hardware // 4)


@pytest.mark.parametrize("document_tokens", [0, 10, 64])
@pytest.mark.parametrize("window", [{}, {"sliding_window": 9, "sliding_window_pattern": 2}])
def test_model_flops_are_those_that_the_trainer_reports(document_tokens, window):
    config = varied(model=window)
    work = make_workload(config, document_tokens)
    ids = np.tile(work.segment_ids(), (work.rows, 1))
    assert ids.max() == (7 if document_tokens == 10 else 1)
    batch = Batch(np.zeros_like(ids), np.zeros_like(ids), ids, np.zeros_like(ids))
    assert cost.flops(work).model * 4 == build_setup(config).flops_per_step(batch)


SPLITS = {
    "ring 4": ({}, {}),
    "ring 4, full": ({}, {"remat_policy": "full"}),
    "ring of rings, save_attention": (
        {"context_parallel_size": 8, "context_parallel_outer_size": 2},
        {"remat_policy": "save_attention"},
    ),
    "usp 2 x 2 x data 2": (
        {
            "context_parallel_strategy": "usp", "context_parallel_ulysses_size": 2,
            "data_parallel_size": 2,
        },
        {},
    ),
    "fsdp 2 x ulysses 2, full": (
        {
            "context_parallel_strategy": "ulysses", "context_parallel_size": 2,
            "fsdp_parallel_size": 2,
        },
        {"remat_policy": "full"},
    ),
    "all_gather 4 in groups": (
        {"context_parallel_strategy": "all_gather", "context_parallel_head_groups": 2}, {},
    ),
    "usp 2 x 4, full": (
        {
            "context_parallel_strategy": "usp", "context_parallel_ulysses_size": 4,
            "context_parallel_size": 8,
        },
        {"remat_policy": "full"},
    ),
    "halos": ({}, {"sliding_window": 9, "sliding_window_pattern": 2}),
}  # fmt: skip


OFTEN = ("ring of rings, save_attention", "usp 2 x 2 x data 2", "all_gather 4 in groups", "halos")


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS],
)
def test_bytes_are_those_of_the_compiled_step(name):
    parallel, model = SPLITS[name]
    config = varied(parallel=parallel, model=model)
    setup = build_setup(config)
    batch = setup.place(model_batch(96, config.batch_size, SEQ_LEN, (7, 30, 5, 16)))
    step = jax.jit(setup.gradients)
    found = collectives(step.lower(setup.abstract_state().params, batch).compile().as_text())
    work, expected = make_workload(config), {}
    for each in cost.traffic(work).all:
        count, size = expected.get(each.op, (0, 0))
        expected[each.op] = (count + each.count, size + each.operand_bytes)
    assert found.keys() == expected.keys()
    scalars = found.pop("all-reduce")[1] - expected.pop("all-reduce")[1]
    assert 0 <= scalars < 64  # the loss and the count of labels
    # The compiler may fetch the labels of tokens once for all layers.
    passes = 3 * config.model.num_layers
    for op, (count, size) in expected.items():
        labels = passes if op in ("all-gather", "collective-permute") else 0
        assert count - labels <= found[op][0] <= count
        each = 4 * work.part_tokens * setup.context.degrees.heads
        assert size - labels * each <= found[op][1] <= size


MUON = OptimizerConfig("muon")


def compiled_update(config):
    """The optimizer's part of a step alone."""
    setup = build_setup(config)
    state = setup.abstract_state()
    update = jax.jit(setup._optimizer.update)
    return update.lower(state.params, state.opt_state, state.params).compile()


@pytest.mark.parametrize("num_layers", [3, 16])
def test_bytes_of_updates_are_those_of_the_compiled_update(num_layers):
    """Whether layers or devices are more; four of the eight devices split the axis `model`."""
    model = {"num_layers": num_layers, "model_dim": 20}
    config = varied(model=model, parallel={"fsdp_parallel_size": 2}, optimizer=MUON)
    (expected,) = cost.traffic(make_workload(config)).updates
    found = collectives(compiled_update(config).as_text())
    assert found[expected.op] == (expected.count, expected.operand_bytes)
    assert expected.count == 2 * 7
    assert expected.group == 4
    assert not cost.traffic(make_workload(varied())).updates


def test_flops_of_updates_are_those_of_the_compiled_update():
    model = {"model_dim": 64, "ffn_dim": 96, "vocab_size": 8}
    config = varied(model=model, parallel={"context_parallel_size": 1}, optimizer=MUON)
    expected = cost.flops(make_workload(config))
    found = compiled_update(config).cost_analysis()["flops"]
    assert expected.updates <= found < 1.1 * expected.updates  # the rest is element by element
    adamw = cost.flops(make_workload(dataclasses.replace(config, optimizer=CONFIG.optimizer)))
    assert (adamw.updates, adamw.hardware) == (0, expected.hardware - expected.updates)
    assert adamw.model == expected.model


def test_parts_and_parameters_that_devices_do_not_divide():
    one, two = (
        cost.traffic(make_workload(varied(batch_size=4 * n, gradient_accumulation_steps=n)))
        for n in (1, 2)
    )
    assert two.sent_bytes == 2 * one.sent_bytes
    odd = varied(model={"model_dim": 30}, parallel=SPLITS["fsdp 2 x ulysses 2, full"][0])
    found = {(each.op, each.group) for each in cost.traffic(make_workload(odd)).gradients}
    assert found == {("reduce-scatter", 2), ("all-reduce", 2), ("all-reduce", 4)}
    alone = cost.traffic(make_workload(varied(parallel={"context_parallel_size": 1})))
    assert alone.sent_bytes == 0


def test_bounds_of_time():
    config = get_recipe("llama3_8b_long").build()
    work, where = make_workload(config), get_slice("v5p:4x4x4")
    computed, sent, held = cost.flops(work), cost.traffic(work), memory.account(work)
    bounds = cost.time_bounds(computed, sent, held, where)
    assert bounds.compute_seconds == computed.hardware / 459e12
    assert bounds.link_seconds == sent.sent_bytes / 600e9
    assert bounds.step_seconds == bounds.compute_seconds
    assert bounds.hbm_seconds > 4 * held.state_bytes / 2765e9 / 2
    assert cost.time_bounds(computed, sent, held, get_slice("v5p:1x1x1")).link_seconds == 0
