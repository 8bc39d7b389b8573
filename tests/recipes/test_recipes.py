"""Recipes are complete configurations whose strategy can be changed by one flag."""

import dataclasses

import pytest

from farspan.recipes import RECIPES, get_recipe
from farspan.train.config import device_count, validate
from farspan.train.parallel import context_degrees


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid(name):
    config = RECIPES[name].build()
    validate(config)
    context_degrees(config.parallel, config.model)


def test_the_quick_start_rings_over_two_and_exchanges_heads_over_four():
    config = get_recipe("quickstart").build()
    assert (config.data.seq_len, device_count(config)) == (8192, 8)
    assert context_degrees(config.parallel, config.model) == (
        "usp",
        {"cp_ring_outer": 1, "cp_ring": 2, "cp_ulysses": 4},
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "usp", "auto"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_strategy_and_size_may_be_changed_alone(name, strategy, size):
    config = RECIPES[name].build()
    parallel = dataclasses.replace(
        config.parallel, context_parallel_strategy=strategy, context_parallel_size=size
    )
    _, sizes = context_degrees(parallel, config.model)
    assert sizes["cp_ring_outer"] * sizes["cp_ring"] * sizes["cp_ulysses"] == size
