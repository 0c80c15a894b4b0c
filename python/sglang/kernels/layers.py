"""Compiles, loads and launches the kernels of what a transformer computes between its products: ``layers.cu`` and the
files of ``TYPED`` and ``UNTYPED``."""

from __future__ import annotations

import logging
import struct
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sglang.kernels import nvrtc
from sglang.kernels.cuda_driver import Kernel
from sglang.srt.errors import StartupError

logger = logging.getLogger(__name__)

MINIMUM_CAPABILITY = (8, 0)
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TYPED = {"decode_attention": "decode_attention.cu"}
UNTYPED = {
    "greedy": "greedy.cu",
    "list_pages": "page_table.cu",
    "draw_token": "draw_token.cu",
    "decode_inputs": "decode_inputs.cu",
}
_FOLDER = Path(__file__).parent

# The kernels' parameters, as the sources' structs lay them out.
NORM = struct.Struct("@4P2qif0q")
HEADS = struct.Struct("@6P4q4i5if0q")
GATE = struct.Struct("@2Pqi0q")
ROTATE = struct.Struct("@8P5q4i2f0q")
COS_SIN = struct.Struct("@4P2if0q")
EMBEDDING = struct.Struct("@3Pq3i0q")
GREEDY = struct.Struct("@5Pq5i0q")
DRAW = struct.Struct("@6P2i0q")
PAGES = struct.Struct("@5Pqi0q")
DECODE_INPUTS = struct.Struct("@6Pqi0q")
DECODE = struct.Struct("@14P10i3f0q")

Program = tuple[str, str, tuple[str, ...]]  # source, architecture, options


def program(name: str, dtype: torch.dtype, capability: tuple[int, int], options: tuple[str, ...] = ()) -> Program:
    """What to compile for kernel ``name`` on values of ``dtype``; those of ``UNTYPED`` are the same for any."""
    if name not in UNTYPED:
        options = (f"-DTYPE={TYPES[dtype]}", *options)
    return source(UNTYPED.get(name) or TYPED.get(name, "layers.cu")), nvrtc.architecture(capability), options


@cache
def source(file: str) -> str:
    headers = ["pdl.cuh"] if file in UNTYPED.values() else ["pdl.cuh", "values.cuh"]
    return "".join((_FOLDER / part).read_text() for part in (*headers, file))


@cache
def unavailable(index: int) -> str | None:
    """Why the kernels can't run on GPU ``index``; None if they can."""
    capability = torch.cuda.get_device_capability(index)
    if capability < MINIMUM_CAPABILITY:
        return f"needs compute capability 8.0 or newer; this device has {capability[0]}.{capability[1]}"
    try:
        nvrtc.load_cubin(*program("greedy", torch.float32, capability))
    except StartupError as error:
        return str(error)
    return None


@cache
def _cubin(item: Program) -> bytes:
    started = time.perf_counter()
    cubin, compiled = nvrtc.load_cubin(*item)
    if compiled:
        logger.info("Compiled the layers' kernels for %s in %.1f s", item[1], time.perf_counter() - started)
    return cubin


@cache
def _kernel(name: str, dtype: torch.dtype, index: int, options: tuple[str, ...]) -> Kernel:
    capability = torch.cuda.get_device_capability(index)
    with torch.cuda.device(index):
        return Kernel(_cubin(program(name, dtype, capability, options)), name, 0, 0, capability >= (9, 0))


def launch(
    name: str,
    dtype: torch.dtype,
    index: int,
    grid: tuple[int, int],
    threads: int,
    params: bytes,
    options: tuple[str, ...] = (),
) -> None:
    """Enqueue kernel ``name`` for ``dtype`` on the current stream of GPU ``index``.

    Args:
        params: the kernel's struct.
        options: macros of its source beside TYPE, for the compiler.

    Raises:
        StartupError: the kernel can't be compiled for this GPU; the text holds NVRTC's log.
    """
    kernel = _kernel(name, dtype, index, options)
    if torch.cuda.current_device() == index:
        kernel.enqueue(grid, threads, torch._C._cuda_getCurrentRawStream(index), params)
        return
    with torch.cuda.device(index):  # streams, the default one above all, belong to a device
        kernel.enqueue(grid, threads, torch._C._cuda_getCurrentRawStream(index), params)


@dataclass(frozen=True)
class GreedyPlan:
    """How ``greedy`` cuts its rows, and the memory that all its calls on a device share: they must be ordered, as
    those of one stream are.

    Attributes:
        partial: int64 [4 * processors], what each block of a row found.
        arrived: int32 [2 * processors], zeros between calls.
    """

    processors: int
    partial: torch.Tensor
    arrived: torch.Tensor

    def splits(self, rows: int, n: int) -> int:
        """Blocks that share a row: two per multiprocessor in all, none with less than 4096 values."""
        return min(32, -(-2 * self.processors // rows), -(-n // 4096))


@cache
def greedy_plan(device: torch.device) -> GreedyPlan:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    partial = torch.empty(4 * processors, dtype=torch.int64, device=device)
    return GreedyPlan(processors, partial, torch.zeros(2 * processors, dtype=torch.int32, device=device))
