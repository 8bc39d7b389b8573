"""Which changes a resumed run may make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farspan.recipes import get_recipe
from farspan.train.config import Stage, to_dict
from farspan.train.resume import check_resumable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 5),
        ("rope_theta", 5e5),
        ("eval_rows", 3),
        ("seq_len", 4096),
        ("packing", "none"),
        ("streaming", True),
        ("append_eos", True),
        ("text_field", "content"),
        ("seed", 1),
        ("batch_size", 2),
    ],
)
def test_resume_refuses_what_changes_the_loss(
    name: str, value: Any, change: Callable[..., Any]
) -> None:
    config = get_recipe("quickstart").build()
    saved = json.loads(json.dumps(to_dict(config)))
    with pytest.raises(ValueError, match=rf"resume: .*{name}: .* then, .* now.*--run-dir"):
        check_resumable(saved, change(config, **{name: value}), 10, Path("run"))


def test_resume_says_what_it_lets_change(change: Callable[..., Any]) -> None:
    config = get_recipe("quickstart").build()
    saved = to_dict(config)
    changed = change(
        config,
        context_parallel_strategy="ring",
        context_parallel_size=4,
        steps=500,
        learning_rate=1e-4,
        run_dir="elsewhere",
        log_every=1,
    )
    assert sorted(check_resumable(saved, changed, 10, Path("run"))) == [
        "context_parallel_size: 8 -> 4",
        "context_parallel_strategy: usp -> ring",
        f"learning_rate: {config.optimizer.learning_rate} -> 0.0001",
        f"steps: {config.steps} -> 500",
    ]


def test_what_the_loader_compares_by_content_may_lie_elsewhere(change: Callable[..., Any]) -> None:
    config = get_recipe("quickstart").build()
    moved = change(config, data="moved/corpus.jsonl", cache_dir="elsewhere")
    changes = check_resumable(to_dict(config), moved, 10, Path("run"))
    assert changes == ["data: stdlib -> moved/corpus.jsonl"]


def test_only_the_stage_that_wrote_the_checkpoint_must_be_the_same(
    change: Callable[..., Any],
) -> None:
    base = get_recipe("quickstart").build()
    config = change(base, stages=(Stage(10, seq_len=16384), Stage(20, seq_len=32768)), steps=30)
    saved = json.loads(json.dumps(to_dict(config)))
    longer = change(config, stages=(Stage(10, seq_len=16384), Stage(25, seq_len=65536)))
    assert check_resumable(saved, longer, 15, Path("run")) == []
    assert check_resumable(saved, longer, 10, Path("run")) == []
    with pytest.raises(ValueError, match=r"seq_len: 32768 then, 16384 now"):
        check_resumable(saved, longer, 21, Path("run"))
    with pytest.raises(ValueError, match=r"seq_len: 16384 then, 8192 now"):
        check_resumable(saved, change(config, stages=()), 15, Path("run"))


def test_a_checkpoint_with_fields_of_another_release_is_refused() -> None:
    config = get_recipe("quickstart").build()
    with pytest.raises(ValueError, match=r"resume: the configuration in run.*wings"):
        check_resumable(to_dict(config) | {"wings": 2}, config, 10, Path("run"))
