"""The contract between strategies and kernels: how is one block of attention computed?

A kernel sees plain arrays. It knows nothing of devices, and a strategy knows nothing of blocks,
so each works with every other.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Inexact

from farspan.kernels.dropout import Dropout
from farspan.masks import Mask, Tokens
from farspan.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """How the weight of a (query, key) pair is made. What is static is part of the compile key.

    Attributes:
      mask: Which keys a query may see. Static.
      scale: Factor on the dot product. Static.
      logits_soft_cap: If given, scores become `cap * tanh(score / cap)`. Static.
      alibi_slopes: If given, float32 `[H]`: the score then loses `slope * |i - j|`, i and j being
        the places of query and key. Source: ALiBi, arXiv:2108.12409.
      dropout: If given, what happens to the weights after the softmax.
    """

    mask: Mask = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    logits_soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    alibi_slopes: Leaf | None = None
    dropout: Dropout | None = None


@runtime_checkable
class Kernel(Protocol):
    """Attention of queries over keys that lie on one device, forward and backward.

    Both directions accept any number of queries and keys, any token order, and any `H % K == 0`.
    Results come in the accumulation type: float32, or float64 for float64 inputs. Padding may
    hold any finite bits.
    """

    @property
    def name(self) -> str:
        """The word that selects the kernel."""
        ...

    def forward(
        self,
        query: Inexact[Array, "B Sq H D"],
        key: Inexact[Array, "B Sk K D"],
        value: Inexact[Array, "B Sk K Dv"],
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Float[Array, "B Sq H Dv"], Float[Array, "B H Sq"]]:
        """Computes softmax attention.

        Returns:
          `(out, lse)`: the normalised output and the natural log-sum-exp of the visible scores.
          A query that sees no key gets output 0 and lse -inf.
        """
        ...

    def backward(
        self,
        query: Inexact[Array, "B Sq H D"],
        key: Inexact[Array, "B Sk K D"],
        value: Inexact[Array, "B Sk K Dv"],
        dout: Inexact[Array, "B Sq H Dv"],
        lse: Float[Array, "B H Sq"],
        delta: Float[Array, "B H Sq"],
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Float[Array, "B Sq H D"], Float[Array, "B Sk K D"], Float[Array, "B Sk K Dv"]]:
        """Computes the gradient contributions of these keys.

        The caller passes `delta` and not the output, so that it is made once and not once per
        step of a ring, and so that a gradient through `lse` enters at one place.

        Args:
          query: As in `forward`.
          key: As in `forward`.
          value: As in `forward`.
          dout: Gradient of the output.
          lse: Log-sum-exp over ALL keys of the row (not only these), -inf where there is none.
          delta: `sum(out * dout) - dlse` per query and head.
          query_tokens: As in `forward`.
          key_tokens: As in `forward`.
          scores: As in `forward`.

        Returns:
          `(dq, dk, dv)`, to be summed over the blocks of keys and of queries.
        """
        ...
