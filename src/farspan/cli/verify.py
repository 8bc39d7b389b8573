"""`farspan verify [RECIPE] [--flag value ...]`: is split training exact on these devices?"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from farspan.cli.flags import parse_flags
from farspan.models.config import DecoderConfig
from farspan.recipes import RECIPES, get_recipe
from farspan.train.config import Packing, ParallelConfig, TrainConfig, device_count, validate

if TYPE_CHECKING:
    from rich.console import Console

    from farspan.context import ContextParallel
    from farspan.testing.verification import Check

_DEFAULT_RECIPE = "quickstart"
_MAX_ACCUMULATION = 2
_OWN, _SAME = "--strategy", "--context-parallel-strategy"
_PLAIN_WIDTH = 120
_ULYSSES = "--context-parallel-ulysses-size"
_DESCRIPTION = (
    "Check on your own devices that split training is exact: attention and its gradients against a "
    "dense float64 oracle, the decoder and a few training steps against one device, a repeated run "
    f"bit for bit. The name of a recipe may come first: {', '.join(RECIPES)} (by default "
    f"{_DEFAULT_RECIPE})."
)


@dataclass(frozen=True)
class VerifyConfig:
    """What is verified.

    Attributes:
      model: The decoder.
      parallel: How many devices work together, and how.
      strategy: Short for --context-parallel-strategy, and "all" for every strategy that these heads
        and devices allow; "recipe" for what --context-parallel-strategy says.
      seq_len: Tokens in one row, rounded up to what the layout can cut. The dense oracle's memory
        grows with the square.
      packing: Check rows of several documents; without it, rows of one document and padding.
      kernel: Attention kernel: "auto" takes the fastest one that this platform and mask allow.
      gradient_accumulation_steps: Parts into which the rows of a step are cut; 2 are checked at
        most.
      layers: Decoder layers that are checked at most.
      vocab: Rows of the embedding that are checked at most.
      seed: Seed of parameters and tokens, which are random.
      json: Print one JSON object instead of tables.
    """

    model: DecoderConfig
    parallel: ParallelConfig
    strategy: Literal["recipe", "all_gather", "ulysses", "ring", "usp", "auto", "all"] = "recipe"
    seq_len: int = 512
    packing: Packing = "best_fit"
    kernel: str = "auto"
    gradient_accumulation_steps: int = 1
    layers: int = 2
    vocab: int = 4096
    seed: int = 0
    json: bool = False


class _Plan(NamedTuple):
    """Runs to verify, which differ in strategy alone, and the strategies that are refused, why."""

    configs: list[TrainConfig]
    contexts: list[ContextParallel]
    refused: dict[str, str]


def main(arguments: list[str]) -> int:
    """Verifies a recipe on the devices at hand.

    Args:
      arguments: The recipe's name, if any, then flags.

    Returns:
      0 if every check passed, else 1.

    Raises:
      ValueError: The arguments or the configuration do not fit, or the devices are too few.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    flags = arguments[1:] if named else arguments
    found = get_recipe(arguments[0] if named else _DEFAULT_RECIPE)
    recipe = found.build()
    typed = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if {_OWN, _SAME} <= typed:
        raise ValueError(f"{_OWN} is short for {_SAME}, got both; use one of them")
    options = parse_flags(
        VerifyConfig(
            model=recipe.model,
            parallel=recipe.parallel,
            packing=recipe.data.packing,
            kernel=recipe.kernel,
            gradient_accumulation_steps=recipe.gradient_accumulation_steps,
            seed=recipe.seed,
        ),
        flags,
        prog=f"farspan verify {found.name}" if named else "farspan verify",
        description=_DESCRIPTION,
    )
    config = _reduced(recipe, options)
    validate(config)
    progress = sys.stderr if options.json else sys.stdout
    progress.write("starting JAX ...\n")
    progress.flush()
    plan = _plan(config, options.strategy, ulysses_typed=_ULYSSES in typed)
    return _run(plan, _scope(found.name, recipe, options, plan.configs[0]), as_json=options.json)


def _reduced(recipe: TrainConfig, options: VerifyConfig) -> TrainConfig:
    """The run to verify: the recipe's, but smaller, and without warm-up, so that weights move."""
    for field, least in (("layers", 1), ("vocab", 2)):
        if getattr(options, field) < least:
            raise ValueError(
                f"{field} must be at least {least}, got {getattr(options, field)}; use "
                f"--{field} {least} or more"
            )
    model = dataclasses.replace(
        options.model,
        num_layers=min(options.layers, options.model.num_layers),
        vocab_size=min(options.vocab, options.model.vocab_size),
    )
    parts = min(options.gradient_accumulation_steps, _MAX_ACCUMULATION)
    return dataclasses.replace(
        recipe,
        model=model,
        parallel=options.parallel,
        data=dataclasses.replace(recipe.data, seq_len=options.seq_len, packing=options.packing),
        optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=1),
        kernel=options.kernel,
        gradient_accumulation_steps=parts,
        batch_size=max(1, parts),  # `rows_for` decides, once the devices are known
        seed=options.seed,
    )


