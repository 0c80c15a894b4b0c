"""Time of what a transformer computes between its products: our operators, torch's and, on a GPU, FlashInfer's.

    python benchmark/bench_layers.py --output benchmark/results/h200_layers.json

``us`` is the time of a call in a replayed CUDA graph of calls behind each other, ``host_us`` what enqueueing one costs
Python. On a CPU both are the time of a call. ``layer`` is all that a decoder layer has between its products, in order,
with products of ``--products`` (w4a16) in between and without attention. On a GPU ``decode_attention_1024`` is the
attention of a decode step of ``rows`` requests with contexts of 1024 tokens, behind each other for as many layers as it
takes to find nothing in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.attention.decode_kernel import DecodeKernel
from sglang.srt.layers.operators import TORCH_OPERATORS, Operators, operators_for
from sglang.srt.platforms import device_name

EPS = 1e-5
# Keys and values that calls behind each other read, so that they come from memory.
CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocabulary: int


MODELS = {
    "llama-8b": Sizes(4096, 32, 8, 128, 14336, 128256),
    "llama-70b": Sizes(8192, 64, 8, 128, 28672, 128256),
    "qwen3-32b": Sizes(5120, 64, 8, 128, 25600, 151936),
    "tiny": Sizes(64, 4, 2, 16, 96, 320),
}
Call = Callable[[], Any]


class Inputs:
    """Tensors of one step with ``rows`` tokens."""

    def __init__(self, sizes: Sizes, rows: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        new = partial(torch.randn, device=device)
        self.sizes, self.rows, self.dtype = sizes, rows, dtype
        self.x, self.residual = (new(rows, sizes.hidden).to(dtype) for _ in range(2))
        self.weight, self.head_weight = torch.ones_like(self.x[0]), torch.ones(sizes.dim, dtype=dtype, device=device)
        self.gate_up = new(rows, 2 * sizes.intermediate).to(dtype)
        self.qkv = new(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim).to(dtype)
        shape = (rows + 16, sizes.kv_heads, sizes.dim)
        zeros = partial(torch.zeros, shape, dtype=dtype, device=device)
        self.keys, self.values = zeros(), zeros()
        self.ids = torch.arange(rows, device=device)
        self.inv_freq = 10000.0 ** -(torch.arange(0, sizes.dim, 2, device=device) / sizes.dim)
        self.table = new(rows + 16, sizes.hidden).to(dtype)
        self.logits = new(rows, sizes.vocabulary)
        self.rotary = TORCH_OPERATORS.cos_sin(self.ids, self.inv_freq, 1.0, dtype)

    def cut(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [rows, heads, dim]."""
        sizes = self.sizes
        heads = qkv.unflatten(1, (-1, sizes.dim))
        parts: tuple[torch.Tensor, ...] = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
        return parts


def calls_of(operators: Operators, i: Inputs) -> dict[str, Call]:
    q, k, v = i.cut(i.qkv)
    return {
        "embedding": lambda: operators.embedding(i.ids, i.table, i.dtype),
        "cos_sin": lambda: operators.cos_sin(i.ids, i.inv_freq, 1.0, i.dtype),
        "rms_norm": lambda: operators.rms_norm(i.x, i.weight, EPS),
        "add_rms_norm": lambda: operators.add_rms_norm(i.x, i.residual, i.weight, EPS),
        "norm_heads": lambda: operators.norm_heads(q, k, i.head_weight, i.head_weight, EPS),
        "silu_and_mul": lambda: operators.silu_and_mul(i.gate_up),
        "rotate_and_store": lambda: operators.rotate_and_store(q, k, v, *i.rotary, i.keys, i.values, i.ids),
        "greedy": lambda: operators.greedy(i.logits),
    }


def flashinfer_calls(i: Inputs) -> dict[str, Call]:
    import flashinfer

    return {
        "rms_norm": lambda: flashinfer.rmsnorm(i.x, i.weight, EPS),
        "add_rms_norm": lambda: flashinfer.fused_add_rmsnorm(i.x, i.residual, i.weight, EPS),
        "silu_and_mul": lambda: flashinfer.silu_and_mul(i.gate_up),
    }


