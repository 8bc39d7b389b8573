"""Recipes: functions that return a `TrainConfig`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farspan.errors import unknown_choice
from farspan.recipes.files import load_config
from farspan.recipes.llama import llama3_8b_extend, llama3_8b_long
from farspan.recipes.quickstart import quickstart
from farspan.train.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """A named starting point for `farspan train`.

    Attributes:
      name: What it is called; for a configuration file, its path.
      description: One sentence for the list of recipes.
      build: Returns the configuration; flags then override its fields.
    """

    name: str
    description: str
    build: Callable[[], TrainConfig]


RECIPES = {
    "quickstart": Recipe(
        "quickstart",
        "Train a small decoder on the Python standard library, 8,192 tokens a row split over 8 "
        "devices; minutes on a laptop CPU.",
        quickstart,
    ),
    "llama3_8b_long": Recipe(
        "llama3_8b_long",
        "Train the 8B Llama 3 architecture on rows of 131,072 tokens, on a pod slice.",
        llama3_8b_long,
    ),
    "llama3_8b_extend": Recipe(
        "llama3_8b_extend",
        "Train the 8B Llama 3 architecture on contexts that grow from 8K to 64K to 1M tokens, on a "
        "pod slice.",
        llama3_8b_extend,
    ),
}


def get_recipe(name: str) -> Recipe:
    """Finds a recipe.

    Args:
      name: Its name, in which `-` and `_` are the same; or the path of a .json file that holds a
        configuration, such as the config.json of a run folder.

    Returns:
      The recipe.

    Raises:
      ValueError: There is none of that name; the message lists them and names the nearest. Or the
        file holds no configuration.
      FileNotFoundError: There is no such file.
    """
    if name.endswith(".json"):
        config = load_config(Path(name))
        return Recipe(name, f"The run that {name} describes.", lambda: config)
    recipe = RECIPES.get(name.replace("-", "_"))
    if recipe is None:
        raise unknown_choice("recipe", name, RECIPES)
    return recipe
