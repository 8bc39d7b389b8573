"""What the model's backward keeps and runs, read from the traced model itself.

The decoder is traced with functions that stand for its projections and its attention: they keep for
backward what the real ones keep, and each leaves its name in the program. So whatever the model and
its remat policy do, what is kept and what is computed anew are counted and not derived.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from farspan.context import attention
from farspan.kernels import Scores
from farspan.masks import Causal, Tokens
from farspan.models import DecoderConfig, decoder
from farspan.ops.linear import linear_gradients

_SHORT, _LONG = 8, 16
"""Tokens of two traces, whose difference is what grows with the tokens."""


@functools.lru_cache
def runs(model: DecoderConfig) -> Counter[tuple[str, str]]:
    """How often each operation runs in one forward and backward over all layers.

    Args:
      model: The decoder.

    Returns:
      By ("forward" or "backward", projection of `decoder.PROJECTIONS` or "attention"). Forward runs
      beyond one a layer are recomputation.
    """
    found: Counter[tuple[str, str]] = Counter()

    def visit(jaxpr: core.Jaxpr, times: int) -> None:
        for eqn in _live_equations(jaxpr):
            direction, _, name = str(eqn.params.get("name", "")).partition("_of_")
            if name:
                found[direction, name] += times
            inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
            for value in eqn.params.values():
                body = getattr(value, "jaxpr", value)
                if isinstance(body, core.Jaxpr):
                    visit(body, inner)

    def gradients(params: Any, tokens: Array) -> Any:
        hidden, pull = jax.vjp(_forward(model, tokens), params)
        return pull(jnp.ones_like(hidden))

    visit(_traced(gradients, model, _SHORT), 1)
    return found


@functools.lru_cache
def saved_bytes_per_token(model: DecoderConfig, *, wide: bool = True) -> int:
    """Bytes that forward keeps for backward, for each token on a device.

    Args:
      model: The decoder; its remat policy decides.
      wide: Whether to count arrays of a wider type than the model's activations.

    Returns:
      All activations that lie between the embedding and the final norm's output, labels aside.
    """

    def saved(params: Any, tokens: Array) -> list[Array]:
        _, pull = jax.vjp(_forward(model, tokens), params)
        return jax.tree.leaves(pull)

    def size(tokens: int) -> int:
        jaxpr = _traced(saved, model, tokens)
        kept = {id(var): var for var in jaxpr.outvars}
        for var in jaxpr.invars:
            kept.pop(id(var), None)
        avals: list[Any] = [var.aval for var in kept.values()]
        if not wide:
            widest = jnp.dtype(model.dtype).itemsize
            avals = [aval for aval in avals if aval.dtype.itemsize <= widest]
        return sum(aval.size * aval.dtype.itemsize for aval in avals)

    return (size(_LONG) - size(_SHORT)) // (_LONG - _SHORT)


def round_bytes_per_token(model: DecoderConfig) -> int:
    """Bytes per token that one recomputed round of layers holds while its backward runs.

    Arrays of a wider type than the activations are left out: inside a layer the compiler makes them
    anew from the narrow ones where it needs them.
    """
    length = min(len(model.windows), model.num_layers)
    plain = dataclasses.replace(model, remat_policy="none", scan_layers=False)
    one, two = (dataclasses.replace(plain, num_layers=n * length) for n in (1, 2))
    return saved_bytes_per_token(two, wide=False) - saved_bytes_per_token(one, wide=False)


def _live_equations(jaxpr: core.Jaxpr) -> list[Any]:
    """Equations that the results depend on; tracing a loop leaves some that nothing does."""
    needed = {id(var) for var in jaxpr.outvars}
    live: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(var) in needed for var in eqn.outvars):
            live.append(eqn)
            needed |= {id(var) for var in eqn.invars}
    return live


def _traced(function: Callable[..., Any], model: DecoderConfig, tokens: int) -> core.Jaxpr:
    params = jax.eval_shape(lambda: decoder.init_params(model, jax.random.key(0)))
    return jax.make_jaxpr(function)(params, jax.ShapeDtypeStruct((1, tokens), jnp.int32)).jaxpr


def _forward(model: DecoderConfig, tokens: Array) -> Callable[[decoder.Params], Array]:
    def attend(query: Array, key: Array, value: Array, *, window: int | None) -> Array:
        del window  # it changes neither what is kept nor how often attention runs
        return attention(
            query, key, value, mask=Causal(), segment_ids=tokens, kernel=_NamedKernel()
        )

    runtime = decoder.Runtime(attention=attend, project=_project)
    return lambda params: decoder.forward(params, tokens, tokens, model, runtime)


def _named(direction: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls can be found by name in a program."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__name__ = f"{direction}_of_{name}"
    return jax.jit(call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(name: str, x: Array, weight: Array) -> Array:
    einsum = decoder.PROJECTIONS[name]
    return _named("forward", name, lambda x, w: jnp.einsum(einsum, x, w.astype(x.dtype)))(x, weight)


def _project_forward(name: str, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _project(name, x, weight), (x, weight)


def _project_backward(name: str, saved: tuple[Array, Array], dout: Array) -> tuple[Array, Array]:
    def gradients(x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
        einsum = decoder.PROJECTIONS[name]
        return linear_gradients(einsum, x, weight.astype(x.dtype), dout, weight.dtype)

    return _named("backward", name, gradients)(*saved, dout)


_project.defvjp(_project_forward, _project_backward)


@dataclasses.dataclass(frozen=True)
class _NamedKernel:
    """A kernel that yields arrays of the right shapes."""

    name: str = "named"

    def forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Array, Array]:
        """See `Kernel.forward`."""
        del key, query_tokens, key_tokens, scores

        def attend(query: Array) -> tuple[Array, Array]:
            wide = query.astype(jnp.float32)
            out = jnp.broadcast_to(wide[..., :1], (*query.shape[:3], value.shape[-1]))
            return out, wide[..., 0].swapaxes(1, 2)

        return _named("forward", "attention", attend)(query)

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Array, Array, Array]:
        """See `Kernel.backward`."""
        del dout, lse, delta, query_tokens, key_tokens, scores

        def gradients(*arrays: Array) -> tuple[Array, ...]:
            return tuple(x.astype(jnp.float32) for x in arrays)

        return _named("backward", "attention", gradients)(query, key, value)
