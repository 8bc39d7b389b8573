"""From a run's configuration to its loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from farspan.data import Loader, make_loader
from farspan.train.config import TrainConfig


def open_loader(config: TrainConfig, progress: Callable[[str], None]) -> Loader:
    """Opens the data of a run; tokenises it first where that was not done yet.

    Args:
      config: The run, without stages.
      progress: Is told, about once a second, how far long work has come.

    Returns:
      The loader, at the first batch.

    Raises:
      ValueError: The data do not fit the configuration; or the model's vocabulary is smaller than
        the tokenizer's.
      OSError: The data cannot be read, or the cache cannot be written.
    """
    arguments = {
        field.name: getattr(config.data, field.name) for field in dataclasses.fields(config.data)
    }
    loader = make_loader(
        **arguments, batch_size=config.batch_size, seed=config.seed, progress=progress
    )
    if loader.vocab_size > config.model.vocab_size:
        loader.close()
        raise ValueError(
            f"vocab_size must cover the tokenizer, got vocab_size={config.model.vocab_size}, "
            f'tokenizer="{config.data.tokenizer}" with {loader.vocab_size}; use --vocab-size '
            f"{loader.vocab_size} or more"
        )
    return loader
