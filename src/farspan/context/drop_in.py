"""`farspan.attention_fn`: exact context-parallel attention for models that people bring."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Int

from farspan.context.api import attention
from farspan.context.checks import constant_slopes
from farspan.context.parallel import ContextParallel
from farspan.context.placement import Placement
from farspan.errors import unknown_choice
from farspan.kernels import Kernel
from farspan.masks import Causal, Full, Mask, SlidingWindow

AnyArray = jax.Array | np.ndarray

# Arguments that callers know and that cannot be honoured: why not, and what to do instead.
_LENGTHS = (
    "a length does not say which slot of a split row holds which token",
    "pass segment_ids, 1 for tokens and 0 for padding, put in order by shard_sequence",
)
_EINSUM = ("there is no einsum to replace", "leave it out")
_REFUSED = {
    "bias": (
        "an array over pairs of tokens is never stored",
        "use alibi_slopes of attention_fn, or its mask in place of -inf",
    ),
    "mask": (
        "an array over pairs of tokens is never stored",
        (
            "pass none: attention_fn(context, mask=farspan.Causal()) says it for all calls, "
            "segment_ids say what is a document or padding, key_ranges what else is data"
        ),
    ),
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "precision": (
        "float32 is always multiplied in full, and narrower types are summed in float32",
        'leave it out; jax.default_matmul_precision("highest") serves the layers around it',
    ),
    "implementation": (
        "the caller's kernels know no split sequence",
        "leave it out, and choose with attention_fn(context, kernel=...)",
    ),
    "q_sharding": ("the context says how arrays are split", "leave it out"),
    "module": ("weights of the softmax are never stored", "call the module with sow_weights=False"),
    "input_positions": (
        "nothing is rotated here",
        "rotate query and key in a function of your own that then calls this one",
    ),
    "qk_attn_weights_einsum": _EINSUM,
    "attn_weights_value_einsum": _EINSUM,
}


class CallOptions(TypedDict, total=False):
    """What else a call takes: what comes with a batch; and names that callers know, to refuse.

    A name may be given with the value None, which is the callers' default.
    """

    segment_ids: Int[AnyArray, "*B S"] | None
    positions: Int[AnyArray, "*B S"] | None
    key_ranges: Int[AnyArray, "*B S n 2"] | None
    sinks: Inexact[AnyArray, " H"] | None
    placement: Placement | None
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    implementation: Any
    q_sharding: Any
    input_positions: Any


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """Attention with the arguments of other libraries. Made by `attention_fn`; see there.

    Immutable and hashable, so modules can hold it and jit can take it as static.

    Attributes:
      context, mask, scale, logits_soft_cap, alibi_slopes, kernel: As given to `attention_fn`.
    """

    context: ContextParallel | None
    mask: Mask
    scale: float | None
    logits_soft_cap: float | None
    alibi_slopes: tuple[float, ...] | None
    kernel: str | Kernel

    def __call__(
        self,
        query: Inexact[AnyArray, "*B S H D"],
        key: Inexact[AnyArray, "*B T K D"],
        value: Inexact[AnyArray, "*B T K Dv"],
        bias: Any = None,
        mask: Any = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_residual: bool = False,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **options: Unpack[CallOptions],
    ) -> Inexact[Array, "*B S H Dv"] | tuple[Inexact[Array, "*B S H Dv"], Inexact[Array, "*B S H"]]:
        """Computes attention; see `attention_fn` for the arguments."""
        del force_fp32_for_softmax  # it always is
        unknown = sorted(set(options) - set(CallOptions.__annotations__))
        if unknown:
            known = {*inspect.signature(self).parameters, *CallOptions.__annotations__} - {
                "options"
            }
            raise unknown_choice("attention_fn: argument", unknown[0], known)
        query, key, value = _one_type(query, key, value, dtype=dtype)
        _check_one_sequence(query, key, value)
        _refuse(
            **options,
            bias=bias,
            mask=mask,
            precision=None if precision in ("default", lax.Precision.DEFAULT) else precision,
            module=module,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        rate = 0.0 if deterministic else dropout_rate
        out, lse = attention(
            *(_one_batch_axis(x, 3) for x in (query, key, value)),
            mask=_narrowed(self.mask, is_causal, local_window_size),
            return_lse=True,
            segment_ids=_one_batch_axis(options.get("segment_ids"), 1),
            positions=_one_batch_axis(options.get("positions"), 1),
            key_ranges=_one_batch_axis(options.get("key_ranges"), 3),
            scale=self.scale if scale is None else scale,
            logits_soft_cap=self.logits_soft_cap if logits_soft_cap is None else logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=options.get("sinks"),
            dropout_rate=rate,
            dropout_seed=_dropout_seed(dropout_rng, broadcast_dropout) if rate else None,
            context=self.context,
            placement=options.get("placement"),
            kernel=self.kernel,
        )
        out = out.reshape(*query.shape[:-1], value.shape[-1])
        if not return_residual:
            return out
        residual = lax.stop_gradient(lse).swapaxes(1, 2).astype(out.dtype)
        return out, residual.reshape(query.shape[:-1])


def attention_fn(
    context: ContextParallel | None,
    mask: Mask = Full(),  # noqa: B008  # immutable
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Sequence[float] | np.ndarray | None = None,
    kernel: str | Kernel = "auto",
) -> AttentionFn:
    """Makes a function that takes the place of the attention of other libraries.

    It is called like `jax.nn.dot_product_attention`, `tokamax.dot_product_attention` and Flax's
    `dot_product_attention`, and fits `attention_fn=` of `nnx.MultiHeadAttention` and of
    `linen.MultiHeadDotProductAttention`. It takes their arguments under their names: each does
    what it says there, or is refused. Arrays are global, `[..., S, heads, dim]`, in the order of
    the context's layout: what goes through the model, and all that says which token is which
    (positions of an embedding, labels), first goes through `shard_sequence`.

    What comes with a batch is passed to the call: `segment_ids`, `positions`, `key_ranges`,
    `sinks` and `placement`, as in `attention`. Where a module makes the call, bind them inside jit,
    `functools.partial(function, segment_ids=ids)`. A Linen module is built anew for each call, with
    that as its argument; in NNX set it as `attention_fn` of the modules that `nnx.merge` has made
    for this call.

    Args:
      context: How the sequence is split; None: one device.
      mask: Which keys a query sees. A call sees what this and its own `is_causal` and
        `local_window_size` allow.
      scale: As in `attention`, for calls that do not say it.
      logits_soft_cap: As in `attention`, for calls that do not say it.
      alibi_slopes: As in `attention`.
      kernel: As in `attention`.

    Returns:
      A function, immutable and hashable. It works under `jax.jit`, `jax.grad` and `jax.vmap`.

      With `dtype` it casts query, key and value, and without, to the type that they promote to.
      Softmax is always in float32. `return_residual` adds the log-sum-exp, `[..., S, H]`, not
      differentiated, -inf where a query sees nothing (and its output is 0).

      Where `deterministic` is False and `dropout_rate` is not 0, `dropout_rng` gives the seed:
      weights are dropped with the same probability as elsewhere, but not the same weights, and
      for each row and head alone (`broadcast_dropout=False`).

      It raises NotImplementedError for arguments that cannot be honoured: arrays `mask` and `bias`,
      lengths, a `precision` or an `implementation` of the caller's choice, sown weights, keys of
      another sequence (cross-attention, a decoding cache).

    Cost:
      That of `attention`.
    """
    if alibi_slopes is not None:
        alibi_slopes = constant_slopes(alibi_slopes, len(alibi_slopes))
    return AttentionFn(context, mask, scale, logits_soft_cap, alibi_slopes, kernel)


def _one_type(*arrays: AnyArray, dtype: Any) -> list[Array]:
    return [jnp.asarray(x, dtype or jnp.result_type(*arrays)) for x in arrays]


def _one_batch_axis(x: Any, ndim: int) -> Any:
    """Joins all axes before the last `ndim` into one."""
    return None if x is None else x.reshape(math.prod(x.shape[:-ndim]), *x.shape[-ndim:])


def _check_one_sequence(query: Array, key: Array, value: Array) -> None:
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise NotImplementedError(
            "attention_fn: query, key and value must be of the same tokens, [..., S, heads, dim], "
            f"got {query.shape}, {key.shape} and {value.shape}; give layers that attend to another "
            "sequence or decode with a cache the library's own function"
        )


def _refuse(**arguments: Any) -> None:
    """Refuses what is given and cannot be honoured."""
    for name, (reason, remedy) in _REFUSED.items():
        given = arguments.get(name)
        if given is None:
            continue
        if hasattr(given, "shape") and hasattr(given, "dtype"):
            given = f"{given.dtype} {given.shape}"
        elif not isinstance(given, str | tuple | lax.Precision):
            given = type(given).__name__  # modules are long when printed
        raise NotImplementedError(
            f"attention_fn: {name} must not be given, for {reason}; got {given}; {remedy}"
        )


def _narrowed(mask: Mask, is_causal: bool, window: int | tuple[int, int] | None) -> Mask:
    """The mask and what the call says, in the shortest form: a placement is known by its mask."""
    if isinstance(window, int):
        window = (window, window)
    said: list[Mask] = [Causal()] if is_causal else []
    if window is not None:
        said.append(SlidingWindow(*window))
    for limit in said:
        bounds = zip(mask.reach(), limit.reach(), strict=True)
        if isinstance(mask, Full):
            mask = limit
        elif not all(most is None or (own is not None and own <= most) for own, most in bounds):
            mask = mask & limit
    return mask


def _dropout_seed(rng: Array | None, broadcast: bool) -> Array:
    if rng is None:
        raise ValueError(
            "attention_fn: dropout needs a key, got dropout_rng=None; pass dropout_rng, or "
            "deterministic=True"
        )
    if broadcast:
        raise NotImplementedError(
            "attention_fn: dropout is drawn for each row and head alone, got "
            "broadcast_dropout=True; pass broadcast_dropout=False"
        )
    return jax.random.bits(rng, (), jnp.uint32)
