"""A Llama-style decoder: plain functions over dataclass pytrees.

The model sees no devices. Whoever calls it hands over three functions (`Runtime`): attention, how
activations are kept split, and how a layer's parameters are fetched.

Source: Llama, arXiv:2302.13971; Llama 3, arXiv:2407.21783.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

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
    """Attention over the whole row, of `[B, S, H, D]` and `[B, S, K, D]`."""

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        """Returns `[B, S, H, D]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What the model is given to run with.

    Attributes:
      attention: Brings tokens together.
      embed: Looks tokens `[B, S]` up in the embedding `[V, M]`.
      constrain: Applied to activations `[B, S, M]`: keeps them split over devices.
      fetch: Given the name of a field of `Params` and that field (of `layers`, one layer of it),
        right before use: gathers what is split over devices.
    """

    attention: AttentionFn
    embed: Callable[[Array, Array], Array] = lambda table, tokens: table[tokens]
    constrain: Callable[[Array], Array] = lambda x: x
    fetch: Callable[[str, Any], Any] = lambda _, weights: weights


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
        head=None if config.tie_embeddings else ("model", "vocab"),
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

    def fetch_and_run(stream: Array, weights: LayerParams) -> Array:
        return decoder_layer(runtime.fetch("layers", weights), stream, tables, config, runtime)

    layer = _with_remat(fetch_and_run, config)
    if config.scan_layers:
        stream, _ = lax.scan(lambda x, weights: (layer(x, weights), None), stream, params.layers)
    else:
        for index in range(config.num_layers):
            stream = layer(stream, jax.tree.map(lambda x, index=index: x[index], params.layers))
    return rms_norm(stream, runtime.fetch("final_norm", params.final_norm), config.norm_eps)


def output_head(params: Params) -> Float[Array, "M V"]:
    """Gives the matrix that turns final hidden states into logits."""
    return params.embedding.T if params.head is None else params.head


def decoder_layer(
    weights: LayerParams,
    stream: Inexact[Array, "B S M"],
    tables: tuple[Array, Array],
    config: DecoderConfig,
    runtime: Runtime,
) -> Inexact[Array, "B S M"]:
    """One layer: attention, then the feed-forward, each added to the stream.

    Args:
      weights: Parameters of this layer, without the layer axis.
      stream: The residual stream.
      tables: From `rope_tables`.
      config: The decoder's shape.
      runtime: Attention, and how activations are split.

    Returns:
      The stream after the layer.
    """
    x = rms_norm(stream, weights.attention_norm, config.norm_eps)
    query = apply_rope(linear("bsm,mhd->bshd", x, weights.query), tables)
    key = apply_rope(linear("bsm,mkd->bskd", x, weights.key), tables)
    value = linear("bsm,mkd->bskd", x, weights.value)
    attended = runtime.attention(query, key, value)
    stream = runtime.constrain(stream + linear("bshd,hdm->bsm", attended, weights.out))
    x = rms_norm(stream, weights.ffn_norm, config.norm_eps)
    gate = jax.nn.silu(linear("bsm,mf->bsf", x, weights.gate))
    up = linear("bsm,mf->bsf", x, weights.up)
    return runtime.constrain(stream + linear("bsf,fm->bsm", gate * up, weights.down))


def _with_remat(
    layer: Callable[[Array, LayerParams], Array], config: DecoderConfig
) -> Callable[[Array, LayerParams], Array]:
    if config.remat_policy == "none":
        return layer
    policy = None
    if config.remat_policy == "save_attention":
        policy = jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not config.scan_layers)
