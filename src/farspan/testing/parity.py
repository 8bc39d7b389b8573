"""Parity of split attention with the dense oracle: shared by the tests and `farspan verify`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from farspan.context import (
    ContextParallel,
    Placement,
    attention,
    latent_attention,
    place_rows,
    shard_sequence,
    unshard_sequence,
)
from farspan.kernels import Kernel
from farspan.masks import Tokens, visible
from farspan.testing.cases import AttentionCase, Inputs
from farspan.testing.oracle import dense_attention_vjp, dense_dropout

F32_TOLERANCE = 1e-5
"""Relative error allowed to float32."""
BF16_FACTOR = 2.0
"""16-bit types may err this many times as much as a plain dense computation in the same type."""


class Parity(NamedTuple):
    """How far one quantity is from the oracle.

    Attributes:
      quantity: `out`, `lse`, the gradients `dq`, `dk`, `dv`, `dsinks` and so on, or `out (plain)`
        and `lse (plain)` from a call that is not differentiated.
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
    case: AttentionCase,
    context: ContextParallel | None,
    kernel: str | Kernel = "auto",
    *,
    placed: bool = False,
    plainly: bool = True,
) -> list[Parity]:
    """Holds one combination against the dense float64 oracle.

    Args:
      case: The problem.
      context: How the sequence is split; None: not at all.
      kernel: As in `farspan.attention`.
      placed: Whether to place the rows, so that a ring makes only the hops they need. The layout
        `balanced` always does.
      plainly: Whether to call it without differentiating, too: a second program to compile.

    Returns:
      A row per output (called plainly, and under differentiation) and per gradient.

    Raises:
      ValueError: If the combination is refused.
    """
    inputs = case.inputs()
    expected = _expected(case, inputs)
    allowed = dict.fromkeys(expected, F32_TOLERANCE)
    if jnp.dtype(case.dtype).itemsize < 4:
        plain = _plain_dense(case, inputs)
        allowed = {
            name: BF16_FACTOR * relative_error(plain[name], value)
            for name, value in expected.items()
        }
    placement = None
    if context is not None and (placed or context.layout == "balanced"):
        placement = place_case(case, inputs, context)
    found = run_attention(case, inputs, context, kernel, placement, plainly=plainly)
    quantities = {name: name.split(" ")[0] for name in found}
    return [
        Parity(name, relative_error(value, expected[quantity]), allowed[quantity])
        for (name, value), quantity in zip(found.items(), quantities.values(), strict=True)
    ]


def run_attention(
    case: AttentionCase,
    inputs: Inputs,
    context: ContextParallel | None,
    kernel: str | Kernel = "auto",
    placement: Placement | None = None,
    *,
    plainly: bool = True,
) -> dict[str, Any]:
    """Runs a case plainly and under `jax.vjp`.

    Args:
      case: The problem.
      inputs: From `case.inputs()`.
      context: As in `attention_parity`.
      kernel: As in `attention_parity`.
      placement: Of these rows; needed by the layout `balanced`.
      plainly: As in `attention_parity`.

    Returns:
      Quantities by name (see `Parity`), in the order of the text.
    """
    per_token = {**inputs.tokens, "dout": inputs.dout, "dlse": inputs.dlse.swapaxes(1, 2)}
    arrays = {**per_token, **inputs.labels}
    arrays = arrays if context is None else shard_sequence(arrays, context, placement)
    names = tuple(inputs.tokens)

    def call(arrays: dict[str, Any], placement: Any, *operands: Any) -> tuple[Any, Any]:
        tokens, weights = operands[: len(names)], dict(operands[-1])
        sinks = weights.pop("sinks", None)
        attend = attention if case.latent is None else latent_attention
        out, lse = attend(
            *tokens, *weights.values(), sinks=sinks, context=context, kernel=kernel,
            placement=placement, return_lse=True, **case.options(),
            **{name: arrays[name] for name in inputs.labels},
        )  # fmt: skip
        return out, lse

    @jax.jit
    def undifferentiated(arrays: dict[str, Any], weights: Any, placement: Any) -> dict[str, Any]:
        out, lse = call(arrays, placement, *[arrays[name] for name in names], weights)
        return {"out (plain)": out, "lse (plain)": lse.swapaxes(1, 2)}

    @jax.jit
    def differentiated(arrays: dict[str, Any], weights: Any, placement: Any) -> Any:
        operands = (*[arrays[name] for name in names], weights)
        (out, lse), pull = jax.vjp(functools.partial(call, arrays, placement), *operands)
        dlse = arrays["dlse"].swapaxes(1, 2).astype(lse.dtype)
        *gradients, dweights = pull((arrays["dout"], dlse))
        found = {f"d{name}": dx for name, dx in zip(names, gradients, strict=True)}
        return {"out": out, "lse": lse.swapaxes(1, 2)} | found, dweights

    by_token, dweights = differentiated(arrays, inputs.weights, placement)
    if plainly:
        by_token = undifferentiated(arrays, inputs.weights, placement) | by_token
    if context is not None:
        by_token = unshard_sequence(by_token, context, case.seq_len, placement)
    result = {name: x.swapaxes(1, 2) if "lse" in name else x for name, x in by_token.items()}
    return result | {f"d{name}": dx for name, dx in dweights.items()}


def place_case(case: AttentionCase, inputs: Inputs, context: ContextParallel) -> Placement:
    """The placement of a case's rows."""
    ones = np.ones((case.batch, case.seq_len), np.int32)
    ids = inputs.labels.get("segment_ids", ones)
    return place_rows(context, case.mask, ids, inputs.labels.get("key_ranges"))


