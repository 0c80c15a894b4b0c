"""Time and error of NVFP4 linear layers: our backends and whatever peers are installed, in one run.

    python benchmark/bench_fp4_gemm.py --graph --output benchmark/results/h200_w4a16.json --plot h200_w4a16.png
    OMP_NUM_THREADS=1 python benchmark/bench_fp4_gemm.py --device cpu \
        --backends cpu,cpu:fp32,cpu:w4a4,bf16,fp32,llama.cpp --shapes 4096x4096,4096x14336 --m 1,16,64,256 \
        --output benchmark/results/cpu_fp4_gemm_1thread.json

On a GPU, rotates over copies of each weight, so that caches hold none of it, and reports the median call. ``--graph``
replays a CUDA graph of calls, which leaves out the host; calls may then overlap as their kernels allow.
On a CPU, backends take turns at every call. Before each, other memory is read (``read_gbps`` is the rate of that), and
the same backend multiplies with a few rows of another weight, so that caches hold its code and the interpreter's, but
nothing of the weight. The lowest decile is reported, of one thread that of its CPU time: what else the machine does
costs all of them alike, and mostly the calls above it.
``gbps`` counts packed weights and block scales, ``rel_err`` is relative to float64 on the exact weights, over at most
64 rows.
Backends: those of ``--fp4-gemm-backend``, ``w4a16:b1r3n1k8u1s3p1x`` and the like (one tiling), ``bf16`` (torch.mm
with weights in ``--dtype``), ``humming`` (pip install humming-kernels), ``gemlite`` (pip install gemlite; tunes
itself for each shape and M, which takes long), ``llama.cpp`` (CPU; pip install llama-cpp-python). One that is absent
or refuses a shape is named and passed over. ``cpu:w4a4`` and the like quantise the input too, which alone makes an
error of 0.1. Whatever ``--dtype`` is, ``cpu:fp32``, ``torch:fp32`` and ``fp32`` (torch.mm) have inputs and, if
unpacked, weights in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers.quantization.nvfp4_utils import E2M1_VALUES

SHAPES = "4096x4096,6144x4096,28672x4096,4096x14336,57344x8192,8192x28672"  # N x K
ROWS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"
GLOBAL_SCALE = 2e-3
COLD_BYTES = 300_000_000  # that a round over the copies reads: several times any L2
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """An NVFP4 weight of random codes: ``packed`` uint8 [N, K / 2], ``scale`` float8_e4m3fn [N, K / 16]."""

    packed: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def random(n: int, k: int, device: str) -> Weight:
        g = torch.Generator(device).manual_seed(0)
        packed = torch.randint(0, 256, (n, k // 2), device=device, generator=g, dtype=torch.uint8)
        scale = torch.rand(n, k // 16, device=device, generator=g) * 3 + 0.02
        return Weight(packed, scale.to(torch.float8_e4m3fn))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def values(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Without the global scale."""
        packed, scale = self.packed[rows], self.scale[rows]
        table = torch.tensor(E2M1_VALUES, dtype=dtype, device=packed.device)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        return table[codes.int()] * scale.to(dtype).repeat_interleave(16, dim=1)


# ------------------------------------------------------------------------------------------------------- backends
def w4a16_kernels(weight: Weight, dtype: torch.dtype, tiling: str = "") -> Call:
    """The kernels of backend ``w4a16`` without the layer around them; of a name, one tiling for any number of rows."""
    from sglang.kernels import w4a16
    from sglang.kernels.w4a16_layout import pack

    n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
    w4a16.prepare(dtype, 0)
    packed = pack(weight.packed, weight.scale, dtype)
    scale = torch.full((n,), GLOBAL_SCALE, device=packed.device)
    device = w4a16.device(0)
    named = {str(way): way for way in w4a16.tilings(device.capability)}
    if tiling and tiling not in named:
        raise ValueError(f"not a tiling; there are {', '.join(named)}")

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0], n)
        way = named[tiling] if tiling else device.choose(x.shape[0], n, k)
        w4a16.gemm(x, packed, scale, None, ((n, GLOBAL_SCALE),), y, way)
        return y

    return call


