"""`farspan train RECIPE [--flag value ...]`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import TYPE_CHECKING

from farspan.cli.flags import parse_flags
from farspan.recipes import RECIPES, get_recipe
from farspan.train.config import TrainConfig, device_count, fresh_run_dir, validate

if TYPE_CHECKING:
    from farspan.train.loop import RunResult

_SIGNAL_STATUS = 128


def main(arguments: list[str]) -> int:
    """Trains from a recipe.

    Args:
      arguments: The recipe's name, then flags.

    Returns:
      0 when every step was done; 128 plus the signal's number when a signal ended the run early.

    Raises:
      ValueError: The arguments, the configuration or the data do not fit.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            f"train needs the name of a recipe first, one of {', '.join(RECIPES)}, got "
            f"{shlex.join(arguments[:1]) or 'nothing'}; use for example `farspan train quickstart`"
        )
    name, *flags = arguments
    recipe = get_recipe(name)
    name = name.replace("-", "_")
    config = parse_flags(
        recipe.build(), flags, prog=f"farspan train {name}", description=recipe.description
    )
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=fresh_run_dir(name))
    validate(config)
    result = _train(config)
    sys.stdout.write(_summary(result, config, ["farspan", "train", name, *flags]) + "\n")
    return 0 if result.stopped_by is None else _SIGNAL_STATUS + result.stopped_by


def _train(config: TrainConfig) -> RunResult:
    from farspan.train.progress import Reporter

    with Reporter(config.log_every).phase("starting JAX"):
        from farspan.dist.devices import ensure_devices

        ensure_devices(device_count(config))
        from farspan.train.loop import run
    return run(config)


def _summary(result: RunResult, config: TrainConfig, command: list[str]) -> str:
    finished = result.stopped_by is None
    lines = [f"{'done' if finished else 'stopped'}: step {result.steps} of {config.steps}"]
    if result.final_loss is not None:
        mean = f"mean of the last {result.final_loss_steps} steps"
        lines.append(
            f"loss        {result.final_loss:.4f} nats a token ({mean}); without context no model "
            f"gets below {result.unigram_loss:.4f}"
        )
    lines.append(f"checkpoint  {result.checkpoint or 'none'}")
    lines.append(f"metrics     {result.metrics}")
    steps = config.steps * 2 if finished else config.steps
    again = _with_flags(command, {"--run-dir": str(result.run_dir), "--steps": str(steps)})
    lines.append(f"go on with  {shlex.join(again)}")
    return "\n".join(lines)


def _with_flags(command: list[str], values: dict[str, str]) -> list[str]:
    """The command with these flags set, in place of those it has."""
    kept: list[str] = []
    skip = False
    for argument in command:
        name = argument.partition("=")[0].replace("_", "-")
        if not skip and name not in values:
            kept.append(argument)
        skip = name in values and "=" not in argument
    return kept + [part for name, value in values.items() for part in (name, value)]


def _help() -> str:
    width = max(map(len, RECIPES))
    recipes = "\n".join(f"  {name:<{width}}  {r.description}" for name, r in RECIPES.items())
    return (
        "usage: farspan train RECIPE [--flag value ...]\n\n"
        "Train a language model. A recipe is a complete configuration; flags override its fields.\n"
        f"\nrecipes:\n{recipes}\n\n"
        "`farspan train RECIPE --help` lists the flags with the recipe's values.\n"
    )