def _expected(case: AttentionCase, inputs: Inputs) -> dict[str, Any]:
    """Every quantity by the oracle, float64."""
    tokens = {name: np.asarray(x).astype(np.float64) for name, x in inputs.tokens.items()}
    if "segment_ids" in inputs.labels:
        real = inputs.labels["segment_ids"] != 0
        tokens = {
            name: np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)
            for name, x in tokens.items()
        }
    weights = {name: np.asarray(x).astype(np.float64) for name, x in inputs.weights.items()}
    expanded = tokens if case.latent is None else tokens | _expand(tokens, weights)
    options: dict[str, Any] = inputs.labels | case.options()
    found = dense_attention_vjp(
        tokens["q"], expanded["k"], expanded["v"], inputs.dout, inputs.dlse,
        sinks=weights.get("sinks"), **options,
    )  # fmt: skip
    result = {"out": found.out, "lse": found.lse, "dq": found.dquery}
    if "sinks" in weights:
        result["dsinks"] = found.dsinks
    if case.latent is None:
        return result | {"dk": found.dkey, "dv": found.dvalue}
    return result | _pull_latent(tokens, weights, found.dkey, found.dvalue)


def _expand(tokens: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of every head from the latent."""
    content = np.einsum("blr,rhd->blhd", tokens["latent"], weights["key_up"])
    rope = tokens["rope_key"][:, :, None]
    shared = np.broadcast_to(rope, (*content.shape[:3], rope.shape[-1]))
    value = np.einsum("blr,rhd->blhd", tokens["latent"], weights["value_up"])
    return {"k": np.concatenate([content, shared], -1), "v": value}


def _pull_latent(
    tokens: dict[str, Any], weights: dict[str, Any], dkey: Any, dvalue: Any
) -> dict[str, Any]:
    """Gradients of what `_expand` was given."""
    key_up, value_up = weights["key_up"], weights["value_up"]
    width = key_up.shape[-1]
    dcontent, drope = dkey[..., :width], dkey[..., width:]
    through_keys = np.einsum("blhd,rhd->blr", dcontent, key_up)
    return {
        "dlatent": through_keys + np.einsum("blhd,rhd->blr", dvalue, value_up),
        "drope_key": drope.sum(2),
        "dkey_up": np.einsum("blr,blhd->rhd", tokens["latent"], dcontent),
        "dvalue_up": np.einsum("blr,blhd->rhd", tokens["latent"], dvalue),
    }


def _plain_dense(case: AttentionCase, inputs: Inputs) -> dict[str, Any]:
    """What a plain dense computation in the inputs' own type gives: the yardstick of bfloat16."""
    dtype = inputs.dout.dtype
    shape = (case.batch, case.seq_len)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    segment = inputs.labels.get("segment_ids", np.ones(shape, np.int32))
    index = inputs.labels.get("positions", np.broadcast_to(np.arange(case.seq_len), shape))
    queries = Tokens(index, segment, inputs.labels.get("key_ranges"))
    seen = np.asarray(visible(case.mask, queries, Tokens(index, segment)))
    options = case.options()
    kept = dense_dropout(index, case.num_heads, options) if case.dropout_rate else np.float64(1)
    slopes = options.get("alibi_slopes")
    distance = np.abs(index[:, None, :, None] - index[:, None, None])
    bias = 0 if slopes is None else slopes[:, None, None] * distance

    def dense(tokens: dict[str, Any], weights: dict[str, Any]) -> tuple[Any, Any]:
        q, sinks = tokens["q"], weights.get("sinks")
        if case.latent is None:
            group = case.num_heads // case.num_kv_heads
            k, v = (jnp.repeat(tokens[name], group, 2) for name in ("k", "v"))
        else:
            content = jnp.einsum("blr,rhd->blhd", tokens["latent"], weights["key_up"])
            rope = jnp.broadcast_to(tokens["rope_key"][:, :, None], (*q.shape[:3], case.latent[1]))
            k = jnp.concatenate([content, rope], -1)
            v = jnp.einsum("blr,rhd->blhd", tokens["latent"], weights["value_up"])
        score = jnp.einsum("bshd,bthd->bhst", q, k) * jnp.asarray(scale, dtype)
        if case.logits_soft_cap is not None:
            score = (case.logits_soft_cap * jnp.tanh(score / case.logits_soft_cap)).astype(dtype)
        score = jnp.where(seen[:, None], (score - bias).astype(dtype), -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*score.shape[:3], 1))
            score = jnp.concatenate([score, column], -1)
        any_seen = jnp.isfinite(score).any(-1, keepdims=True)
        weight = jax.nn.softmax(jnp.where(any_seen, score, 0), -1)
        weight = jnp.where(jnp.isfinite(score), weight, 0)[..., : case.seq_len]
        lse = jax.nn.logsumexp(jnp.where(any_seen, score, 0).astype(jnp.float32), -1)
        out = jnp.einsum("bhst,bthd->bshd", (weight * kept).astype(dtype), v)
        return out, jnp.where(any_seen[..., 0] & (segment != 0)[:, None], lse, -jnp.inf)

    (out, lse), pull = jax.vjp(dense, inputs.tokens, inputs.weights)
    dtokens, dweights = pull((inputs.dout, inputs.dlse))
    gradients = {f"d{name}": dx for name, dx in (dtokens | dweights).items()}
    return {"out": out, "lse": lse} | gradients
