"""A Llama-style decoder: plain functions over dataclass pytrees.

The model sees no devices. Whoever calls it hands over the functions (`Runtime`) in which tokens
meet each other or a parameter, and which therefore depend on how both are split.

Source: Llama, arXiv:2302.13971; Llama 3, arXiv:2407.21783.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Int

from farspan.models.config import DecoderConfig
from farspan.ops.linear import linear
from farspan.ops.norm import rms_norm
from farspan.ops.rope import apply_rope, rope_tables
from farspan.types import ATTENTION_NAMES, Leaf


@runtime_checkable
class AttentionFn(Protocol):
    """Causal attention over the whole row, of `[B, S, H, D]` and `[B, S, K, D]`."""

    def __call__(self, query: Array, key: Array, value: Array, *, window: int | None) -> Array:
        """Returns `[B, S, H, D]`; with a window, a query sees itself and `window - 1` before it."""
        ...


PROJECTIONS = {
    "query": "bsm,mhd->bshd",
    "key": "bsm,mkd->bskd",
    "value": "bsm,mkd->bskd",
    "out": "bshd,hdm->bsm",
    "gate": "bsm,mf->bsf",
    "up": "bsm,mf->bsf",
    "down": "bsf,fm->bsm",
}
"""What each matrix of a layer does, as an einsum of activations and matrix."""


def _project(name: str, x: Array, weight: Array) -> Array:
    return linear(PROJECTIONS[name], x, weight)


def _norm(eps: float, x: Array, weight: Array) -> Array:
    return rms_norm(x, weight, eps)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What the model is given to run with.

    Attributes:
      attention: Brings tokens together.
      embed: Looks tokens `[B, S]` up in the embedding `[V, M]`.
      project: Multiplies activations with a matrix of a layer, which is named as in `PROJECTIONS`.
      norm: Normalises activations: `norm(eps, x, weight)`.
      constrain: Applied to activations `[B, S, M]`: keeps them split over devices.
    """

    attention: AttentionFn
    embed: Callable[[Array, Array], Array] = lambda table, tokens: table[tokens]
    project: Callable[[str, Array, Array], Array] = _project
    norm: Callable[[float, Array, Array], Array] = _norm
    constrain: Callable[[Array], Array] = lambda x: x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """Parameters of decoder layers, stacked along a leading layer axis `L` in `Params`.

    Attributes:
      attention_norm: `[L, M]`.
      query: `[L, M, H, D]`.
      key: `[L, M, K, D]`.
      value: `[L, M, K, D]`.
      out: `[L, H, D, M]`.
      ffn_norm: `[L, M]`.
      gate: `[L, M, F]`.
      up: `[L, M, F]`.
      down: `[L, F, M]`.
    """

    attention_norm: Leaf
    query: Leaf
    key: Leaf
    value: Leaf
    out: Leaf
    ffn_norm: Leaf
    gate: Leaf
    up: Leaf
    down: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """Parameters of a decoder.

    Attributes:
      embedding: `[V, M]`.
      layers: All layers, stacked.
      final_norm: `[M]`.
      head: `[M, V]`, or None where the embedding serves as head, too.
    """

    embedding: Leaf
    layers: LayerParams
    final_norm: Leaf
    head: Leaf | None


HEAD_AXES = ("model", "vocab")
"""Names of the axes of the output head, tied or not."""


def logical_axes(config: DecoderConfig) -> Params:
    """Names of the axes of every parameter, for the table that shards them (`dist.sharding`)."""
    return Params(
        embedding=("vocab", "model"),
        layers=LayerParams(
            attention_norm=("layer", "norm"),
            query=("layer", "model", "heads", "head"),
            key=("layer", "model", "heads", "head"),
            value=("layer", "model", "heads", "head"),
            out=("layer", "heads", "head", "model"),
            ffn_norm=("layer", "norm"),
            gate=("layer", "model", "ffn"),
            up=("layer", "model", "ffn"),
            down=("layer", "ffn", "model"),
        ),
        final_norm=("norm",),
        head=None if config.tie_embeddings else HEAD_AXES,
    )


