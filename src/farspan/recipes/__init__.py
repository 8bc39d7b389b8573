"""Recipes: functions that return a `TrainConfig`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farspan.errors import unknown_choice
from farspan.recipes.llama import llama3_8b_long
from farspan.recipes.quickstart import quickstart
from farspan.train.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """A named starting point for `farspan train`.

    Attributes:
      description: One sentence for the list of recipes.
      build: Returns the configuration; flags then override its fields.
    """

    description: str
    build: Callable[[], TrainConfig]


RECIPES = {
    "quickstart": Recipe(
        "Train a small decoder on the Python standard library, 8,192 tokens a row split over 8 "
        "devices; minutes on a laptop CPU.",
        quickstart,
    ),
    "llama3_8b_long": Recipe(
        "Train the 8B Llama 3 architecture on rows of 131,072 tokens, on a pod slice.",
        llama3_8b_long,
    ),
}


def get_recipe(name: str) -> Recipe:
    """Finds a recipe by name; `-` and `_` are the same.

    Raises:
      ValueError: There is none of that name; the message lists them and names the nearest.
    """
    recipe = RECIPES.get(name.replace("-", "_"))
    if recipe is None:
        raise unknown_choice("recipe", name, RECIPES)
    return recipe
