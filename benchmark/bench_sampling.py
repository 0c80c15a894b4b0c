"""Time of sampling under limits: our kernel, torch's sort, its 1024 largest candidates, and FlashInfer's sampler.

    python benchmark/bench_sampling.py --output benchmark/results/h200_sampling.json

``us`` is the median time from probabilities to tokens on an idle stream, between events of the device; on a CPU the
median time of a call. ``kernel`` is what a server on a GPU does, ``sort`` what it does where our kernels can't be
had; ``candidates`` has to ask the device whether they were enough and is what a server on a CPU begins with. FlashInfer
applies top-k, then top-p to what is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers import cuda_sampling, sampler
from sglang.srt.platforms import device_name, resolve_device
from sglang.srt.sampling.sampling_batch_info import CANDIDATES, SamplingBatchInfo, SamplingGroup
from sglang.srt.sampling.sampling_params import SamplingParams

LIMITS: dict[str, dict[str, Any]] = {
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9, min_p 0.02": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
}
Call = Callable[[], Any]


def median_us(call: Call, device: torch.device, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def sorted_draw(probs: torch.Tensor, group: SamplingGroup, noise: torch.Tensor, count: int) -> torch.Tensor:
    """The sampler's operators of torch on the ``count`` largest probabilities."""
    values, ids = probs.topk(count, dim=-1)
    return sampler.draw_candidates(values, ids, group, noise)


def calls_of(probs: torch.Tensor, params: SamplingParams) -> dict[str, Call]:
    rows, size = probs.shape
    (group,) = SamplingBatchInfo.from_params([params] * rows, size, probs.device).groups
    noise = torch.rand(rows, 1, dtype=torch.float64, device=probs.device)
    calls: dict[str, Call] = {
        "sort": lambda: sorted_draw(probs, group, noise, group.most_kept),
        "candidates": lambda: sorted_draw(probs, group, noise, min(CANDIDATES, size)),
    }
    if cuda_sampling.takes(probs):
        calls["kernel"] = lambda: cuda_sampling.draw(probs, group, noise)
    if probs.device.type == "cuda" and not params.min_p:
        try:
            from flashinfer.sampling import top_k_top_p_sampling_from_probs
        except ImportError:
            return calls
        top_ks, top_ps = group.top_ks.squeeze(1).int(), group.top_ps.squeeze(1).clamp(max=1.0)
        calls["flashinfer"] = lambda: top_k_top_p_sampling_from_probs(probs, top_ks, top_ps)
    return calls


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    results = []
    for size in options.vocabulary:
        for rows in options.rows:
            torch.manual_seed(0)
            # As a model's head gives them: bfloat16, with a few likely tokens.
            logits = (3 * torch.randn(rows, size, device=device)).bfloat16().float()
            probs = logits.softmax(-1)
            for name, limits in LIMITS.items():
                calls = calls_of(probs, SamplingParams(**limits))
                us = {kind: round(median_us(call, device, options.repeats), 1) for kind, call in calls.items()}
                print(f"vocabulary {size}, {rows} rows, {name}: {us}", flush=True)
                results.append({"vocabulary": size, "rows": rows, "limits": name, "us": us})
    if options.output is not None:
        report = {"device": device_name(device), "torch": torch.__version__, "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
