"""The step that is compiled ahead of time is the step that a run takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from farspan.data import Batch
from farspan.plan.aot import compile_program, compiler_available
from farspan.recipes import get_recipe
from farspan.train.config import TrainConfig, from_dict, to_dict
from farspan.train.program import lower_train_step
from farspan.train.step import build_setup


def small(layers: int = 1, **parallel: Any) -> TrainConfig:
    config = get_recipe("quickstart").build()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=layers, model_dim=128, ffn_dim=128),
        data=dataclasses.replace(config.data, seq_len=256),
        parallel=dataclasses.replace(config.parallel, **parallel),
    )


def test_a_configuration_survives_json() -> None:
    config = small(context_parallel_strategy="ring")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_is_lowered_without_a_state_or_a_batch(layout: str, accumulation: int) -> None:
    config = dataclasses.replace(
        small(context_parallel_load_balance=layout),
        batch_size=accumulation,
        gradient_accumulation_steps=accumulation,
    )
    setup = build_setup(config)
    rows = np.ones((accumulation, 256), np.int32)
    batch = setup.place(Batch(tokens=rows, labels=rows, segment_ids=rows, positions=rows))
    wanted = setup._step.lower(setup.init_state(), batch)
    assert setup.lower_step().as_text() == wanted.as_text()
    program = lower_train_step(jax.devices(), config=to_dict(config))
    assert program.in_tree == wanted.in_tree
    assert program.out_info == wanted.out_info


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="cp_ring=2, cp_ulysses=4 = 8 with 4"):
        lower_train_step(jax.devices()[:4], config=to_dict(small()))


@pytest.mark.skipif(not compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'")
def test_the_quick_start_fits_eight_chips(tmp_path: Path) -> None:
    report = compile_program(
        "farspan.train.program:lower_train_step",
        {"config": to_dict(small())},
        "v5p:2x2x2",
        cache_dir=tmp_path,
    )
    assert report.fits
    assert report.memory is not None
    # The new state takes the place of the old; beside it come the batch and four metrics.
    state = build_setup(small()).abstract_state()
    held = sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    assert report.memory.alias_bytes >= held
    kinds = {row.kind: row for row in report.collectives}
    assert kinds["collective-permute"].transfers > 0, "the ring"
    assert kinds["all-to-all"].transfers > 0, "the heads"
    assert all(row.sent_bytes > 0 for row in report.collectives)
