"""Text to token ids and back."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from farspan.errors import unknown_choice


@runtime_checkable
class Tokenizer(Protocol):
    """What the loader needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Identifies the tokenizer in a checkpoint: equal names mean equal ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Returns the ids of UTF-8 `text`, int32 [tokens], with no special ids added."""
        ...

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Returns the text of `ids`; special ids stand for no text."""
        ...


class ByteTokenizer:
    """One token a byte, and two special ids that `encode` never makes.

    Documents are told apart by segment ids, never by a special id, so text cannot forge a border.
    """

    name = "byte"
    bos_id = 256
    eos_id = 257
    vocab_size = 258

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Encodes text.

        Args:
          text: Any bytes.

        Returns:
          int32 [len(text)], each 0..255.
        """
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Decodes ids.

        Args:
          ids: Integers, any shape, each in [0, 258); BOS and EOS stand for no text.

        Returns:
          The bytes, of which `encode` gives back the ids without BOS and EOS.

        Raises:
          ValueError: An id lies outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"token ids must be in [0, {self.vocab_size}), got {outside[0]}; "
                f"decode only ids that this tokenizer made, without labels or padding marks"
            )
        return array[array < self.bos_id].astype(np.uint8).tobytes()


_TOKENIZERS = {ByteTokenizer.name: ByteTokenizer}


def get_tokenizer(name: str) -> ByteTokenizer:
    """Returns the tokenizer called `name` (`"byte"`).

    Raises:
      ValueError: No tokenizer has this name; the message points at the nearest one.
    """
    if name not in _TOKENIZERS:
        raise unknown_choice("tokenizer", name, _TOKENIZERS)
    return _TOKENIZERS[name]()