class Layer:
    """Products and what lies between them, of random weights; queries stand in for attention's result."""

    def __init__(self, i: Inputs, backend: str) -> None:
        from sglang.srt.layers.quantization.fp4_utils import backends
        from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight

        s, device = i.sizes, i.x.device

        def product(n: int, k: int) -> NvFp4Linear:
            packed = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
            scale = torch.ones(n, k // 16, device=device).to(torch.float8_e4m3fn)
            scales = torch.full((1,), 0.3 / k**0.5, device=device)
            return NvFp4Linear(
                NvFp4Weight(packed, scale, scales, (n,), Activation.NONE, i.dtype), backends()[backend]()
            )

        self.qkv_proj = product((s.heads + 2 * s.kv_heads) * s.dim, s.hidden)
        self.o_proj = product(s.hidden, s.heads * s.dim)
        self.gate_up_proj, self.down_proj = product(2 * s.intermediate, s.hidden), product(s.hidden, s.intermediate)

    def __call__(self, operators: Operators, i: Inputs) -> torch.Tensor:
        x, residual = operators.add_rms_norm(i.x, i.residual, i.weight, EPS)
        q, k, v = i.cut(self.qkv_proj(x))
        operators.rotate_and_store(q, k, v, *i.rotary, i.keys, i.values, i.ids)
        x, residual = operators.add_rms_norm(self.o_proj(q.flatten(1)), residual, i.weight, EPS)
        x = self.down_proj(operators.silu_and_mul(self.gate_up_proj(x)))
        i.x.copy_(x)  # the next call depends on this one
        return x


def attention_calls(sizes: Sizes, requests: int, context: int, dtype: torch.dtype) -> dict[str, Call]:
    """One layer's attention of a decode step, with every token's slot somewhere."""
    torch.manual_seed(0)
    new = partial(torch.randn, device="cuda", dtype=dtype)
    slots, heads, kv_heads, dim = requests * context, sizes.heads, sizes.kv_heads, sizes.dim
    layers = min(50, -(-CACHE_BYTES // (4 * slots * kv_heads * dim)))
    caches = [(new(slots, kv_heads, dim), new(slots, kv_heads, dim)) for _ in range(layers)]
    q, scaling = new(requests, heads, dim), dim**-0.5
    table = torch.randperm(slots, device="cuda").int().view(requests, context)
    rows = torch.arange(requests, device="cuda")
    lengths = torch.full((requests,), context, device="cuda")
    target = AttentionTarget(q.device, dtype, dtype, heads, kv_heads, dim)
    calls: dict[str, Call] = {}
    if DecodeKernel.takes(target):
        kernel, ours = DecodeKernel(target, requests * kv_heads), cycle(caches)
        calls["ours"] = lambda: kernel(q, *next(ours), table, rows, lengths, None, scaling)
    try:
        import flashinfer
    except ImportError as error:
        print(f"flashinfer: {error}", file=sys.stderr)
        return calls
    indptr = torch.arange(requests + 1, dtype=torch.int32) * context
    last, out, theirs = torch.ones(requests, dtype=torch.int32), torch.empty_like(q), cycle(caches)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(384 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True,
        use_tensor_cores=heads // kv_heads >= 4, paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=table.flatten(), paged_kv_last_page_len_buffer=last.cuda(), backend="fa2",
    )  # fmt: skip
    wrapper.plan(
        indptr, table.flatten(), last, heads, kv_heads, dim, 1, sm_scale=scaling, q_data_type=dtype, kv_data_type=dtype
    )
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    calls["flashinfer"] = lambda: wrapper.run(q, tuple(x.unsqueeze(1) for x in next(theirs)), out=out, enable_pdl=pdl)
    return calls


def microseconds(call: Call, repeats: int, device: str) -> tuple[float, float]:
    """Of a call: in a graph, and of enqueueing it."""
    for _ in range(3):
        call()
    if device == "cpu":
        taken = [_elapsed(call) for _ in range(repeats)]
        return statistics.median(taken) * 1e6, statistics.median(taken) * 1e6
    number = 50
    host, graph = [], torch.cuda.CUDAGraph()
    for _ in range(repeats):
        torch.cuda.synchronize()
        host.append(_elapsed(lambda: [call() for _ in range(number)]) / number)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(number):
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / number)
    return statistics.median(times[2:]), statistics.median(host) * 1e6


def _elapsed(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measurements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dtype = getattr(torch, args.dtype)

    def rows_of(model: str, rows: int, operator: str, calls: dict[str, Call]) -> Iterator[dict[str, Any]]:
        for name, call in calls.items():
            us, host_us = microseconds(call, args.repeats, args.device)
            yield {
                "model": model, "rows": rows, "operator": operator, "implementation": name,
                "us": round(us, 2), "host_us": round(host_us, 2),
            }  # fmt: skip

    for model in args.models.split(","):
        for rows in map(int, args.rows.split(",") if args.rows else ()):
            inputs = Inputs(MODELS[model], rows, dtype, args.device)
            calls = {"ours": calls_of(operators_for(args.device), inputs), "torch": calls_of(TORCH_OPERATORS, inputs)}
            if args.device == "cuda":
                try:
                    calls["flashinfer"] = flashinfer_calls(inputs)
                except ImportError as error:
                    print(f"flashinfer: {error}", file=sys.stderr)
            if args.products:
                layer = Layer(inputs, args.products)
                calls["ours"]["layer"] = partial(layer, operators_for(args.device), inputs)
                calls["torch"]["layer"] = partial(layer, TORCH_OPERATORS, inputs)
            for operator in calls["ours"]:
                chosen = {name: available[operator] for name, available in calls.items() if operator in available}
                yield from rows_of(model, rows, operator, chosen)
        if args.device == "cuda":
            for context in map(int, args.contexts.split(",") if args.contexts else ()):
                for requests in map(int, args.requests.split(",")):
                    operator = f"decode_attention_{context}"
                    yield from rows_of(
                        model, requests, operator, attention_calls(MODELS[model], requests, context, dtype)
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", default="llama-8b,llama-70b,qwen3-32b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rows", default="1,8,64,4096", help="tokens of a step; empty: only `decode_attention`")
    parser.add_argument("--contexts", default="1024,8192", help="of `decode_attention`; empty: no such rows")
    parser.add_argument("--requests", default="1,4,8,16,32", help="of a step of `decode_attention`")
    parser.add_argument("--products", default="w4a16", help="backend of the products in `layer`; empty: no `layer`")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    found = []
    with torch.inference_mode():
        for row in measurements(args):
            found.append(row)
            print(" ".join(f"{value:>16}" for value in row.values()), flush=True)
    if args.output:
        report = {
            "device": device_name(torch.device(args.device)),
            "torch": torch.__version__,
            "dtype": args.dtype,
            "rows": found,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
