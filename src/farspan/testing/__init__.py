"""What tests, benchmarks and `farspan verify` share."""

from farspan.testing.cases import AttentionCase, Inputs
from farspan.testing.oracle import DenseResult, dense_attention, dense_attention_vjp
from farspan.testing.parity import (
    Parity,
    attention_parity,
    place_case,
    relative_error,
    run_attention,
)

__all__ = [
    "AttentionCase",
    "DenseResult",
    "Inputs",
    "Parity",
    "attention_parity",
    "dense_attention",
    "dense_attention_vjp",
    "place_case",
    "relative_error",
    "run_attention",
]
