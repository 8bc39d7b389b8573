"""What the rest of `farspan.data` needs of a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64


@dataclass(frozen=True)
class ChatFormat:
    """How a tokenizer wants conversations written.

    Attributes:
      templates: Name to Jinja source: `default`, and perhaps `tool_use` for those with tools.
      named_tokens: What templates call special tokens: `eos_token` to its text.
      special_tokens: Text of every special token to its id.
    """

    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    special_tokens: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Located:
    """Ids, and where in the text they are.

    Attributes:
      tokens: The ids, int32.
      starts: First character of each, int32; a mark is one character or several.
      ends: The character after its last, int32.
    """

    tokens: Int32[np.ndarray, "tokens"]
    starts: Int32[np.ndarray, "tokens"]
    ends: Int32[np.ndarray, "tokens"]


@runtime_checkable
class Tokenizer(Protocol):
    """Makes ids of text."""

    @property
    def name(self) -> str:
        """Identifies the tokenizer in a checkpoint: equal names mean equal ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None if there is none."""
        ...

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Returns the ids of UTF-8 `text`, int32 [tokens], no special id among them."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, "_"]]:
        """Returns `encode` of each text, sooner."""
        ...

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Returns the text of `ids`; special ids stand for no text."""
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """Makes ids of conversations as well."""

    @property
    def chat(self) -> ChatFormat:
        """How conversations are written."""
        ...

    def encode_marked(self, text: str) -> Located:
        """Returns the ids of a text in which `marks.mark` stands for special tokens."""
        ...


def check_ids(ids: Int64[np.ndarray, "_"], vocab_size: int) -> None:
    """Checks that a tokenizer can decode ids.

    Raises:
      ValueError: One lies outside the vocabulary.
    """
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"token ids must be in [0, {vocab_size}), got {outside[0]}; "
            f"decode only ids that this tokenizer made, without labels or padding marks"
        )
