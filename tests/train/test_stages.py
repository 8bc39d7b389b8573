"""The parts of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farspan.recipes import get_recipe
from farspan.train.config import Stage
from farspan.train.stages import most_devices, split_into_parts


def test_each_stage_changes_what_it_names_and_keeps_the_rest(change: Callable[..., Any]) -> None:
    base = change(get_recipe("quickstart").build(), steps=30, seed=2**32 - 2)
    stages = (
        Stage(10, seq_len=16384, rope_theta=1e6, context_parallel_size=4),
        Stage(20, data="other.txt", batch_size=2),
    )
    first, second, third = split_into_parts(change(base, stages=stages))
    assert [(p.start, p.stop) for p in (first, second, third)] == [(0, 10), (10, 20), (20, 30)]
    assert first.config == base
    assert second.config == change(
        base, seq_len=16384, rope_theta=1e6, context_parallel_size=4, seed=2**32 - 1
    )
    assert third.config == change(second.config, data="other.txt", batch_size=2, seed=0)
    assert most_devices(change(base, stages=stages)) == 8


def test_a_run_may_end_before_its_last_stage(change: Callable[..., Any]) -> None:
    config = change(
        get_recipe("quickstart").build(), steps=10, stages=(Stage(10, context_parallel_size=64),)
    )
    (part,) = split_into_parts(config)
    assert (part.start, part.stop) == (0, 10)
    assert most_devices(config) == 8


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(0, seq_len=64),), "one after another.*from_step=0"),
        ((Stage(20, seq_len=64), Stage(10, seq_len=32)), "from_step=20, 10; put them in order"),
        ((Stage(5),), "must change something, got from_step=5"),
        ((Stage(5, seq_len=1),), "seq_len must be at least 2"),
        ((Stage(5, batch_size=3, gradient_accumulation_steps=2),), "must divide batch_size"),
    ],
)
def test_stages_that_do_not_fit_are_refused(
    stages: tuple[Stage, ...], message: str, change: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        split_into_parts(change(get_recipe("quickstart").build(), stages=stages))
