"""Every kernel equals the oracle on one device, whatever the shapes and the order of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farspan
from farspan.kernels import KERNELS, Scores, SplashKernel, XlaKernel, get_kernel
from farspan.kernels.tpu import fitting_block
from farspan.masks import Tokens
from farspan.plan.hlo import instructions
from farspan.testing import AttentionCase, attention_parity

BLOCKS = XlaKernel(rows=64, key_block=32)
SPLASH = SplashKernel(128, 128, 128, 128)
HALVES = ("bfloat16", "float16")
WINDOW = farspan.Causal() & farspan.SlidingWindow(20, 0)
CASES = {
    "mha": AttentionCase(num_kv_heads=8),
    "gqa": AttentionCase(),
    "mqa": AttentionCase(num_kv_heads=1),
    "one head": AttentionCase(num_heads=1, num_kv_heads=1),
    "full": AttentionCase(mask=farspan.Full()),
    "window": AttentionCase(mask=WINDOW, seq_len=192),
    "window ahead": AttentionCase(mask=farspan.SlidingWindow(3, 40), seq_len=160),
    "union": AttentionCase(mask=WINDOW | farspan.SlidingWindow(0, 0)),
    "packed": AttentionCase(documents=(7, 20, 16, 16), seq_len=192),
    "all padding but one": AttentionCase(documents=(1,)),
    "one token": AttentionCase(seq_len=1),
    "prime length": AttentionCase(seq_len=101, documents=(50, 40)),
    "value wider": AttentionCase(value_dim=24, head_dim=20),
    "value narrower": AttentionCase(value_dim=8, head_dim=24),
    "soft cap": AttentionCase(logits_soft_cap=2.0, scale=0.5),
    "sinks": AttentionCase(sinks=True, documents=(30, 20)),
    "chunked": AttentionCase(mask=farspan.Causal() & farspan.Chunked(24), seq_len=160),
    "block causal": AttentionCase(mask=farspan.BlockCausal(20), seq_len=160),
    "prefix": AttentionCase(mask=farspan.PrefixLM(50), seq_len=160),
    "prefix of each document": AttentionCase(
        mask=farspan.Causal() | farspan.KeyRanges(1), documents=(60, 90), seq_len=160,
        given="prefix",
    ),
    "shared prefix": AttentionCase(
        mask=farspan.Causal() & farspan.KeyRanges(2), documents=(60, 40, 30), seq_len=160,
        given="shared_prefix",
    ),
    "alibi": AttentionCase(alibi=True, logits_soft_cap=3.0, documents=(30, 20)),
    "alibi both ways": AttentionCase(alibi=True, mask=farspan.Full()),
    "dropout": AttentionCase(dropout_rate=0.4, sinks=True, documents=(30, 20)),
    "latent": AttentionCase(latent=(12, 8), head_dim=24, documents=(30, 20)),
    "everything": AttentionCase(
        mask=WINDOW, documents=(40, 30, 9), seq_len=97, value_dim=24, sinks=True,
        logits_soft_cap=3.0, restart_positions=True, alibi=True, dropout_rate=0.1,
    ),
}  # fmt: skip
SMOKE = {"gqa", "everything"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.smoke) if n in SMOKE else n for n in CASES]
)
@pytest.mark.parametrize("kernel", [KERNELS["reference"], BLOCKS, SPLASH], ids=lambda k: k.name)
def test_kernel_equals_oracle(kernel, name):
    for row in attention_parity(CASES[name], None, kernel):
        assert row.ok, row


@pytest.mark.parametrize("kernel", [KERNELS["xla"], SPLASH], ids=lambda k: k.name)
def test_several_blocks_equal_oracle(kernel):
    for row in attention_parity(
        dataclasses.replace(CASES["everything"], seq_len=700), None, kernel
    ):
        assert row.ok, row


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, dtype) for kernel in (KERNELS["reference"], BLOCKS) for dtype in HALVES),
        (SPLASH, "bfloat16"),  # it refuses float16, below
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_16_bit_types_err_at_most_twice_as_much_as_plain(kernel, dtype):
    case = AttentionCase(dtype=dtype, seq_len=256, sinks=True, documents=(100, 100, 40))
    for row in attention_parity(case, None, kernel):
        assert row.ok, row


@pytest.mark.parametrize("kernel", [KERNELS["reference"], BLOCKS], ids=lambda k: k.name)
def test_float64_is_computed_in_float64(kernel):
    with jax.enable_x64(True):
        for row in attention_parity(AttentionCase(dtype="float64", sinks=True), None, kernel):
            assert row.error < 1e-13 or row.quantity == "dsinks", row


HEADS = st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)])


def check_any_order(blocks, query_len, key_len, heads, seed):
    """Queries and keys of different numbers, in any order, as steps of a ring bring them."""
    draw = np.random.default_rng(seed)

    def normal(length, count):
        return jnp.asarray(draw.standard_normal((1, length, count, 8)), jnp.float32)

    query, dout = normal(query_len, heads[0]), normal(query_len, heads[0])
    key, value = normal(key_len, heads[1]), normal(key_len, heads[1])
    tokens = [
        Tokens(
            jnp.asarray(draw.permutation(max(query_len, key_len))[None, :n], jnp.int32),
            jnp.asarray(draw.integers(0, 3, (1, n)), jnp.int32),
        )
        for n in (query_len, key_len)
    ]
    scores = Scores(farspan.Causal(), 0.3)
    dense = KERNELS["reference"]
    out, lse = dense.forward(query, key, value, *tokens, scores)
    found_out, found_lse = blocks.forward(query, key, value, *tokens, scores)
    np.testing.assert_allclose(found_out, out, atol=2e-6)
    np.testing.assert_allclose(found_lse, lse, atol=2e-6)
    delta = (out * dout).sum(-1).swapaxes(1, 2)
    arguments = (query, key, value, dout, lse, delta, *tokens, scores)
    for found, expected in zip(
        blocks.backward(*arguments), dense.backward(*arguments), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(max_examples=3)
@given(st.integers(1, 70), st.integers(1, 70), HEADS, st.integers(0, 1000))
def test_xla_equals_dense_for_any_lengths_and_token_order(query_len, key_len, heads, seed):
    check_any_order(XlaKernel(rows=32, key_block=16), query_len, key_len, heads, seed)


@settings(max_examples=3)
@given(st.integers(1, 400), st.integers(1, 400), HEADS, st.integers(0, 1000))
def test_splash_equals_dense_for_any_lengths_and_token_order(query_len, key_len, heads, seed):
    check_any_order(SPLASH, query_len, key_len, heads, seed)


@pytest.mark.parametrize("block", [128, 96])
def test_lengths_that_no_block_divides_are_deterministic(block):
    case = AttentionCase(seq_len=192, documents=(150, 40))
    inputs = case.inputs()

    @jax.jit
    def run(q, k, v):
        return farspan.attention(
            q, k, v, mask=case.mask, segment_ids=jnp.asarray(inputs.labels["segment_ids"]),
            kernel=XlaKernel(key_block=block),
        )  # fmt: skip

    arrays = [jnp.asarray(x) for x in inputs.tokens.values()]
    first = np.asarray(run(*arrays))
    for _ in range(10):
        np.testing.assert_array_equal(np.asarray(run(*arrays)), first)


def test_no_buffer_of_query_by_key_size():
    """Nothing quadratic is held, forward or backward, packed documents included."""
    length = 4096
    case = AttentionCase(seq_len=length, batch=1, num_heads=4, num_kv_heads=1)

    def loss(q, k, v, ids):
        return farspan.attention(q, k, v, mask=case.mask, segment_ids=ids, kernel="xla").sum()

    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 1, 1)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, ids).compile()
    largest = max(
        int(np.prod(dims)) for found in instructions(compiled.as_text()) for _, dims in found.shapes
    )
    assert largest <= 2 * length * 4 * 16
    assert compiled.memory_analysis().temp_size_in_bytes < 20 * length * 4 * 16 * 4


def test_empty_blocks_are_never_visited():
    """Documents of 64 tokens: each row of blocks lists only its own document's keys."""
    from farspan.kernels.xla import _Grid

    ids = jnp.repeat(jnp.arange(1, 9), 64)[None]
    tokens = Tokens(jnp.arange(512)[None], ids)
    query = jnp.zeros((1, 512, 4, 8))
    kernel = XlaKernel(rows=32 * 4, key_block=32)
    grid = _Grid.make(kernel, query, query[:, :, :1], tokens, tokens, Scores(farspan.Causal(), 1.0))
    visits = [int(grid.row(jnp.asarray(place)).visits) for place in range(grid.num_rows)]
    assert visits == [1, 2] * 8
    assert [int(x) for x in grid.row(jnp.asarray(5)).order[:2]] == [4, 5]


