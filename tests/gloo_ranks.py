"""Tensor-parallel ranks as processes with real collectives between them, which outlive a test."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from forked import CONTEXT
from sglang.srt.distributed import (
    RankFailedError,
    TensorParallelGroup,
    close_tensor_parallel,
    init_tensor_parallel,
)
from sglang.srt.utils.net import Rendezvous


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, size, store_file, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            tp = init_tensor_parallel(rank, size, torch.device("cpu"), Rendezvous.on_this_machine(store_file))
            result = function(tp, *arguments)
            close_tensor_parallel(tp)
            connection.send((result, None))
        except Exception:
            connection.send((None, traceback.format_exc()))


class GlooRanks:
    """Processes that are ranks for one function after another. :meth:`close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of ``function(group, *arguments)`` on each of ``size`` ranks; all of these are pickled."""
        while len(self._processes) < size:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._runs += 1
        store_file = str(self._folder / f"ranks{self._runs}")
        connections = self._connections[:size]
        for rank, connection in enumerate(connections):
            connection.send((rank, size, store_file, function, arguments))
        try:
            results = []
            for rank, connection in enumerate(connections):
                assert connection.poll(120), f"rank {rank} does not answer"
                result, error = connection.recv()
                assert error is None, f"rank {rank}: {error}"
                results.append(result)
            return results
        except BaseException:
            self.close()  # the next run gets new ones
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._connections.clear()
        self._processes.clear()


def collectives(tp: TensorParallelGroup) -> dict[str, Any]:
    """What every collective makes of numbers that tell the ranks apart, for each dtype that a model may have."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.arange(6).reshape(2, 3).to(dtype) + 10 * tp.rank
        found[f"sum {dtype}"] = tp.all_reduce(x.T.clone().T).tolist()  # not contiguous
        found[f"max {dtype}"] = tp.all_reduce_max(x.clone()).tolist()
        found[f"gather {dtype}"] = tp.all_gather(x[:, :2]).tolist()
        found[f"broadcast {dtype}"] = tp.broadcast(x.clone()).tolist()
    found["bytes"] = [tp.broadcast_bytes(data * (tp.rank + 1)) for data in (b"abc", b"", b"x" * 100_000)]
    found["minimum"] = tp.minimum(10 - tp.rank)
    found["largest"] = [tp.largest(value) for value in (0.0, 1e-45, 0.1 * (tp.rank + 1), 3e38, torch.inf)]
    try:
        found["given up"] = tp.minimum(0) == 0 if tp.rank == 1 else tp.largest(2.0)
    except RankFailedError:
        found["given up"] = True
    return found
