"""An attention layer as a program in one direction sends what the formulas say."""

import jax
import pytest

from farspan.context import ContextParallel
from farspan.dist import make_mesh
from farspan.plan.hlo import collectives
from farspan.testing.compiled import AttentionLayer, expected_collectives, lower_attention

SIZES = {"cp_ring": 2, "cp_ulysses": 2}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["usp", "all_gather"])
def test_one_direction_alone(strategy, direction):
    layer = {"batch": 1, "seq_len": 64, "num_kv_heads": 4}
    lowered = lower_attention(
        jax.devices(), strategy=strategy, direction=direction, sizes=SIZES, layer=layer,
        kernel="xla",
    )  # fmt: skip
    context = ContextParallel(make_mesh(**SIZES), strategy)
    whole = AttentionLayer(**layer, metadata=())
    assert collectives(lowered.compile().as_text()) == expected_collectives(
        context, whole, [direction]
    )
