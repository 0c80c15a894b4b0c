"""What a benchmark run comes to, by SGLang's names: the printed table and the keys of the result file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang.benchmark.backends import RequestFuncOutput

WIDTH = 50
PERCENTILES = (90, 95, 99)

# Key of the results -> how the table calls it and its format.
_TABLE: dict[str, tuple[str, str]] = {
    "completed": ("Successful requests:", ""),
    "duration": ("Benchmark duration (s):", ".2f"),
    "total_input_tokens": ("Total input tokens:", ""),
    "total_input_text_tokens": ("Total input text tokens:", ""),
    "total_output_tokens": ("Total generated tokens:", ""),
    "total_output_tokens_retokenized": ("Total generated tokens (retokenized):", ""),
    "request_throughput": ("Request throughput (req/s):", ".2f"),
    "input_throughput": ("Input token throughput (tok/s):", ".2f"),
    "output_throughput": ("Output token throughput (tok/s):", ".2f"),
    "max_output_tokens_per_s": ("Peak output token throughput (tok/s):", ".2f"),
    "max_concurrent_requests": ("Peak concurrent requests:", ""),
    "total_throughput": ("Total token throughput (tok/s):", ".2f"),
    "concurrency": ("Concurrency:", ".2f"),
}
# Key's middle -> heading and name in the table.
_LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}


def calculate_metrics(
    input_lens: Sequence[int],
    outputs: Sequence[RequestFuncOutput],
    retokenized_lens: Sequence[int],
    duration: float,
) -> dict[str, Any]:
    """Figures of a run; times of requests in milliseconds, throughputs per second.

    TPOT of a request is the time after its first token over the tokens after the first, so a request with one token
    has none. ITL is over all gaps of all requests. A statistic over nothing is 0.

    Args:
        input_lens: prompt tokens of each request as the dataset says.
        outputs: what became of each; those that failed count nowhere.
        retokenized_lens: tokens of each generated text by the local tokenizer.
        duration: seconds from the first request's start to the last one's end.
    """
    done = [(i, output) for i, output in enumerate(outputs) if output.success]
    good = [output for _, output in done]
    total_input = sum(input_lens[i] for i, _ in done)
    total_output = sum(output.output_len for output in good)
    e2e = [output.latency for output in good]
    peak_tokens, peak_requests = _peaks(good)
    samples = {
        "e2e_latency": e2e,
        "ttft": [output.ttft for output in good],
        "tpot": [(o.latency - o.ttft) / (o.output_len - 1) for o in good if o.output_len > 1],
        "itl": [gap for output in good for gap in output.itl],
    }
    return {
        "duration": duration,
        "completed": len(good),
        "total_input_tokens": total_input,
        "total_input_text_tokens": total_input,
        "total_input_vision_tokens": 0,
        "total_output_tokens": total_output,
        "total_output_tokens_retokenized": sum(retokenized_lens[i] for i, _ in done),
        "request_throughput": len(good) / duration,
        "input_throughput": total_input / duration,
        "output_throughput": total_output / duration,
        "total_throughput": (total_input + total_output) / duration,
        **{key: value for name, values in samples.items() for key, value in _statistics(name, values).items()},
        "concurrency": sum(e2e) / duration,
        "accept_length": None,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = np.array(seconds or [0.0]) * 1000
    found = {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": ms.std()}
    found |= {f"p{p}_{name}_ms": np.percentile(ms, p) for p in PERCENTILES}
    if name == "itl":
        found["max_itl_ms"] = ms.max()
    return {key: float(value) for key, value in found.items()}


def _peaks(outputs: Sequence[RequestFuncOutput]) -> tuple[float, int]:
    """Most token events, and most requests at work, in any second since the first start."""
    if not outputs:
        return 0.0, 0
    begin = min(output.start_time for output in outputs)
    seconds = math.ceil(max(output.start_time + output.latency for output in outputs) - begin) + 1
    tokens, requests = np.zeros(seconds), np.zeros(seconds, dtype=np.int64)
    for output in outputs:
        start = output.start_time - begin
        times = start + output.ttft + np.cumsum([0.0, *output.itl])
        np.add.at(tokens, np.minimum(times.astype(np.int64), seconds - 1), 1)
        requests[int(start) : int(start + output.latency) + 1] += 1
    return float(tokens.max()), int(requests.max())


def print_table(head: dict[str, Any], metrics: dict[str, Any], tail: dict[str, dict[str, str]]) -> None:
    """SGLang's table.

    Args:
        head: lines above the figures.
        metrics: of :func:`calculate_metrics`.
        tail: heading -> lines, below.
    """
    print("\n" + " Serving Benchmark Result ".center(WIDTH, "="))
    _print_lines(head)
    _print_lines({label: format(metrics[key], form) for key, (label, form) in _TABLE.items()})
    for name, (heading, short) in _LATENCIES.items():
        print(heading.center(WIDTH, "-"))
        labels = {f"mean_{name}_ms": "Mean", f"median_{name}_ms": "Median"}
        labels |= {f"p{p}_{name}_ms": f"P{p}" for p in PERCENTILES}
        labels |= {"max_itl_ms": "Max"} if name == "itl" else {}
        _print_lines({f"{label} {short} (ms):": f"{metrics[key]:.2f}" for key, label in labels.items()})
    for heading, lines in tail.items():
        print(heading.center(WIDTH, "-"))
        _print_lines(lines)
    print("=" * WIDTH)


def _print_lines(lines: dict[str, Any]) -> None:
    for label, value in lines.items():
        print(f"{label:<40} {value!s:<10}")
