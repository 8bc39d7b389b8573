"""Runs of the Llama architecture at real size."""

from __future__ import annotations

from farspan.models.config import DecoderConfig
from farspan.train.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig


def llama3_8b_long() -> TrainConfig:
    """The architecture of Llama 3 8B on rows of 131,072 tokens, over 64 devices.

    Source: arXiv 2407.21783 (table 3: layers, dimensions, rope base, peak learning rate).
    """
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=128256,
            num_layers=32,
            model_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_dim=14336,
            rope_theta=500000.0,
            tie_embeddings=False,
            dtype="bfloat16",
            remat_policy="full",
        ),
        data=DataConfig(seq_len=131072),
        parallel=ParallelConfig(
            context_parallel_strategy="ring",
            context_parallel_size=8,
            fsdp_parallel_size=8,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        steps=10000,
        batch_size=8,
        checkpoint_every=500,
        keep_checkpoints=3,
        log_every=1,
    )
