"""Y = X W^T for NVFP4 weights and bfloat16 or float16 activations: compiles, loads and launches the w4a16 kernels.

Three ways, see :func:`sglang.kernels.w4a16_tilings.ranked`: mma.sync for small M, wgmma on compute capability 9.0 for
larger, and for the rest a dequantised copy of some rows of the weight in a shared scratch, multiplied by cuBLAS.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from sglang.kernels import nvrtc
from sglang.kernels.cuda_driver import Kernel, Launch, TensorMap, tensor_map
from sglang.kernels.w4a16_layout import ROWS, UNIT
from sglang.kernels.w4a16_tilings import (
    MAX_SPLIT,
    SCRATCH_BYTES,
    SMALL,
    WIDE,
    SmallTiling,
    Way,
    WideTiling,
    ranked,
    shared_limit,
    small_tilings,
)

logger = logging.getLogger(__name__)

GRAIN = 128  # rows of weights in the scratch are a multiple of it
_FOLDER = Path(__file__).parent

Program = tuple[str, str, tuple[str, ...]]  # source, architecture, options


# ------------------------------------------------------------------------------------------------------- sources
@cache
def source(name: str, columns: int = 0) -> str:
    """Of "small", "dequantize" or "wgmma"; the last one's operand list depends on ``columns``."""
    files = ["pdl.cuh", "values.cuh", "w4a16_common.cuh", *(["w4a16_sums.cuh"] if name == "small" else [])]
    common = "".join((_FOLDER / file).read_text() for file in files)
    return common + (_wgmma_instruction(columns) if columns else "") + (_FOLDER / f"w4a16_{name}.cu").read_text()


def _wgmma_instruction(columns: int) -> str:
    count = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(4))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        "__device__ __forceinline__ void wgmma(float *d, const u32 *a, u64 b) {\n"
        '  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n'
        f'wgmma.mma_async.sync.aligned.m64n{columns}k16.f32." TYPES " {{{outputs}}}, {{{inputs}}}, %{count + 4}, '
        f'p, 1, 1, 0;\\n}}" : {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n}}\n'
    )


def program(tiling: Way, dtype: torch.dtype, capability: tuple[int, int]) -> Program:
    """What to compile for ``tiling``; None means the dequantising kernel."""
    arch = nvrtc.architecture(capability)
    if tiling is None:
        return source("dequantize"), arch, (f"-DTYPE={int(dtype == torch.float16)}",)
    if isinstance(tiling, WideTiling):
        return source("wgmma", tiling.columns), arch, tiling.options(dtype)
    return source("small"), arch, tiling.options(dtype)


_cubins: dict[Program, bytes] = {}


def compile_programs(programs: Iterable[Program]) -> None:
    """Have them compiled or read from the cache, several at a time; says so if it has to compile."""
    missing = [item for item in dict.fromkeys(programs) if item not in _cubins]
    cached = [item for item in missing if nvrtc.is_cached(*item)]
    compiling, started = len(missing) - len(cached), time.perf_counter()
    if compiling:
        logger.info("w4a16: compiling %d kernels for %s", compiling, missing[0][1])
    with ThreadPoolExecutor(8) as pool:
        for item, (cubin, _) in zip(missing, pool.map(lambda item: nvrtc.load_cubin(*item), missing), strict=True):
            _cubins[item] = cubin
    if compiling:
        logger.info("w4a16: compiled %d kernels in %.1f s", compiling, time.perf_counter() - started)


# ------------------------------------------------------------------------------------------------------- devices
@dataclass(frozen=True)
class Device:
    """What the choice of a tiling depends on, and the memory that all calls share."""

    index: int
    capability: tuple[int, int]
    processors: int
    max_clusters: tuple[tuple[int, int], ...]  # blocks in a cluster, how many of those run at once
    scratch: torch.Tensor  # uint8 [SCRATCH_BYTES]; calls must be ordered, as those of one stream are
    ready: torch.Tensor  # int32 [blocks that run at once], zeros between calls

    def choose(self, m: int, n: int, k: int, rank: int = 0, paired: bool = False) -> Way:
        """The way that the model puts at ``rank``; the first where there are not as many; see ``ranked``."""
        ways = _ranked(m, n, k, self.capability, self.processors, self.max_clusters, paired)
        return ways[rank] if rank < len(ways) else ways[0]


