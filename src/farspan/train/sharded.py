"""Operations of tokens with parameters, where both are split over the same devices.

Each device takes its own tokens. It gathers a parameter right before use, in the type of the
computation, and once more in backward: between the passes only shards are kept. A parameter's
gradient is made in float32 from the device's own tokens, then summed over devices straight into its
shards. Left to the partitioner, gradients are summed whole on every device on some platforms, and
the gathered parameters of all layers are kept for backward.

Source: ZeRO, arXiv:1910.02054, stage 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Inexact, Int

from farspan.context import ContextParallel
from farspan.context.base import wait_for
from farspan.dist import gather_shards, scatter_sum
from farspan.ops.cross_entropy import cross_entropy_gradients, cross_entropy_sums
from farspan.ops.linear import linear_gradients
from farspan.ops.norm import rms_norm, rms_norm_gradients


@dataclasses.dataclass(frozen=True)
class Split:
    """How tokens and one parameter lie on the mesh. Static.

    Attributes:
      context: The mesh, and how tokens are split over it.
      spec: How the parameter is split.
    """

    context: ContextParallel
    spec: PartitionSpec

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes over which tokens are split, those of one device left out."""
        batch, sequence = self.context.partition_spec(2)
        return tuple(a for a in (*batch, *sequence) if self.context.mesh.shape[a] > 1)

    def gather(self, shard: Array, dtype: Any) -> Array:
        """Inside `run`: the whole parameter, rounded to `dtype` before the wire."""
        whole = shard.astype(dtype)
        for axis, names in self._split_dimensions():
            whole = gather_shards(whole, self.context.mesh, names, axis)
        return whole

    def sum_into_shards(self, gradient: Array) -> Array:
        """Inside `run`: this device's shard of the sum of all devices' gradients."""
        scattered: set[str] = set()
        for axis, names in self._split_dimensions():
            gradient = scatter_sum(gradient, self.context.mesh, names, axis)
            scattered |= set(names)
        rest = tuple(name for name in self.token_axes if name not in scattered)
        return lax.psum(gradient, rest) if rest else gradient

    def sum(self, x: Array) -> Array:
        """Inside `run`: the sum over all devices that hold different tokens."""
        return lax.psum(x, self.token_axes) if self.token_axes else x

    def after(self, arrays: Any, *before: Array) -> Any:
        """Inside `run`: the arrays, not used until `before` is there, where order must be kept."""
        if self.context.orders_collectives:
            for each in before:
                arrays = wait_for(arrays, each)
        return arrays

    def tokens(self, ndim: int) -> PartitionSpec:
        """Partitioning of an array `[B, S, ...]`."""
        return self.context.partition_spec(ndim)

    def _split_dimensions(self) -> list[tuple[int, tuple[str, ...]]]:
        """Dimensions of the parameter that are split, and the mesh axes that split them."""
        named = [
            (axis, (n,) if isinstance(n, str) else tuple(n or ()))
            for axis, n in enumerate(self.spec)
        ]
        return [(axis, names) for axis, names in named if names]

    def run(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Makes `local` run on each device's shards; gradients are ours, so none are derived."""
        return jax.shard_map(
            local,
            mesh=self.context.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sharded_linear(
    split: Split, einsum: str, x: Inexact[Array, "B S ..."], weight: Float[Array, ...]
) -> Array:
    """`farspan.ops.linear` with a weight that is split over devices.

    Args:
      split: How x and the weight lie on the mesh.
      einsum: As in `farspan.ops.linear.linear`.
      x: Activations.
      weight: Parameter.

    Returns:
      The product, of x's type, split like x.

    Cost:
      Gathers the weight in x's type in forward and again in backward, and reduces its gradient in
      float32.
    """
    out_ndim = len(einsum.split("->")[1])

    def local(x: Array, weight: Array) -> Array:
        return jnp.einsum(einsum, x, split.gather(split.after(weight, x), x.dtype))

    in_specs = (split.tokens(x.ndim), split.spec)
    return split.run(local, in_specs, split.tokens(out_ndim))(x, weight)


def _linear_forward(
    split: Split, einsum: str, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return sharded_linear(split, einsum, x, weight), (x, weight)


def _linear_backward(
    split: Split, einsum: str, saved: tuple[Array, Array], dout: Array
) -> tuple[Array, Array]:
    x, weight = saved

    def local(x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
        whole = split.gather(split.after(weight, x, dout), x.dtype)
        dx, dweight = linear_gradients(einsum, x, whole, dout, jnp.float32)
        dweight = split.sum_into_shards(dweight)
        return split.after(dx, dweight), dweight

    # Tied to dout, so that the weight is not fetched before its gradient is due.
    weight, dout = lax.optimization_barrier((weight, dout))
    tokens = split.tokens(x.ndim)
    in_specs = (tokens, split.spec, split.tokens(dout.ndim))
    dx, dweight = split.run(local, in_specs, (tokens, split.spec))(x, weight, dout)
    return dx, dweight.astype(weight.dtype)


sharded_linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sharded_rms_norm(
    split: Split, eps: float, x: Inexact[Array, "B S M"], weight: Float[Array, " M"]
) -> Array:
    """`farspan.ops.norm.rms_norm` of tokens that are split over devices.

    Args:
      split: How x and the weight lie on the mesh; the weight is whole on every device.
      eps: As in `rms_norm`.
      x: Activations.
      weight: Parameter.

    Returns:
      The normalised activations, of x's type, split like x.
    """
    tokens = split.tokens(x.ndim)
    local = functools.partial(rms_norm, eps=eps)
    return split.run(local, (tokens, split.spec), tokens)(x, weight)


def _norm_forward(
    split: Split, eps: float, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return sharded_rms_norm(split, eps, x, weight), (x, weight)


def _norm_backward(
    split: Split, eps: float, saved: tuple[Array, Array], dout: Array
) -> tuple[Array, Array]:
    x, weight = saved

    def local(x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
        dx, dweight = rms_norm_gradients(x, weight, eps, dout)
        dweight = split.sum_into_shards(dweight)
        return split.after(dx, dweight), dweight

    tokens = split.tokens(x.ndim)
    in_specs = (tokens, split.spec, tokens)
    dx, dweight = split.run(local, in_specs, (tokens, split.spec))(x, weight, dout)
    return dx, dweight.astype(weight.dtype)


sharded_rms_norm.defvjp(_norm_forward, _norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sharded_embedding(
    split: Split, table: Float[Array, "V M"], tokens: Int[Array, "B S"]
) -> Float[Array, "B S M"]:
    """Looks tokens up in an embedding that is split over devices.

    Args:
      split: How tokens and the table lie on the mesh.
      table: The embedding.
      tokens: Token ids.

    Returns:
      Rows of the table, of its type, split like `tokens`.
    """

    def local(table: Array, tokens: Array) -> Array:
        return split.gather(table, table.dtype)[tokens]

    return split.run(local, (split.spec, split.tokens(2)), split.tokens(3))(table, tokens)


def _embedding_forward(split: Split, table: Array, tokens: Array) -> tuple[Array, Any]:
    # Of the table only its rows and type are needed; an array of no elements carries them.
    return sharded_embedding(split, table, tokens), (tokens, table[:, :0])


def _embedding_backward(split: Split, saved: Any, gradient: Array) -> tuple[Array, None]:
    tokens, table = saved

    def local(tokens: Array, gradient: Array) -> Array:
        whole = jnp.zeros((len(table), gradient.shape[-1]), jnp.float32)
        return split.sum_into_shards(whole.at[tokens].add(gradient.astype(jnp.float32)))

    in_specs = (split.tokens(2), split.tokens(3))
    return split.run(local, in_specs, split.spec)(tokens, gradient).astype(table.dtype), None


sharded_embedding.defvjp(_embedding_forward, _embedding_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sharded_cross_entropy(
    split: Split,
    squares: bool,
    hidden: Inexact[Array, "B S M"],
    head: Float[Array, "M V"],
    labels: Int[Array, "B S"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums the cross-entropy of all labelled tokens on all devices, a tile of logits at a time.

    Args:
      split: How tokens and the head lie on the mesh.
      squares: Whether the squared normalisers are summed as well, for a z-loss.
      hidden: Final hidden states.
      head: Output head.
      labels: Next tokens or `IGNORE_LABEL`.

    Returns:
      The sums of `farspan.ops.cross_entropy.cross_entropy_sums`, the same on every device.
    """

    def local(hidden: Array, head: Array, labels: Array) -> tuple[Array, Array]:
        whole = split.gather(split.after(head, hidden), hidden.dtype)
        found = cross_entropy_sums(_flat(hidden), whole, labels.reshape(-1), squares=squares)
        return split.sum(found[0]), split.sum(found[1]) if squares else found[1]

    in_specs = (split.tokens(3), split.spec, split.tokens(2))
    return split.run(local, in_specs, PartitionSpec())(hidden, head, labels)


def _cross_entropy_forward(
    split: Split, squares: bool, hidden: Array, head: Array, labels: Array
) -> tuple[tuple[Array, Array], Any]:
    found = sharded_cross_entropy(split, squares, hidden, head, labels)
    return found, (hidden, head, labels, found)


def _cross_entropy_backward(
    split: Split, squares: bool, saved: Any, dsums: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    hidden, head, labels, found = saved

    def local(
        hidden: Array,
        head: Array,
        labels: Array,
        found: tuple[Array, Array],
        dloss: Array,
        dsquares: Array,
    ) -> tuple[Array, Array]:
        whole = split.gather(split.after(head, hidden), hidden.dtype)
        dhidden, dhead = cross_entropy_gradients(
            _flat(hidden), whole, labels.reshape(-1), dloss, dsquares if squares else None
        )
        dhead = split.sum_into_shards(dhead)
        return split.after(dhidden.reshape(hidden.shape), dhead, *found), dhead

    in_specs = (split.tokens(3), split.spec, split.tokens(2), *[PartitionSpec()] * 3)
    out_specs = (split.tokens(3), split.spec)
    dhidden, dhead = split.run(local, in_specs, out_specs)(hidden, head, labels, found, *dsums)
    return dhidden, dhead.astype(head.dtype), None


sharded_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _flat(hidden: Array) -> Array:
    return hidden.reshape(-1, hidden.shape[-1])
