"""``/metrics``: Prometheus metrics by SGLang's names, so that its dashboards show this server.

Everything lives in the HTTP process. What the scheduler does came with its last output: a scrape never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang.srt.managers.io_struct import LoadSnapshot
from sglang.srt.managers.request_state import ReqState
from sglang.srt.observability.request_observer import is_aborted
from sglang.srt.sampling.sampling_params import GRAMMAR_FIELDS

GB = 1 << 30

# SGLang's, in seconds and in tokens.
_FIRST_TOKEN = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_END_TO_END = (*_FIRST_TOKEN, 600, 1200, 1800, 2400)
_BETWEEN_TOKENS = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200),
    *(0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_TOKENS = (
    *(
        100,
        300,
        500,
        700,
        1000,
        1500,
        2000,
        3000,
        4000,
        5000,
        6000,
        7000,
        8000,
        9000,
        10000,
        12500,
        15000,
        17500,
        20000,
    ),
    *(22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000),
    1000000,
)

# Of the load: name behind "sglang:", what it says.
_LOAD_GAUGES: dict[str, tuple[str, str]] = {
    "num_running_reqs": ("num_running_reqs", "The number of running requests."),
    "num_queue_reqs": ("num_waiting_reqs", "The number of requests in the waiting queue."),
    "num_used_tokens": ("num_used_tokens", "The number of KV slots that requests hold."),
    "kv_used_tokens": ("num_used_tokens", "The number of KV slots that requests hold."),
    "kv_evictable_tokens": ("num_evictable_tokens", "The number of KV slots that only the prefix cache holds."),
    "token_usage": ("token_usage", "The part of the KV slots that requests hold."),
    "gen_throughput": ("gen_throughput", "The generation throughput (token/s)."),
    "cache_hit_rate": ("cache_hit_rate", "The prefix cache hit rate of the last prefill."),
}


@dataclass
class _Times:
    begin: float
    first: float | None = None
    last: float = 0.0


class MetricsCollector:
    """A :class:`RequestObserver` that counts.

    Args:
        model_name: a label of every metric.
        info: what the scheduler reported of itself when it was ready.
    """

    def __init__(self, model_name: str, info: Mapping[str, Any]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine_type": "unified"}
        self._scheduler_labels = {**self._labels, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._times: dict[str, _Times] = {}
        self._slots = int(info.get("max_total_num_tokens", 0))
        self._load = {name: self._gauge(name, text) for name, (_, text) in _LOAD_GAUGES.items()}
        self._available = self._gauge("kv_available_tokens", "The number of free KV slots.")
        retracted = "Number of times that a request had to give its KV slots back."
        self._retracted = self._counter("num_retracted_requests_total", retracted, self._scheduler_labels)
        self._retracted_before = 0
        self._set_constants(info)

        self._prompt_tokens = self._by_streaming(Counter, "prompt_tokens_total", "Number of prefill tokens processed.")
        self._new_tokens = self._by_streaming(
            Counter, "generation_tokens_total", "Number of generation tokens processed."
        )
        self._requests = self._by_streaming(Counter, "num_requests_total", "Number of requests processed.")
        self._cached_tokens = self._counter(
            "cached_tokens_total", "Number of cached prompt tokens.", {**self._labels, "cache_source": "total"}
        )
        structured = "Number of structured output requests processed."
        self._structured = self._counter("num_so_requests_total", structured, self._labels)
        self._aborted = self._counter("num_aborted_requests_total", "Number of requests aborted.", self._labels)
        self._first_token = self._by_streaming(
            Histogram, "time_to_first_token_seconds", "Time to first token in seconds.", buckets=_FIRST_TOKEN
        )
        self._end_to_end = self._by_streaming(
            Histogram, "e2e_request_latency_seconds", "End-to-end request latency in seconds.", buckets=_END_TO_END
        )
        per_token = "A request's time after its first token by its number of further tokens, in seconds."
        self._per_token = self._by_streaming(
            Histogram, "request_time_per_output_token_seconds", per_token, buckets=_BETWEEN_TOKENS
        )
        # The name before 0.5.
        self._per_token_before = self._histogram("time_per_output_token_seconds", per_token, _BETWEEN_TOKENS)
        between = "Time between two tokens of a request in seconds."
        self._between_tokens = self._histogram("inter_token_latency_seconds", between, _BETWEEN_TOKENS)
        self._prompt_lengths = self._histogram("prompt_tokens_histogram", "Prompt tokens of a request.", _TOKENS)
        uncached = "Prompt tokens of a request that had to be computed."
        self._uncached_lengths = self._histogram("uncached_prompt_tokens_histogram", uncached, _TOKENS)
        self._output_lengths = self._histogram("generation_tokens_histogram", "Output tokens of a request.", _TOKENS)

        names = ("endpoint", "method")
        self._http_requests = self._make(Counter, "http_requests_total", "HTTP requests.", names)
        self._http_responses = self._make(Counter, "http_responses_total", "HTTP responses.", (*names, "status_code"))

    # What metrics there are

    def _make(self, kind: Callable[..., Any], name: str, text: str, labels: Iterable[str], **options: Any) -> Any:
        return kind(f"sglang:{name}", text, tuple(labels), registry=self._registry, **options)

    def _gauge(self, name: str, text: str) -> Gauge:
        return cast(Gauge, self._make(Gauge, name, text, self._scheduler_labels).labels(**self._scheduler_labels))

    def _counter(self, name: str, text: str, labels: Mapping[str, str]) -> Counter:
        return cast(Counter, self._make(Counter, name, text, labels).labels(**labels))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = self._make(Histogram, name, text, self._labels, buckets=buckets)
        return cast(Histogram, metric.labels(**self._labels))

    def _by_streaming(self, kind: Callable[..., Any], name: str, text: str, **options: Any) -> dict[bool, Any]:
        metric = self._make(kind, name, text, (*self._labels, "is_streaming"), **options)
        return {stream: metric.labels(**self._labels, is_streaming=str(stream).lower()) for stream in (False, True)}

    def _set_constants(self, info: Mapping[str, Any]) -> None:
        memory = info.get("memory_usage", {})
        constants = {
            "max_total_num_tokens": ("KV slots.", self._slots),
            "max_running_requests": ("Most requests that run at the same time.", info.get("max_running_requests", 0)),
            "weight_memory_usage_gb": ("Memory of the weights in GB.", memory.get("weight_bytes", 0) / GB),
            "kv_cache_memory_usage_gb": ("Memory of the KV cache in GB.", memory.get("kv_cache_bytes", 0) / GB),
        }
        for name, (text, value) in constants.items():
            self._gauge(name, text).set(value)

    # What is counted

    def received(self, state: ReqState, stream: bool) -> None:
        self._times[state.rid] = _Times(time.perf_counter())

    def progressed(self, state: ReqState, stream: bool, new_tokens: int) -> None:
        times = self._times.get(state.rid)
        if times is None or not new_tokens:
            return
        now = time.perf_counter()
        if times.first is None:
            times.first = now
            self._first_token[stream].observe(now - times.begin)
        else:
            for _ in range(new_tokens):
                self._between_tokens.observe((now - times.last) / new_tokens)
        times.last = now

    def finished(self, state: ReqState, stream: bool) -> None:
        times = self._times.pop(state.rid, None)
        if times is None:
            return
        tokens, params = len(state.output_ids), state.request.sampling_params
        self._requests[stream].inc()
        self._prompt_tokens[stream].inc(state.prompt_tokens)
        self._new_tokens[stream].inc(tokens)
        self._cached_tokens.inc(state.cached_tokens)
        if any(getattr(params, name) is not None for name in GRAMMAR_FIELDS):
            self._structured.inc()
        if is_aborted(state):
            self._aborted.inc()
            return
        self._end_to_end[stream].observe(time.perf_counter() - times.begin)
        if times.first is not None and tokens > 1:
            per_token = (times.last - times.first) / (tokens - 1)
            self._per_token[stream].observe(per_token)
            self._per_token_before.observe(per_token)
        self._prompt_lengths.observe(state.prompt_tokens)
        self._uncached_lengths.observe(state.prompt_tokens - state.cached_tokens)
        self._output_lengths.observe(tokens)

    def http_request(self, endpoint: str, method: str) -> None:
        """A request to a route came; ``endpoint`` is the route's path, not the request's."""
        self._http_requests.labels(endpoint=endpoint, method=method).inc()

    def http_response(self, endpoint: str, method: str, status: int) -> None:
        """Its response begins."""
        self._http_responses.labels(endpoint=endpoint, method=method, status_code=str(status)).inc()

    def render(self, load: LoadSnapshot) -> bytes:
        """Everything in Prometheus's text format, with ``load`` as it is now."""
        for name, (field, _) in _LOAD_GAUGES.items():
            self._load[name].set(getattr(load, field))
        self._available.set(self._slots - load.num_used_tokens - load.num_evictable_tokens)
        self._retracted.inc(load.num_retracted_reqs - self._retracted_before)
        self._retracted_before = load.num_retracted_reqs
        return generate_latest(self._registry)
