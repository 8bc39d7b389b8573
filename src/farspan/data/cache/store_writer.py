"""Writes the files of a token store, a chunk at a time."""

import hashlib
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from farspan.data.tokens.encode import Encoded

FILES: Mapping[str, str] = MappingProxyType(
    {"offsets": "<i8", "token_counts": "<i8", "scored": "|b1"}
)
"""The files beside `tokens`, without `.bin`, and the type of their numbers."""

_CHUNK_TOKENS = 1 << 20
_MAX_UINT16 = 1 << 16


def token_dtype(vocab_size: int) -> str:
    """Returns the type in which ids of this vocabulary are kept."""
    return "<u2" if vocab_size <= _MAX_UINT16 else "<i4"


class StoreWriter:
    """Writes `tokens.bin`, `offsets.bin`, `token_counts.bin`, and `scored.bin` where it is needed.

    Memory is bounded by a chunk of tokens, 8 bytes a document, and the vocabulary.

    Args:
      folder: Where to; it exists and is empty.
      vocab_size: Every id is below this.

    Attributes:
      tokens: Tokens added so far.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self.tokens = 0
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._offsets = array("q", [0])
        self._counts = np.zeros(vocab_size, np.int64)
        self._empty = 0
        self._waiting: list[Encoded] = []
        self._waiting_tokens = 0
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in ("tokens", "scored")}
        self._files: dict[str, BinaryIO] = {"tokens": (folder / "tokens.bin").open("wb")}

    def add(self, encoded: Encoded) -> None:
        """Appends a document; its ids must be valid."""
        count = len(encoded.tokens)
        if count == 0:
            self._empty += 1
            return
        self.tokens += count
        self._offsets.append(self.tokens)
        self._waiting.append(encoded)
        self._waiting_tokens += count
        if self._waiting_tokens >= _CHUNK_TOKENS:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Writes what is left, to the disk itself.

        Returns:
          JSON values: the sizes of the `files` in bytes, `documents`, `empty_documents`, `tokens`
          and the `digest` of the data.
        """
        self._flush()
        offsets = np.frombuffer(self._offsets, np.int64).astype("<i8")
        for name, values in (("offsets", offsets), ("token_counts", self._counts.astype("<i8"))):
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
            self._files[name].write(values.tobytes())
        sizes: dict[str, int] = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        digest = hashlib.blake2b(offsets.tobytes(), digest_size=16)
        for name, part in self._digests.items():
            digest.update(part.digest() if name in self._files else b"")
        return {
            "files": sizes,
            "documents": len(self._offsets) - 1,
            "empty_documents": self._empty,
            "tokens": self.tokens,
            "digest": digest.hexdigest(),
        }

    def close(self) -> None:
        """Closes the files, whatever has been written."""
        for file in self._files.values():
            file.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        tokens = np.concatenate([encoded.tokens for encoded in self._waiting])
        scored = np.concatenate([_scored(encoded) for encoded in self._waiting])
        self._counts += np.bincount(tokens[scored], minlength=len(self._counts))
        written = self.tokens - len(tokens)
        if "scored" not in self._files and any(e.scored is not None for e in self._waiting):
            self._files["scored"] = (self._folder / "scored.bin").open("wb")
            for begin in range(0, written, _CHUNK_TOKENS):  # of every document so far, all of it
                self._write("scored", np.ones(min(_CHUNK_TOKENS, written - begin), np.bool_))
        if "scored" in self._files:
            self._write("scored", scored)
        self._write("tokens", tokens.astype(self._dtype))
        self._waiting, self._waiting_tokens = [], 0

    def _write(self, name: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._digests[name].update(data)
        self._files[name].write(data)


def _scored(encoded: Encoded) -> np.ndarray:
    if encoded.scored is None:
        return np.ones(len(encoded.tokens), np.bool_)
    return encoded.scored
