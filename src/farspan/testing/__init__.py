"""What tests, benchmarks and `farspan verify` share."""

from farspan.testing.oracle import DenseResult, dense_attention, dense_attention_vjp

__all__ = ["DenseResult", "dense_attention", "dense_attention_vjp"]
