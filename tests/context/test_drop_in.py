"""The drop-in: what other libraries' attention does, on a split sequence, or a refusal."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import farspan
from farspan.context import drop_in
from farspan.testing import dense_attention, relative_error

CAUSAL = farspan.Causal()
DOCUMENTS = np.repeat(np.array([[1, 2, 3, 0], [1, 2, 2, 2]], np.int32), [9, 12, 7, 4], axis=1)


def ring(degree=4, layout="zigzag"):
    return farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", layout)


def ulysses(degree=2, layout="striped"):
    return farspan.ContextParallel(farspan.make_mesh(cp_ulysses=degree), "ulysses", layout)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(batch=(2,), seq_len=32, heads=4, kv_heads=2, dim=8):
    return (
        random(*batch, seq_len, heads, dim),
        *random(2, *batch, seq_len, kv_heads, dim, seed=1),
    )


def with_gradients(function, arrays):
    """Output and gradients under jit."""

    @jax.jit
    def call(arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(jnp.cos(out))

    return call(arrays)


def assert_same(context, expected_function, function, arrays=None):
    """Holds the drop-in on a split sequence against a function on a whole one."""
    arrays = qkv() if arrays is None else arrays
    expected = with_gradients(expected_function, arrays)
    found = with_gradients(function, farspan.shard_sequence(arrays, context))
    for x, y in zip(farspan.unshard_sequence(found, context), expected, strict=True):
        assert relative_error(x, y) < 1e-5


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (ring, {"is_causal": True}),
        (ring, {"local_window_size": 5}),
        (ring, {"is_causal": True, "local_window_size": 5, "scale": 0.2}),
        (ulysses, {"is_causal": True, "scale": 0.2}),
        (ulysses, {"local_window_size": (6, 2)}),
    ],
)
def test_the_arguments_of_jax_mean_what_they_mean_there(make, arguments):
    context = make()
    assert_same(
        context,
        functools.partial(jax.nn.dot_product_attention, **arguments),
        functools.partial(farspan.attention_fn(context), **arguments),
    )


@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_any_number_of_batch_axes_and_the_residual_as_in_jax(batch):
    arrays = qkv(batch, seq_len=8)
    flat = [x.reshape(-1, *x.shape[-3:]) for x in arrays]
    function = farspan.attention_fn(None)
    options = {"is_causal": True, "return_residual": True}
    found = jax.jit(functools.partial(function, **options))(*arrays)
    expected = jax.nn.dot_product_attention(*flat, **options)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == (*batch, *y.shape[1:])
        assert relative_error(x, y.reshape(x.shape)) < 1e-5
    ids = np.ones((*batch, 8), np.int32)
    same = function(*arrays, is_causal=True, segment_ids=ids, positions=ids.cumsum(-1))
    assert relative_error(same, found[0]) < 1e-5


def test_the_residual_is_not_differentiated():
    def total(query):
        _, residual = farspan.attention_fn(None)(query, key, value, return_residual=True)
        return residual.sum()

    query, key, value = qkv(seq_len=8)
    np.testing.assert_array_equal(jax.grad(total)(query), 0)


def test_the_call_can_only_narrow_the_mask():
    context, arrays = ring(), qkv()
    mask = farspan.Chunked(20)
    function = farspan.attention_fn(context, mask)
    split = farspan.shard_sequence(arrays, context)
    out = jax.jit(functools.partial(function, is_causal=True, local_window_size=(7, 7)))(*split)
    mask &= CAUSAL & farspan.SlidingWindow(7, 0)
    assert (
        relative_error(farspan.unshard_sequence(out, context), dense_attention(*arrays, mask=mask))
        < 1e-5
    )


@pytest.mark.parametrize(
    ("mask", "arguments", "expected"),
    [
        (farspan.Full(), {}, farspan.Full()),
        (farspan.Full(), {"is_causal": True}, CAUSAL),
        (CAUSAL, {"is_causal": True}, CAUSAL),
        (farspan.SlidingWindow(3, 0), {"is_causal": True}, farspan.SlidingWindow(3, 0)),
        (farspan.SlidingWindow(3, 0), {"local_window_size": 4}, farspan.SlidingWindow(3, 0)),
        (CAUSAL, {"local_window_size": 4}, CAUSAL & farspan.SlidingWindow(4, 4)),
        (farspan.PrefixLM(5), {"is_causal": True}, farspan.PrefixLM(5) & CAUSAL),
    ],
)
def test_a_mask_said_twice_is_the_mask_that_a_placement_knows(
    monkeypatch, mask, arguments, expected
):
    masks = []

    def attention(query, key, value, *, mask, **options):
        masks.append(mask)
        return farspan.attention(query, key, value, mask=mask, **options)

    monkeypatch.setattr(drop_in, "attention", attention)
    farspan.attention_fn(None, mask)(*qkv(seq_len=8), **arguments)
    assert masks == [expected]


def test_what_comes_with_a_batch_goes_with_the_call():
    """Documents, their balanced placement and sinks; soft cap and slopes are options."""
    context = ring(layout="balanced")
    arrays, sinks = qkv(), random(4)
    placement = farspan.place_rows(context, CAUSAL, DOCUMENTS)
    options = {"logits_soft_cap": 2.0, "alibi_slopes": (0.5, 0.25, 0.1, 0.0)}
    function = farspan.attention_fn(context, CAUSAL, **options)
    *split, ids = farspan.shard_sequence((*arrays, DOCUMENTS), context, placement)
    out = jax.jit(function)(*split, segment_ids=ids, placement=placement, sinks=sinks)
    expected = dense_attention(*arrays, mask=CAUSAL, segment_ids=DOCUMENTS, sinks=sinks, **options)
    out = farspan.unshard_sequence(out, context, placement=placement)
    assert relative_error(out, expected) < 1e-5


def test_what_a_call_says_goes_before_the_options():
    function = farspan.attention_fn(None, CAUSAL, scale=9.0, logits_soft_cap=9.0)
    arrays = qkv(seq_len=8)
    out = function(*arrays, scale=0.3, logits_soft_cap=1.5)
    expected = dense_attention(*arrays, mask=CAUSAL, scale=0.3, logits_soft_cap=1.5)
    assert relative_error(out, expected) < 1e-5


def test_vmap_gives_what_a_batch_gives():
    context = ring(2)
    function = functools.partial(farspan.attention_fn(context), is_causal=True)
    arrays = farspan.shard_sequence(qkv(), context)
    one_by_one = jax.vmap(function)(*(x[:, None] for x in arrays))
    np.testing.assert_allclose(one_by_one[:, 0], function(*arrays), atol=1e-6)


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        (("float32", "float32", "float32"), "bfloat16"),
        (("bfloat16", "bfloat16", "bfloat16"), "float32"),
        (("bfloat16", "float32", "bfloat16"), None),
        (("bfloat16", "bfloat16", "bfloat16"), None),
    ],
)
def test_types_promote_as_in_flax(types, dtype):
    arrays = [
        jnp.asarray(x, name) for x, name in zip(qkv(seq_len=8, kv_heads=4), types, strict=True)
    ]
    out = farspan.attention_fn(None)(*arrays, dtype=dtype, precision="default")
    expected = nnx.dot_product_attention(*arrays, dtype=dtype)
    assert out.dtype == expected.dtype
    tolerance = 1e-2 if out.dtype == jnp.bfloat16 else 1e-5
    assert relative_error(out.astype(np.float32), expected.astype(np.float32)) < tolerance


def test_dropout_draws_its_seed_from_the_key():
    function, arrays = farspan.attention_fn(None, CAUSAL), qkv(seq_len=8)
    key = jax.random.key(3)
    arguments = {"dropout_rng": key, "dropout_rate": 0.5, "broadcast_dropout": False}
    found = jax.jit(functools.partial(function, **arguments))(*arrays)
    seed = jax.random.bits(key, (), jnp.uint32)
    expected = farspan.attention(*arrays, mask=CAUSAL, dropout_rate=0.5, dropout_seed=seed)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    arguments["dropout_rng"] = jax.random.key(4)
    assert np.abs(function(*arrays, **arguments) - expected).max() > 0.1
    without = function(*arrays, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(without, function(*arrays))
    with pytest.raises(ValueError, match=r"needs a key, got dropout_rng=None; pass dropout_rng"):
        function(*arrays, dropout_rate=0.5)
    with pytest.raises(NotImplementedError, match="alone, got broadcast_dropout=True; pass broad"):
        function(*arrays, dropout_rate=0.5, dropout_rng=key)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("bias", np.zeros((1, 1, 8, 8), np.float32), r"float32 \(1, 1, 8, 8\); use alibi_slopes"),
        ("mask", np.ones((1, 1, 8, 8), bool), r"bool \(1, 1, 8, 8\); pass none: attention_fn\("),
        ("mask", CAUSAL, r"Causal; pass none: attention_fn\(context, mask=farspan.Causal\(\)\)"),
        ("query_seq_lengths", np.array([5, 8]), r"int64 \(2,\); pass segment_ids"),
        ("key_value_seq_lengths", [5, 8], "list; pass segment_ids"),
        ("precision", "highest", "highest; leave it out; jax.default_matmul_precision"),
        ("precision", jax.lax.Precision.HIGH, "HIGH; leave it out"),
        ("implementation", "cudnn", r"cudnn; leave it out, and choose with attention_fn\(.*kernel"),
        ("implementation", ("triton", "xla"), r"\('triton', 'xla'\); leave it out"),
        ("q_sharding", ring(2).sharding(4), "NamedSharding; leave it out"),
        ("input_positions", np.zeros((2, 8), int), r"int64 \(2, 8\); rotate query and key"),
        ("qk_attn_weights_einsum", jnp.einsum, "function; leave it out"),
        ("attn_weights_value_einsum", jnp.einsum, "function; leave it out"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name, value, found):
    function, arrays = farspan.attention_fn(ring(2)), qkv(seq_len=8)
    with pytest.raises(
        NotImplementedError, match=f"^attention_fn: {name} must not be given, for .*; got {found}"
    ):
        jax.jit(functools.partial(function, **{name: value}))(*arrays)
    assert function(*arrays, **{name: None}).shape == arrays[0].shape


@pytest.mark.parametrize(
    ("name", "meant"), [("segment_id", "segment_ids"), ("is_casual", "is_causal")]
)
def test_names_that_nobody_knows_are_refused(name, meant):
    with pytest.raises(ValueError, match=rf"got '{name}'; did you mean \"{meant}\"\?"):
        farspan.attention_fn(None)(*qkv(seq_len=8), **{name: True})


def test_keys_of_another_sequence_are_refused():
    query, key, value = qkv(seq_len=8)
    with pytest.raises(
        NotImplementedError, match=r"same tokens.*got \(2, 1, 4, 8\), \(2, 8, 2, 8\)"
    ):
        farspan.attention_fn(None)(query[:, :1], key, value)


def test_equal_choices_are_equal_so_that_jit_compiles_once():
    context = ring(2)
    make = functools.partial(farspan.attention_fn, context, CAUSAL)
    assert make(alibi_slopes=np.ones(2)) == make(alibi_slopes=[1.0, 1.0])
    assert hash(make()) == hash(make())
    assert make(scale=1.0) != make()


def layer(attention_fn, **options):
    return nnx.MultiHeadAttention(
        4, 16, num_kv_heads=2, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options
    )


def loss_and_gradients(module, x, bind, **arguments):
    """Of an NNX module whose attention functions `bind` replaces for this call alone."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def of(params):
        merged = nnx.merge(graph, params, rest)
        for _, inner in nnx.iter_modules(merged):
            if isinstance(inner, nnx.MultiHeadAttention):
                inner.attention_fn = bind(inner.attention_fn)
        return jnp.cos(merged(x, **arguments)).mean()

    return jax.value_and_grad(of)(params)


