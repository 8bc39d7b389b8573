"""The row that a picture shows: its mask and its documents, as typed."""

from __future__ import annotations

import ast
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan import masks
from farspan.masks import Mask

_FORMS = (
    "Causal()",
    "Full()",
    "SlidingWindow(left, right)",
    "Chunked(size)",
    "BlockCausal(size)",
    "PrefixLM(length)",
)
_CLASSES: dict[str, type[Mask]] = {
    name: getattr(masks, name) for name in (form.partition("(")[0] for form in _FORMS)
}
_MIXED_PERCENT = (38, 9, 27, 4, 16)


class Row(NamedTuple):
    """One row of tokens.

    Attributes:
      mask: The mask.
      mask_text: As typed.
      seq_len: Tokens, `S`.
      documents: Lengths of the documents.
      segment_ids: Document of each token, int32 `[S]`, 0 for padding; None: one document.
    """

    mask: Mask
    mask_text: str
    seq_len: int
    documents: tuple[int, ...]
    segment_ids: NDArray[np.int32] | None

    @property
    def padding(self) -> int:
        """Tokens after the last document."""
        return self.seq_len - sum(self.documents)

    @property
    def bounds(self) -> list[int]:
        """First place of each document, and the place after the last."""
        return [0, *itertools.accumulate(self.documents)]

    def facts(self) -> dict[str, Any]:
        """The row as numbers and words."""
        return {
            "mask": self.mask_text,
            "seq_len": self.seq_len,
            "documents": list(self.documents),
            "padding": self.padding,
        }

    def describe(self) -> str:
        """The row in a few words."""
        return f"{self.mask_text}, {self.describe_tokens()}"

    def describe_tokens(self) -> str:
        """Its tokens in a few words."""
        count = len(self.documents)
        documents = "one document" if count == 1 else f"{count} documents"
        padding = f" + {self.padding:,} padding" if self.padding else ""
        return f"{self.seq_len:,} tokens, {documents}{padding}"


def make_row(mask_text: str, seq_len: int, documents: str) -> Row:
    """Reads what was typed.

    Args:
      mask_text: An expression over masks.
      seq_len: Tokens in the row.
      documents: `one`, `mixed` or lengths such as `100,300,50`; the rest of the row is padding.

    Returns:
      The row.

    Raises:
      ValueError: If something cannot be read, or the documents do not fit the row.
    """
    if seq_len < 1:
        raise ValueError(f"--seq-len must be at least 1, got {seq_len}")
    lengths = _lengths(documents, seq_len)
    if sum(lengths) > seq_len:
        raise ValueError(
            f"--documents must fit the row, got {sum(lengths)} tokens for --seq-len {seq_len}; use "
            f"--seq-len {sum(lengths)} or more"
        )
    ids = None
    if lengths != (seq_len,):
        ids = np.zeros(seq_len, np.int32)
        ids[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return Row(parse_mask(mask_text), " ".join(mask_text.split()), seq_len, lengths, ids)


def parse_mask(text: str) -> Mask:
    """Reads an expression over masks, such as `Causal() & SlidingWindow(1023, 0)`.

    Only calls of the mask classes, whole numbers, None, & and | are read: nothing is executed.

    Raises:
      ValueError: If the text is anything else, or a mask refuses its numbers.
    """
    try:
        return _mask_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"--mask must be made of {', '.join(_FORMS)}, joined by & and |, with whole numbers or "
            f'None, got {text!r}; use for example "Causal() & SlidingWindow(1023, 0)"'
        ) from None


def _mask_of(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask_of(left) & _mask_of(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask_of(left) | _mask_of(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CLASSES:
            named = {str(keyword.arg): _number(keyword.value) for keyword in keywords}
            if len(named) < len(keywords):
                raise TypeError
            return _CLASSES[name](*map(_number, args), **named)
        case _:
            raise TypeError


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
        case ast.Constant(value=None | int() as value) if not isinstance(value, bool):
            return value
        case _:
            raise TypeError


def _lengths(documents: str, seq_len: int) -> tuple[int, ...]:
    if documents == "one":
        return (seq_len,)
    if documents == "mixed":
        return tuple(max(1, seq_len * percent // 100) for percent in _MIXED_PERCENT)[:seq_len]
    try:
        lengths = tuple(int(length) for length in documents.split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise ValueError(
            "--documents must be one, mixed, or lengths of at least 1 such as 100,300,50, got "
            f"{documents!r}"
        )
    return lengths
