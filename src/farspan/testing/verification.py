"""The checks of `farspan verify`: one recipe, its strategies, the devices at hand."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from farspan.context import ContextParallel
from farspan.data import Batch
from farspan.testing.model_parity import (
    ModelRun,
    document_lengths,
    in_float32,
    initial_state,
    is_float32,
    model_batch,
    model_parity,
    repetition,
    rounded_model_parity,
    run_model,
    unsplit,
)
from farspan.testing.parity import AttentionCase, Parity, attention_parity
from farspan.train.config import TrainConfig
from farspan.train.parallel import layer_kinds, make_context
from farspan.train.step import TrainState

TOKENS_PER_PIECE = 4
"""Fewest tokens per piece of a row with which `document_lengths` can place its edges."""
_MODEL_ROWS = 3  # the kinds of rows of a model batch
_ATTENTION_ROWS = 2  # documents end at the edges in one, and cross them in the other
_ORACLE_ARRAYS = 5  # float64 [B, H, S, S] alive at once in the dense oracle

_QUANTITIES = ("out (plain)", "lse (plain)", "out", "lse", "dq", "dk", "dv")

Phase = Callable[[str], AbstractContextManager[object]]


class Check(NamedTuple):
    """One line of the table: what was compared, and how far apart it was."""

    check: str
    parity: Parity


class _Reference(NamedTuple):
    """The model on one device: where it starts, and what came of it by type."""

    initial: TrainState
    runs: dict[str, ModelRun]


def fit_seq_len(wanted: int, contexts: Sequence[ContextParallel]) -> int:
    """Rounds a row's length up to what all these layouts can cut, with room for documents."""
    pieces = _pieces(contexts)
    return max(TOKENS_PER_PIECE, -(-wanted // pieces)) * pieces


def rows_for(config: TrainConfig) -> int:
    """Rows of the model's batch: each kind of row, over all replicas and accumulation steps."""
    parallel = config.parallel
    shards = parallel.data_parallel_size * parallel.fsdp_parallel_size
    return _round_up(_MODEL_ROWS, shards * config.gradient_accumulation_steps)


def check_oracle_fits(config: TrainConfig) -> None:
    """Raises ValueError if the dense oracle would take more than half of this machine's memory."""
    seq_len, heads, rows = config.data.seq_len, config.model.num_heads, _attention_rows(config)
    per_pair_bytes = _ORACLE_ARRAYS * 8 * rows * heads
    needed_bytes = per_pair_bytes * seq_len**2
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes // 2:
        longest = math.isqrt(memory_bytes // 2 // per_pair_bytes)
        raise ValueError(
            f"the dense float64 oracle must fit half of the {_gib(memory_bytes)} of memory here, "
            f"got {rows} rows of seq_len={seq_len} with num_heads={heads}, which need "
            f"{_gib(needed_bytes)}; use --seq-len {longest} or less: parity does not depend on it"
        )


def verify(configs: Sequence[TrainConfig], phase: Phase) -> Iterator[list[Check]]:
    """Runs every check, one configuration after another.

    Args:
      configs: Runs that differ in their strategy alone, `rows_for` rows of `fit_seq_len` tokens.
      phase: Given a description, the context to do that piece of work in.

    Yields:
      The checks of each configuration: attention against the dense float64 oracle, the model
      against the same on one device, and a repeated run against the first.

    Raises:
      ValueError: If a configuration is not possible.
    """
    contexts = [make_context(config.parallel, config.model) for config in configs]
    shared = configs[0]
    seq_len = shared.data.seq_len
    documents = document_lengths(seq_len, _pieces(contexts))
    if not shared.data.packs:
        documents = (seq_len - seq_len // 8,)
    batch = model_batch(
        shared.model.vocab_size, shared.batch_size, seq_len, documents, seed=shared.seed
    )
    reference: _Reference | None = None
    for config, context in zip(configs, contexts, strict=True):
        checks = _attention_checks(config, context, documents, phase)
        reference = reference or _run_reference(shared, batch, phase)
        yield checks + _model_checks(config, context.strategy, batch, reference, phase)


def _attention_checks(
    config: TrainConfig, context: ContextParallel, documents: tuple[int, ...], phase: Phase
) -> list[Check]:
    model = config.model
    cases = {"packed" if config.data.packs else "padded": documents, "unpacked": None}
    checks: list[Check] = []
    kinds = layer_kinds(model, context)
    for (name, lengths), (window, kind) in itertools.product(cases.items(), kinds.items()):
        case = AttentionCase(
            mask=kind.mask,
            batch=_attention_rows(config),
            seq_len=config.data.seq_len,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            value_dim=model.head_dim,
            documents=lengths,
            dtype=model.dtype,
            seed=config.seed,
        )
        what = f"attention, {name}" + (f", window {window}" if window else "")
        with phase(f"{kind.context.strategy}: {what}, against the float64 oracle"):
            parity = attention_parity(case, kind.context, config.kernel)
        rows = {row.quantity: row for row in parity}
        checks += [Check(what, rows[quantity]) for quantity in _QUANTITIES]
    return checks


def _run_reference(config: TrainConfig, batch: Batch, phase: Phase) -> _Reference:
    with phase("model: initial parameters"):
        initial = initial_state(config)
    runs: dict[str, ModelRun] = {}
    for variant in _precisions(config):
        with phase(f"model on one device, {_type(variant)}"):
            (runs[_type(variant)],) = run_model(unsplit(variant), batch, initial)
    return _Reference(initial, runs)


def _model_checks(
    config: TrainConfig,
    strategy: str,
    batch: Batch,
    reference: _Reference,
    phase: Phase,
) -> list[Check]:
    checks: list[Check] = []
    runs = reference.runs
    for variant in _precisions(config):
        dtype = _type(variant)
        with phase(f"{strategy}: model, {dtype}, against one device"):
            split, again = run_model(variant, batch, reference.initial, repeats=2)
        if is_float32(variant):
            rows = model_parity(split, runs[dtype], config.model.num_layers)
        else:
            rows = rounded_model_parity(split, runs[dtype], runs["float32"])
        checks += [Check(f"model, {dtype}", row) for row in rows]
        checks += [Check(f"repeated, {dtype}", row) for row in repetition(split, again)]
    return checks


def _precisions(config: TrainConfig) -> list[TrainConfig]:
    """The run in float32, where an error cannot hide in rounding, then as configured."""
    return [config] if is_float32(config) else [in_float32(config), config]


def _type(config: TrainConfig) -> str:
    return "float32" if is_float32(config) else "bfloat16"


def _pieces(contexts: Sequence[ContextParallel]) -> int:
    return math.lcm(2, *(context.sequence_multiple for context in contexts))


def _attention_rows(config: TrainConfig) -> int:
    parallel = config.parallel
    return _round_up(_ATTENTION_ROWS, parallel.data_parallel_size * parallel.fsdp_parallel_size)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB"
