"""The tokens of many documents, end to end in one array."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer


@dataclass(frozen=True, eq=False)
class Ragged:
    """Parts of one array by index: `ragged[i]` is `values[offsets[i] : offsets[i + 1]]`, a view.

    Attributes:
      values: All parts end to end, [total].
      offsets: Where each part begins, and the total, int64 [parts + 1].
    """

    values: np.ndarray
    offsets: Int64[np.ndarray, "_"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The documents of one source as tokens; documents without a token are counted, not held.

    Attributes:
      tokens: Token ids of all documents end to end, integers [tokens].
      offsets: Where each document begins, and the number of tokens, int64 [documents + 1].
      scored: Which tokens may be labels, bool [tokens]; None for all of them.
      token_counts: How often each id occurs where it may be a label, int64 [vocab_size].
      empty_documents: Documents that have no token.
      digest: Of tokens, borders and scored tokens; equal digests mean equal data.
    """

    tokens: Integer[np.ndarray, "tokens"]
    offsets: Int64[np.ndarray, "borders"]
    scored: Bool[np.ndarray, "tokens"] | None
    token_counts: Int64[np.ndarray, "vocab"]
    empty_documents: int
    digest: str

    @property
    def documents(self) -> Ragged:
        """Token ids of each document."""
        return Ragged(self.tokens, self.offsets)

    @property
    def documents_scored(self) -> Ragged | None:
        """Which tokens of each document may be labels; None for all of them."""
        return None if self.scored is None else Ragged(self.scored, self.offsets)

    @property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Tokens of each document, each at least 1."""
        return np.diff(self.offsets)