def registered(full_name: str) -> Callable[[Weight, torch.dtype], Call]:
    """A backend of the registry."""
    name, _, kind = full_name.partition(":")
    if name == "w4a16" and kind:
        return partial(w4a16_kernels, tiling=kind)

    def make(weight: Weight, dtype: torch.dtype) -> Call:
        from sglang.srt.layers.quantization.fp4_utils import Target, backends
        from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight

        n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
        if name not in backends():
            raise ValueError(f"not a backend; there are {', '.join((*MAKERS, *backends()))}")
        backend = backends()[name]
        weight_only = name in ("torch", "cpu", "w4a16") and kind != "w4a4"
        reason = backend.unsupported_reason(Target.current(weight.packed.device).for_layer(k, n, weight_only, dtype))
        if reason is not None:
            raise ValueError(reason)
        one = torch.ones((), device=weight.packed.device)
        return NvFp4Linear(
            NvFp4Weight(
                packed=weight.packed,
                scale=weight.scale,
                global_scales=torch.full((1,), GLOBAL_SCALE, device=weight.packed.device),
                part_sizes=(n,),
                activation=Activation.NONE if weight_only else Activation.STATIC,
                dtype=dtype,
                input_scale=None if weight_only else one / 2688 * 8,
                input_scale_inv=None if weight_only else 1 / (one / 2688 * 8),
            ),
            backend(),
        )

    return make


def unpacked(weight: Weight, dtype: torch.dtype) -> Call:
    matrix = (weight.values(torch.float32) * GLOBAL_SCALE).to(dtype).T
    return lambda x: x @ matrix


def humming(weight: Weight, dtype: torch.dtype) -> Call:
    from humming.layer import HummingLayer  # type: ignore[import-not-found, unused-ignore]

    n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype).cuda()
    tensors = {"weight": weight.packed, "weight_scale": weight.scale}
    layer.load_from_tensors({**tensors, "weight_scale_2": torch.full((1,), GLOBAL_SCALE)})
    layer.transform()
    return layer  # type: ignore[no-any-return]


def gemlite(weight: Weight, dtype: torch.dtype) -> Call:
    from gemlite.helper import A16W4_NVFP  # type: ignore[import-not-found, unused-ignore]

    helper = A16W4_NVFP(device=str(weight.packed.device), dtype=dtype)
    inverse = torch.tensor(1 / GLOBAL_SCALE)
    return helper.from_packed_weights(weight.packed, scales=weight.scale, meta_scale=inverse)  # type: ignore[no-any-return]


def llama_cpp(weight: Weight, dtype: torch.dtype) -> Call:
    import ggml_peer

    return ggml_peer.make(weight.values(torch.float32), GLOBAL_SCALE)


MAKERS: dict[str, Callable[[Weight, torch.dtype], Call]] = {
    "w4a16": w4a16_kernels,
    "bf16": unpacked,
    "fp32": unpacked,
    "humming": humming,
    "gemlite": gemlite,
    "llama.cpp": llama_cpp,
}


