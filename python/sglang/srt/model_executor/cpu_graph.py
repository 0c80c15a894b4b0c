"""Recorded steps on a CPU: the calls of our kernels with their arguments, made again in one call of C++.

A step of a small model is hundreds of kernels of microseconds each, and torch and Python take as long to find out which
they are. What a kernel is called with depends on the shapes alone, so it is noted once. torch's own operators can't be
noted: a step that computes with one of them is refused.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.kernels import cpu_extension
from sglang.srt.model_executor.device_graph import Cut, DeviceGraph, GraphUnavailable

# A kernel and what it is called with.
Call = tuple[cpu_extension.Function, tuple[float | None, ...]]

ALIGNMENT = 64
CHUNK_BYTES = 1 << 20


class CpuGraphCapture:
    """Records graphs that share the memory of their intermediate tensors and results: only one may run at a time, and a
    result is good until any other of them is recorded or replayed."""

    def __init__(self) -> None:
        self._arena = Arena()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        """Run once, noting the calls. Every replay writes the result again.

        What ``run`` reads beside what it allocates must stay where it is as long as the graph is used.

        Raises:
            GraphUnavailable: ``run`` does something that a replay would not do again.
        """
        (graph,), result = self.in_pieces(lambda cut: run())
        return graph, result

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[DeviceGraph], torch.Tensor]:
        """The same in pieces.

        Raises:
            GraphUnavailable: as above.
        """
        pieces: list[list[Call]] = [[]]
        threads = torch.get_num_threads()
        self._arena.reuse()
        token = cpu_extension.recording.set(pieces[0])

        def cut() -> None:
            pieces.append([])
            cpu_extension.recording.set(pieces[-1])

        try:
            with _OnlyOurKernels(self._arena):
                result = run(cut)
        finally:
            cpu_extension.recording.reset(token)
        return [CpuGraph(calls, self._arena, threads) for calls in pieces], result


class CpuGraph:
    """Calls to make again, and the memory that they work in."""

    def __init__(self, calls: list[Call], arena: Arena, threads: int) -> None:
        packed = [function.pack(arguments) for function, arguments in calls]
        self._arguments = ctypes.create_string_buffer(b"".join(packed))
        at = ctypes.addressof(self._arguments)
        table: list[int] = []
        for (function, _), arguments in zip(calls, packed, strict=True):
            table += function.recorded, at
            at += len(arguments)
        self._calls = (ctypes.c_int64 * len(table))(*table)
        self._count = len(calls)
        self._arena = arena
        self._threads = threads
        self._replay = cpu_extension.load().replay

    def replay(self) -> None:
        """Raises:
        RuntimeError: torch has another number of threads than when this was recorded.
        IndexError: a token id is outside the vocabulary.
        MemoryError: a kernel has no memory to work in.
        """
        if torch.get_num_threads() != self._threads:
            raise RuntimeError(
                f"recorded on {self._threads} threads, replayed on {torch.get_num_threads()}: record it again"
            )
        cpu_extension.raise_for(self._replay(ctypes.addressof(self._calls), self._count))


class _OnlyOurKernels(TorchDispatchMode):
    """Gives torch.empty memory of the arena, lets views pass and refuses every other operator."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch would import its compiler here, in the first decode step: seconds, memory and a folder. Nothing is
        compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.ops.aten.empty.memory_format and on_cpu:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if not func._schema.is_mutable:
            result = func(*args, **kwargs)
            if _are_views(result, args):
                return result
        raise GraphUnavailable(f"it computes with torch's {func}, which is not one of our kernels")


def _are_views(result: object, args: tuple[Any, ...]) -> bool:
    """Whether the result is nothing but the memory of arguments."""
    tensors = result if isinstance(result, list | tuple) else [result]
    given = {tensor.untyped_storage().data_ptr() for tensor in args if _has_storage(tensor)}
    return all(_has_storage(one) and one.untyped_storage().data_ptr() in given for one in tensors)


def _has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """A weight in oneDNN's layout has none that torch knows."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


class Arena:
    """Memory for the tensors of one recording at a time: what one recording has freed, and everything after
    :meth:`reuse`, is given out again, while none of it moves or is returned to the system."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._free: list[tuple[int, int, int]] = []  # chunk, begin, end; ascending, never two that touch
        self._generation = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._chunks))

    def reuse(self) -> None:
        """Forget all tensors there are."""
        self._generation += 1
        self._free = [(index, 0, len(chunk)) for index, chunk in enumerate(self._chunks)]

    def empty(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is free again once nothing refers to it."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        chunk, begin = self._take(size)
        memory = (ctypes.c_char * size).from_buffer(self._chunks[chunk], begin)
        # The tensor's storage holds `memory`, and nothing else does.
        weakref.finalize(memory, self._give, self._generation, chunk, begin, begin + size)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> tuple[int, int]:
        for index, (chunk, begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(chunk, begin + size, end)] if end - begin > size else []
                return chunk, begin
        length = max(size, CHUNK_BYTES)
        self._chunks.append(mmap.mmap(-1, length))
        chunk = len(self._chunks) - 1
        if length > size:
            self._free.append((chunk, size, length))
        return chunk, 0

    def _give(self, generation: int, chunk: int, begin: int, end: int) -> None:
        if generation != self._generation:  # its memory may belong to another tensor by now
            return
        merged: list[tuple[int, int, int]] = []
        for part in sorted([*self._free, (chunk, begin, end)]):
            if merged and merged[-1][0] == part[0] and merged[-1][2] == part[1]:
                merged[-1] = (part[0], merged[-1][1], part[2])
            else:
                merged.append(part)
        self._free = merged
