"""Parity of split attention with the dense oracle: shared by the tests and `farspan verify`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from farspan.context import ContextParallel, attention, shard_sequence, unshard_sequence
from farspan.kernels import Kernel
from farspan.masks import Causal, Mask
from farspan.testing.oracle import DenseResult, dense_attention_vjp

F32_TOLERANCE = 1e-5
"""Relative error allowed to float32."""
BF16_FACTOR = 2.0
"""16-bit types may err this many times as much as a plain dense computation in the same type."""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention problem.

    Attributes:
      mask: The mask.
      batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim: Sizes.
      documents: Lengths of the documents of each row, padding after them; None for no segment
        ids. Rows take the list rotated by their number, so that they differ.
      restart_positions: Whether to pass positions that restart in each document.
      dtype: Type of q, k, v.
      scale: As in `farspan.attention`.
      logits_soft_cap: As in `farspan.attention`.
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
    dtype: str = "float32"
    scale: float | None = None
    logits_soft_cap: float | None = None
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

    def inputs(self) -> Inputs:
        """Draws the inputs, host arrays in the order of the text."""
        draw = np.random.default_rng(self.seed)
        dtype = jnp.dtype(self.dtype)

        def normal(heads: int, dim: int) -> Any:
            return draw.standard_normal((self.batch, self.seq_len, heads, dim)).astype(dtype)

        segment_ids = self.segment_ids()
        positions = None
        if self.restart_positions:
            assert segment_ids is not None, "positions restart in documents"
            starts = np.diff(segment_ids, axis=1, prepend=-1) != 0
            index = np.arange(self.seq_len)[None]
            positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
            positions = positions.astype(np.int32)
        lse = draw.standard_normal((self.batch, self.num_heads, self.seq_len))
        return Inputs(
            query=normal(self.num_heads, self.head_dim),
            key=normal(self.num_kv_heads, self.head_dim),
            value=normal(self.num_kv_heads, self.value_dim),
            dout=normal(self.num_heads, self.value_dim),
            dlse=lse.astype(np.float32),
            segment_ids=segment_ids,
            positions=positions,
            sinks=draw.standard_normal(self.num_heads).astype(np.float32) if self.sinks else None,
        )

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `farspan.attention` beside the arrays."""
        return {"mask": self.mask, "scale": self.scale, "logits_soft_cap": self.logits_soft_cap}


class Inputs(NamedTuple):
    """Inputs of a case; `[B, S, ...]`, dlse `[B, H, S]`, sinks `[H]`."""

    query: Any
    key: Any
    value: Any
    dout: Any
    dlse: Any
    segment_ids: Any
    positions: Any
    sinks: Any