@lru_cache(65536)
def _ranked(
    m: int,
    n: int,
    k: int,
    capability: tuple[int, int],
    processors: int,
    max_clusters: tuple[tuple[int, int], ...],
    paired: bool,
) -> tuple[Way, ...]:
    return ranked(m, n, k, capability, processors, dict(max_clusters), paired)


@cache
def device(index: int) -> Device:
    """Raises StartupError where the kernels can't be compiled."""
    with torch.cuda.device(index):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
        ready = torch.zeros(
            max(tiling.blocks for tiling in SMALL) * properties.multi_processor_count, dtype=torch.int32, device="cuda"
        )
        clusters = {1: properties.multi_processor_count}
        if capability == (9, 0):
            probe = WIDE[0]
            wgmma = _kernel(probe, torch.bfloat16, index, "w4a16_wgmma")
            for split in range(2, MAX_SPLIT + 1):
                clusters[split] = wgmma.max_clusters(split, probe.shared)
        return Device(index, capability, properties.multi_processor_count, tuple(clusters.items()), scratch, ready)


@cache
def _kernel(tiling: Way, dtype: torch.dtype, index: int, name: str) -> Kernel:
    capability = torch.cuda.get_device_capability(index)
    item = program(tiling, dtype, capability)
    compile_programs([item])
    threads, shared = 256, 0
    if name == "w4a16_gemm":
        assert isinstance(tiling, SmallTiling)
        threads, shared = tiling.threads(capability), shared_limit(capability)
    elif name == "w4a16_wgmma":
        assert isinstance(tiling, WideTiling)
        threads, shared = tiling.threads, tiling.shared
    with torch.cuda.device(index):
        return Kernel(_cubins[item], name, threads, shared, capability >= (9, 0))


@lru_cache(1024)
def _kernel_of(tiling: Way, dtype: torch.dtype, index: int) -> Kernel:
    if isinstance(tiling, WideTiling):
        return _kernel(replace(tiling, split=1, share=1), dtype, index, "w4a16_wgmma")  # kernels take any of them
    return _kernel(tiling, dtype, index, "w4a16_dequantize" if tiling is None else "w4a16_gemm")


def tilings(capability: tuple[int, int]) -> tuple[Way, ...]:
    """Every way that calls on such a device may take."""
    return (None, *small_tilings(capability), *(WIDE if capability == (9, 0) else ()))


@cache
def prepare(dtype: torch.dtype, index: int) -> None:
    """Compile and load every kernel for activations of ``dtype``, and take the shared memory of the device, so that
    none of it happens in a call."""
    capability = device(index).capability
    compile_programs(program(tiling, dtype, capability) for tiling in tilings(capability))
    for tiling in tilings(capability):
        _kernel_of(tiling, dtype, index)


# ------------------------------------------------------------------------------------------------------ launching
class _SmallParams(ctypes.Structure):
    _fields_ = [
        ("w_map", TensorMap),
        ("x_map", TensorMap),
        *((name, ctypes.c_void_p) for name in ("w", "x", "y", "scale", "bias")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "k_units", "row_blocks", "stages", "tiles", "granule")),
        *((name, ctypes.c_void_p) for name in ("partial", "ready", "residual", "norm_weight", "squares", "x_squares")),
        ("x_eps", ctypes.c_float),
        ("gate_blocks", ctypes.c_int),
        ("padding", ctypes.c_char * 56),  # to a multiple of 64 bytes, the alignment of a tensor map
    ]


class _WideParams(ctypes.Structure):
    _fields_ = [
        ("w_map", TensorMap),
        ("x_map", TensorMap),
        *((name, ctypes.c_void_p) for name in ("y", "scale", "bias")),
        *((name, ctypes.c_int) for name in ("m", "n", "k_units", "n_tiles", "m_tiles", "split", "share")),
        ("padding", ctypes.c_char * 12),
    ]