def _plan(config: TrainConfig, wanted: str, *, ulysses_typed: bool) -> _Plan:
    from farspan.dist import ensure_devices
    from farspan.kernels import get_kernel
    from farspan.schedules import GENERAL_STRATEGIES
    from farspan.testing.verification import check_oracle_fits, fit_seq_len, rows_for
    from farspan.train.parallel import make_context

    ensure_devices(device_count(config))
    get_kernel(config.kernel)  # `auto` asks for the devices, so it must not come before them
    kept = config.parallel.context_parallel_strategy
    names = GENERAL_STRATEGIES if wanted == "all" else (kept if wanted == "recipe" else wanted,)
    plan = _Plan([], [], {})
    for name in names:
        parallel = dataclasses.replace(config.parallel, context_parallel_strategy=name)
        ulysses = parallel.context_parallel_ulysses_size
        if name == "usp":
            unfit = ulysses and parallel.context_parallel_size % ulysses and not ulysses_typed
        else:
            unfit = not ulysses_typed or wanted == "all"
        if unfit:  # the size belongs to another split
            parallel = dataclasses.replace(parallel, context_parallel_ulysses_size=0)
        try:
            context = make_context(parallel, config.model)
        except ValueError as error:
            if wanted != "all":
                raise
            plan.refused[name] = str(error)
            continue
        plan.contexts.append(context)
        plan.configs.append(dataclasses.replace(config, parallel=parallel))
    seq_len = fit_seq_len(config.data.seq_len, plan.contexts)
    for index, run in enumerate(plan.configs):
        data = dataclasses.replace(run.data, seq_len=seq_len)
        plan.configs[index] = dataclasses.replace(run, data=data, batch_size=rows_for(run))
    check_oracle_fits(plan.configs[0])
    return plan


def _scope(name: str, recipe: TrainConfig, options: VerifyConfig, config: TrainConfig) -> str:
    """What is checked of what was asked for, in one line."""
    model, data = config.model, config.data
    rows = "packed rows" if data.packs else "rows"
    parts, asked = config.gradient_accumulation_steps, options.gradient_accumulation_steps
    return (
        f"verify {name}: {model.num_layers} of {options.model.num_layers} layers, "
        f"{model.vocab_size} of {options.model.vocab_size} vocabulary rows "
        f"({model.num_parameters:,} parameters), {config.batch_size} "
        f"{rows} of {data.seq_len} tokens in {parts} of {asked} parts, {model.dtype}, kernel "
        f"{config.kernel}, learning rate {recipe.optimizer.learning_rate} without warm-up"
    )


def _run(plan: _Plan, scope: str, *, as_json: bool) -> int:
    from rich.console import Console

    from farspan.testing.verification import verify
    from farspan.train.progress import Reporter

    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    reporter = Reporter(1, console)
    reporter.note(scope)
    for strategy, reason in plan.refused.items():
        reporter.note(f"refused {strategy}: {reason}")
    rows: list[dict[str, Any]] = []
    for context, checks in zip(plan.contexts, verify(plan.configs, reporter.phase), strict=True):
        rows += [_row(context, check) for check in checks]
        if not as_json:
            _print_table(console, f"strategy {context.split}", rows[-len(checks) :])
    failed = [row for row in rows if not row["ok"]]
    mesh = plan.contexts[0].mesh
    summary = {
        "devices": mesh.size,
        "platform": mesh.devices.flat[0].platform,
        "layout": plan.contexts[0].layout,
        "passed": len(rows) - len(failed),
        "total": len(rows),
        "refused": plan.refused,
    }
    if as_json:
        sys.stdout.write(json.dumps({**summary, "rows": rows}) + "\n")
        return int(bool(failed))
    for row in failed:
        reporter.note("failed {strategy}: {check}: {quantity}".format(**row))
    reporter.note(
        "verify: {passed} of {total} checks passed on {devices} {platform} devices".format(
            **summary
        )
        + f" ({_splits(plan.contexts)}, {summary['layout']})"
    )
    return int(bool(failed))


def _row(context: ContextParallel, check: Check) -> dict[str, Any]:
    error, tolerance = (x if math.isfinite(x) else None for x in check.parity[1:])
    return {
        "check": check.check,
        "strategy": context.strategy,
        "quantity": check.parity.quantity,
        "error": error,
        "tolerance": tolerance,
        "ok": check.parity.ok,
    }


def _print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in ("check", "quantity", "error", "tolerance", "ok"):
        table.add_column(heading, justify="right" if heading in ("error", "tolerance") else "left")
    for row in rows:
        numbers = (_number(row["error"]), _number(row["tolerance"]))
        ok = "yes" if row["ok"] else "[red]NO[/red]"
        table.add_row(row["check"], row["quantity"], *numbers, ok)
    console.print(title)
    console.print(table, soft_wrap=False)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}" if value else "0"


def _splits(contexts: list[ContextParallel]) -> str:
    """The strategies, and the sizes of the axes that split the batch where they do."""
    noun = "strategy" if len(contexts) == 1 else "strategies"
    shape = contexts[0].mesh.shape
    batch = [f"{axis} {shape[axis]}" for axis in contexts[0].batch_axes if shape[axis] > 1]
    return ", ".join([f"{noun} {', '.join(context.split for context in contexts)}", *batch])