class Parity(NamedTuple):
    """How far one quantity is from the oracle.

    Attributes:
      quantity: `out`, `lse`, `dq`, `dk`, `dv`, `dsinks`, or `out (plain)` and `lse (plain)` from a
        call that is not differentiated.
      error: Greatest deviation over the greatest value of the oracle.
      tolerance: What is allowed.
    """

    quantity: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within tolerance; False for NaN."""
        return self.error <= self.tolerance


def relative_error(found: Any, expected: Any) -> float:
    """`max|found - expected| / max|expected|`; equal infinities count as equal."""
    found, expected = (np.asarray(x).astype(np.float64) for x in (found, expected))
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.where(found == expected, 0, found - expected)
    finite = expected[np.isfinite(expected)]
    greatest = np.abs(finite).max(initial=0)
    return float(np.abs(difference).max(initial=0) / (greatest if greatest > 0 else 1))


def attention_parity(
    case: AttentionCase, context: ContextParallel | None, kernel: str | Kernel = "auto"
) -> list[Parity]:
    """Holds one combination against the dense float64 oracle.

    Args:
      case: The problem.
      context: How the sequence is split; None: not at all.
      kernel: As in `farspan.attention`.

    Returns:
      A row per output (called plainly, and under differentiation) and per gradient.

    Raises:
      ValueError: If the combination is refused.
    """
    inputs = case.inputs()
    expected = dense_attention_vjp(*inputs[:5], **_masking(inputs), **case.options())
    allowed = _tolerances(case, inputs, expected)
    found = run_attention(case, inputs, context, kernel)
    reference = {
        "out (plain)": expected.out,
        "lse (plain)": expected.lse,
        "out": expected.out,
        "lse": expected.lse,
        "dq": expected.dquery,
        "dk": expected.dkey,
        "dv": expected.dvalue,
        "dsinks": expected.dsinks,
    }
    return [
        Parity(name, relative_error(value, reference[name]), allowed[name.split(" ")[0]])
        for name, value in found.items()
    ]


def run_attention(
    case: AttentionCase,
    inputs: Inputs,
    context: ContextParallel | None,
    kernel: str | Kernel = "auto",
) -> dict[str, Any]:
    """Runs a case plainly and under `jax.vjp`.

    Returns:
      Quantities by name (see `Parity`), in the order of the text.
    """
    per_token = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "dout": inputs.dout}
    per_token["dlse"] = inputs.dlse.swapaxes(1, 2)
    labels = {"segment_ids": inputs.segment_ids, "positions": inputs.positions}
    arrays = {**per_token, **{name: x for name, x in labels.items() if x is not None}}
    arrays = arrays if context is None else shard_sequence(arrays, context)

    def call(arrays: dict[str, Any], q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
        return attention(
            q, k, v, segment_ids=arrays.get("segment_ids"), positions=arrays.get("positions"),
            sinks=sinks, context=context, kernel=kernel, return_lse=True, **case.options(),
        )  # fmt: skip

    @jax.jit
    def plainly(arrays: dict[str, Any], sinks: Any) -> dict[str, Any]:
        out, lse = call(arrays, arrays["q"], arrays["k"], arrays["v"], sinks)
        return {"out (plain)": out, "lse (plain)": lse.swapaxes(1, 2)}

    @jax.jit
    def differentiated(arrays: dict[str, Any], sinks: Any) -> tuple[dict[str, Any], Any]:
        operands = (arrays["q"], arrays["k"], arrays["v"], sinks)
        (out, lse), pull = jax.vjp(functools.partial(call, arrays), *operands)
        dlse = arrays["dlse"].swapaxes(1, 2).astype(lse.dtype)
        dq, dk, dv, dsinks = pull((arrays["dout"], dlse))
        return {"out": out, "lse": lse.swapaxes(1, 2), "dq": dq, "dk": dk, "dv": dv}, dsinks

    gradients, dsinks = differentiated(arrays, inputs.sinks)
    by_token = plainly(arrays, inputs.sinks) | gradients
    if context is not None:
        by_token = unshard_sequence(by_token, context, case.seq_len)
    result = {name: x.swapaxes(1, 2) if "lse" in name else x for name, x in by_token.items()}
    return result if inputs.sinks is None else result | {"dsinks": dsinks}


def _masking(inputs: Inputs) -> dict[str, Any]:
    return {
        "segment_ids": inputs.segment_ids,
        "positions": inputs.positions,
        "sinks": inputs.sinks,
    }


def _tolerances(case: AttentionCase, inputs: Inputs, expected: DenseResult) -> dict[str, float]:
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    if jnp.dtype(case.dtype).itemsize >= 4:
        return dict.fromkeys(names, F32_TOLERANCE)
    plain = _plain_dense(case, inputs)
    errors = (relative_error(x, y) for x, y in zip(plain, expected, strict=True) if y is not None)
    return {name: BF16_FACTOR * error for name, error in zip(names, errors, strict=False)}


def _plain_dense(case: AttentionCase, inputs: Inputs) -> tuple[Any, ...]:
    """What a plain dense computation in the inputs' own type gives: the yardstick of bfloat16."""
    dtype = inputs.query.dtype
    group = case.num_heads // case.num_kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    ones = np.ones((case.batch, case.seq_len), np.int32)
    segment = ones if inputs.segment_ids is None else inputs.segment_ids
    index = np.arange(case.seq_len)[None] if inputs.positions is None else inputs.positions
    seen = np.zeros((case.batch, case.seq_len, case.seq_len), bool)
    for lo, hi in case.mask.key_ranges(index[:, :, None]):
        seen |= (index[:, None] >= lo) & (index[:, None] < hi)
    seen &= (segment[:, :, None] == segment[:, None]) & (segment[:, None] != 0)

    def dense(q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        score = jnp.einsum("bshd,bthd->bhst", q, k) * jnp.asarray(scale, dtype)
        if case.logits_soft_cap is not None:
            score = (case.logits_soft_cap * jnp.tanh(score / case.logits_soft_cap)).astype(dtype)
        score = jnp.where(seen[:, None], score, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*score.shape[:3], 1))
            score = jnp.concatenate([score, column], -1)
        any_seen = jnp.isfinite(score).any(-1, keepdims=True)
        weight = jax.nn.softmax(jnp.where(any_seen, score, 0), -1)
        weight = jnp.where(jnp.isfinite(score), weight, 0)[..., : case.seq_len]
        lse = jax.nn.logsumexp(jnp.where(any_seen, score, 0).astype(jnp.float32), -1)
        out = jnp.einsum("bhst,bthd->bshd", weight.astype(dtype), v)
        return out, jnp.where(any_seen[..., 0] & (segment != 0)[:, None], lse, -jnp.inf)

    outputs, pull = jax.vjp(dense, inputs.query, inputs.key, inputs.value, inputs.sinks)
    return (*outputs, *pull((inputs.dout, inputs.dlse)))
