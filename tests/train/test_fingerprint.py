"""A fingerprint is that of the global array: equal on every mesh, different for other bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from farspan.train.fingerprint import fingerprints

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")


def draw(dtype: str, shape: tuple[int, ...] = (8, 6)) -> NDArray[Any]:
    values = np.random.default_rng(0).integers(0, 250, shape)
    return np.asarray(values, jnp.dtype(dtype))


def by_hand(array: NDArray[Any]) -> int:
    words = array.view(f"u{array.dtype.itemsize}").ravel().astype(object)
    return sum(int(word) * (2 * place + 1) for place, word in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_is_the_sum_of_bits_by_place_on_every_mesh(dtype: str) -> None:
    array = draw(dtype)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(), PartitionSpec(("a", "b")), PartitionSpec("a", "b")):
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        assert fingerprints({"x": placed}) == {"x": by_hand(array)}


def test_scalars_and_empty_leaves_are_named() -> None:
    state = {"a": [jnp.int32(7), None, jnp.zeros((0, 3))], "nan": jnp.float32("nan")}
    assert fingerprints(state) == {"a.0": 7, "a.2": 0, "nan": 0x7FC00000}


@settings(max_examples=30)
@given(st.data())
def test_a_flipped_bit_and_two_swapped_elements_are_noticed(data: st.DataObject) -> None:
    array = draw("float32")
    before = fingerprints({"x": array})
    flipped = array.copy()
    place = data.draw(st.integers(0, array.size - 1))
    flipped.view(np.uint32).ravel()[place] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert fingerprints({"x": flipped}) != before
    a, b = data.draw(st.lists(st.integers(0, array.size - 1), min_size=2, max_size=2, unique=True))
    swapped = array.copy().ravel()
    swapped[[a, b]] = swapped[[b, a]]
    same = array.ravel()[a] == array.ravel()[b]
    assert (fingerprints({"x": swapped.reshape(array.shape)}) == before) == same
