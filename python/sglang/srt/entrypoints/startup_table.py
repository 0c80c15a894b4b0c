"""The table that the log has when the server is ready: what is served, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

GB = 1 << 30


def startup_table(args: ServerArgs, config: ModelConfig, info: Mapping[str, Any]) -> str:
    """Lines of a name and a value.

    Args:
        info: what the scheduler reported of itself; what it does not say is left out.
    """
    rows = list(_rows(args, config, info))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)


def _rows(args: ServerArgs, config: ModelConfig, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Model", f"{args.served_model_name} ({config.architecture})"
    ranks = f", {args.tp_size} ranks" if args.tp_size > 1 else ""
    yield "Computes in", f"{str(config.dtype).removeprefix('torch.')}{ranks}"
    if "memory_usage" in info:
        each = " per rank" if args.tp_size > 1 else ""
        yield "Weights", f"{info['memory_usage']['weight_bytes'] / GB:.2f} GB{each}"
    for kind, text in info.get("layers", {}).items():
        yield f"  {kind}", text
    yield from _fp4_rows(info)
    if "resolved_attention_backend" in info:
        yield "Attention backend", info["resolved_attention_backend"]
    if "memory_usage" in info:
        size = info["memory_usage"]["kv_cache_bytes"] / GB
        dtype = info.get("resolved_kv_cache_dtype", "")
        yield "KV cache", f"{info['max_total_num_tokens']} tokens, {size:.2f} GB{each}, {dtype}"
    if "max_running_requests" in info:
        yield "Running requests", f"at most {info['max_running_requests']}"
    yield "Context length", f"{config.context_len} tokens"


def _fp4_rows(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The backend of NVFP4 products where there are any, and whose wish it was. The line of the choice has reasons."""
    resolution = info.get("fp4_gemm_backend")
    if not isinstance(resolution, Mapping) or not info.get("fp4_gemm_choices"):
        return
    wish = resolution["requested"]
    yield "FP4 GEMM backend", resolution["resolved"] + (" (auto takes the best here)" if wish == "auto" else "")
