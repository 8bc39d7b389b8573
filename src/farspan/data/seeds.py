"""Random numbers that are the same in every process and release."""

import hashlib

import numpy as np
from jaxtyping import Float64, Int64

MAX_SEED = 2**32 - 1


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Returns a seed in 0 .. 2**32 - 1 of its own for each `purpose` under `seed`."""
    words = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little")


def permutation(count: int, seed: int) -> Int64[np.ndarray, "count"]:
    """Returns 0 .. count - 1 in an order drawn from `seed`, int64 [count]."""
    # NumPy promises the raw stream of a bit generator for all releases, but not `permutation`.
    keys = np.random.PCG64(seed).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def uniform(count: int, seed: int) -> Float64[np.ndarray, "count"]:
    """Returns `count` numbers in [0, 1) drawn from `seed`, float64 [count]."""
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(11)) * 2.0**-53
