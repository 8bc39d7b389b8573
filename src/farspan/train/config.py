"""The configuration of a training run: plain nested dataclasses, no JAX import.

Every field is a flag of `farspan train`, named after the field (`--seq-len`); its entry under
Attributes is the help text. `validate` checks the ranges of single fields. Rules about
combinations (degree and heads, sequence length and layout) belong to `farspan.schedules` and are
checked when the run is built.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from farspan.models.config import DecoderConfig


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    Attributes:
      data: Training text: "stdlib" (the source of Python's standard library), or the path of a
        .txt, .md, .py or .jsonl file, or of a folder of such files.
      tokenizer: How text becomes tokens: "byte" makes a token of each UTF-8 byte (vocabulary 258).
      seq_len: Tokens in one row of a batch, before the row is split over devices.
      packing: Put several documents into one row; they never attend to one another. Without it a
        row holds one document and padding.
    """

    data: str = "stdlib"
    tokenizer: str = "byte"
    seq_len: int = 8192
    packing: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices work together, and how.

    Attributes:
      context_parallel_strategy: How keys and values meet the queries of other devices: gather all
        of them, exchange heads (ulysses), pass them round a ring, both of these (usp), or whichever
        sends the fewest bytes (auto).
      context_parallel_size: Devices over which one row is split; 1 turns context parallelism off.
      context_parallel_ulysses_size: Of those devices, how many exchange heads under the usp
        strategy; the rest form the ring. 0 lets Farspan choose.
      context_parallel_outer_size: Of the devices in the ring of ring or usp, how many lie along an
        outer ring over slow links, around rings over fast ones; 1: one ring.
      context_parallel_head_groups: Groups into which all_gather and ulysses cut the heads: the next
        group's keys are on their way while one group attends. 1: all heads at once.
      context_parallel_ring_streams: Parts of a visitor that ring and usp send at once, each over
        other links: 2 both ways round a ring of chips, 4 and 6 over two and three rings of a torus
        that share no link.
      context_parallel_load_balance: Which tokens of a row each device holds. Under a causal mask
        zigzag and striped give every device the same work for one document; balanced solves for the
        documents of each batch; contiguous does neither.
      data_parallel_size: Groups of devices that each read rows of their own.
      fsdp_parallel_size: Groups of devices that each read rows of their own and share the
        parameters out among them.
    """

    context_parallel_strategy: Literal["all_gather", "ulysses", "ring", "usp", "auto"] = "usp"
    context_parallel_size: int = 8
    context_parallel_ulysses_size: int = 0
    context_parallel_outer_size: int = 1
    context_parallel_head_groups: int = 1
    context_parallel_ring_streams: int = 1
    context_parallel_load_balance: Literal["contiguous", "zigzag", "striped", "balanced"] = "zigzag"
    data_parallel_size: int = 1
    fsdp_parallel_size: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, linear warm-up, then a cosine to a tenth of the peak learning rate at the last step.

    Attributes:
      learning_rate: Peak learning rate.
      warmup_steps: Steps over which the learning rate rises to its peak.
      weight_decay: Decoupled weight decay of matrices; norms, biases and sinks are not decayed.
      beta1: Decay of the running mean of gradients.
      beta2: Decay of the running mean of squared gradients.
      clip_norm: Largest global gradient norm; longer gradients are scaled down to it. 0 turns
        clipping off.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
      model: The decoder.
      data: What the model reads.
      parallel: How many devices work together, and how.
      optimizer: AdamW, linear warm-up, then a cosine to a tenth of the peak at the last step.
      kernel: Computes the blocks of attention: the fastest one here (auto), blockwise on any
        platform (xla), or all pairs at once, for checks of short rows (reference).
      steps: Optimizer steps in the whole run, those before a resume included.
      batch_size: Rows in one optimizer step, over all devices and accumulation steps together.
      gradient_accumulation_steps: Parts into which the rows of a step are cut and computed one
        after another; the gradient is that of the whole batch.
      seed: Seed of the initial parameters and of the order of the data.
      run_dir: Folder of metrics.jsonl, config.json and checkpoints. A folder that holds a
        checkpoint is resumed. Left empty, each run gets a new folder under runs/.
      checkpoint_every: Steps between checkpoints; the last step is always saved. 0 saves the last
        step only.
      keep_checkpoints: Newest checkpoints kept; older ones are deleted.
      log_every: Steps between printed lines when the output is not a terminal. metrics.jsonl has
        every step.
    """

    model: DecoderConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    kernel: str = "auto"
    steps: int = 1000
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    seed: int = 0
    run_dir: str = ""
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10


