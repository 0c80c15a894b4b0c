"""Tensor-parallel ranks as threads of this process, with real collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from sglang.srt.distributed import TensorParallelGroup

T = TypeVar("T")


@dataclass
class Board:
    """Where the ranks meet."""

    barrier: threading.Barrier
    slots: dict[int, Any] = field(default_factory=dict)

    def exchange(self, rank: int, value: T) -> list[T]:
        """Every rank's value."""
        self.slots[rank] = value
        self.barrier.wait(timeout=30)
        values = [self.slots[index] for index in range(self.barrier.parties)]
        self.barrier.wait(timeout=30)
        return values


@dataclass(frozen=True)
class ThreadGroup(TensorParallelGroup):
    board: Board | None = None

    def _exchange(self, value: T) -> list[T]:
        assert self.board is not None
        return self.board.exchange(self.rank, value)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x.clone())).sum(0))

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x.clone())).amax(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x.clone()), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x.clone())[0])

    def broadcast_bytes(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def minimum(self, value: int) -> int:
        return min(self._exchange(value))


def thread_groups(size: int) -> list[ThreadGroup]:
    """The groups of ``size`` ranks that meet each other."""
    board = Board(threading.Barrier(size))
    return [ThreadGroup(rank, size, board=board) for rank in range(size)]


def on_every_rank(size: int, run: Callable[[int], T]) -> list[T]:
    """The results of ``run(rank)``, each rank in a thread. torch's default dtype is the process's: the ranks find it as
    the caller set it, and must not change it."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
