"""`farspan train RECIPE [--flag value ...]`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.flags import parse_flags
from farspan.cli.recipe_arguments import recipes_help, split_name
from farspan.recipes import get_recipe
from farspan.train.config import TrainConfig, fresh_run_dir, validate
from farspan.train.stages import most_devices

if TYPE_CHECKING:
    from farspan.train.loop import RunResult

_SIGNAL_STATUS = 128


def main(arguments: list[str]) -> int:
    """Trains from a recipe.

    Args:
      arguments: The recipe's name, or the path of a run's config.json; then flags.

    Returns:
      0 when every step was done; 128 plus the signal's number when a signal ended the run early.

    Raises:
      ValueError: The arguments, the configuration or the data do not fit.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(recipes_help("train", "[--flag value ...]", "Train a language model."))
        return 0
    name, flags = split_name("train", arguments)
    recipe = get_recipe(name)
    config = parse_flags(
        recipe.build(),
        flags,
        prog=f"farspan train {recipe.name}",
        description=recipe.description,
    )
    validate(config)
    most_devices(config)  # the stages are in order and in range
    result, speaks = _train(config, Path(recipe.name).stem)
    if speaks:
        sys.stdout.write(_summary(result, config, ["farspan", "train", recipe.name, *flags]) + "\n")
    return 0 if result.stopped_by is None else _SIGNAL_STATUS + result.stopped_by


def _train(config: TrainConfig, name: str) -> tuple[RunResult, bool]:
    """Runs it; also says whether this process speaks for all."""
    from farspan.dist.processes import join_processes, share
    from farspan.train.progress import Reporter

    group = join_processes()
    with Reporter(config.log_every, quiet=not group.primary).phase("starting JAX"):
        from farspan.dist.devices import ensure_devices
        from farspan.train.loop import run

        ensure_devices(most_devices(config))
        if not config.run_dir:
            config = dataclasses.replace(config, run_dir=share(fresh_run_dir(name)))
    return run(config), group.primary


def _summary(result: RunResult, config: TrainConfig, command: list[str]) -> str:
    from farspan.train.metrics import read_metrics
    from farspan.train.progress import loss_curve

    finished = result.stopped_by is None
    lines = [f"{'done' if finished else 'stopped'}: step {result.steps} of {config.steps}"]
    if result.final_loss is not None:
        mean = f"mean of the last {result.final_loss_steps} steps"
        lines.append(f"loss        {result.final_loss:.4f} nats a token ({mean}){_beside(result)}")
    curve = loss_curve(record["loss"] for record in read_metrics(result.metrics))
    if curve:
        lines.append(f"all steps   {curve}")
    if result.evaluation is not None:
        lines.append(f"evaluation  {result.evaluation.eval_loss:.4f} nats a token, held out")
    if result.skipped:
        lines.append(f"skipped     {result.skipped} steps that were not finite")
    lines.append(f"checkpoint  {result.checkpoint or 'none'}")
    lines.append(f"metrics     {result.metrics}")
    steps = config.steps * 2 if finished else config.steps
    again = _with_flags(command, {"--run-dir": str(result.run_dir), "--steps": str(steps)})
    lines.append(f"go on with  {shlex.join(again)}")
    return "\n".join(lines)


def _beside(result: RunResult) -> str:
    if result.unigram_loss is None:
        return ""
    return f"; without context no model gets below {result.unigram_loss:.4f}"


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
