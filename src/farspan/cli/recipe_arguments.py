"""What commands that begin with a recipe share: its name, its stages, their help."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from farspan.cli.flags import parse_flags
from farspan.recipes import RECIPES, get_recipe
from farspan.train.config import TrainConfig, validate
from farspan.train.stages import split_into_parts


@dataclass(frozen=True)
class StageOptions:
    """Options of a command that looks at one stage of a run.

    Attributes:
      config: The run.
      stage: Which of the run's stages is looked at; 0: the part before the first one.
    """

    config: TrainConfig
    stage: int = 0


Options = TypeVar("Options", bound=StageOptions)


def split_name(command: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Splits the arguments of a command into the recipe's name and flags.

    Raises:
      ValueError: No name comes first.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            f"{command} needs the name of a recipe first, one of {', '.join(RECIPES)}, got "
            f"{shlex.join(arguments[:1]) or 'nothing'}; use for example `farspan {command} "
            "quickstart`"
        )
    return arguments[0], list(arguments[1:])


def parse_stage(
    command: str,
    name: str,
    flags: Sequence[str],
    options: Callable[[TrainConfig], Options],
    about: str,
) -> tuple[str, Options]:
    """Reads the flags of a command that looks at one stage of a run.

    Args:
      command: Its name.
      name: As `get_recipe` takes it.
      flags: Flags as typed.
      options: Makes the command's options of a run.
      about: First sentence of the help.

    Returns:
      The recipe's own name, and the options, whose run is that stage alone.

    Raises:
      ValueError: There is no such recipe, flag or stage, or a field is out of range.
    """
    recipe = get_recipe(name)
    parsed = parse_flags(
        options(recipe.build()),
        flags,
        prog=f"farspan {command} {recipe.name}",
        description=f"{about} The recipe: {recipe.description}",
    )
    validate(parsed.config)
    parts = split_into_parts(parsed.config)
    if not 0 <= parsed.stage < len(parts):
        raise ValueError(
            f"stage must be from 0 to {len(parts) - 1}, the stages of the run, got "
            f"{parsed.stage}; use one of these"
        )
    return recipe.name, dataclasses.replace(parsed, config=parts[parsed.stage].config)


def recipes_help(command: str, usage: str, about: str) -> str:
    """The help of a command before a recipe is named.

    Args:
      command: Its name.
      usage: What may follow the recipe.
      about: What it does.
    """
    width = max(map(len, RECIPES))
    recipes = "\n".join(f"  {name:<{width}}  {r.description}" for name, r in RECIPES.items())
    return (
        f"usage: farspan {command} RECIPE|CONFIG.json {usage}\n\n{about}\n"
        f"\nrecipes:\n{recipes}\n\n"
        "A recipe is a complete configuration; flags override its fields. The config.json of a run "
        f"folder is one, too.\n`farspan {command} RECIPE --help` lists the flags with the recipe's "
        "values.\n"
    )
