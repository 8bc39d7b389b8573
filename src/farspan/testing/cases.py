"""Attention problems by their parameters: shared by tests, benchmarks and `farspan verify`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from farspan.masks import Causal, Mask, prefix_key_ranges, shared_prefix_key_ranges


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention problem.

    Attributes:
      mask: The mask.
      batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim: Sizes.
      documents: Lengths of the documents of each row, padding after them; None for no segment
        ids. Rows take the list rotated by their number, so that they differ.
      restart_positions: Whether to pass positions that restart in each document.
      given: What `key_ranges` hold, for a mask that reads them: the first third of each document
        ("prefix", for `Causal() | KeyRanges(1)`), or a first document that the others of the row
        share ("shared_prefix", for `Causal() & KeyRanges(2)`).
      latent: `(rank, rope_dim)`: keys and values come from a latent; `num_kv_heads` is not used.
      dtype: Type of q, k, v.
      scale: As in `farspan.attention`.
      logits_soft_cap: As in `farspan.attention`.
      alibi: Whether to pass ALiBi slopes.
      dropout_rate: As in `farspan.attention`.
      sinks: Whether to pass sinks.
      seed: Of the random inputs.
    """

    mask: Mask = dataclasses.field(default_factory=Causal)
    batch: int = 2
    seq_len: int = 64
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    documents: tuple[int, ...] | None = None
    restart_positions: bool = False
    given: Literal["prefix", "shared_prefix"] | None = None
    latent: tuple[int, int] | None = None
    dtype: str = "float32"
    scale: float | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    dropout_rate: float = 0.0
    sinks: bool = False
    seed: int = 0

    def segment_ids(self) -> NDArray[np.int32] | None:
        """int32 `[B, S]`, or None."""
        if self.documents is None:
            return None
        rows = np.zeros((self.batch, self.seq_len), np.int32)
        for row in range(self.batch):
            turn = row % len(self.documents)
            lengths = self.documents[turn:] + self.documents[:turn]
            ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
            rows[row, : len(ids)] = ids[: self.seq_len]
        return rows

    def labels(self) -> dict[str, NDArray[np.int32]]:
        """What comes with the tokens, as far as used: `segment_ids`, `positions`, `key_ranges`."""
        segment_ids = self.segment_ids()
        labels: dict[str, NDArray[np.int32]] = {}
        if segment_ids is None:
            assert not any((self.restart_positions, self.given)), "documents are needed"
            return labels
        starts = np.diff(segment_ids, axis=1, prepend=-1) != 0
        index = np.arange(self.seq_len)[None]
        positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        if self.restart_positions:
            labels["positions"] = positions.astype(np.int32)
        if self.given == "prefix":
            lengths = np.array([[(row == i).sum() for i in row] for row in segment_ids])
            labels["key_ranges"] = prefix_key_ranges(segment_ids, positions < lengths // 3)
        elif self.given == "shared_prefix":
            prefix = np.where(segment_ids > 1, 1, 0).astype(np.int32)
            segment_ids, labels["key_ranges"] = shared_prefix_key_ranges(segment_ids, prefix)
        return labels | {"segment_ids": segment_ids}

    def inputs(self) -> Inputs:
        """Draws the inputs, host arrays in the order of the text."""
        draw = np.random.default_rng(self.seed)
        dtype = jnp.dtype(self.dtype)

        def normal(*shape: int) -> Any:
            return draw.standard_normal(shape).astype(dtype)

        rows = (self.batch, self.seq_len)
        query = normal(*rows, self.num_heads, self.head_dim)
        weights: dict[str, Any] = {}
        if self.latent is None:
            keys = {
                "k": normal(*rows, self.num_kv_heads, self.head_dim),
                "v": normal(*rows, self.num_kv_heads, self.value_dim),
            }
        else:
            rank, rope = self.latent
            keys = {"latent": normal(*rows, rank), "rope_key": normal(*rows, rope)}
            widths = {"key_up": self.head_dim - rope, "value_up": self.value_dim}
            weights = {
                name: normal(rank, self.num_heads, width) / np.asarray(rank**0.5, dtype)
                for name, width in widths.items()
            }
        dout = normal(*rows, self.num_heads, self.value_dim)
        dlse = draw.standard_normal((self.batch, self.num_heads, self.seq_len))
        if self.sinks:
            weights["sinks"] = draw.standard_normal(self.num_heads).astype(np.float32)
        return Inputs({"q": query, **keys}, weights, self.labels(), dout, dlse.astype(np.float32))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `farspan.attention` beside the arrays."""
        options: dict[str, Any] = {
            "mask": self.mask,
            "scale": self.scale,
            "logits_soft_cap": self.logits_soft_cap,
        }
        if self.alibi:
            options["alibi_slopes"] = 2.0 ** -np.arange(1, self.num_heads + 1)
        if self.dropout_rate:
            options |= {"dropout_rate": self.dropout_rate, "dropout_seed": 7 + self.seed}
        return options


class Inputs(NamedTuple):
    """Inputs of a case.

    Attributes:
      tokens: What is differentiated and has a row per token, `[B, S, ...]`, by name: `q` with `k`
        and `v`, or with `latent` and `rope_key`.
      weights: What is differentiated and has none: `key_up`, `value_up`, `sinks`.
      labels: What comes with the tokens, int32 `[B, S, ...]`, named as in `farspan.attention`.
      dout: `[B, S, H, Dv]`.
      dlse: `[B, H, S]`.
    """

    tokens: dict[str, Any]
    weights: dict[str, Any]
    labels: dict[str, NDArray[np.int32]]
    dout: Any
    dlse: Any