class _DequantizeParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "out")),
        *((name, ctypes.c_int) for name in ("row_blocks", "k", "k_units")),
    ]


@dataclass(frozen=True)
class Fusion:
    """What ``w4a16_small.cu`` computes besides x W^T, see there. Where it is not None

    Attributes:
        gate: y is [M, N / 2], N a multiple of 32; with tilings of an even number of blocks of 16 rows.
        residual: [M, N] contiguous, N a multiple of 16; becomes the sum with the product.
        norm_weight: [N], with ``residual``.
        squares: float32 [M, N / 16], written with ``residual``.
        x_squares: float32 [M, K / 16] contiguous.
        x_eps: added to their mean.
    """

    gate: bool = False
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    x_squares: torch.Tensor | None = None
    x_eps: float = 0.0

    def values(self, row_blocks: int) -> Extras:
        addresses = map(_address, (self.residual, self.norm_weight, self.squares, self.x_squares))
        return (*addresses, self.x_eps, row_blocks // 2 if self.gate else 0)


PLAIN = Fusion()


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    parts: Sequence[tuple[int, float]],
    y: torch.Tensor,
    tiling: Way,
    fusion: Fusion = PLAIN,
) -> None:
    """Write ``x W^T * scale + bias`` into ``y``: sums in float32, rounded once (with cuBLAS and a bias perhaps twice).

    Args:
        x: [M > 0, K], bfloat16 or float16, unit inner stride, rows at multiples of 16 bytes; K a multiple of 64.
        weight: result of :func:`sglang.kernels.w4a16_layout.pack` for x's dtype.
        scale: float32 [N].
        bias: [N] of x's dtype.
        parts: rows of neighbouring parts of the weight, and their scale, which ``scale`` repeats.
        y: [M, N] of x's dtype, contiguous, 16-byte aligned.
        tiling: how; None for cuBLAS on a dequantised copy.
        fusion: what a small tiling computes besides.
    """
    (m, k), n, index = x.shape, scale.shape[0], x.device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    memory = weight.data_ptr(), weight.shape[0], weight.shape[1], scale.data_ptr(), _address(bias)
    stride = x.stride(0) if m > 1 else k
    if isinstance(tiling, SmallTiling):
        extras = fusion.values(weight.shape[0])
        _small(tiling, x.dtype, index, stream, memory, x.data_ptr(), stride, y.data_ptr(), m, n, k, extras)()
        return
    assert fusion is PLAIN, "only small tilings do more than multiply"
    if isinstance(tiling, WideTiling):
        _wide(tiling, x.dtype, index, stream, memory, x.data_ptr(), stride, y.data_ptr(), m, n, k)()
    else:
        _scratch(x, weight, bias, parts, y)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


Memory = tuple[int, int, int, int, "int | None"]  # packed weight, its first two sizes, scale, bias
Extras = tuple["int | float | None", ...]  # the last fields of _SmallParams


