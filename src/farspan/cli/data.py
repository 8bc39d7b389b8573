"""`farspan data RECIPE [--flag value ...]`: tokenise a run's data ahead, and say how it packs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farspan.cli.recipe_arguments import StageOptions, parse_stage, recipes_help, split_name

if TYPE_CHECKING:
    from rich.console import Console

    from farspan.data import Loader

_ABOUT = (
    "Tokenise the data of a run into the cache, and say how its documents pack into rows. Needs no "
    "devices."
)
_BAR_WIDTH = 32
_PLAIN_WIDTH = 110


@dataclass(frozen=True)
class DataOptions(StageOptions):
    """Whose data is looked at.

    Attributes:
      json: Print one JSON object instead of text.
    """

    json: bool = False


def main(arguments: list[str]) -> int:
    """Tokenises and packs, as a run would before its first step.

    Args:
      arguments: The recipe's name, or the path of a run's config.json; then flags.

    Returns:
      0.

    Raises:
      ValueError: The arguments or the data do not fit.
      OSError: The data cannot be read, or the cache cannot be written.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(recipes_help("data", "[--json] [--flag value ...]", _ABOUT))
        return 0
    _, options = parse_stage("data", *split_name("data", arguments), DataOptions, _ABOUT)
    config = options.config
    if config.data.streaming:
        raise ValueError(
            "data is counted as a whole, got streaming=True, which reads it while training; use "
            "--no-streaming"
        )
    from rich.console import Console

    from farspan.train.dataset import open_loader

    console = Console(highlight=False, soft_wrap=True, stderr=options.json)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    with console.status(f"reading {config.data.data}") as status:
        loader = open_loader(config, status.update)
    lengths = _by_length(loader)
    if options.json:
        facts = loader.counts() | {
            "vocab_size": loader.vocab_size,
            "unigram_loss": loader.unigram_loss,
            "lengths": lengths,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        console.print(loader.describe(), markup=False)
        console.print(f"without context no model gets below {loader.unigram_loss:.4f} nats a token")
        _print_lengths(console, lengths)
    loader.close()
    return 0


def _by_length(loader: Loader) -> list[dict[str, Any]]:
    """Documents and tokens by length, in powers of two, from the shortest that occurs."""
    lengths = loader.document_lengths()
    powers = np.frexp(lengths)[1] - 1
    documents = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    first = int(powers.min())
    return [
        {"from_tokens": 2**power, "documents": int(documents[power]), "tokens": int(tokens[power])}
        for power in range(first, len(documents))
    ]


def _print_lengths(console: Console, lengths: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in ("document length", "documents", "tokens", "share"):
        table.add_column(heading, justify="right")
    table.add_column("of the tokens")
    total = sum(row["tokens"] for row in lengths)
    most = max(row["tokens"] for row in lengths)
    for row in lengths:
        start = row["from_tokens"]
        table.add_row(
            f"{start:,} to {2 * start - 1:,}",
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / total:.1%}",
            "█" * round(_BAR_WIDTH * row["tokens"] / most),
        )
    console.print(table, soft_wrap=False)
