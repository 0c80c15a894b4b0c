"""What a device can do at best, and when it works: shared by the benchmarks of GPU steps."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang.srt.platforms import total_memory


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, call: Callable[[], Any], repeats: int) -> float:
    """The least time of a call."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def device_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of a large copy (read and written) in GB/s, and of a large bf16 product in TFLOP/s."""
    size, n = (1 << 31, 8192) if device.type == "cuda" else (1 << 26, 512)
    pair = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    copy = 2 * size / _seconds(device, lambda: pair[0].copy_(pair[1]), 20) / 1e9
    pair.clear()
    pair += [torch.randn(n, n, device=device).bfloat16() for _ in range(2)]
    product = 2 * n**3 / _seconds(device, lambda: pair[0] @ pair[1], 20) / 1e12
    pair.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"copy_gbps": round(copy, 1), "bf16_tflops": round(product, 2)}


def device_memory(name: str) -> int:
    """Bytes that a device has, found without a context on it."""
    if name == "cpu":
        return total_memory(torch.device("cpu"))
    return int(torch.cuda.get_device_properties(0).total_memory)


def floor_ms(rates: dict[str, float], read: float, flops: float) -> dict[str, Any]:
    """The least time of a step that reads so many bytes and computes so many operations, and which of both it is."""
    by_bytes, by_flops = read / rates["copy_gbps"] / 1e6, flops / rates["bf16_tflops"] / 1e9
    return {"ms": max(by_bytes, by_flops), "bound": "bytes" if by_bytes >= by_flops else "flops"}


def busy_ms(device: torch.device, call: Callable[[], Any]) -> float | None:
    """Milliseconds within ``call`` in which the device did something, overlapping kernels counted once; None on a CPU.

    Measured with torch.profiler, which slows the host down but not the kernels.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return (
        union(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        )
        / 1e3
    )


def union(intervals: Any) -> float:
    """The length of what (begin, end) intervals cover together."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total
