"""SentencePiece tokenizers, from a .model file."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from farspan.data.optional import require
from farspan.data.tokens.tokenizer_types import check_ids


class SentencePieceTokenizer:
    """A SentencePiece .model.

    Its control symbols are never made of text; the symbols that its trainer defined as text are.
    Conversations need a tokenizer.json: a .model does not say which symbols are the markup of a
    template.

    Args:
      path: The file.

    Attributes:
      name: `sentencepiece:` and a digest of the file.
      vocab_size: Its number of pieces.
      eos_id: Its end of sentence; None if it has none.

    Raises:
      ModuleNotFoundError: The package `sentencepiece` is not installed.
      ValueError: The file is no such model.
    """

    def __init__(self, path: Path):
        library = require("sentencepiece", f"tokenizer: {path}")
        raw = path.read_bytes()
        self._processor: Any = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(raw)
        except RuntimeError as error:
            raise ValueError(
                f"tokenizer: {path} must be a SentencePiece model, got another file ({error}); "
                f"name a tokenizer.json instead"
            ) from error
        self.name = f"sentencepiece:{hashlib.blake2b(raw, digest_size=16).hexdigest()}"
        self.vocab_size: int = self._processor.vocab_size()
        eos: int = self._processor.eos_id()
        self.eos_id = eos if eos >= 0 else None

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Encodes UTF-8 `text`; see `Tokenizer`."""
        return np.array(self._processor.encode(text.decode(), out_type=int), np.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, "_"]]:
        """Encodes each of `texts`; see `Tokenizer`."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Decodes ids; see `Tokenizer`.

        Raises:
          ValueError: An id lies outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(array, self.vocab_size)
        return self._processor.decode(array.tolist()).encode()
