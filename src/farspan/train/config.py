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
from pathlib import Path
from typing import Any, Literal, cast

from farspan.models.config import DecoderConfig
from farspan.platform import folder_to_write
from farspan.train.decode import decode

Packing = Literal["best_fit", "first_fit", "concatenate", "none"]


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    Attributes:
      data: Training text: "stdlib" (the source of Python's standard library); the path or URL of a
        .txt, .md, .py, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or .array_record file, of a
        folder of such files, or of a dataset that Hugging Face's library saved; or a .toml file
        that mixes several of these by weights.
      tokenizer: How text becomes tokens: "byte" makes a token of each UTF-8 byte (vocabulary 258);
        else the path of a tokenizer.json or a SentencePiece .model, or of the folder that holds it.
      seq_len: Tokens in one row of a batch, before the row is split over devices.
      packing: How documents share rows; they never attend to one another. best_fit and first_fit
        keep a document whole where a row can hold it, concatenate fills every row and cuts
        documents at its end, none gives each document a row of its own.
      streaming: Read and tokenise while training, rather than all of the data before the first
        step; the order is then shuffled inside a window only.
      shuffle_window_rows: Rows that streaming packs and shuffles together.
      text_field: Name of the text in JSON lines, Parquet, Arrow and ArrayRecord records. Records
        with "messages" are conversations, whatever its name.
      append_eos: End each document with the tokenizer's end-of-sequence token.
      chat_template: File with the Jinja template of conversations; left empty, the tokenizer's own.
        The loss is on the assistant's turns only.
      eval_data: Held-out data, named like `data`; left empty, `eval_rows` rows of `data`.
      eval_rows: Rows in an evaluation; without `eval_data` they are held out of training. With it,
        0 takes all rows.
      cache_dir: Folder of tokenised data, kept between runs. Left empty: "tokens" in
        $FARSPAN_CACHE_DIR, or in farspan in the user's cache folder.
    """

    data: str = "stdlib"
    tokenizer: str = "byte"
    seq_len: int = 8192
    packing: Packing = "best_fit"
    streaming: bool = False
    shuffle_window_rows: int = 1024
    text_field: str = "text"
    append_eos: bool = False
    chat_template: str = ""
    eval_data: str = ""
    eval_rows: int = 0
    cache_dir: str = ""

    @property
    def packs(self) -> bool:
        """Whether documents share rows."""
        return self.packing != "none"


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
    """How gradients change the parameters.

    Attributes:
      optimizer: adamw; or muon, which makes the updates of hidden matrices orthogonal and leaves
        embedding, head and vectors to adamw.
      learning_rate: Peak learning rate.
      schedule: What follows the warm-up: a cosine, a line, nothing (constant), or the peak until
        the last `decay_steps` and then a line (wsd).
      warmup_steps: Steps over which the learning rate rises to its peak.
      decay_steps: Steps at the end over which wsd lets the learning rate fall.
      final_learning_rate_fraction: Learning rate of the last step over the peak.
      weight_decay: Decoupled weight decay of matrices; norms, biases and sinks are not decayed.
      beta1: Decay of the running mean of gradients.
      beta2: Decay of the running mean of squared gradients.
      clip_norm: Largest global gradient norm; longer gradients are scaled down to it. 0 turns
        clipping off.
      z_loss: Weight of the mean squared log of the softmax's normaliser in the loss; it keeps
        logits small. 0 turns it off.
      ema_decay: Decay of a running mean of the parameters, which evaluations then report as well.
        0 turns it off.
      non_finite: What follows a loss or gradient that is not finite. Either way the parameters stay
        as they were and the batch is written to RUN_DIR/non_finite; then the run stops, or skips
        this batch.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 0
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    z_loss: float = 0.0
    ema_decay: float = 0.0
    non_finite: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class Stage:
    """A later part of a run, which changes what the part before used; None keeps it.

    Attributes:
      from_step: Optimizer steps done when it begins, at least 1.
      data: What the model reads.
      seq_len: Tokens in one row.
      rope_theta: Base of the rotary frequencies.
      batch_size: Rows in one optimizer step.
      gradient_accumulation_steps: Parts of a step.
      context_parallel_size: Devices over which one row is split.
      data_parallel_size: Groups of devices that each read rows of their own.
      fsdp_parallel_size: The same, sharing the parameters out among them.
    """

    from_step: int
    data: str | None = None
    seq_len: int | None = None
    rope_theta: float | None = None
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    context_parallel_size: int | None = None
    data_parallel_size: int | None = None
    fsdp_parallel_size: int | None = None


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
      model: The decoder.
      data: What the model reads.
      parallel: How many devices work together, and how.
      optimizer: How gradients change the parameters.
      kernel: Computes the blocks of attention: the fastest one here (auto), blockwise on any
        platform (xla), or all pairs at once, for checks of short rows (reference).
      steps: Optimizer steps in the whole run, those before a resume included.
      batch_size: Rows in one optimizer step, over all devices and accumulation steps together.
      gradient_accumulation_steps: Parts into which the rows of a step are cut and computed one
        after another; the gradient is that of the whole batch.
      stages: Later parts of the run, in order, each "from_step=1000,seq_len=65536,rope_theta=8e6":
        what to change after so many steps, for contexts that grow within one run.
      seed: Seed of the initial parameters and of the order of the data.
      run_dir: Folder of metrics.jsonl, config.json and checkpoints; a path, no URL. A folder that
        holds a checkpoint is resumed. Left empty, each run gets a new folder under runs/.
      checkpoint_every: Steps between checkpoints; the last step is always saved. 0 saves the last
        step only.
      keep_checkpoints: Newest checkpoints kept; older ones are deleted.
      log_every: Steps between printed lines when the output is not a terminal. metrics.jsonl has
        every step.
      eval_every: Steps between evaluations on held-out rows (eval_rows or eval_data), which also
        follow the last step. 0: only then.
      profile: Write a trace of three steps for XProf or TensorBoard to RUN_DIR/profile.
      wandb_project: Weights & Biases project that receives the metrics as well; needs wandb.
    """

    model: DecoderConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    kernel: str = "auto"
    steps: int = 1000
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    stages: tuple[Stage, ...] = ()
    seed: int = 0
    run_dir: str = ""
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    eval_every: int = 0
    profile: bool = False
    wandb_project: str = ""


MAX_SEEDS = 2**32
"""Seeds are below this."""

_AT_LEAST_ONE = (
    ("data", "seq_len"),
    ("parallel", "context_parallel_size"),
    ("parallel", "context_parallel_outer_size"),
    ("parallel", "context_parallel_head_groups"),
    ("parallel", "context_parallel_ring_streams"),
    ("parallel", "data_parallel_size"),
    ("parallel", "fsdp_parallel_size"),
    ("data", "shuffle_window_rows"),
    ("", "steps"),
    ("", "batch_size"),
    ("", "gradient_accumulation_steps"),
    ("", "keep_checkpoints"),
    ("", "log_every"),
)
_AT_LEAST_ZERO = (
    ("parallel", "context_parallel_ulysses_size"),
    ("data", "eval_rows"),
    ("optimizer", "warmup_steps"),
    ("optimizer", "decay_steps"),
    ("optimizer", "weight_decay"),
    ("optimizer", "clip_norm"),
    ("optimizer", "z_loss"),
    ("", "checkpoint_every"),
    ("", "eval_every"),
)


def validate(config: TrainConfig) -> None:
    """Checks the range of every field of the run itself.

    Raises:
        ValueError: names the first field that is out of range, its value and a remedy.
    """
    run_folder(config.run_dir)
    for minimum, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
        for section, name in names:
            value = getattr(getattr(config, section) if section else config, name)
            if value < minimum:
                raise ValueError(
                    f"{name} must be at least {minimum}, got {value}; use {_flag(name)} {minimum} "
                    "or more"
                )
    if not 0 <= config.seed < MAX_SEEDS:
        raise ValueError(
            f"seed must be at least 0 and below 2**32, got {config.seed}; use for example --seed 0"
        )
    if config.data.seq_len < 2:
        raise ValueError(
            f"seq_len must be at least 2, or no token has a next one, got {config.data.seq_len}; "
            "use --seq-len 2 or more"
        )
    _check_optimizer(config.optimizer)
    check_decay(config.optimizer, config.steps)
    if config.eval_every and not (config.data.eval_rows or config.data.eval_data):
        raise ValueError(
            f"eval_every needs held-out data, got eval_every={config.eval_every}, eval_rows=0 and "
            "no eval_data; use for example --eval-rows 8, or --eval-data with a path"
        )
    if config.batch_size % config.gradient_accumulation_steps:
        raise ValueError(
            "gradient_accumulation_steps must divide batch_size, got "
            f"batch_size={config.batch_size}, "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}; use "
            f"--gradient-accumulation-steps {_nearest_divisor(config)}"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if not (math.isfinite(optimizer.learning_rate) and optimizer.learning_rate > 0):
        raise ValueError(
            f"learning_rate must be positive and finite, got {optimizer.learning_rate}; use for "
            "example --learning-rate 3e-4"
        )
    for name, usual in (("beta1", 0.9), ("beta2", 0.95), ("ema_decay", 0.999)):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            raise ValueError(
                f"{name} must be at least 0 and below 1, got {value}; use for example "
                f"{_flag(name)} {usual}"
            )
    if not 0 <= optimizer.final_learning_rate_fraction <= 1:
        raise ValueError(
            "final_learning_rate_fraction must be from 0 to 1, got "
            f"{optimizer.final_learning_rate_fraction}; use for example "
            "--final-learning-rate-fraction 0.1"
        )


def check_decay(optimizer: OptimizerConfig, steps: int) -> None:
    """Checks that `decay_steps` fits the schedule and the number of steps.

    Raises:
      ValueError: It does not.
    """
    decay, warmup = optimizer.decay_steps, optimizer.warmup_steps
    if optimizer.schedule != "wsd":
        if decay:
            raise ValueError(
                f"decay_steps belongs to schedule wsd alone, got decay_steps={decay} with schedule "
                f"{optimizer.schedule}; use --schedule wsd, or --decay-steps 0"
            )
    elif decay < 1 or warmup + decay > steps:
        raise ValueError(
            "schedule wsd needs decay_steps of at least 1, which with warmup_steps fit into steps, "
            f"got decay_steps={decay}, warmup_steps={warmup} and steps={steps}; use for example "
            f"--decay-steps {max(1, min(steps - warmup, steps // 10))}, or fewer --warmup-steps"
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


def run_folder(run_dir: str) -> Path:
    """The run folder of that name.

    Raises:
      ValueError: It is a URL.
    """
    return folder_to_write(run_dir, "run_dir (--run-dir)")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of JSON values."""
    values = dataclasses.asdict(config)
    values["stages"] = list(values["stages"])
    return values


def from_dict(values: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """The configuration that `to_dict` wrote; what is missing takes its default.

    Args:
      values: Nested dictionaries of JSON values.
      where: What holds them, for messages.

    Raises:
      ValueError: A name is unknown or a value has another type; the message says where.
    """
    return decode(TrainConfig, values, where)


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
