"""The run of the quick start."""

from __future__ import annotations

from farspan.models.config import DecoderConfig
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig


def quickstart() -> TrainConfig:
    """A byte-level Llama-style decoder; 8 devices, ring 2 x ulysses 4, share each row.

    Sized for two CPU cores, where the devices are virtual.
    """
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=258,
            num_layers=2,
            model_dim=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn_dim=768,
        ),
        data=DataConfig(data="stdlib", tokenizer="byte", seq_len=8192, packing="best_fit"),
        parallel=ParallelConfig(
            context_parallel_strategy="usp",
            context_parallel_size=8,
            context_parallel_load_balance="zigzag",
        ),
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=5),
        steps=40,
        batch_size=1,
        checkpoint_every=20,
        log_every=5,
    )
