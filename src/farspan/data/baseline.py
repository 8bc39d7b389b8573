"""The loss a model must beat to have learned anything from context."""

from collections.abc import Iterable
from typing import cast

import numpy as np
from jaxtyping import Float, Int32, Integer

from farspan.data.batch import Batch
from farspan.types import PAD_SEGMENT_ID

Tokens = Int32[np.ndarray, "..."]


def unigram_loss(data: Tokens | Batch | Iterable[Tokens | Batch]) -> float:
    """Computes the loss of the best predictor that sees no context.

    That is the entropy of the distribution of token ids,
    `-sum_v p(v) log p(v)` with `p(v) = count(v) / tokens`.

    Args:
      data: Token ids (int32, >= 0, any shape), a batch, of which padding is left out, or a
        finite iterable of these, such as `loader.eval_batches()`.

    Returns:
      Nats a token.

    Raises:
      ValueError: There is no token, or an id is negative.
    """
    counts = np.zeros(0, np.int64)
    single = isinstance(data, (np.ndarray, Batch))
    for part in cast("Iterable[Tokens | Batch]", [data] if single else data):
        tokens = _real_tokens(part) if isinstance(part, Batch) else part
        if tokens.size and tokens.min() < 0:
            raise ValueError(
                f"unigram_loss: token ids must be at least 0, got {tokens.min()}; "
                f"pass tokens, not labels"
            )
        part_counts = np.bincount(tokens.reshape(-1), minlength=counts.size)
        part_counts[: counts.size] += counts
        counts = part_counts
    if not counts.any():
        raise ValueError("unigram_loss: there must be a token, got none; pass data with text")
    return entropy(counts)


def entropy(weights: Integer[np.ndarray, "_"] | Float[np.ndarray, "_"]) -> float:
    """Computes the entropy of the distribution that is proportional to `weights`.

    Args:
      weights: Any numbers >= 0 that do not sum to 0, such as how often each token occurs.

    Returns:
      Nats.
    """
    probabilities = weights[weights > 0] / weights.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _real_tokens(batch: Batch) -> Tokens:
    return batch.tokens[batch.segment_ids != PAD_SEGMENT_ID]
