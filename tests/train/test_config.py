"""Configuration: ranges, counts and choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from farspan import data
from farspan.layouts import get_layout
from farspan.recipes import RECIPES, get_recipe
from farspan.schedules import GENERAL_STRATEGIES
from farspan.train import config as config_module
from farspan.train.config import (
    ParallelConfig,
    flatten,
    fresh_run_dir,
    to_dict,
    validate,
)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_and_json(name: str) -> None:
    config = RECIPES[name].build()
    validate(config)
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)
    assert RECIPES[name].description.endswith(".")


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match='did you mean "quickstart"'):
        get_recipe("quickstrat")
    assert get_recipe("llama3-8b-long") is RECIPES["llama3_8b_long"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("seq_len", 1, "--seq-len 2"),
        ("steps", 0, "--steps 1"),
        ("batch_size", 0, "--batch-size 1"),
        ("context_parallel_size", 0, "--context-parallel-size 1"),
        ("context_parallel_ulysses_size", -1, "--context-parallel-ulysses-size 0"),
        ("data_parallel_size", 0, "--data-parallel-size 1"),
        ("fsdp_parallel_size", 0, "--fsdp-parallel-size 1"),
        ("gradient_accumulation_steps", 0, "--gradient-accumulation-steps 1"),
        ("keep_checkpoints", 0, "--keep-checkpoints 1"),
        ("checkpoint_every", -1, "--checkpoint-every 0"),
        ("log_every", 0, "--log-every 1"),
        ("warmup_steps", -1, "--warmup-steps 0"),
        ("weight_decay", -0.1, "--weight-decay 0"),
        ("clip_norm", -1.0, "--clip-norm 0"),
        ("learning_rate", 0.0, "--learning-rate"),
        ("learning_rate", float("nan"), "--learning-rate"),
        ("beta1", 1.0, "--beta1 0.9"),
        ("beta2", -0.5, "--beta2 0.9"),
        ("ema_decay", 1.0, "--ema-decay 0.999"),
        ("z_loss", -1.0, "--z-loss 0"),
        ("final_learning_rate_fraction", 1.5, "--final-learning-rate-fraction 0.1"),
        ("eval_rows", -1, "--eval-rows 0"),
        ("seed", -1, "--seed 0"),
        ("seed", 2**32, "--seed 0"),
        ("shuffle_window_rows", 0, "--shuffle-window-rows 1"),
    ],
)
def test_each_field_out_of_range_is_named_with_its_value_and_a_remedy(
    name: str, value: Any, remedy: str, change: Callable[..., Any]
) -> None:
    config = change(get_recipe("quickstart").build(), **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}.*{remedy}"):
        validate(config)


def test_a_run_folder_is_a_path_and_no_url(change: Callable[..., Any]) -> None:
    config = change(get_recipe("quickstart").build(), run_dir="gs://bucket/run")
    with pytest.raises(
        ValueError, match=r"--run-dir\) must be .*got the URL 'gs://bucket/run'; use"
    ):
        validate(config)


def test_accumulation_must_divide_the_batch_and_the_nearest_divisor_is_named(
    change: Callable[..., Any],
) -> None:
    config = change(get_recipe("quickstart").build(), batch_size=6, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="use --gradient-accumulation-steps 3"):
        validate(config)


def test_field_names_are_unique_across_sections() -> None:
    nested = to_dict(get_recipe("quickstart").build())
    leaves = sum(len(v) if isinstance(v, dict) else 1 for v in nested.values())
    assert len(flatten(nested)) == leaves


def test_choices_are_those_that_exist() -> None:
    assert get_args(config_module.Packing) == get_args(data.Packing)

    def choices(config: type[Any], name: str) -> set[str]:
        return set(get_args(get_type_hints(config)[name]))

    strategies = choices(ParallelConfig, "context_parallel_strategy")
    assert strategies == {"auto", *GENERAL_STRATEGIES}
    for layout in choices(ParallelConfig, "context_parallel_load_balance"):
        assert get_layout(layout).multiple(2) >= 2


def test_fresh_run_dirs_carry_the_recipe_name() -> None:
    assert fresh_run_dir("quickstart").startswith("runs/quickstart-")


def test_evaluations_need_held_out_rows(change: Callable[..., Any]) -> None:
    config = change(get_recipe("quickstart").build(), eval_every=5)
    with pytest.raises(ValueError, match=r"eval_every=5, eval_rows=0.*--eval-rows 8"):
        validate(config)
    validate(change(config, eval_rows=1))
    validate(change(config, eval_data="held-out.txt"))


@pytest.mark.parametrize("changes", [{"schedule": "wsd"}, {"decay_steps": 3}])
def test_decay_steps_and_wsd_need_each_other(
    changes: dict[str, Any], change: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="schedule wsd"):
        validate(change(get_recipe("quickstart").build(), **changes))
