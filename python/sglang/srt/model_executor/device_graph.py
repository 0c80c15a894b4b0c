"""Recording a step's work once, so that it can be repeated without Python: what a recording is, and CUDA's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch

# Runs before a recording: libraries allocate, compile, load and tune in the first, and nothing of it may be recorded.
WARM_UP_RUNS = 2


class DeviceGraph(Protocol):
    """Recorded work. It reads and writes the addresses that were used while it was recorded."""

    def replay(self) -> None: ...


# Records what its argument does. The result is written again by every replay.
Capture = Callable[[Callable[[], torch.Tensor]], "tuple[DeviceGraph, torch.Tensor]"]

# Ends one piece of a recording and begins the next.
Cut = Callable[[], None]


class GraphUnavailable(Exception):  # noqa: N818
    """What was run can't be recorded on this device; the text says why. It did no harm and can be run as it is."""


class DeviceCapture(Protocol):
    """A :data:`Capture` that can also record in pieces, for work that can't be recorded as a whole."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]: ...

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[DeviceGraph], torch.Tensor]:
        """Record what ``run`` does before, between and behind its calls of ``Cut``: one graph more than there are
        calls. They share memory, so they must be replayed in this order, with nothing of the same capture between."""


class CudaGraphCapture:
    """Records CUDA graphs that share one memory pool, so that all of them need as much as the largest: only one may run
    at a time, and a result is good until any other of them is replayed. The largest should be recorded first.

    Everything is recorded on one side stream of the device, for which libraries allocate their workspaces once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        """Raises:
        RuntimeError: as :meth:`in_pieces`.
        """
        (graph,), result = self.in_pieces(lambda cut: run())
        return graph, result

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[DeviceGraph], torch.Tensor]:
        """Raises:
        RuntimeError: ``run`` allocates too much, waits for the device, or does something else that can't be recorded.
        """
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    run(lambda: None)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                graphs, result = self._record(run)
            torch.cuda.current_stream().wait_stream(self._stream)
        return graphs, borrowed(result)

    def _record(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[DeviceGraph], torch.Tensor]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads may go on calling CUDA: NCCL's watchdog asks for events, which the mode "global" would take
            # for a mistake of the recording.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        begin()
        try:
            result = run(cut)
        except Exception:
            with suppress(RuntimeError):  # to end a broken recording fails too, and says less
                graphs[-1].capture_end()
            raise
        graphs[-1].capture_end()
        return [*graphs], result


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Memory:
    """Bytes on a GPU, which somebody else keeps."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without a hold on its memory, which a recording's pool keeps as long as there is a graph of it: the
    next recording, or the rest of this one, may use it too, where the results of all would add up to gigabytes."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size, address = reach * tensor.itemsize, tensor.data_ptr()
    if tensor.device.type == "cuda":
        values = torch.as_tensor(_Memory(address, size), device=tensor.device).view(tensor.dtype)
    else:
        values = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride())


def capture_for(device: torch.device) -> DeviceCapture:
    """What records work on ``device``."""
    if device.type == "cuda":
        return CudaGraphCapture(device)
    from sglang.srt.model_executor.cpu_graph import CpuGraphCapture

    return CpuGraphCapture()
