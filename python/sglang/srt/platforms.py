"""The device seam: the only place that asks which device there is and how much memory it has."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
import torch

from sglang.srt.errors import ArgumentError


def resolve_device(name: str | None = None, rank: int = 0) -> torch.device:
    """The device to run on: ``name`` ("cpu", "cuda" or "cuda:1"), or the best one there is for None.

    ``rank`` is the number of the GPU where the name has none.

    Raises:
        ArgumentError: no such kind of device, or no usable GPU for "cuda".
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ArgumentError(f"--device {name}: unknown device; valid: cpu, cuda")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "this PyTorch was built without CUDA" if torch.version.cuda is None else "no usable GPU was found"
        raise ArgumentError(f"--device {name}: {why}; use --device cpu or install a CUDA build and a driver")
    # Not torch.cuda.current_device(): it would create a context in a process that only checks arguments.
    number = int(index or rank)
    if number >= torch.cuda.device_count():
        raise ArgumentError(f"--device {name}: this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device("cuda", number)


def gpu_count() -> int:
    """GPUs that this process can use."""
    return torch.cuda.device_count()


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability (major, minor) of a GPU; None for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """The model name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now, by this process, on ``device``; on the CPU within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *(max(limit - used, 0) for limit, used in _cgroup_memory())])


def total_memory(device: torch.device) -> int:
    """Bytes that ``device`` has; on the CPU at most the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_memory())])


def release_unused_memory(device: torch.device) -> None:
    """Give back what allocators of ``device`` keep for later, after deleting objects that only refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
        trim(0)


class DeviceEvent(Protocol):
    """A place in a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""


class _Reached:
    def synchronize(self) -> None:
        return None


_REACHED = _Reached()


def record_event(device: torch.device) -> DeviceEvent:
    """Where ``device`` is when it has done all that it was given so far; a CPU is there already."""
    if device.type != "cuda":
        return _REACHED
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[list[int]] | torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """``values``, a list or a tensor on the CPU, as a tensor of ``dtype`` on ``device``, without waiting for it.

    A copy from memory that is not pinned would wait for everything that the device was given before.
    """
    host = values.to(dtype) if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a tensor on the CPU, without waiting: it may be read once an event that was recorded later is reached.

    ``x`` itself where it is on the CPU.
    """
    if x.device.type != "cuda":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _cgroup_memory(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every memory-limited cgroup around this process, versions 1 and 2.

    Used memory excludes the inactive page cache, which the kernel drops before it refuses an allocation.
    """
    found: list[tuple[int, int]] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version2 = controllers == ""
        base = root if version2 else root / "memory"
        names = ("memory.max", "memory.current") if version2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        cache_key = "inactive_file" if version2 else "total_inactive_file"
        folder = base / group.lstrip("/")
        while True:
            try:
                # "max" (version 2) fails int(): no limit at this level.
                limit, used = (int((folder / name).read_text()) for name in names)
                stats = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                found.append((limit, used - int(stats.get(cache_key, 0))))
            except (OSError, ValueError):
                pass
            if folder == base:
                break
            folder = folder.parent
    return found
