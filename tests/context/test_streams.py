"""Rings whose visitors travel in parts, each in an order of its own."""

import pytest

import farspan
from farspan.testing import AttentionCase, attention_parity

KERNEL = farspan.XlaKernel(rows=16, key_block=8)


@pytest.mark.parametrize(
    ("streams", "fields"),
    [
        (4, {"num_kv_heads": 8}),  # queries travel in backward
        (6, {"documents": (20, 30), "sinks": True}),
        (6, {"latent": (12, 8), "head_dim": 24, "dtype": "bfloat16"}),
    ],
)
def test_streams_over_rings_that_share_no_link_equal_the_oracle(streams, fields):
    context = farspan.ContextParallel(
        farspan.make_mesh(cp_ring=8), "ring", "zigzag", ring_streams=streams
    )
    for row in attention_parity(AttentionCase(seq_len=96, **fields), context, KERNEL):
        assert row.ok, row


def test_what_cannot_be_cut_into_streams_is_refused():
    mesh = farspan.make_mesh(cp_ring=4)
    inputs = AttentionCase(seq_len=64).inputs().tokens
    arrays = [inputs[name] for name in "qkv"]

    def attend(streams, strategy="ring", stop=64):
        context = farspan.ContextParallel(mesh, strategy, ring_streams=streams)
        return farspan.attention(
            *(x[:, :stop] for x in arrays), mask=farspan.Causal(), context=context
        )

    with pytest.raises(ValueError, match=r"streams must be.*got 4 with 1.*use 2 streams or fewer"):
        attend(4)
    with pytest.raises(ValueError, match=r"only ring and usp.*got strategy=all_gather"):
        attend(2, "all_gather")
    with pytest.raises(ValueError, match="ring_streams must be at least 1, got 0"):
        attend(0)
    with pytest.raises(ValueError, match=r"must be a multiple of 24.*got seq_len=40"):
        attend(3, stop=40)
