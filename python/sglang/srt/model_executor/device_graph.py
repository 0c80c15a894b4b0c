"""Recording a step's work once, so that it can be repeated without Python: what a recording is, and CUDA's."""

from __future__ import annotations

from collections.abc import Callable
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


class GraphUnavailable(Exception):  # noqa: N818
    """What was run can't be recorded on this device; the text says why. It did no harm and can be run as it is."""


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
        RuntimeError: ``run`` allocates too much, waits for the device, or does something else that can't be recorded.
        """
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    run()
            graph = torch.cuda.CUDAGraph()
            failure: Exception | None = None
            try:
                # Other threads may go on calling CUDA: NCCL's watchdog asks for events, which the mode "global" would
                # take for a mistake of the recording.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        result = run()
                    except Exception as error:
                        failure = error
                        raise
            except Exception as error:  # to end a broken recording fails too, and says less
                raise failure or error from None
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph, _borrowed(result)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Borrowed:
    """The memory of a tensor, which somebody else keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.itemsize * stride for stride in tensor.stride()),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` float32 without a hold on its memory, which the pool of a graph keeps as long as there is a graph: the
    next recording may use it too, where results of all sizes would add up to gigabytes."""
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device)


def capture_for(device: torch.device) -> Capture:
    """What records work on ``device``."""
    if device.type == "cuda":
        return CudaGraphCapture(device)
    from sglang.srt.model_executor.cpu_graph import CpuGraphCapture

    return CpuGraphCapture()
