"""What users of other trainers reported as broken, and what must hold of every call."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import farspan
from farspan.testing import AttentionCase, attention_parity, dense_attention, relative_error

CAUSAL = farspan.Causal()
KERNEL = farspan.XlaKernel(rows=16, key_block=8)


def ring(degree, layout="zigzag"):
    return farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", layout)


def usp(layout="zigzag"):
    return farspan.ContextParallel(farspan.make_mesh(cp_ring=2, cp_ulysses=2), "usp", layout)


def assert_parity(case, context):
    for row in attention_parity(case, context, KERNEL):
        assert row.ok, row


def attend(q, k, v, context, **options):
    """Attention in the order of the text, through the layout and back."""
    ids = options.pop("segment_ids", None)
    ids = np.ones(q.shape[:2], np.int32) if ids is None else ids
    q, k, v, ids = farspan.shard_sequence((q, k, v, ids), context)
    out = farspan.attention(
        q, k, v, segment_ids=ids, context=context, kernel=KERNEL, mask=CAUSAL, **options
    )
    return np.asarray(farspan.unshard_sequence(out, context))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("documents", "length", "degree"),
    [((7,), 8, 2), ((4, 3), 12, 2), ((4, 3), 12, 3), ((698,), 704, 4)],
)
def test_documents_that_no_chunk_divides_lose_no_token(documents, length, degree):
    case = AttentionCase(documents=documents, seq_len=length, batch=1)
    assert_parity(case, ring(degree))
    q, k, v = case.inputs().tokens.values()
    out = attend(q, k, v, ring(degree), segment_ids=case.segment_ids())
    assert (np.abs(out[0, : sum(documents)]).max((1, 2)) > 0).all()
    again = attend(q, k, v, ring(degree), segment_ids=case.segment_ids())
    np.testing.assert_array_equal(out, again)


def test_rows_have_boundaries_of_their_own():
    ids = np.stack([np.repeat([1, 2], [10, 6]), np.repeat([1, 2], [3, 13])]).astype(np.int32)
    q, k, v = random(3, 2, 16, 4, 8)
    out = attend(q, k, v, usp(), segment_ids=ids)
    expected = dense_attention(q, k, v, mask=CAUSAL, segment_ids=ids)
    assert relative_error(out, expected) < 1e-5
    swapped = attend(q[::-1].copy(), k[::-1].copy(), v[::-1].copy(), usp(), segment_ids=ids[::-1])
    np.testing.assert_array_equal(swapped[::-1], out)


@pytest.mark.parametrize("make", [lambda: ring(4), usp])
def test_documents_do_not_leak(make):
    """Changing every token of document 0 changes the others by exactly 0."""
    case = AttentionCase(documents=(13, 20, 9, 8, 14), batch=1)
    q, k, v = case.inputs().tokens.values()
    out = attend(q, k, v, make(), segment_ids=case.segment_ids())
    for x in (q, k, v):
        x[:, :13] += 1
    changed = attend(q, k, v, make(), segment_ids=case.segment_ids())
    np.testing.assert_array_equal(changed[:, 13:], out[:, 13:])
    assert np.abs(changed[:, :13] - out[:, :13]).max() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_padding_may_hold_any_bits(side, garbage):
    """Padding changes no result, gets output 0 and gradient exactly 0."""
    q, k, v, dout = random(4, 1, 16, 4, 8)
    real = slice(6, 16) if side == "left" else slice(0, 10)
    ids = np.zeros((1, 16), np.int32)
    ids[:, real] = 1
    alone = dense_attention(*(x[:, real] for x in (q, k, v)), mask=CAUSAL)
    for x in (q, k, v, dout):
        x[ids == 0] = garbage
    context = ring(4)
    q, k, v, dout, ids = farspan.shard_sequence((q, k, v, dout, ids), context)

    def call(q, k, v):
        return farspan.attention(
            q, k, v, mask=CAUSAL, segment_ids=ids, context=context, kernel=KERNEL
        )

    out, pull = jax.vjp(call, q, k, v)
    out, *gradients = farspan.unshard_sequence((out, *pull(dout)), context)
    assert relative_error(out[:, real], alone) < 1e-5
    padding = np.setdiff1d(np.arange(16), np.arange(16)[real])
    for x in (out, *gradients):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(np.asarray(x)[:, padding], 0)


def test_too_short_for_the_layout_names_the_multiple():
    q = jnp.zeros((1, 4, 1, 4))
    with pytest.raises(ValueError, match=r"multiple of 2 \* 4 shards = 8, got seq_len=4"):
        farspan.attention(q, q, q, mask=CAUSAL, context=ring(4))
    with pytest.raises(ValueError, match="multiple of 8, got seq_len=4; pass segment_ids"):
        farspan.shard_sequence(q, ring(4))
    q, k, v = random(3, 1, 4, 1, 4)
    out = attend(q, k, v, ring(2))
    assert out.shape == (1, 4, 1, 4)
    assert relative_error(out, dense_attention(q, k, v, mask=CAUSAL)) < 1e-5


@pytest.mark.parametrize("length", [63, 2999, 5])
def test_any_length_is_padded_and_pads_change_nothing(length):
    q, k, v = random(3, 1, length, 2, 8)
    expected = dense_attention(q, k, v, mask=CAUSAL)
    placed = attend(q, k, v, ring(4))[:, :length]
    assert relative_error(placed, expected) < 1e-5
    inside = farspan.attention(q, k, v, mask=CAUSAL, context=ring(4, "contiguous"))
    assert relative_error(inside, expected) < 1e-5
    both_ways = farspan.attention(q, k, v, mask=farspan.Full(), context=ring(4, "contiguous"))
    assert relative_error(both_ways, dense_attention(q, k, v, mask=farspan.Full())) < 1e-5


def test_padding_without_segment_ids_is_refused_rather_than_attended_to():
    x = np.zeros((1, 6, 2, 4), np.float32)
    with pytest.raises(ValueError, match="pass segment_ids"):
        farspan.shard_sequence((x, x), ring(4))


def test_segment_ids_alone_equal_explicit_positions():
    case = AttentionCase(documents=(20, 30))
    q, k, v = case.inputs().tokens.values()
    positions = np.tile(np.arange(64, dtype=np.int32), (2, 1))
    context = usp()
    arrays = farspan.shard_sequence((q, k, v, case.segment_ids(), positions), context)

    @jax.jit
    def run(q, k, v, ids, positions):
        options = {"mask": CAUSAL, "segment_ids": ids, "context": context, "kernel": KERNEL}
        implied = farspan.attention(q, k, v, **options)
        return implied, farspan.attention(q, k, v, positions=positions, **options)

    implied, explicit = run(*arrays)
    np.testing.assert_array_equal(np.asarray(implied), np.asarray(explicit))


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "usp"])
def test_vmap_jit_and_eager_agree(strategy):
    mesh = farspan.make_mesh(cp_ring=2, cp_ulysses=2)
    context = farspan.ContextParallel(mesh, strategy, "zigzag")
    q, k, v = random(3, 3, 2, 32, 4, 8)

    def call(q, k, v):
        return (farspan.attention(q, k, v, mask=CAUSAL, context=context, kernel=KERNEL) ** 2).sum()

    run = jax.value_and_grad(call, (0, 1, 2))
    eager = [run(*x) for x in zip(q, k, v, strict=True)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *eager)
    for found in (jax.vmap(run)(q, k, v), jax.jit(jax.vmap(run))(q, k, v)):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(stacked), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_asymmetric_value_width_keeps_the_heads_of_the_query():
    for heads, kv_heads in ((4, 2), (4, 1), (4, 4)):
        for strategy in ("all_gather", "ulysses", "ring", "usp"):
            mesh = farspan.make_mesh(cp_ring=2, cp_ulysses=2)
            context = farspan.ContextParallel(mesh, strategy, "striped")
            case = AttentionCase(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=24, value_dim=16, batch=1
            )
            assert_parity(case, context)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses"), [(12, 6, 4), (6, 3, 2), (8, 2, 8), (16, 4, 8)]
)
def test_kv_heads_that_the_ulysses_degree_does_not_divide(heads, kv_heads, ulysses):
    """Copies of the least number of times; the gradients of all copies are summed."""
    context = farspan.ContextParallel(farspan.make_mesh(cp_ulysses=ulysses), "ulysses")
    assert_parity(AttentionCase(num_heads=heads, num_kv_heads=kv_heads, batch=1), context)


def test_any_number_of_documents_in_a_row():
    """There is no greatest number of segments: here every token is a document of its own."""
    case = AttentionCase(documents=(1,) * 64, batch=1)
    assert_parity(case, usp())
    q, k, v = case.inputs().tokens.values()
    out = attend(q, k, v, ring(4), segment_ids=case.segment_ids())
    np.testing.assert_allclose(out, np.repeat(v, 4, axis=2), rtol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_lengths_that_no_kernel_block_divides(layout):
    """160 tokens a shard in blocks of 128, packed; ten runs are equal to the bit."""
    context = farspan.ContextParallel(farspan.make_mesh(cp_ring=4), "ring", layout)
    case = AttentionCase(seq_len=640, documents=(300, 200, 77), batch=1, num_heads=4)
    kernel = farspan.XlaKernel(key_block=128)
    for row in attention_parity(case, context, kernel):
        assert row.ok, row
    q, k, v = case.inputs().tokens.values()
    ids = case.segment_ids()
    placement = farspan.place_rows(context, CAUSAL, ids)
    placed = farspan.shard_sequence((q, k, v, ids), context, placement)

    @jax.jit
    def run(q, k, v, ids):
        return farspan.attention(
            q, k, v, mask=CAUSAL, segment_ids=ids, context=context, placement=placement,
            kernel=kernel,
        )  # fmt: skip

    first = np.asarray(run(*placed))
    for _ in range(10):
        np.testing.assert_array_equal(np.asarray(run(*placed)), first)


def test_gradients_match_finite_differences():
    """The oracle's closed form, held against the definition of a derivative."""
    case = AttentionCase(
        seq_len=8, batch=1, num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4,
        documents=(5, 3), sinks=True, logits_soft_cap=2.0, alibi=True, dropout_rate=0.3,
    )  # fmt: skip
    inputs = case.inputs()
    arrays = [np.asarray(x, np.float64) for x in (*inputs.tokens.values(), inputs.weights["sinks"])]
    options = case.options() | inputs.labels

    def loss(q, k, v, sinks):
        out, lse = dense_attention(q, k, v, sinks=sinks, return_lse=True, **options)
        return (out * inputs.dout).sum() + (lse * inputs.dlse).sum()

    exact = farspan.testing.dense_attention_vjp(
        *arrays[:3], inputs.dout, inputs.dlse, sinks=arrays[3], **options
    )
    for which, gradient in enumerate(exact[2:]):
        flat = arrays[which].reshape(-1)
        for place in range(0, flat.size, max(1, flat.size // 7)):
            kept = flat[place]
            ends = []
            for step in (1e-6, -1e-6):
                flat[place] = kept + step
                ends.append(loss(*arrays))
            flat[place] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert abs(slope - gradient.reshape(-1)[place]) < 1e-7


def test_same_input_twice_is_bitwise_equal():
    case = AttentionCase(documents=(5, 23, 1, 28))
    context = usp()
    arrays = farspan.shard_sequence((*case.inputs().tokens.values(), case.segment_ids()), context)

    @jax.jit
    def run(q, k, v, ids):
        def loss(q, k, v):
            out = farspan.attention(q, k, v, mask=CAUSAL, segment_ids=ids, context=context)
            return (out**2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for x, y in zip(run(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


ZEROS = {"query": jnp.zeros((2, 8, 4, 8)), "key": jnp.zeros((2, 8, 2, 8))}
ZEROS["value"] = ZEROS["key"]
REFUSED = {
    "dims": ({"query": ZEROS["query"][0]}, r"must be \[B, S, heads, dim\]"),
    "length": ({"key": ZEROS["key"][:, :-1]}, "must agree in B, S, K and D"),
    "heads": ({"query": ZEROS["query"][:, :, :3]}, "H=3, K=2"),
    "dtype": ({"query": ZEROS["query"].astype(jnp.bfloat16)}, "query bfloat16, key float32"),
    "integers": ({name: x.astype(int) for name, x in ZEROS.items()}, "floating dtype"),
    "ids shape": ({"segment_ids": jnp.ones((2, 7), int)}, "segment_ids must be"),
    "ids dtype": ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers"),
    "positions": ({"positions": jnp.ones((8,), int)}, "positions must be integers"),
    "sinks": ({"sinks": jnp.ones((2,))}, r"sinks must be \[H\]"),
    "cap": ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive"),
    "unknown option": ({"softcap": 3.0}, "did you mean"),
    "no ranges": ({"mask": farspan.KeyRanges(1)}, "reads 1 ranges per query, got no key_ranges"),
    "needless ranges": ({"key_ranges": jnp.ones((2, 8, 1, 2), int)}, r"\[B, S, n, 2\] = \(2, 8, 0"),
    "slopes": ({"alibi_slopes": np.ones(3)}, r"alibi_slopes must be \[H\] = \(4,\), got \(3,\)"),
    "rate": ({"dropout_rate": 1.0, "dropout_seed": 0}, r"dropout_rate must be in \[0, 1\)"),
    "no seed": ({"dropout_rate": 0.1}, "needs an integer seed.*pass another dropout_seed"),
    "kernel": ({"kernel": "splish"}, "kernel must be one of"),
}


@pytest.fixture
def unchecked():
    """Without the tests' own check of annotations, so that the user's errors are seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_named(name):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        farspan.attention(**ZEROS | {"mask": CAUSAL} | change)


@pytest.mark.usefixtures("unchecked")
def test_traced_slopes_are_refused_rather_than_left_without_gradient():
    def loss(slopes):
        return farspan.attention(**ZEROS, mask=CAUSAL, alibi_slopes=slopes).sum()

    with pytest.raises(ValueError, match=r"slopes must be constants.*not differentiated"):
        jax.grad(loss)(jnp.ones(4))


@pytest.mark.usefixtures("unchecked")
def test_arrays_of_a_latent_must_agree():
    x = jnp.zeros((1, 8, 4, 12))
    good = [
        x,
        jnp.zeros((1, 8, 6)),
        jnp.zeros((1, 8, 4)),
        jnp.zeros((6, 4, 8)),
        jnp.zeros((6, 4, 5)),
    ]
    assert farspan.latent_attention(*good, mask=CAUSAL).shape == (1, 8, 4, 5)
    for place in range(5):
        wrong = [y[..., :-1] if n == place else y for n, y in enumerate(good)]
        if place == 4:
            wrong[4] = wrong[4][:, :-1]
        with pytest.raises(ValueError, match=r"latent_attention: .* must agree, got"):
            farspan.latent_attention(*wrong, mask=CAUSAL)
    with pytest.raises(ValueError, match="must share one floating dtype"):
        farspan.latent_attention(*good[:4], good[4].astype(jnp.bfloat16), mask=CAUSAL)


def test_impossible_combinations_are_refused_before_anything_runs():
    mesh = farspan.make_mesh(cp_ulysses=4)
    context = farspan.ContextParallel(mesh, "ulysses")
    q = jnp.zeros((1, 8, 6, 8))
    with pytest.raises(ValueError, match=r"degree of 1, 2, 3, 6, or strategy ring or all_gather"):
        farspan.attention(q, q, q, mask=CAUSAL, context=context)
    context = farspan.ContextParallel(farspan.make_mesh(data=2, cp_ring=2))
    with pytest.raises(ValueError, match="batch must be a multiple"):
        farspan.attention(q, q, q, mask=CAUSAL, context=context)


def test_context_names_are_checked_at_once():
    mesh = farspan.make_mesh(cp_ring=2)
    with pytest.raises(ValueError, match='did you mean "ring"'):
        farspan.ContextParallel(mesh, "rign")
    with pytest.raises(ValueError, match='did you mean "striped"'):
        farspan.ContextParallel(mesh, "ring", "stripe")
    plain = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="must have a context axis"):
        farspan.ContextParallel(plain)


def test_a_mesh_of_the_users_own():
    mesh = jax.make_mesh((2, 4), ("rows", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    context = farspan.ContextParallel(
        mesh, "ring", "striped", context_axes=("seq", "none"), batch_axes=("rows",)
    )
    assert_parity(AttentionCase(documents=(20, 30)), context)
