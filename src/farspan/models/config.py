"""The shape of a decoder. No JAX import, so that the command line can read it quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
      vocab_size: Rows of the embedding; at least the tokenizer's vocabulary.
      num_layers: Decoder layers.
      model_dim: Width of the residual stream.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; divides the query heads.
      head_dim: Width of one head; even.
      ffn_dim: Width of the feed-forward layer.
      rope_theta: Base of the rotary frequencies; raise it for longer contexts.
      sliding_window: Tokens that a query of a windowed layer sees, itself and those before it, as
        in Hugging Face's configurations; 0: every layer sees the whole document.
      sliding_window_pattern: With a window, every so many layers one sees the whole document, and
        the others the window: 6 as in Gemma 3, 2 as in GPT-OSS; 0: all layers are windowed.
      norm_eps: Added to the mean square in RMSNorm.
      tie_embeddings: Use the embedding as output head as well.
      dtype: Type of activations and matrix products; norms, softmax and the loss use float32.
      param_dtype: Type of the stored parameters.
      scan_layers: Compile one layer and loop over it, rather than every layer by itself.
      remat_policy: What backward recomputes: "none" keeps every activation, "full" keeps the input
        of each layer only (with a sliding_window_pattern, of each round of the pattern),
        "save_attention" keeps the output of attention as well, so that attention runs once.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_theta: float = 10_000.0
    sliding_window: int = 0
    sliding_window_pattern: int = 0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_layers: bool = True
    remat_policy: Literal["none", "full", "save_attention"] = "none"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "ffn_dim")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                "head_dim must be even and at least 2 (rotary positions turn pairs), "
                f"got head_dim={self.head_dim}; use {max(2, self.head_dim + 1)}"
            )
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                "num_kv_heads must divide num_heads, got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; "
                f"use num_kv_heads={', '.join(map(str, fits))}"
            )
        for name in ("sliding_window", "sliding_window_pattern"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.sliding_window_pattern and not self.sliding_window:
            raise ValueError(
                "sliding_window_pattern says which layers have a window, got "
                f"sliding_window_pattern={self.sliding_window_pattern} with sliding_window=0; set "
                "sliding_window to the tokens that a query sees, or the pattern to 0"
            )
        if self.norm_eps <= 0 or self.rope_theta <= 0:
            raise ValueError(
                "norm_eps and rope_theta must be positive, got "
                f"norm_eps={self.norm_eps}, rope_theta={self.rope_theta}"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer of one round of the pattern; None: it sees the whole document.

        Layer `i` has the window `windows[i % len(windows)]`.
        """
        if not self.sliding_window:
            return (None,)
        if not self.sliding_window_pattern:
            return (self.sliding_window,)
        return (*[self.sliding_window] * (self.sliding_window_pattern - 1), None)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        attention = self.model_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        per_layer = attention + 3 * self.model_dim * self.ffn_dim + 2 * self.model_dim
        tables = 1 if self.tie_embeddings else 2
        embedding = tables * self.vocab_size * self.model_dim
        return self.num_layers * per_layer + embedding + self.model_dim

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: no norms, the output head once."""
        norms = self.num_layers * 2 * self.model_dim + self.model_dim
        lookup = 0 if self.tie_embeddings else self.vocab_size * self.model_dim
        return self.num_parameters - norms - lookup
