"""The package itself: quick to import, and everything it offers can be reached."""

import subprocess
import sys

import pytest

import farspan


@pytest.mark.smoke
def test_import_loads_no_jax():
    code = "import sys, farspan; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", farspan.__all__)
def test_every_public_name_exists_and_is_described(name):
    assert getattr(farspan, name).__doc__


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        farspan.atention  # noqa: B018


def test_the_readmes_example_in_one_piece():
    """Masks, mesh, context, sharding and back, as the README shows them."""
    import numpy as np

    mesh = farspan.make_mesh(cp_ring=4, cp_ulysses=2)
    context = farspan.ContextParallel(mesh, strategy="usp", layout="zigzag")
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, 64, 4, 8)).astype(np.float32)
    k, v = draw.standard_normal((2, 1, 64, 2, 8)).astype(np.float32)
    ids = np.repeat(np.array([[1, 2]], np.int32), 32, axis=1)
    mask = farspan.Causal() & farspan.SlidingWindow(left=15, right=0)
    q_, k_, v_, ids_ = farspan.shard_sequence((q, k, v, ids), context)
    out = farspan.attention(q_, k_, v_, mask=mask, segment_ids=ids_, context=context)
    assert out.sharding.is_equivalent_to(context.sharding(4), 4)
    found = farspan.unshard_sequence(out, context)
    expected = farspan.testing.dense_attention(q, k, v, mask=mask, segment_ids=ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)
