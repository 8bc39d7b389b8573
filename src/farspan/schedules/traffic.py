"""What one device sends for one attention layer, to the byte.

The formulas count exactly what the strategies in `farspan.context` send; tests hold them against
the collectives of the compiled program.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from farspan.schedules.hops import Hops
from farspan.schedules.rules import Degrees, Direction, StrategyName, kv_replicas


def ulysses_break_even_degree(num_heads: int, num_kv_heads: int) -> float:
    """Degree above which Ulysses sends fewer bytes than a ring in forward: 1 + H / K.

    A ring sends 2 * S * K * D * (P - 1) / P elements per device, Ulysses
    (2 * H + 2 * K) * D * S / P * (P - 1) / P.
    """
    return 1 + num_heads / num_kv_heads


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer on one data-parallel replica.

    Attributes:
      batch: Rows per replica, `B`.
      seq_len: Tokens per row, `S`.
      num_heads, num_kv_heads: Heads per tensor shard, `H` and `K`.
      head_dim, value_dim: `D` and `Dv`.
      itemsize: Bytes per element of q, k, v and out.
      segments: Whether rows carry segment ids.
      positions: Whether the places of tokens are data (explicit, or a balanced layout).
      key_ranges: Ranges of keys that come with each query.
      sinks: Whether there are sinks, whose gradient is summed over the sequence.
      latent_dims: Widths of the arrays that are sent in place of keys and values, such as
        `(kv_lora_rank, rope_dim)`; empty: keys and values themselves.
    """

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    segments: bool = False
    positions: bool = False
    key_ranges: int = 0
    sinks: bool = False
    latent_dims: tuple[int, ...] = ()

    @property
    def metadata_arrays(self) -> int:
        """int32 arrays of `[B, S]` that travel with the keys."""
        return int(self.segments) + int(self.positions)

    @property
    def query_metadata(self) -> tuple[int, int]:
        """Arrays that travel with the queries, and int32 numbers per token in them."""
        arrays = self.metadata_arrays
        return arrays + (self.key_ranges > 0), arrays + 2 * self.key_ranges

    def key_elements(self, kv_heads: int) -> int:
        """Elements per token of what stands for `kv_heads` keys and values."""
        return sum(self.latent_dims) or kv_heads * (self.head_dim + self.value_dim)

    @property
    def expansion_elements(self) -> int:
        """Elements of the matrices that turn a latent into keys and values."""
        if not self.latent_dims:
            return 0
        rank, rope = self.latent_dims
        return rank * self.num_heads * (self.head_dim - rope + self.value_dim)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective that one device takes part in during one layer's pass.

    Attributes:
      op: `collective-permute`, `all-gather`, `all-to-all`, `reduce-scatter` or `all-reduce`.
      count: How often it runs.
      operand_bytes: Bytes that the device puts in, summed over the runs.
      group: Devices that take part.
    """

    op: str
    count: int
    operand_bytes: int
    group: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the device."""
        if self.op == "collective-permute":
            return self.operand_bytes
        if self.op == "all-gather":
            return self.operand_bytes * (self.group - 1)
        if self.op == "all-reduce":  # a reduce-scatter and an all-gather
            return 2 * self.operand_bytes * (self.group - 1) // self.group
        return self.operand_bytes * (self.group - 1) // self.group


@dataclasses.dataclass(frozen=True)
class Options:
    """What else a strategy is told, and what its traffic depends on.

    Attributes:
      hops: How far keys travel in a ring; None is all the way round.
      head_groups: Groups into which heads are cut.
      halo_tokens: Tokens of each transfer of a halo (`halo_transfers`).
      replicas: Devices in the mesh for each tensor shard: those that share the gradients of sinks
        and of the matrices of a latent. 0 is the context-parallel degree.
      streams: Streams in which a ring sends; more than one go all the way round.
    """

    hops: Hops | None = None
    head_groups: int = 1
    halo_tokens: tuple[int, ...] = ()
    replicas: int = 0
    streams: int = 1


