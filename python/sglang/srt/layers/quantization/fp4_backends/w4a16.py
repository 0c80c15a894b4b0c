"""Backend ``w4a16``: NVFP4 weights times 16-bit activations on GPUs from compute capability 8.0 on, exact scales.

Layers that a checkpoint means for W4A4 are multiplied too, with their activations left in 16 bits: closer to the
unquantised model than what Blackwell computes, not the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from sglang.kernels import w4a16
from sglang.kernels.w4a16_layout import ROWS, pack
from sglang.kernels.w4a16_tilings import MAX_SMALL_M, SmallTiling
from sglang.srt.layers.fusion import SUMMED, AddRMSNorm, Rows, SiluAndMul, Step, Then, UnscaledRows
from sglang.srt.layers.quantization.fp4_target import Target, at_least
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight

logger = logging.getLogger(__name__)

MINIMUM_CAPABILITY = (8, 0)
# The first NVRTC that compiles for a device: the copy engine of 9.0 needs 12.0; that of 10.7 has been seen with 13.5.
MINIMUM_NVRTC = {
    **dict.fromkeys([(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], "12.0"),
    (10, 0): "12.8",
    (10, 3): "12.9",
    (10, 7): "13.5",
    (11, 0): "13.0",
    (12, 0): "12.8",
    (12, 1): "12.9",
}
VARIANTS = 4  # ways worth timing for a number of rows; the model of their times is within a few percent


@dataclass
class W4A16Weight(PreparedWeight):
    """``packed`` uint8 [N / 16, K / 128, 1152] (``w4a16_layout``), ``scale`` float32 [N]; ``sizes`` and ``scales`` are
    the rows and global scales of the parts that ``scale`` repeats; ``in_features``: K."""

    packed: torch.Tensor
    scale: torch.Tensor
    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    in_features: int

    @property
    def paired(self) -> bool:
        """Whether it may be gates and what they are for."""
        return _paired(self.sizes)


def _paired(sizes: Sequence[int]) -> bool:
    return len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] % ROWS == 0


@cache
def _log_activations() -> None:
    logger.info(
        "w4a16: W4A4 layers keep their activations in 16 bits here (weight-only): closer to the unquantised model than "
        "W4A4 on Blackwell, and not the same numbers; --fp4-gemm-backend torch computes those, slowly"
    )


# A custom operator, so that graphs of torch.compile keep it whole.
_library = torch.library.Library("sglang", "FRAGMENT")
_library.define(
    "w4a16_gemm(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int[] sizes, float[] scales, int rank) -> Tensor"
)


def _gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: Sequence[int],
    scales: Sequence[float],
    rank: int,
    fusion: w4a16.Fusion = w4a16.PLAIN,
) -> torch.Tensor:
    (m, k), n = x.shape, scale.shape[0]
    y = x.new_empty(m, n // 2 if fusion.gate else n)
    if m == 0:
        return y
    if x.stride(1) != 1 or x.data_ptr() % 16 or (m > 1 and x.stride(0) % 8):
        x = x.clone(memory_format=torch.contiguous_format)
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()  # nothing to do for a layer's own
    index = x.device.index
    way = w4a16.device(index).choose(m, n, k, rank, _paired(sizes))
    parts = tuple(zip(sizes, scales, strict=True))
    if torch.cuda.current_device() == index:
        w4a16.gemm(x, weight, scale, bias, parts, y, way, fusion)
        return y
    with torch.cuda.device(index):
        w4a16.gemm(x, weight, scale, bias, parts, y, way, fusion)
    return y


def _shape_of_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: Sequence[int],
    scales: Sequence[float],
    rank: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], scale.shape[0])


_library.impl("w4a16_gemm", _gemm, "CUDA")
torch.library.register_fake("sglang::w4a16_gemm", _shape_of_gemm, lib=_library)


class W4A16Backend(Fp4GemmBackend):
    """``variant``: "" takes, for each number of rows, the way that the model of their times puts first; "rank2" the
    second one, and so on."""

    name = "w4a16"
    in_multiple = 64
    per_column_scale = True
    keeps_activations = True

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.variant = f"rank{rank + 1}" if rank else ""

    @classmethod
    def priority(cls, target: Target) -> int:
        if target.capability is None or target.capability < MINIMUM_CAPABILITY:
            return -1
        if target.capability >= (10, 0):  # has FP4 units: only what those can't multiply
            return 5 if target.weight_only else -1
        return 10

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        capability = target.capability
        if target.device != "cuda" or capability is None:
            return f"needs a CUDA GPU of compute capability 8.0 or newer; this is {target}"
        if capability not in MINIMUM_NVRTC:
            known = ", ".join(f"{major}.{minor}" for major, minor in MINIMUM_NVRTC)
            return f"needs compute capability {known}; this device has {capability[0]}.{capability[1]}"
        if target.dtype not in (torch.bfloat16, torch.float16):
            return f"multiplies bfloat16 or float16 activations, the model runs in {target.dtype}"
        minimum = MINIMUM_NVRTC[capability]
        if target.nvrtc is None:
            return f"needs NVRTC {minimum} or newer (libnvrtc, which CUDA builds of torch bring)"
        if not at_least(target.nvrtc, minimum):
            return f"needs NVRTC {minimum} or newer for this device, {target.nvrtc} is installed"
        return None

    @classmethod
    def fix(cls, target: Target) -> str | None:
        minimum = MINIMUM_NVRTC.get(target.capability or (0, 0))
        if target.device != "cuda" or minimum is None or at_least(target.nvrtc, minimum):
            return None
        if (target.cuda or "13").startswith("12") and minimum.startswith("12"):
            return f"pip install 'nvidia-cuda-nvrtc-cu12>={minimum}'"
        return f"pip install 'nvidia-cuda-nvrtc>={max(minimum, '13.0')}'"

    @classmethod
    def variants(cls, target: Target) -> tuple[Fp4GemmBackend, ...]:
        return tuple(cls(rank) for rank in range(VARIANTS))

    def prepare(self, weight: NvFp4Weight) -> W4A16Weight:
        if weight.activation is not Activation.NONE:
            _log_activations()
        index = weight.packed.device.index
        w4a16.prepare(weight.dtype, 0 if index is None else index)
        packed = pack(weight.packed, weight.scale, weight.dtype)
        scales = tuple(weight.global_scales.tolist())
        return W4A16Weight(self.name, packed, weight.column_scale(), weight.part_sizes, scales, weight.in_features)

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        weight.check_owner(self)
        assert isinstance(weight, W4A16Weight)
        # An operator of torch costs microseconds, of which a prompt's step has hundreds.
        multiply = torch.ops.sglang.w4a16_gemm if torch.compiler.is_compiling() else _gemm
        y: torch.Tensor = multiply(x, weight.packed, weight.scale, bias, weight.sizes, weight.scales, self.rank)
        return y

    def fuses(self, weight: PreparedWeight, step: Step, rows: int) -> bool:
        assert isinstance(weight, W4A16Weight)
        n, device = weight.scale.shape[0], w4a16.device(weight.packed.device.index)
        if (
            rows > MAX_SMALL_M
            or n % SUMMED
            or not isinstance(device.choose(rows, n, weight.in_features, self.rank, weight.paired), SmallTiling)
        ):
            return False
        return step is not SiluAndMul or weight.paired

    def apply_fused(self, x: Rows, weight: PreparedWeight, bias: torch.Tensor | None, then: Then) -> Rows:
        weight.check_owner(self)
        assert isinstance(weight, W4A16Weight)
        fusion = w4a16.Fusion(gate=isinstance(then, SiluAndMul))
        if isinstance(x, UnscaledRows):
            fusion = replace(fusion, x_squares=x.squares, x_eps=x.eps)
            x = x.values
        if isinstance(then, AddRMSNorm):
            sums = x.shape[0], weight.scale.shape[0] // SUMMED
            squares = torch.empty(sums, dtype=torch.float32, device=x.device)
            fusion = replace(fusion, residual=then.residual, norm_weight=then.weight, squares=squares)
        y = _gemm(x, weight.packed, weight.scale, bias, weight.sizes, weight.scales, self.rank, fusion)
        return UnscaledRows(y, squares, then.eps) if isinstance(then, AddRMSNorm) else y
