"""Runs of the Llama architecture at real size."""

from __future__ import annotations

from farspan.models.config import DecoderConfig
from farspan.train.config import (
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    Stage,
    TrainConfig,
)

_LLAMA3_8B = DecoderConfig(
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
)


def llama3_8b_long() -> TrainConfig:
    """The architecture of Llama 3 8B on rows of 131,072 tokens, over 64 devices.

    Source: arXiv 2407.21783 (table 3: layers, dimensions, rope base, peak learning rate).
    """
    return TrainConfig(
        model=_LLAMA3_8B,
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


def llama3_8b_extend() -> TrainConfig:
    """The same architecture; contexts grow from 8K to 64K to 1M tokens within one run.

    About 4M tokens a step throughout, over 64 devices: rows of 8K fit one device each, those of 64K
    are split over 8, those of 1M over all. The base of the rotary frequencies grows along.

    Source: arXiv 2410.02660 (ProLong: base 8e6 at 64K).
    """
    return TrainConfig(
        model=_LLAMA3_8B,
        data=DataConfig(seq_len=8192),
        parallel=ParallelConfig(
            context_parallel_strategy="ring", context_parallel_size=1, fsdp_parallel_size=64
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_steps=2000, schedule="wsd", decay_steps=1000
        ),
        stages=(
            Stage(
                from_step=8000,
                seq_len=65536,
                rope_theta=8e6,
                batch_size=64,
                context_parallel_size=8,
                fsdp_parallel_size=8,
            ),
            Stage(
                from_step=9500,
                seq_len=1048576,
                rope_theta=2.8e9,
                batch_size=4,
                gradient_accumulation_steps=4,
                context_parallel_size=64,
                fsdp_parallel_size=1,
            ),
        ),
        steps=10000,
        batch_size=512,
        checkpoint_every=500,
        keep_checkpoints=3,
        log_every=1,
    )
