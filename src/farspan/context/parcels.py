"""Exchanges of every device with every other, as permutes.

The TPU compiler lets permutes travel while a kernel runs, and what gathers, scatters or exchanges
at one stroke it does not. Between n devices there are n - 1, one for each shift: device r sends to
device r + shift. What has the same way is packed into one array, since only a few permutes can be
on their way at once. A shift by s crosses up to s links; every pair of devices meets once, so the
links of a torus carry what they carry in an all-to-all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes

PERMUTES_IN_FLIGHT = 5
"""How many permutes the TPU compiler keeps on their way at once, unless told otherwise."""

Input = TypeVar("Input")
State = TypeVar("State")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcel:
    """Arrays packed into one.

    Attributes:
      wire: Their bits, `[B, L, width]`, in unsigned integers as wide as the narrowest of them.
      contents: Dimensions behind `[B, L]`, and type, of each.
    """

    wire: Array
    contents: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})


Parcels = dict[int, Parcel]
"""By shift. What shift 0 has is for the device itself."""


def pack(*arrays: Array) -> Parcel:
    """Packs arrays `[B, L, ...]`."""
    unit = min(x.dtype.itemsize for x in arrays)
    columns: list[Array] = []
    for x in arrays:
        bits = lax.bitcast_convert_type(x, _unsigned(x.dtype.itemsize))
        bits = bits.reshape(*x.shape[:2], -1)
        columns += [
            (bits >> 8 * first).astype(_unsigned(unit))
            for first in range(0, x.dtype.itemsize, unit)
        ]
    contents = tuple((x.shape[2:], x.dtype.name) for x in arrays)
    return Parcel(jnp.concatenate(columns, axis=-1), contents)


def unpack(parcel: Parcel) -> tuple[Array, ...]:
    """The arrays that were packed."""
    wire, start = parcel.wire, 0
    unit = wire.dtype.itemsize
    arrays: list[Array] = []
    for dims, dtype in parcel.contents:
        itemsize = jnp.dtype(dtype).itemsize
        width = math.prod(dims)
        bits = jnp.zeros((), _unsigned(itemsize))
        for first in range(0, itemsize, unit):
            column = wire[..., start : start + width].astype(_unsigned(itemsize))
            bits, start = bits | column << 8 * first, start + width
        arrays.append(lax.bitcast_convert_type(bits, dtype).reshape(*wire.shape[:2], *dims))
    return tuple(arrays)


@dataclasses.dataclass(frozen=True)
class Consignment:
    """Parcels that set out together.

    Attributes:
      parcels: What they carry.
      axes: Mesh axes of the devices.
      degree: Devices along them.
      sign: 1: device r sends each to r + shift; -1: to r - shift.
    """

    parcels: Parcels
    axes: Axes
    degree: int
    sign: int

    def send(self, shift: int, parcel: Parcel) -> Parcel:
        """Sends one to the device that is `shift` further in the consignment's direction."""
        if shift == 0:
            return parcel
        pairs = [(r, (r + self.sign * shift) % self.degree) for r in range(self.degree)]
        return dataclasses.replace(parcel, wire=lax.ppermute(parcel.wire, self.axes, pairs))


def deliver(sent: Consignment) -> Parcels:
    """Sends parcels with nothing beside them; what comes, by shift."""
    return {shift: sent.send(shift, parcel) for shift, parcel in sent.parcels.items()}


def deliver_beside(
    sent: Sequence[Consignment],
    work: Callable[[State, Input], tuple[State, Any]],
    state: State,
    inputs: Sequence[Input],
) -> tuple[list[Parcels], State, list[Any]]:
    """Sends parcels while something is computed, piece by piece.

    Args:
      sent: The parcels.
      work: Computes a piece: from the state and an input, the state after it and the piece.
      state: The first state.
      inputs: Inputs, arrays in each: no piece is begun before the one before is there, and the
        parcels that travel beside it.

    Returns:
      What comes, as in `deliver`; the last state; and the pieces.
    """
    queue = [(number, shift) for number, one in enumerate(sent) for shift in one.parcels if shift]
    waiting = {(number, shift): sent[number].parcels[shift] for number, shift in queue}
    arrived = [{0: one.parcels[0]} if 0 in one.parcels else {} for one in sent]
    pieces: list[Any] = []
    # All is packed before the first piece: what else could be done meanwhile would take its place.
    state, waiting, later = lax.optimization_barrier((state, waiting, list(inputs)))
    count = len(inputs)
    for place in range(count):
        first, stop = (len(queue) * n // count for n in (place, place + 1))
        under_way = {key: sent[key[0]].send(key[1], waiting.pop(key)) for key in queue[first:stop]}
        state, piece = work(state, later.pop(0))
        state, piece, under_way, waiting, later = lax.optimization_barrier(
            (state, piece, under_way, waiting, later)
        )
        pieces.append(piece)
        for (number, shift), parcel in under_way.items():
            arrived[number][shift] = parcel
    return arrived, state, pieces


def rows_by_shift(arrays: Sequence[Array], shifts: Sequence[int]) -> Parcels:
    """Packs arrays `[B, L * len(shifts), ...]`, L rows for each shift."""
    whole = pack(*arrays)
    parts = jnp.split(whole.wire, len(shifts), axis=1)
    return {shift: Parcel(part, whole.contents) for shift, part in zip(shifts, parts, strict=True)}


def unpack_rows(parcels: Parcels) -> tuple[Array, ...]:
    """The arrays that were packed, one parcel's rows after the other's, by shift."""
    by_array = zip(*(unpack(parcels[shift]) for shift in sorted(parcels)), strict=True)
    return tuple(jnp.concatenate(parts, axis=1) for parts in by_array)


def row_pieces(length: int, num_parcels: int) -> list[tuple[int, int]]:
    """Cuts rows so that no more parcels travel beside a piece than can be on their way.

    Args:
      length: Rows.
      num_parcels: Parcels that travel meanwhile.

    Returns:
      First and last row (exclusive) of each piece. They lie on whole blocks of a kernel, up to
      1,024 rows, where there are enough of them.
    """
    count = max(1, min(length, -(-num_parcels // PERMUTES_IN_FLIGHT)))
    block = min(1024, 1 << (length // count).bit_length() - 1)
    blocks = -(-length // block)
    edges = [min(length, (2 * blocks * n + count) // (2 * count) * block) for n in range(count + 1)]
    return list(itertools.pairwise(edges))


def _unsigned(itemsize: int) -> Any:
    return jnp.dtype(f"uint{8 * itemsize}")
