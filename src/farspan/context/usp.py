"""USP: Ulysses inside, ring outside.

Each Ulysses group exchanges heads, so that its devices hold the same run of tokens with different
heads; every device then rings with its peers of the other groups. The layout's chunks belong to
the ring, and a group splits a ring chunk evenly: shard order is (ring, ulysses), ring outermost.

The degree is not capped by the heads, as with Ulysses alone, and a ring of R devices makes R - 1
hops of K / U heads each, where a ring alone would make P - 1.

Source: USP, arXiv:2405.07719.
"""

from __future__ import annotations

from farspan.context.ring import Ring
from farspan.context.ulysses import Ulysses


def usp() -> Ulysses:
    """The head exchange of Ulysses around the ring: `Ulysses(inner=Ring())`."""
    return Ulysses(inner=Ring())