_AT_LEAST_ONE = (
    ("data", "seq_len"),
    ("parallel", "context_parallel_size"),
    ("parallel", "context_parallel_outer_size"),
    ("parallel", "context_parallel_head_groups"),
    ("parallel", "context_parallel_ring_streams"),
    ("parallel", "data_parallel_size"),
    ("parallel", "fsdp_parallel_size"),
    ("", "steps"),
    ("", "batch_size"),
    ("", "gradient_accumulation_steps"),
    ("", "keep_checkpoints"),
    ("", "log_every"),
)
_AT_LEAST_ZERO = (
    ("parallel", "context_parallel_ulysses_size"),
    ("optimizer", "warmup_steps"),
    ("optimizer", "weight_decay"),
    ("optimizer", "clip_norm"),
    ("", "checkpoint_every"),
)


def validate(config: TrainConfig) -> None:
    """Checks the range of every field of the run itself.

    Raises:
        ValueError: names the first field that is out of range, its value and a remedy.
    """
    for minimum, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
        for section, name in names:
            value = getattr(getattr(config, section) if section else config, name)
            if value < minimum:
                raise ValueError(
                    f"{name} must be at least {minimum}, got {value}; use {_flag(name)} {minimum} "
                    "or more"
                )
    if config.data.seq_len < 2:
        raise ValueError(
            f"seq_len must be at least 2, or no token has a next one, got {config.data.seq_len}; "
            "use --seq-len 2 or more"
        )
    optimizer = config.optimizer
    if not (math.isfinite(optimizer.learning_rate) and optimizer.learning_rate > 0):
        raise ValueError(
            f"learning_rate must be positive and finite, got {optimizer.learning_rate}; use for "
            "example --learning-rate 3e-4"
        )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            raise ValueError(
                f"{name} must be at least 0 and below 1, got {value}; use for example "
                f"{_flag(name)} 0.9"
            )
    if config.batch_size % config.gradient_accumulation_steps:
        raise ValueError(
            "gradient_accumulation_steps must divide batch_size, got "
            f"batch_size={config.batch_size}, "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}; use "
            f"--gradient-accumulation-steps {_nearest_divisor(config)}"
        )


def device_count(config: TrainConfig) -> int:
    """Number of devices that the run needs: the product of its parallel sizes."""
    parallel = config.parallel
    return (
        parallel.context_parallel_size * parallel.data_parallel_size * parallel.fsdp_parallel_size
    )


def fresh_run_dir(name: str) -> str:
    """A new run folder, `runs/NAME-DATE-TIME`, in local time to the second."""
    return f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `to_dict` wrote."""
    fields = dict(values)
    for name, part in (
        ("model", DecoderConfig),
        ("data", DataConfig),
        ("parallel", ParallelConfig),
        ("optimizer", OptimizerConfig),
    ):
        fields[name] = part(**fields[name])
    return TrainConfig(**fields)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Field name to value, from the nested form of `to_dict`; field names are unique."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(cast("dict[str, Any]", value)))
        else:
            flat[name] = value
    return flat


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest_divisor(config: TrainConfig) -> int:
    wanted, size = config.gradient_accumulation_steps, config.batch_size
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - wanted))