def collectives(
    strategy: str,
    degrees: Degrees,
    shape: AttentionShape,
    direction: Direction,
    options: Options | None = None,
) -> tuple[Collective, ...]:
    """Lists what one device sends for one attention layer.

    Partial outputs and gradients are merged in float32, so gradients of keys and values travel
    as 4 bytes an element in a ring, in a halo and in an all-gather's reduce-scatter. Groups of
    heads send by permutes what all heads at once do by whole collectives.

    Args:
      strategy: A name in `STRATEGIES`.
      degrees: From `degrees`.
      shape: Sizes of the layer.
      direction: `forward` or `backward` (which fetches keys and values anew: no strategy keeps
        more than its own shard between the passes).
      options: What else the strategy is told.

    Returns:
      Collectives with exact counts and bytes; empty where the degree is 1.
    """
    options = _options(shape, options)
    if strategy == "all_gather":
        found = _all_gather(degrees, shape, direction, options)
    else:
        found = _head_exchange(degrees, shape, direction, options)
        if strategy == "halo":
            found += _halo(degrees, shape, direction, options)
        else:
            found += _rings(degrees, shape, direction, options)
    shared = shape.expansion_elements + shape.num_heads * shape.sinks
    if shared and direction == "backward":
        found.append(Collective("all-reduce", 1, shared * 4, options.replicas or degrees.total))
    return tuple(c for c in found if c.group > 1 and c.count > 0)


def sent_bytes(
    strategy: str,
    degrees: Degrees,
    shape: AttentionShape,
    direction: Direction,
    options: Options | None = None,
) -> int:
    """Bytes that leave one device for one attention layer in one direction."""
    return sum(c.sent_bytes for c in collectives(strategy, degrees, shape, direction, options))


