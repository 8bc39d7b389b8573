"""A ring of processes around PyTorch's flash kernel for the CPU, over gloo.

This ring is ours: no public PyTorch call runs context parallelism on a CPU, so this is the shortest
one that does PyTorch justice. It calls `aten::_scaled_dot_product_flash_attention_for_cpu` and its
backward directly, shards in zigzag order so that every rank has the same causal work and computes
no block that is wholly hidden, sends the grouped kv heads unrepeated, and receives the next shard
while it computes. Every rank gets an equal share of the cores.
"""

from __future__ import annotations

import atexit
import datetime
import os
from typing import Any, NamedTuple

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in `torch_flash`

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from peers import Prepared, Setting
from peers.problem import Problem

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ALL = slice(None)


def prepare(problem: Problem, setting: Setting) -> Prepared:
    """See `Peer.prepare`."""
    rank, size = setting.rank, setting.processes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setting.meeting_place}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(minutes=10),
    )
    atexit.register(dist.destroy_process_group)
    index = _zigzag(problem.seq_len, rank, size)
    arrays = [torch.from_numpy(x[:, index]) for x in problem.inputs()]  # [B, Sl, heads, D]
    ring = _Ring(rank, size, problem.scale)

    def step() -> list[Tensor]:
        with torch.no_grad():
            out, lse = ring.forward(*arrays[:3])
            return [out, *ring.backward(*arrays, out, lse)]

    return Prepared(step, lambda outputs: [x.numpy() for x in outputs], index)


def _zigzag(seq_len: int, rank: int, size: int) -> np.ndarray:
    """Places of a rank's tokens: chunk `rank` and its mirror image of `2 * size` chunks."""
    if seq_len % (2 * size):
        raise ValueError(f"torch ring: seq_len must be a multiple of {2 * size}, got {seq_len}")
    chunks = np.arange(seq_len).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[-1 - rank]])


class _Block(NamedTuple):
    """What a rank computes with a visiting shard: slices of local queries and of visiting keys."""

    queries: slice
    keys: slice
    is_causal: bool


class _Ring:
    """Arrays are `[B, Sl, heads, D]`; lse is `[B, H, Sl]`."""

    def __init__(self, rank: int, size: int, scale: float) -> None:
        self.rank, self.size, self.scale = rank, size, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the local queries."""
        visiting = torch.stack((key, value))
        out = lse = torch.empty(0)
        for step in range(self.size):
            arriving = self._exchange(visiting) if step < self.size - 1 else None
            block = self._block(step, query.shape[1])
            partial = self._attend(block, query, visiting)
            if step == 0:
                out, lse = partial
            else:
                _merge_into(out[:, block.queries], lse[..., block.queries], *partial)
            visiting = visiting if arriving is None else arriving.wait()
        return out, lse

    def _attend(self, block: _Block, query: Tensor, visiting: Tensor) -> tuple[Tensor, Tensor]:
        key, value = visiting[:, :, block.keys].transpose(2, 3)
        queries = query[:, block.queries].transpose(1, 2)
        out, lse = _FORWARD(queries, key, value, 0.0, block.is_causal, scale=self.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dq, dk, dv` of the local tokens; gradients of a shard's keys travel behind it."""
        visiting = torch.stack((key, value))
        dquery, gradients = torch.zeros_like(query), torch.zeros_like(visiting)
        arriving_gradients = None
        for step in range(self.size):
            arriving = self._exchange(visiting) if step < self.size - 1 else None
            block = self._block(step, query.shape[1])
            share = self._differentiate(block, query, visiting, dout, out, lse)
            dquery[:, block.queries] += share[0]
            if arriving_gradients is not None:
                gradients = arriving_gradients.wait()
            gradients[0, :, block.keys] += share[1]
            gradients[1, :, block.keys] += share[2]
            arriving_gradients = self._exchange(gradients)
            visiting = visiting if arriving is None else arriving.wait()
        assert arriving_gradients is not None
        dkey, dvalue = arriving_gradients.wait()
        return dquery, dkey, dvalue

    def _differentiate(
        self, block: _Block, query: Tensor, visiting: Tensor, *per_query: Tensor
    ) -> list[Tensor]:
        dout, out, lse = per_query
        key, value = visiting[:, :, block.keys].transpose(2, 3)
        queries, dout, out = (x[:, block.queries].transpose(1, 2) for x in (query, dout, out))
        lse = lse[..., block.queries]
        found = _BACKWARD(
            dout, queries, key, value, out, lse, 0.0, block.is_causal, scale=self.scale
        )
        return [x.transpose(1, 2) for x in found]

    def _block(self, step: int, length: int) -> _Block:
        """What is visible at a step: of an earlier shard its first half, of a later one all of it,
        but only to the second half of the local queries."""
        source = (self.rank - step) % self.size
        if source == self.rank:
            return _Block(_ALL, _ALL, is_causal=True)
        if source < self.rank:
            return _Block(_ALL, slice(0, length // 2), is_causal=False)
        return _Block(slice(length // 2, length), _ALL, is_causal=False)

    def _exchange(self, sent: Tensor) -> _Arriving:
        """Starts to send to the next rank and to receive from the previous one."""
        received = torch.empty_like(sent)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, received, (self.rank - 1) % self.size),
            ]
        )
        return _Arriving(received, sent, requests)


class _Arriving(NamedTuple):
    """A transfer under way; it keeps what is sent alive."""

    received: Tensor
    sent: Tensor
    requests: list[Any]

    def wait(self) -> Tensor:
        """What has arrived."""
        for request in self.requests:
            request.wait()
        return self.received


def _merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges a partial result over further keys into `out` and `lse`, in place."""
    share = torch.sigmoid(other_lse - lse).transpose(1, 2)[..., None]
    out.lerp_(other_out, share)
    torch.logaddexp(lse, other_lse, out=lse)