def init_params(config: DecoderConfig, rng: Array) -> Params:
    """Draws initial parameters.

    Args:
      config: The decoder's shape.
      rng: A PRNG key.

    Returns:
      Parameters of `config.param_dtype`: normal with deviation 0.02, those that write into the
      residual stream scaled down by `sqrt(2 * num_layers)`; norms are 1.
    """
    layers, dim, width = config.num_layers, config.model_dim, config.head_dim
    dtype = jnp.dtype(config.param_dtype)
    keys = iter(jax.random.split(rng, 9))
    into_stream = 0.02 / (2 * layers) ** 0.5

    def normal(*shape: int, scale: float = 0.02) -> Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    return Params(
        embedding=normal(config.vocab_size, dim),
        layers=LayerParams(
            attention_norm=jnp.ones((layers, dim), dtype),
            query=normal(layers, dim, config.num_heads, width),
            key=normal(layers, dim, config.num_kv_heads, width),
            value=normal(layers, dim, config.num_kv_heads, width),
            out=normal(layers, config.num_heads, width, dim, scale=into_stream),
            ffn_norm=jnp.ones((layers, dim), dtype),
            gate=normal(layers, dim, config.ffn_dim),
            up=normal(layers, dim, config.ffn_dim),
            down=normal(layers, config.ffn_dim, dim, scale=into_stream),
        ),
        final_norm=jnp.ones((dim,), dtype),
        head=None if config.tie_embeddings else normal(dim, config.vocab_size),
    )


def forward(
    params: Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    config: DecoderConfig,
    runtime: Runtime,
) -> Inexact[Array, "B S M"]:
    """Runs the decoder up to the final norm; `output_head` turns the result into logits.

    Args:
      params: Parameters.
      tokens: Token ids, in whatever order the row lies.
      positions: Place of each token in its document.
      config: The decoder's shape.
      runtime: Attention, and how arrays are split.

    Returns:
      Final hidden states of `config.dtype`.
    """
    tables = rope_tables(positions, config.head_dim, config.rope_theta)
    stream = runtime.constrain(runtime.embed(params.embedding, tokens).astype(config.dtype))

    def run_round(stream: Array, weights: LayerParams) -> Array:
        """Runs the layers of one round of the pattern of windows, `[layers, ...]`."""
        for index in range(len(weights.query)):
            layer = jax.tree.map(lambda x, index=index: x[index], weights)
            window = config.windows[index]
            stream = decoder_layer(layer, stream, tables, config, runtime, window)
        return stream

    length = len(config.windows)
    rounds, rest = divmod(config.num_layers, length)
    run = _with_remat(run_round, config)
    if config.scan_layers and rounds:
        whole = jax.tree.map(
            lambda x: x[: rounds * length].reshape(rounds, length, *x.shape[1:]), params.layers
        )
        stream, _ = lax.scan(lambda x, weights: (run(x, weights), None), stream, whole)
    else:
        for start in range(0, rounds * length, length):
            stream = run(stream, _layers(params.layers, start, start + length))
    if rest:
        stream = run(stream, _layers(params.layers, rounds * length, config.num_layers))
    return runtime.norm(config.norm_eps, stream, params.final_norm)


def _layers(stacked: LayerParams, start: int, stop: int) -> LayerParams:
    return jax.tree.map(lambda x: x[start:stop], stacked)


def output_head(params: Params) -> Float[Array, "M V"]:
    """Gives the matrix that turns final hidden states into logits."""
    return params.embedding.T if params.head is None else params.head


def decoder_layer(
    weights: LayerParams,
    stream: Inexact[Array, "B S M"],
    tables: tuple[Array, Array],
    config: DecoderConfig,
    runtime: Runtime,
    window: int | None = None,
) -> Inexact[Array, "B S M"]:
    """One layer: attention, then the feed-forward, each added to the stream.

    Args:
      weights: Parameters of this layer, without the layer axis.
      stream: The residual stream.
      tables: From `rope_tables`.
      config: The decoder's shape.
      runtime: Attention, and how activations are split.
      window: Tokens that a query sees, or None for all before it.

    Returns:
      The stream after the layer.
    """
    project = runtime.project
    x = runtime.norm(config.norm_eps, stream, weights.attention_norm)
    query = apply_rope(project("query", x, weights.query), tables)
    key = apply_rope(project("key", x, weights.key), tables)
    value = project("value", x, weights.value)
    attended = runtime.attention(query, key, value, window=window)
    stream = runtime.constrain(stream + project("out", attended, weights.out))
    x = runtime.norm(config.norm_eps, stream, weights.ffn_norm)
    gated = jax.nn.silu(project("gate", x, weights.gate)) * project("up", x, weights.up)
    return runtime.constrain(stream + project("down", gated, weights.down))


def _with_remat(
    layer: Callable[[Array, LayerParams], Array], config: DecoderConfig
) -> Callable[[Array, LayerParams], Array]:
    if config.remat_policy == "none":
        return layer
    policy = None
    if config.remat_policy == "save_attention":
        policy = jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not config.scan_layers)