def held_key_bytes(
    strategy: str, degrees: Degrees, shape: AttentionShape, options: Options | None = None
) -> int:
    """Bytes of keys and values that one device holds at once in forward, at most.

    Counts its own shard, what has come and what is arriving (in the type of the inputs); a latent
    as it is sent, not expanded.
    """
    options = _options(shape, options)
    token_bytes = shape.batch * shape.itemsize
    local = shape.seq_len // degrees.total * shape.key_elements(shape.num_kv_heads)
    own = local * token_bytes
    if degrees.total == 1:
        return own
    share = min(1.0, 2 / options.head_groups)
    if strategy == "all_gather":
        return own + round(local * degrees.total * share) * token_bytes
    brought = 0
    if degrees.heads > 1:
        tokens = shape.seq_len // degrees.sequence
        brought = tokens * shape.key_elements(_heads_inside(shape, degrees, options)) * token_bytes
        brought = round(brought * share)
    if strategy == "halo":
        extra = sum(options.halo_tokens) * shape.key_elements(
            _heads_inside(shape, degrees, options)
        )
        return own + brought + (brought or own) + extra * token_bytes
    visitor = brought or own
    rings = sum(n > 1 for n in (degrees.outer, degrees.sequence // degrees.outer))
    return own + brought + 2 * rings * visitor


def choose_ulysses_degree(num_heads: int, num_kv_heads: int, size: int, *, tensor: int = 1) -> int:
    """Chooses how much of a context-parallel size exchanges heads.

    Args:
      num_heads: Query heads.
      num_kv_heads: Key and value heads.
      size: Context-parallel size.
      tensor: Size of the tensor axis.

    Returns:
      Of all splits ring x ulysses of `size` that the heads allow, the Ulysses degree that sends
      fewest bytes over forward and backward; the greatest among equals.
    """
    heads, kv_heads = num_heads // tensor, max(1, num_kv_heads // tensor)
    shape = AttentionShape(1, 16 * size, heads, kv_heads, 128, 128, 2)

    def cost(ulysses: int) -> tuple[int, int]:
        split = Degrees(size // ulysses, ulysses)
        sent = sent_bytes("usp", split, shape, "forward")
        return sent + sent_bytes("usp", split, shape, "backward"), -ulysses

    return min((u for u in range(1, size + 1) if size % u == 0 and heads % u == 0), key=cost)


def choose_strategy(
    num_heads: int, num_kv_heads: int, size: int, *, tensor: int = 1
) -> tuple[StrategyName, int]:
    """Chooses a strategy by the bytes it sends, for `strategy="auto"`.

    Args:
      num_heads: As in `choose_ulysses_degree`.
      num_kv_heads: As in `choose_ulysses_degree`.
      size: As in `choose_ulysses_degree`.
      tensor: As in `choose_ulysses_degree`.

    Returns:
      `(strategy, ulysses_degree)`: ring, usp or ulysses, as the best degree is 1, less than `size`,
      or `size`.
    """
    ulysses = choose_ulysses_degree(num_heads, num_kv_heads, size, tensor=tensor)
    if ulysses == size:
        return "ulysses", ulysses
    return ("ring", 1) if ulysses == 1 else ("usp", ulysses)


def group_hops(hops: Hops, inner: int, outer: int) -> Hops:
    """Hops of an outer ring of `outer` groups, from those between their `inner` shards each.

    Takes integers, or integer arrays where hops are data.
    """
    before, after = -(-hops.before // inner), -(-hops.after // inner)
    whole = before + after >= outer  # further round than the ring is long: once round will do
    return Hops(whole * (outer - 1) + (1 - whole) * before, (1 - whole) * after)


def jumps(degree: int) -> list[int]:
    """The powers of two by which a distance in a ring is gone, if it is data."""
    return [1 << bit for bit in range((degree - 1).bit_length())]


def ring_backward_visitor(
    *,
    key_elements: int,
    query_elements: int,
    out_elements: int,
    num_heads: int,
    itemsize: int,
    labels: int,
    query_labels: int,
) -> Literal["keys", "queries"]:
    """Chooses what travels in the backward of a ring by bytes per token.

    Args:
      key_elements: Elements of keys and values, or of the latent.
      query_elements: Elements of the queries.
      out_elements: Elements of the output's gradient.
      num_heads: Query heads.
      itemsize: Bytes per element.
      labels: int32 numbers that travel with either.
      query_labels: Further ones that queries need.

    Returns:
      `keys`: (k, v, dk, dv); `queries`: (q, dout, lse, delta, dq), which is less for plain
      multi-head attention only.
    """
    keys = key_elements * (itemsize + 4) + labels * 4
    per_query = (query_elements + out_elements) * itemsize + 8 * num_heads
    queries = per_query + query_elements * 4 + (labels + query_labels) * 4
    return "keys" if keys <= queries else "queries"


def _options(shape: AttentionShape, options: Options | None) -> Options:
    """Options as they bear on what is sent: all groups of heads share one latent."""
    options = options or Options()
    return dataclasses.replace(options, head_groups=1) if shape.latent_dims else options


def _heads_inside(shape: AttentionShape, degrees: Degrees, options: Options) -> int:
    """Kv heads on one device after the exchange, over all groups of heads."""
    groups = options.head_groups
    kv_heads = shape.num_kv_heads // groups
    return groups * kv_heads * kv_replicas(kv_heads, degrees.heads) // degrees.heads


def _all_gather(
    degrees: Degrees, shape: AttentionShape, direction: Direction, options: Options
) -> list[Collective]:
    local, group = shape.batch * shape.seq_len // degrees.total, degrees.sequence
    elements = local * shape.key_elements(shape.num_kv_heads)
    gathered, labels = elements * shape.itemsize, shape.metadata_arrays
    if options.head_groups > 1:
        ways, sent = 1, gathered * (group - 1)
        if direction == "backward":
            ways, sent = 2, sent + elements * 4 * (group - 1)
        return [
            _parcels(ways, sent, group, options),
            Collective("all-gather", labels, labels * local * 4, group),
        ]
    found = [Collective("all-gather", 2 + labels, gathered + labels * local * 4, group)]
    if direction == "backward":
        found.append(Collective("reduce-scatter", 2, elements * 4 * group, group))
    return found


def _parcels(ways: int, sent_bytes: int, group: int, options: Options) -> Collective:
    """What groups of heads send: to each other device one permute for all that comes for a group.

    Another, if there are two ways, for all that goes home.
    """
    count = ways * options.head_groups * (group - 1)
    return Collective("collective-permute", count, sent_bytes, group)


def _rings(
    degrees: Degrees, shape: AttentionShape, direction: Direction, options: Options
) -> list[Collective]:
    inner = degrees.sequence // degrees.outer
    hops, whole = options.hops, Hops(degrees.sequence - 1, 0)
    if hops is None or (options.streams > 1 and degrees.outer == 1):
        hops = whole
    if degrees.outer == 1:
        return [_ring(degrees.sequence, hops, degrees, shape, direction, options)]
    around = Hops(inner - 1, 0)
    outer_hops = group_hops(hops, inner, degrees.outer)
    inside = _ring(inner, around, degrees, shape, direction, options)
    rounds = 1 + outer_hops.before + outer_hops.after
    return [
        _ring(
            degrees.outer,
            outer_hops,
            degrees,
            shape,
            direction,
            dataclasses.replace(options, streams=1),
        ),
        dataclasses.replace(
            inside, count=inside.count * rounds, operand_bytes=inside.operand_bytes * rounds
        ),
    ]


def _ring(
    group: int,
    hops: Hops,
    degrees: Degrees,
    shape: AttentionShape,
    direction: Direction,
    options: Options,
) -> Collective:
    transfers = hops.before + hops.after
    tokens = shape.batch * shape.seq_len // degrees.sequence
    elements = shape.key_elements(_heads_inside(shape, degrees, options))
    metadata = shape.metadata_arrays
    per_token = elements * shape.itemsize + metadata * 4
    arrays, in_stream = 2 + metadata, transfers * (1 + metadata)  # keys and values as one
    if direction == "backward":
        heads = shape.num_heads // degrees.heads
        query, out = heads * shape.head_dim, heads * shape.value_dim
        query_arrays, query_numbers = shape.query_metadata
        visitor = ring_backward_visitor(
            key_elements=elements, query_elements=query, out_elements=out, num_heads=heads,
            itemsize=shape.itemsize, labels=metadata, query_labels=query_numbers - metadata,
        )  # fmt: skip
        if visitor == "keys":
            per_token, arrays = per_token + elements * 4, arrays + 2
        else:
            per_token = (query + out) * shape.itemsize + 8 * heads + query_numbers * 4 + query * 4
            arrays = 4 + query_arrays + 1
            in_stream += 2 * transfers
        # In a stream, gradients travel as one with the visitor that follows, if one does.
        in_stream += min(transfers, 2)
    count = transfers * arrays if options.streams == 1 else options.streams * in_stream
    return Collective("collective-permute", count, transfers * tokens * per_token, group)


def _halo(
    degrees: Degrees, shape: AttentionShape, direction: Direction, options: Options
) -> list[Collective]:
    tokens = shape.batch * sum(options.halo_tokens)
    elements = shape.key_elements(_heads_inside(shape, degrees, options))
    arrays, per_token = 2, elements * shape.itemsize
    if shape.segments:
        arrays, per_token = arrays + 1, per_token + 4
    if direction == "backward":
        arrays, per_token = arrays + 2, per_token + elements * 4
    count = arrays * len(options.halo_tokens)
    return [Collective("collective-permute", count, tokens * per_token, degrees.sequence)]


def _head_exchange(
    degrees: Degrees, shape: AttentionShape, direction: Direction, options: Options
) -> list[Collective]:
    local = shape.batch * shape.seq_len // degrees.total
    query = local * shape.num_heads * shape.head_dim
    out = local * shape.num_heads * shape.value_dim
    per_row = local * shape.num_heads * 4
    operand, count = (query + out) * shape.itemsize + per_row, 3  # q in; out, lse back
    if direction == "backward":  # q, dout, lse, delta in; dq back
        operand, count = operand + per_row + query * shape.itemsize, 5
    metadata, numbers = shape.query_metadata
    gathered = [(metadata, numbers * local * 4)]
    scattered: list[Collective] = []
    if shape.latent_dims:
        elements = local * shape.key_elements(0)
        gathered.append((2, elements * shape.itemsize))
        if direction == "backward":
            summed = elements * 4 * degrees.heads
            scattered.append(Collective("reduce-scatter", 2, summed, degrees.heads))
    else:
        kv_heads = shape.num_kv_heads // options.head_groups
        replicas = kv_replicas(kv_heads, degrees.heads)
        elements = local * shape.key_elements(shape.num_kv_heads) * replicas
        operand, count = operand + elements * shape.itemsize, count + 2
        if direction == "backward":  # replicas are summed in float32
            operand += elements * (shape.itemsize if replicas == 1 else 4)
            count += 2
    exchanged = Collective("all-to-all", count, operand, degrees.heads)
    if options.head_groups > 1:
        exchanged = _parcels(2, exchanged.sent_bytes, degrees.heads, options)
    labels = [Collective("all-gather", n, size, degrees.heads) for n, size in gathered]
    return [exchanged, *labels, *scattered]