# --------------------------------------------------------------------------------------------------------- timing
class Turns:
    """Times calls on a CPU in turns, ``flush`` read before each; of a single thread, the time it runs."""

    def __init__(self, flush: torch.Tensor, repeats: int, seconds: float) -> None:
        self._flush, self._repeats, self._seconds = flush, repeats, seconds
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._reads: list[float] = []

    def microseconds(self, calls: dict[str, Sequence[Call]], inputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """The lowest decile of ``repeats`` calls of each backend's first, after its second; of fewer, but 5, where
        these took ``seconds``."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(self._repeats + 1):
            for name, (call, small) in calls.items():
                if index > 5 and sum(times[name]) > self._seconds:
                    continue
                start = self._now()
                self._flush.sum()
                read = self._now() - start
                small(inputs[name])
                before = self._now()
                call(inputs[name])
                if index > 0:
                    times[name].append(self._now() - before)
                    self._reads.append(read)
        return {name: lowest_decile(measured) * 1e6 for name, measured in times.items()}

    @property
    def read_gbps(self) -> float:
        return self._flush.nbytes / lowest_decile(self._reads) / 1e9


def lowest_decile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def microseconds(calls: Sequence[Call], x: torch.Tensor, graph: bool, repeats: int) -> float:
    """Median time of a call on a GPU, over rounds in which every copy is called once."""

    def round_of_calls() -> None:
        for call in calls:
            call(x)

    round_of_calls()
    torch.cuda.synchronize()
    run: Callable[[], None] = round_of_calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            round_of_calls()
        run = captured.replay
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def relative_error(call: Call, weight: Weight, x: torch.Tensor) -> float:
    y, rows = call(x)[-64:], x[-64:].double()
    difference = total = 0.0
    for first in range(0, y.shape[1], 4096):
        part = slice(first, first + 4096)
        expected = rows @ weight.values(torch.float64, part).T * GLOBAL_SCALE
        difference += (y[:, part].double() - expected).square().sum().item()
        total += expected.square().sum().item()
    return float((difference / total) ** 0.5)


def bench(args: argparse.Namespace, report: dict[str, Any]) -> Iterator[None]:
    """Add to ``report["rows"]``, a shape at a time. Backends take turns at each M, so that they meet the device in the
    same state of heat and clocks."""
    default = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    dtypes = {name: torch.float32 if name.endswith("fp32") else default for name in args.backends}
    on_cuda, result = args.device == "cuda", report["rows"]
    turns = None if on_cuda else Turns(torch.ones(args.flush_mib << 18), args.repeats, args.seconds)
    for n, k in args.shapes:
        weight, few_rows = Weight.random(n, k, args.device), Weight.random(32, k, args.device)
        made: dict[str, list[Call]] = {}
        for name in args.backends:
            read = 2 * n * k if name == "bf16" else weight.nbytes
            copies = max(2, min(32, -(-COLD_BYTES // read))) if on_cuda else 1
            try:
                make = MAKERS.get(name) or registered(name)
                made[name] = [make(weight, dtypes[name]) for _ in range(copies)]
                if not on_cuda:
                    made[name].append(make(few_rows, dtypes[name]))
            except Exception as error:
                print(f"{name} {n}x{k}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        for m in args.m:
            x = torch.randn(m, k, device=args.device, generator=torch.Generator(args.device).manual_seed(m)).to(default)
            inputs = {name: x.to(dtypes[name]) for name in made}
            errors: dict[str, float] = {}
            times: dict[str, float] = {}
            for name, calls in made.items():
                try:
                    errors[name] = relative_error(calls[0], weight, inputs[name])
                    if on_cuda:
                        torch.cuda.synchronize()
                        time.sleep(args.pause)
                        few = calls[:2] if m >= 1024 else calls  # a round is then long enough
                        times[name] = microseconds(few, inputs[name], args.graph, 3 if m >= 1024 else args.repeats)
                except Exception as error:
                    errors.pop(name, None)
                    print(f"{name} {n}x{k} M={m}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if turns is not None:
                times = turns.microseconds({name: made[name] for name in errors}, inputs)
                report["machine"]["read_gbps"] = round(turns.read_gbps, 1)
            for name, us in times.items():
                row = {"backend": name, "n": n, "k": k, "m": m, "us": round(us, 2)}
                row |= {"tflops": round(2e-6 * n * k * m / us, 4), "gbps": round(weight.nbytes / us / 1e3, 1)}
                result.append(row | {"rel_err": float(f"{errors[name]:.3e}")})
        del made
        if on_cuda:
            torch.cuda.empty_cache()
        print_table([row for row in result if (row["n"], row["k"]) == (n, k)])
        yield


# --------------------------------------------------------------------------------------------------------- output
def print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    names = list(dict.fromkeys(row["backend"] for row in rows))
    cells = {(row["backend"], row["m"]): row for row in rows}
    print(f"\nN={rows[0]['n']} K={rows[0]['k']}: microseconds (relative error)")
    print("M".rjust(6), *(name.rjust(20) for name in names))
    for m in sorted({row["m"] for row in rows}):
        found = [cells.get((name, m)) for name in names]
        print(f"{m:6}", *(f"{r['us']:10.1f} ({r['rel_err']:.1e})".rjust(20) if r else "-".rjust(20) for r in found))
    sys.stdout.flush()


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """TFLOP/s and GB/s against M, one row of axes per shape."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    figure, axes = pyplot.subplots(len(shapes), 2, figsize=(11, 3 * len(shapes)), squeeze=False)
    for (n, k), line in zip(shapes, axes, strict=True):
        for axis, (key, label) in zip(line, (("tflops", "TFLOP/s"), ("gbps", "GB/s of weights")), strict=True):
            for name in dict.fromkeys(row["backend"] for row in rows):
                mine = [row for row in rows if (row["n"], row["k"], row["backend"]) == (n, k, name)]
                axis.plot([row["m"] for row in mine], [row[key] for row in mine], marker=".", label=name)
            axis.set(xscale="log", yscale="log", xlabel="M", ylabel=label, title=f"N={n} K={k}")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def machine(device: str) -> dict[str, Any]:
    versions = {}
    for name in ("torch", "humming-kernels", "gemlite", "flashinfer-python"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"versions": versions, "python": platform.python_version(), "cuda": torch.version.cuda}
    if device == "cuda":
        size = 1 << 31
        a, b = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        us = microseconds([lambda x: b.copy_(x)], a, graph=False, repeats=20)
        found |= {"device": torch.cuda.get_device_name(), "copy_gbps": round(2 * size / us / 1e3)}
    else:
        from sglang.check_env import devices

        cpu = devices()[-1]
        found |= {"device": f"{cpu['name']}, {cpu['instructions']}", "threads": torch.get_num_threads()}
    return found


def shapes(text: str) -> list[tuple[int, int]]:
    return [(int(n), int(k)) for n, k in (item.split("x") for item in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["w4a16", "humming", "bf16"])
    parser.add_argument("--shapes", type=shapes, default=shapes(SHAPES), help=f"N x K, default {SHAPES}")
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=ROWS.split(","))
    parser.add_argument("--repeats", type=int, help="calls of each copy; default 9, on a CPU 100")
    parser.add_argument("--seconds", type=float, default=3, help="for a backend's calls at one M, after five (CPU)")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each timing, to cool down (CUDA)")
    parser.add_argument("--flush-mib", type=int, default=256, help="read before each call (CPU): more than its caches")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="PNG file (needs matplotlib)")
    args = parser.parse_args()
    args.m = [int(m) for m in args.m]
    args.repeats = args.repeats or (9 if args.device == "cuda" else 100)
    rows: list[dict[str, Any]] = []
    statistic = "median"
    if args.device == "cpu":
        clock = "CPU time" if torch.get_num_threads() == 1 else "time"
        statistic = f"lowest decile, {clock} of calls in turns"
    head = {"machine": machine(args.device), "graph": args.graph, "statistic": statistic, "dtype": args.dtype}
    report: dict[str, Any] = head | {"rows": rows}
    for _ in bench(args, report):
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n  ".join(json.dumps(row) for row in rows)
            head = json.dumps({**report, "rows": []}, indent=1).removesuffix("[]\n}")
            args.output.write_text(f"{head}[\n  {lines}\n ]\n}}\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