# Cached: a launch depends on nothing but addresses and sizes, of which a server sees few.
@lru_cache(4096)
def _small(
    tiling: SmallTiling,
    dtype: torch.dtype,
    index: int,
    stream: int,
    memory: Memory,
    x: int,
    x_stride: int,
    y: int,
    m: int,
    n: int,
    k: int,
    extras: Extras,
) -> Launch:
    where = device(index)
    weight, blocks, k_units, scale, bias = memory
    columns, units, tiles = 8 * tiling.nb, tiling.stage_units, tiling.tiles(n)
    w_map = x_map = TensorMap()
    if where.capability >= (9, 0):
        box = tiling.rows // ROWS // (2 if extras[-1] else 1)  # gates and what they are for are copied each by itself
        w_map = _weight_map(weight, blocks, k_units, (box, units))
        if not tiling.one_row:
            x_map = tensor_map(x, 2, (64, m, k // 64), (2 * x_stride, 128), (64, columns, 2 * units), True)
    assert tiling.rows // ROWS % 2 == 0 or not extras[-1], "halves of a tile"
    assert m == 1 or not tiling.one_row
    stages = -(-k_units // units)
    granule = 1 if tiling.cut and m <= columns else stages
    params = _SmallParams(
        w_map, x_map, weight, x, y, scale, bias, x_stride, m, n, k, k_units, blocks, stages, tiles, granule,
        where.scratch.data_ptr(), where.ready.data_ptr(), *extras,
    )  # fmt: skip
    kernel = _kernel_of(tiling, dtype, index)
    grid = (min(tiling.blocks * where.processors, tiles * stages // granule), -(-m // columns))
    return kernel.launch(grid, tiling.taken(k, where.capability), stream, params)


@lru_cache(4096)
def _wide(
    tiling: WideTiling,
    dtype: torch.dtype,
    index: int,
    stream: int,
    memory: Memory,
    x: int,
    x_stride: int,
    y: int,
    m: int,
    n: int,
    k: int,
) -> Launch:
    weight, blocks, k_units, scale, bias = memory
    w_map = _weight_map(weight, blocks, k_units, (tiling.rows // ROWS, 1))
    x_map = tensor_map(x, 2, (64, m, k // 64), (2 * x_stride, 128), (64, tiling.columns // tiling.share, 1), True)
    n_tiles, m_tiles = -(-n // (tiling.share * tiling.rows)), -(-m // tiling.columns)
    params = _WideParams(w_map, x_map, y, scale, bias, m, n, k_units, n_tiles, m_tiles, tiling.split, tiling.share)
    cluster, tiles = tiling.split * tiling.share, n_tiles * m_tiles
    clusters = tiles if tiling.split > 1 else min(tiles, device(index).processors // cluster)
    kernel = _kernel_of(tiling, dtype, index)
    return kernel.launch((clusters * cluster, 1), tiling.shared, stream, params, cluster)


@lru_cache(4096)
def _weight_map(weight: int, blocks: int, k_units: int, box: tuple[int, int]) -> TensorMap:
    return tensor_map(
        weight, 8, (UNIT // 8, k_units, blocks), (UNIT, k_units * UNIT), (UNIT // 8, box[1], box[0]), False
    )


@contextmanager
def _whole_sums() -> Iterator[None]:
    """cuBLAS adds partial sums in float32; in the output's type, float16 ones could overflow before they are scaled."""
    flags = torch.backends.cuda.matmul
    saved = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = saved


def _scratch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parts: Sequence[tuple[int, float]],
    y: torch.Tensor,
) -> None:
    k, where = x.shape[1], device(x.device.index)
    k_units = weight.shape[1]
    kernel = _kernel_of(None, x.dtype, where.index)
    values = where.scratch.view(x.dtype)
    step = (values.numel() // k - ROWS) // GRAIN * GRAIN
    start = 0
    with _whole_sums():
        for size, scale in parts:
            for first in range(start, start + size, step):
                last = min(first + step, start + size)
                block, end = first // ROWS, -(-last // ROWS)  # a part may begin inside a block of rows
                copy = values[: (end - block) * ROWS * k].view(-1, k)
                params = _DequantizeParams(
                    weight.data_ptr() + block * k_units * UNIT, copy.data_ptr(), end - block, k, k_units
                )
                grid = (min(8 * where.processors, -(-(end - block) * k // 512)), 1)
                kernel.launch(grid, 0, torch.cuda.current_stream(x.device).cuda_stream, params)()
                rows = copy[first - block * ROWS : last - block * ROWS]
                out = y[:, first:last]
                # The scale is applied to the float32 sums: no overflow, no rounding before it. A bias may find them
                # rounded: some of cuBLAS's kernels add it after that.
                if bias is not None:
                    out.copy_(bias[first:last].expand_as(out))
                torch.addmm(out, x, rows.T, beta=0 if bias is None else 1, alpha=128.0 * scale, out=out)
            start += size