def test_documents_reach_the_layers_of_flax_nnx():
    context, x = ring(), random(2, 32, 16)
    pairs = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None]
    real = (DOCUMENTS != 0)[..., None]
    stock = loss_and_gradients(
        layer(nnx.dot_product_attention),
        x * real,
        lambda function: (
            lambda *arrays, **arguments: function(*arrays, **arguments) * real[..., None]
        ),
        mask=pairs,
        is_causal=True,
    )
    x, ids = farspan.shard_sequence((x, DOCUMENTS), context)
    function = farspan.attention_fn(context)
    found = loss_and_gradients(
        layer(function), x, lambda inner: functools.partial(inner, segment_ids=ids), is_causal=True
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(stock), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_flax_nnx_drops_out_with_its_own_keys_and_is_refused_what_cannot_be():
    x = random(1, 8, 16)
    function = farspan.attention_fn(None, CAUSAL)
    module = layer(function, dropout_rate=0.5, broadcast_dropout=False)
    first, second = (module(x, deterministic=False) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(module(x, deterministic=True), layer(function)(x))
    with pytest.raises(NotImplementedError, match=r"module must not be given.*sow_weights=False"):
        layer(function)(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match="pass broadcast_dropout=False"):
        layer(function, dropout_rate=0.5)(x, deterministic=False)
    with pytest.raises(NotImplementedError, match="mask must not be given"):
        layer(function)(x, mask=nnx.make_causal_mask(x[..., 0]))
    decoder = layer(function)
    decoder.init_cache((1, 8, 16))
    with pytest.raises(NotImplementedError, match="decode with a cache"):
        decoder(x[:, :1], decode=True)


def test_flax_linen_takes_it_too():
    context, x = ulysses(), random(2, 32, 16)

    def module(function):
        return flax.linen.MultiHeadDotProductAttention(4, attention_fn=function)

    stock = module(flax.linen.dot_product_attention)
    params = stock.init(jax.random.key(0), x)
    same = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None]
    causal = same & np.tri(32, dtype=bool)
    expected = stock.apply(params, x, mask=causal)
    x, ids = farspan.shard_sequence((x, DOCUMENTS), context)
    function = farspan.attention_fn(context, CAUSAL)

    @jax.jit
    def apply(params, x, ids):
        return module(functools.partial(function, segment_ids=ids)).apply(params, x)

    found = farspan.unshard_sequence(apply(params, x, ids), context)
    real = DOCUMENTS != 0
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
    with pytest.raises(NotImplementedError, match="module must not be given"):
        module(function).apply(params, x, sow_weights=True)


def test_rotary_embedding_goes_around_it():
    """As the README of the examples shows it: by the place in the text, wherever the token lies."""
    context = ring()
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (2, 32))

    def rotary(attention_fn, query, key, value, *, input_positions, **arguments):
        angles = input_positions[..., None, None] / 10000.0 ** (jnp.arange(4) / 4)

        def turn(x):
            first, second = jnp.split(x, 2, axis=-1)
            cos, sin = jnp.cos(angles), jnp.sin(angles)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        return attention_fn(turn(query), turn(key), value, **arguments)

    bind = functools.partial(functools.partial, is_causal=True)
    split = farspan.shard_sequence(positions, context)
    assert_same(
        context,
        bind(rotary, jax.nn.dot_product_attention, input_positions=positions),
        bind(rotary, farspan.attention_fn(context), input_positions=split),
    )