def visited(tokens, keys, scores, splits=1, stays="query", block=128):
    """Entries of every list, as (whole, block)."""
    from farspan.kernels.splash import _Grid

    grid = _Grid.make(
        1, tokens, keys, scores, query_block=block, key_block=block, chunk=128, splits=splits,
        exact=True, interpret=True,
    )  # fmt: skip
    lists = np.asarray(jax.jit(functools.partial(grid.lists, stays))())[0, :, :, 0]
    return [[[divmod(int(x), 2) for x in row[1 : 1 + row[0]]] for row in split] for split in lists]


def test_splash_lists_the_blocks_that_are_not_empty():
    ids = jnp.repeat(jnp.arange(1, 5), 256)[None]
    packed = Tokens(jnp.arange(1024)[None], ids)
    scores = Scores(farspan.Causal(), 1.0)
    assert visited(packed, packed, scores) == [
        [[(2 * d, 0)] if half == 0 else [(2 * d, 1), (2 * d + 1, 0)]
         for d in range(4) for half in range(2)]
    ]  # fmt: skip
    even, odd = visited(packed, packed, scores, splits=2, stays="key")
    assert even[2] == [(2, 0)]
    assert odd[2] == [(3, 1)]
    striped = Tokens(jnp.arange(256)[None] * 4 + 1)
    assert visited(striped, Tokens(jnp.arange(256)[None] * 4 + 3), scores) == [
        [[(0, 0)], [(0, 1), (1, 0)]]
    ]


