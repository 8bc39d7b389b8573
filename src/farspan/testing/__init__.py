"""What tests, benchmarks and `farspan verify` share."""

from farspan.testing.oracle import DenseResult, dense_attention, dense_attention_vjp
from farspan.testing.parity import AttentionCase, Parity, attention_parity, relative_error

__all__ = [
    "AttentionCase",
    "DenseResult",
    "Parity",
    "attention_parity",
    "dense_attention",
    "dense_attention_vjp",
    "relative_error",
]
