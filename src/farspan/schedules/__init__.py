"""Who holds, sends and computes what at each step, what it costs, and what is possible."""

from farspan.schedules.balance import balanced_order, imbalance
from farspan.schedules.halo import HaloTransfer, halo_transfers, reach_hops
from farspan.schedules.hops import Hops, hops_needed, needed_shards
from farspan.schedules.rules import (
    STRATEGIES,
    Degrees,
    Direction,
    StrategyName,
    check_combination,
    check_length,
    degrees,
    kv_replicas,
    sequence_multiple,
)
from farspan.schedules.traffic import (
    AttentionShape,
    Collective,
    Options,
    choose_strategy,
    choose_ulysses_degree,
    collectives,
    group_hops,
    held_key_bytes,
    jumps,
    ring_backward_visitor,
    sent_bytes,
    ulysses_break_even_degree,
)
from farspan.schedules.work import Step, pairs_per_shard, steps

__all__ = [
    "STRATEGIES",
    "AttentionShape",
    "Collective",
    "Degrees",
    "Direction",
    "HaloTransfer",
    "Hops",
    "Options",
    "Step",
    "StrategyName",
    "balanced_order",
    "check_combination",
    "check_length",
    "choose_strategy",
    "choose_ulysses_degree",
    "collectives",
    "degrees",
    "group_hops",
    "halo_transfers",
    "held_key_bytes",
    "hops_needed",
    "imbalance",
    "jumps",
    "kv_replicas",
    "needed_shards",
    "pairs_per_shard",
    "reach_hops",
    "ring_backward_visitor",
    "sent_bytes",
    "sequence_multiple",
    "steps",
    "ulysses_break_even_degree",
]