def test_splash_lists_of_millions_of_keys_hold_as_many_entries_as_blocks():
    """One of 64 shards meets 14 million gathered keys: lists of integers, nothing quadratic."""
    block, shard, count = 2048, 2**17, 2**17 * 107
    place = jnp.arange(count, dtype=jnp.int32)[None]
    queries, keys = Tokens(place[:, -shard:]), Tokens(place)
    (rows,) = visited(queries, keys, Scores(farspan.Causal(), 1.0), block=block)
    earlier = (count - shard) // block
    assert [len(row) for row in rows] == list(range(earlier + 1, count // block + 1))
    assert [row[-1] for row in rows] == [(n, 0) for n in range(earlier, count // block)]
    assert all(whole for row in rows for _, whole in row[:-1])


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 128), (300, 384), (1024, 1024), (1025, 128), (1280, 256), (3000, 1024), (3072, 1024),
     (2**17, 1024), (2**17 + 128, 1024)],
)  # fmt: skip
def test_blocks_pad_a_length_by_little(length, block):
    found = fitting_block(length, 1024)
    assert found == block
    assert -length % found <= max(127, length // 8)


def test_splash_refuses_types_and_blocks_that_a_tpu_has_not():
    arrays = [jnp.zeros((1, 128, 2, 8), jnp.float16)] * 3
    with pytest.raises(ValueError, match=r'bfloat16 or float32, got float16; .*kernel="xla"'):
        farspan.attention(*arrays, mask=farspan.Causal(), kernel="splash")
    with pytest.raises(ValueError, match=r"multiple of 128, got 96"):
        SplashKernel(key_block=96)


def test_unknown_kernel_names_the_nearest():
    with pytest.raises(ValueError, match=r'kernel must be one of.*did you mean "xla"'):
        get_kernel("xlaa")
