"""Tensor parallelism: which rank this process is, and the collectives that layers and the scheduler need.

Layers receive a :class:`TensorParallelGroup`; nothing here is process-wide state but what torch.distributed keeps.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import distributed

from sglang.srt.errors import StartupError
from sglang.srt.utils.net import Rendezvous

# An idle server waits in a broadcast. That a rank has died is noticed by the parent process, not by a timeout.
_WAIT_FOR_EVER = timedelta(days=3650)
# A rank connects to a store that listens already.
_MEETING = timedelta(seconds=60)
# One more than the bits of infinity, the largest that a float32 of 0 or more has: they are ordered as the numbers are.
_ABOVE_ALL_BITS = 0x7F800001


class RankFailedError(Exception):
    """Another rank has given up what all ranks were doing, and has told them."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """``size`` processes that each hold one shard; this one is number ``rank``.

    Every rank must call the same collectives in the same order, with tensors of the same shape and dtype. Sums are
    computed in the dtype of the tensor.

    ``process_group`` is the ``torch.distributed`` group for tensors on the model's device, ``cpu_group`` that for what
    the ranks have to agree on (both None where ``size`` is 1). ``nnodes`` machines hold as many ranks each, in order.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None
    cpu_group: Any = None
    nnodes: int = 1

    @property
    def local_size(self) -> int:
        """Ranks on this machine."""
        return self.size // self.nnodes

    @property
    def local_rank(self) -> int:
        """Which of this machine's ranks, and GPUs, this one is."""
        return self.rank % self.local_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks; ``x`` may be overwritten."""
        return self._reduce(x, distributed.ReduceOp.SUM)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over the ranks; ``x`` may be overwritten. Not for NaN."""
        return self._reduce(x, distributed.ReduceOp.MAX)

    def _reduce(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        distributed.all_reduce(x, op=operation, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate ``x`` [..., n] of all ranks along the last dimension: [..., size * n]."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x, group=self.process_group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of rank 0, a contiguous tensor on the model's device; overwrites that of the others."""
        if self.size > 1:
            distributed.broadcast(x, src=0, group=self.process_group)
        return x

    def broadcast_bytes(self, data: bytes) -> bytes:
        """``data`` of rank 0; what the others give is ignored. They wait without a time limit."""
        if self.size == 1:
            return data
        length = torch.tensor(len(data))
        distributed.broadcast(length, src=0, group=self.cpu_group)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if not len(buffer):
            return b""
        if self.rank == 0:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        distributed.broadcast(buffer, src=0, group=self.cpu_group)
        return buffer.numpy().tobytes()

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        result = torch.tensor(value)
        distributed.all_reduce(result, op=distributed.ReduceOp.MIN, group=self.cpu_group)
        return int(result)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, which are 0 or more, as float32.

        Raises:
            RankFailedError: on all ranks but one that has given up, which calls ``minimum(0)`` instead.
        """
        bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
        found = self.minimum(_ABOVE_ALL_BITS - bits)
        if found == 0:
            raise RankFailedError
        result: float = struct.unpack("<f", struct.pack("<i", _ABOVE_ALL_BITS - found))[0]
        return result


SINGLE = TensorParallelGroup()


def check_same_on_all_ranks(tp: TensorParallelGroup, choices: dict[str, str]) -> None:
    """``choices`` is what each rank found for flags that were left to it. All ranks call this.

    Raises:
        StartupError: this rank has another choice than rank 0, with which they would not meet in every collective.
    """
    first = msgspec.json.decode(tp.broadcast_bytes(msgspec.json.encode(choices)), type=dict[str, str])
    for flag, mine in choices.items():
        if mine != first[flag]:
            raise StartupError(
                f"{flag}: rank {tp.rank} has {mine} and rank 0 has {first[flag]}, but all need the same one. Make "
                "their machines alike (the log says what is missing), or name one that runs on all."
            )


def init_tensor_parallel(rank: int, size: int, device: torch.device, rendezvous: Rendezvous) -> TensorParallelGroup:
    """Meet the other ranks: returns when all have called this.

    Args:
        rank, size: of this process.
        device: this rank's; tensors on a GPU go through NCCL, on the CPU through gloo.
        rendezvous: the same for all ranks of a machine.
    """
    if size == 1:
        return SINGLE
    if rendezvous.interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, rendezvous.interface)
    store = _open_store(rendezvous, size)
    store.set_timeout(_WAIT_FOR_EVER)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_WAIT_FOR_EVER)
    cpu_group = distributed.group.WORLD
    if device.type != "cuda":
        return TensorParallelGroup(rank, size, cpu_group, cpu_group, rendezvous.nnodes)
    torch.cuda.set_device(device)
    nccl_group = distributed.new_group(backend="nccl", timeout=_WAIT_FOR_EVER)
    tp = TensorParallelGroup(rank, size, nccl_group, cpu_group, rendezvous.nnodes)
    # NCCL connects the ranks at their first collective, which must not be one that a CUDA graph captures.
    tp.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
    return tp


def _open_store(rendezvous: Rendezvous, size: int) -> Any:
    if rendezvous.address is None:
        return distributed.FileStore(rendezvous.store_file, size)  # type: ignore[attr-defined]
    host, port = rendezvous.address
    return distributed.TCPStore(host, port, is_master=False, timeout=_MEETING)  # type: ignore[attr-defined]


def close_tensor_parallel(tp: TensorParallelGroup) -> None:
    """Leave the ranks that :func:`init_tensor_parallel` met; all do so after the same collective."""
    if tp.size > 1:
        distributed.destroy_process_group()
