"""Muon: each layer's matrix is made orthogonal by itself, on any split, and the rest is AdamW's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from farspan.train.config import OptimizerConfig
from farspan.train.muon import Place, is_hidden_matrix, orthogonal
from farspan.train.optimizer import build_optimizer

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("fsdp", "cp"))
BOTH = ("fsdp", "cp")


def place(axes: tuple[str, ...], *spec: str | tuple[str, ...] | None) -> Place:
    return Place(axes, NamedSharding(MESH, PartitionSpec(*spec)))


def draw(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def newton_schulz(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Five steps of the published iteration, in float64, on one matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("layer", "model", "heads", "head"), (3, 16, 2, 12), (None, BOTH)),
        (("layer", "heads", "head", "model"), (3, 2, 4, 16), (None, None, None, BOTH)),
        (("layer", "model", "ffn"), (16, 8, 20), (None, "cp")),
        (("layer", "ffn", "model"), (2, 20, 8), ()),
    ],
)
def test_each_layers_matrix_is_orthogonalised_by_itself(
    axes: tuple[str, ...], shape: tuple[int, ...], spec: tuple[str, ...]
) -> None:
    """Whether layers or devices are more; heads lie side by side in one matrix."""
    x = draw(*shape)
    where = place(axes, *spec, *[None] * (len(shape) - len(spec)))
    assert where.is_hidden_matrix
    found = jax.jit(lambda x: orthogonal(x, where))(jax.device_put(x, where.sharding))
    assert found.sharding.is_equivalent_to(where.sharding, x.ndim)
    rows = shape[1] if axes[1] == "model" else int(np.prod(shape[1:-1]))
    for layer, result in zip(x.astype(np.float64), np.asarray(found), strict=True):
        matrix = newton_schulz(layer.reshape(rows, -1))
        scale = 0.2 * max(matrix.shape) ** 0.5
        np.testing.assert_allclose(result, scale * matrix.reshape(layer.shape), atol=2e-4)
        singular = np.linalg.svd(result.reshape(rows, -1) / scale, compute_uv=False)
        assert 0.5 < singular.min() <= singular.max() < 1.5


def test_a_gradient_of_zero_gives_an_update_of_zero() -> None:
    where = place(("layer", "model", "ffn"), None, BOTH, None)
    assert not np.asarray(orthogonal(jnp.zeros((2, 8, 4)), where)).any()


def test_only_matrices_of_layers_are_hidden() -> None:
    assert not is_hidden_matrix(("vocab", "model"))
    assert not is_hidden_matrix(("model", "vocab"))
    assert not is_hidden_matrix(("layer", "norm"))
    assert not is_hidden_matrix(("norm",))


def test_embeddings_and_norms_move_as_under_adamw_and_matrices_by_their_momentum() -> None:
    places = {
        "embedding": place(("vocab", "model"), None, "cp"),
        "norm": place(("layer", "norm")),
        "up": place(("layer", "model", "ffn"), None, "cp", None),
    }
    params = {"embedding": draw(6, 8), "norm": draw(2, 8), "up": draw(2, 8, 12)}
    params = {name: jax.device_put(x, places[name].sharding) for name, x in params.items()}
    config = OptimizerConfig(weight_decay=0.1, clip_norm=0.0, beta1=0.8)
    adamw = build_optimizer(config)
    muon = build_optimizer(
        OptimizerConfig("muon", weight_decay=0.1, clip_norm=0.0, beta1=0.8), places
    )
    state, other = muon.init(params), adamw.init(params)
    assert optax.tree.get(state, "mu")["up"] == optax.MaskedNode()
    update, momentum = jax.jit(muon.update), 0.0
    for step in range(2):
        gradients = {name: draw(*x.shape, seed=step) for name, x in params.items()}
        momentum = 0.8 * momentum + gradients["up"]
        found, state = update(gradients, state, params)
        expected, other = adamw.update(gradients, other, params)
    for name in ("embedding", "norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    ahead = orthogonal(jnp.asarray(0.8 * momentum + gradients["up"]), places["up"])
    np.testing.assert_allclose(found["up"], -ahead - 0.1 * params["up"], atol=1e-5)
