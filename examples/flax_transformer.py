"""A stock Flax transformer, made context-parallel by one argument, beside itself on one device.

    python examples/flax_transformer.py
    python examples/flax_transformer.py --strategy ring --layout striped --seq-len 2048 --steps 20

Both models start from the same parameters and see the same data. Each step prints the loss of
both, and the greatest difference between any two entries of their gradients. Where there is no
accelerator, the sequence is split over 8 virtual CPU devices. Needs flax and optax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import farspan
from farspan.dist import ensure_devices

VOCABULARY = 64
WIDTH = 64
HEADS = 8
LAYERS = 2


class Block(nnx.Module):
    """Attention and a feed-forward layer: nothing here knows of devices."""

    def __init__(self, attention_fn: Callable[..., jax.Array], rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, attention_fn=attention_fn, rngs=rngs
        )
        self.feed_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.feed_norm(x))))


class Transformer(nnx.Module):
    """A decoder with learned positions."""

    def __init__(self, seq_len: int, attention_fn: Callable[..., jax.Array]) -> None:
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(seq_len, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention_fn, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        # A token's position comes with it: in a split row it is not the place in the array.
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Batch(NamedTuple):
    """Integers `[B, S]`, all in one order: that of the text, or that of a layout."""

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    labels: jax.Array | np.ndarray


def make_batch(seq_len: int) -> Batch:
    """Rows that repeat a random pattern, so that there is something far back to attend to."""
    pattern = np.random.default_rng(0).integers(0, VOCABULARY, (2, seq_len // 4), np.int32)
    text = np.tile(pattern, 5)[:, : seq_len + 1]
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (2, seq_len))
    # Labels are shifted here, in the order of the text, never after the row is put in order.
    return Batch(text[:, :-1], positions, text[:, 1:])


def loss_of(model: Transformer, batch: Batch) -> jax.Array:
    """Mean over all tokens, whatever order they lie in."""
    logits = model(batch.tokens, batch.positions)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


@nnx.jit
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, batch: Batch
) -> tuple[jax.Array, nnx.State]:
    """One step; returns the loss and the gradients."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss, gradients


def compare(
    context: farspan.ContextParallel, seq_len: int, steps: int
) -> Iterator[tuple[float, float, float]]:
    """Trains both models; yields (loss, context-parallel loss, gradient difference) per step."""
    batch = make_batch(seq_len)
    stock = Transformer(seq_len, attention_fn=nnx.dot_product_attention)
    stock_optimizer = nnx.Optimizer(stock, optax.adam(3e-3), wrt=nnx.Param)

    split = Transformer(seq_len, attention_fn=farspan.attention_fn(context))  # the one argument
    everywhere = NamedSharding(context.mesh, PartitionSpec())
    nnx.update(split, jax.device_put(nnx.state(split), everywhere))
    split_optimizer = nnx.Optimizer(split, optax.adam(3e-3), wrt=nnx.Param)
    # Tokens, positions and labels are put in order and on the devices together, outside jit.
    split_batch = farspan.shard_sequence(batch, context)

    for _ in range(steps):
        loss, gradients = train_step(stock, stock_optimizer, batch)
        split_loss, split_gradients = train_step(split, split_optimizer, split_batch)
        differences = jax.tree.map(
            lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), gradients, split_gradients
        )
        yield float(loss), float(split_loss), float(max(jax.tree.leaves(differences)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and prints a line per step."""
    parser = argparse.ArgumentParser(description="A stock Flax model, context-parallel.")
    parser.add_argument("--strategy", default="usp", help="all_gather, ulysses, ring or usp")
    parser.add_argument("--layout", default="zigzag", help="contiguous, zigzag or striped")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens per row, 16 or a multiple")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args(arguments)

    ensure_devices(8)
    mesh = farspan.make_mesh(cp_ring=4, cp_ulysses=2)
    context = farspan.ContextParallel(mesh, given.strategy, given.layout)
    print(f"{given.seq_len} tokens per row over {mesh.size} devices: {context.split}")
    print("step   loss on one device   loss context-parallel   greatest gradient difference")
    rows = compare(context, given.seq_len, given.steps)
    for step, (loss, split_loss, difference) in enumerate(rows):
        print(f"{step:4}   {loss:18.7f}   {split_loss:21.7f}   {difference:28.1e}")


if __name__ == "__main__":
    main()
