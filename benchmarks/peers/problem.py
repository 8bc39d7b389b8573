"""The problem that every implementation solves: seeded inputs, and a float64 reference.

Needs NumPy only, so that a peer's interpreter need hold neither farspan nor JAX.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

QUANTITIES = ("out", "dq", "dk", "dv")
_QUERIES_PER_CHUNK = 256  # the reference holds a chunk's scores for the query heads of one kv head


class Inputs(NamedTuple):
    """float32 host arrays, `[B, S, heads, D]`; `dout` is the gradient of the output."""

    query: F32
    key: F32
    value: F32
    dout: F32


@dataclasses.dataclass(frozen=True)
class Problem:
    """Causal attention, forward and backward, in float32."""

    seq_len: int
    batch: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    seed: int = 0

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    def inputs(self) -> Inputs:
        """Draws the inputs; the same everywhere."""
        draw = np.random.default_rng(self.seed)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        return Inputs(*(self._normal(draw, count) for count in heads))

    def _normal(self, draw: np.random.Generator, heads: int) -> F32:
        shape = (self.batch, self.seq_len, heads, self.head_dim)
        return draw.standard_normal(shape, dtype=np.float32)


def reference(problem: Problem) -> dict[str, F64]:
    """Output and gradients by the definition of attention, in float64, a few queries at a time.

    Cost:
      14 B H D S^2 / 2 FLOPs, 3 G `_QUERIES_PER_CHUNK` S float64 of memory: about a minute on two
      cores at S = 16,384 and the default sizes.
    """
    query, key, value, dout = (
        x.astype(np.float64).transpose(0, 2, 1, 3) for x in problem.inputs()
    )  # [B, heads, S, D]
    out, dquery, dkey, dvalue = (np.zeros_like(x) for x in (dout, query, key, value))
    for row in range(problem.batch):
        for head in range(problem.num_kv_heads):
            queries = row, slice(head * problem.group, (head + 1) * problem.group)
            keys = row, head
            _reference_of_kv_head(
                (query[queries], key[keys], value[keys], dout[queries]),
                (out[queries], dquery[queries], dkey[keys], dvalue[keys]),
                problem.scale,
            )
    found = (x.transpose(0, 2, 1, 3) for x in (out, dquery, dkey, dvalue))
    return dict(zip(QUANTITIES, found, strict=True))


def _reference_of_kv_head(
    given: tuple[F64, F64, F64, F64], found: tuple[F64, F64, F64, F64], scale: float
) -> None:
    """Fills `out, dq` `[G, S, D]` and `dk, dv` `[S, D]` of one kv head, in place."""
    query, key, value, dout = given
    out, dquery, dkey, dvalue = found
    group, seq_len, dim = query.shape
    for start in range(0, seq_len, _QUERIES_PER_CHUNK):
        end = min(start + _QUERIES_PER_CHUNK, seq_len)
        rows = (group * (end - start), dim)  # heads of the group over queries: one matmul
        queries, douts = query[:, start:end].reshape(rows), dout[:, start:end].reshape(rows)
        keys, values = key[:end], value[:end]
        weight = queries @ keys.T
        weight *= scale
        hidden = np.arange(end) > np.arange(start, end)[:, None]
        weight.reshape(group, end - start, end)[:, hidden] = -np.inf
        weight -= weight.max(-1, keepdims=True)
        np.exp(weight, out=weight)
        weight /= weight.sum(-1, keepdims=True)
        outs = weight @ values
        dvalue[:end] += weight.T @ douts
        weight *= douts @ values.T - (douts * outs).sum(-1, keepdims=True)  # now d(score)
        weight *= scale
        dkey[:end] += weight.T @ queries
        out[:, start:end] = outs.reshape(group, end - start, dim)
        dquery[:, start:end] = (weight @ keys).reshape(group, end - start, dim)


def relative_error(found: NDArray[np.floating], expected: F64) -> float:
    """`max|found - expected| / max|expected|`; NaN if anything found is NaN."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
