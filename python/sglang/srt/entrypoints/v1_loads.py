"""``/v1/loads`` and the older ``/get_load``: what load balancers ask. Answered from the scheduler's last output."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from sglang import __version__
from sglang.srt.errors import RequestError
from sglang.srt.managers.io_struct import LoadSnapshot

GB = 1 << 30
_SECTIONS = ("core", "memory", "queues", "all")


def loads(load: LoadSnapshot, info: Mapping[str, Any], query: Mapping[str, str], accelerators: int) -> dict[str, Any]:
    """The answer to ``/v1/loads``.

    Args:
        info: what the scheduler reported of itself when it was ready.
        query: the request's parameters: ``include`` (sections, separated by commas) and ``dp_rank`` (0).
        accelerators: number of GPUs, or of processes on a CPU.

    Raises:
        RequestError: a parameter is unknown or asks for what there is not.
    """
    for name in query:
        if name not in ("include", "dp_rank", "format"):
            raise RequestError(f"Unrecognized query parameter: {name}", name)
    if query.get("format", "json") != "json":
        raise RequestError("'format' must be json; /metrics has Prometheus's (--enable-metrics).", "format")
    if query.get("dp_rank", "0") != "0":
        raise RequestError("'dp_rank' must be 0: there is no data parallelism.", "dp_rank")
    sections = [section.strip() for section in query.get("include", "all").split(",")]
    if wrong := [section for section in sections if section not in _SECTIONS]:
        raise RequestError(f"Invalid include sections: {wrong}. Valid options: {list(_SECTIONS)}.", "include")
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": __version__,
        "num_accelerators": accelerators,
        "loads": [_rank(load, info, sections)],
    }


def _rank(load: LoadSnapshot, info: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    most = int(info.get("max_running_requests", 0))
    slots = int(info.get("max_total_num_tokens", 0))
    answer: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_total_reqs": load.num_running_reqs + load.num_waiting_reqs,
        "num_used_tokens": load.num_used_tokens,
        "max_total_num_tokens": slots,
        "max_running_requests": most,
        "token_usage": load.token_usage,
        "gen_throughput": load.gen_throughput,
        "cache_hit_rate": load.cache_hit_rate,
        "utilization": load.num_running_reqs / most if most else 0.0,
    }
    if {"all", "memory"} & set(sections):
        memory = info.get("memory_usage", {})
        answer["memory"] = {
            "weight_gb": memory.get("weight_bytes", 0) / GB,
            "kv_cache_gb": memory.get("kv_cache_bytes", 0) / GB,
            "token_capacity": slots,
        }
    if {"all", "queues"} & set(sections):
        answer["queues"] = {"waiting": load.num_waiting_reqs, "retracted": load.num_retracted_reqs}
    return answer


def get_load(load: LoadSnapshot) -> list[dict[str, int]]:
    """The answer to ``/get_load``: one object per data-parallel rank."""
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
            "num_waiting_reqs": load.num_waiting_reqs,
            "num_tokens": load.num_used_tokens,
        }
    ]
