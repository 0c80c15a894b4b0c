"""Whether a product is right, and how long it takes with its weight not in a cache."""

from __future__ import annotations

import itertools
import logging
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

import torch

from sglang.srt.layers.quantization.fp4_verify import Exact, Layer, exact_product
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import E2M1_MAX, E4M3_MAX

logger = logging.getLogger(__name__)

clock: Callable[[], float] = time.perf_counter

# In the norm. What is right leaves the rounding of the output (0.23 % in bfloat16) and a few codes that approximate
# reciprocals move.
ERROR_LIMIT = 0.01

# Medians of samples: at least MIN (so that one outlier does not count), then until BUDGET seconds are spent or MAX is
# reached; never longer than LIMIT seconds.
MIN_SAMPLES, MAX_SAMPLES, BUDGET, LIMIT = 3, 25, 0.05, 1.0
MIN_CALLS = 8  # in a graph, over which the cost of starting it is spread

# Copies of a weight that are used in turn, so that none is still in the cache when its turn comes.
MAX_COPIES, MAX_COLD_BYTES = 32, 256 << 20

_LARGEST = 3.0  # of the inputs before they are scaled
_PROBE_ROWS = 64


class CaptureError(RuntimeError):
    """A capture has failed. torch's random numbers and its allocator are of no use in this process any more."""


@dataclass(frozen=True)
class Probe:
    """An input of up to ``x.shape[0]`` rows, which repeat after those of ``exact``. The first row holds the largest
    value of every column, so that a scale computed from any number of rows is the same."""

    x: torch.Tensor
    exact: Exact

    @staticmethod
    def make(weight: NvFp4Weight, rows: int, activations_kept: bool = False) -> Probe:
        generator = torch.Generator().manual_seed(0)
        period = min(rows, _PROBE_ROWS)
        base = torch.randn(period, weight.in_features, generator=generator).clamp_(-_LARGEST, _LARGEST)
        base[0] = torch.copysign(torch.tensor(_LARGEST), base[0])
        base = base.to(weight.packed.device)
        if weight.activation is Activation.STATIC and weight.input_scale is not None:
            base *= weight.input_scale * (E2M1_MAX * E4M3_MAX / _LARGEST)
            if weight.pre_quant_scale is not None:
                base /= weight.pre_quant_scale.abs().mean().clamp(min=1e-6)
        layer = Layer(weight.product, weight, None, on_grid=False, activations_kept=activations_kept)
        exact = exact_product(layer, base.to(weight.dtype))
        excess = float(exact.y.abs().max()) / (torch.finfo(weight.dtype).max / 4)
        if excess > 1:  # float16 could not hold the result
            base *= 2.0 ** -ceil(log2(excess))
            exact = exact_product(layer, base.to(weight.dtype))
        return Probe(base.to(weight.dtype).repeat(-(-rows // period), 1)[:rows], exact)

    def problem(self, y: torch.Tensor) -> str | None:
        """What is wrong with the product ``y`` of the first rows of ``x``."""
        exact, period = self.exact, self.exact.y.shape[0]
        if y.dtype != self.x.dtype:
            return f"its result is {y.dtype}"
        worst = 0.0
        for piece in y.split(period):
            rows = slice(len(piece))
            expected = replace(exact, y=exact.y[rows], limit=exact.limit[rows], size=exact.size[rows])
            if not bool(piece.isfinite().all()):
                return f"its result for {len(y)} rows holds NaN or infinity"
            worst = max(worst, expected.error(piece))
        return f"its result for {len(y)} rows is wrong by {worst:.1%}" if worst > ERROR_LIMIT else None


def copies_needed(weight_bytes: int, device: torch.device) -> int:
    """How many copies of a weight are larger together than twice the device's cache, within this module's limits."""
    cold = min(2 * _cache_bytes(device), MAX_COLD_BYTES)
    return min(MAX_COPIES, 1 + cold // max(1, weight_bytes))


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", file.read_text().strip())
        sizes += [int(found[1]) << {"K": 10, "M": 20}[found[2]]] if found else []
    return max(sizes, default=32 << 20)


def seconds_per_call(
    calls: Sequence[Callable[[], object]], device: torch.device, give_up: float = float("inf")
) -> tuple[float, str]:
    """How long one of ``calls`` takes, the same product with different copies of the weight, after the first has run.

    Returns:
        Median of the samples in seconds (where the first exceeds ``give_up`` it is the only one), and what they are:
        "graph" (replays of a CUDA graph of all calls), "events" (launches between CUDA events, of calls that wait for
        the GPU) or "clock" (single calls on a CPU).

    Raises:
        CaptureError: the calls don't wait for the GPU, but can't be captured either.
    """
    sample, per_sample, how = _cuda_sampler(calls) if device.type == "cuda" else _cpu_sampler(calls)
    samples = [sample()]
    while samples[0] <= give_up and len(samples) < MAX_SAMPLES:
        spent = sum(samples) * per_sample
        if spent > LIMIT or (spent > BUDGET and len(samples) >= MIN_SAMPLES):
            break
        samples.append(sample())
    return statistics.median(samples), how


def _cpu_sampler(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], float], int, str]:
    turn = itertools.cycle(calls)

    def sample() -> float:
        call = next(turn)
        start = clock()
        call()
        return clock() - start

    return sample, 1, "clock"


def _cuda_sampler(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], float], int, str]:
    in_a_row = list(calls) * -(-MIN_CALLS // len(calls))
    graph = _captured(in_a_row)

    def run() -> None:
        if graph is not None:
            graph.replay()
        else:
            for call in in_a_row:
                call()

    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(in_a_row)

    run()
    return sample, len(in_a_row), "events" if graph is None else "graph"


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph | None:
    """All of ``calls``; None where they wait for the GPU, which a capture would not survive.

    Raises:
        CaptureError: they can't be captured for another reason.
    """
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # torch says that this mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        calls[0]()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        logger.debug("FP4 GEMM autotune: no CUDA graph can be captured: %s", error)
        return None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(f"it can't be captured in a CUDA graph: {error}") from error
    return graph
