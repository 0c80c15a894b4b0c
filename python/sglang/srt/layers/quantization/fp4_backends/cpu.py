"""Backend ``cpu``: our kernel for CPUs (``kernels/cpu``), exact for W4A4, with activations kept for weight-only layers.

W4A4: the bits of backend ``torch``, whose file defines the order of additions. e2m1 doubled is an integer, so a block's
dot product is one here, and exact.

Weight-only: inputs are float32 values, left as they are. In ascending order the 16 products of a block with e2m1 are
added by fused multiply-adds, then blocks with theirs, times the block's scale; each rounds once, to float32. For a
bfloat16 input weights are multiplied by their scale, which is exact; the products of the even columns of two blocks are
added apart from those of the odd ones, then the two sums, then pairs of blocks.

Either way a row's bits depend on that row and the weight alone: not on other rows, threads or the instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.kernels import cpu_extension
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, Target
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE, pack, unpack

PANEL = 32
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def to_panels(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's layout: 32 rows interleaved, padded with zeros.

    Args:
        packed: uint8 [N, K / 2].
        scale: float8_e4m3fn [N, K / 16].

    Returns:
        codes uint8 [P, K / 16, 2, 2, 4, 2, 4, 2], where byte (p, b, g, z, u, h, r, i) holds columns
        16 b + 8 z + 2 h + i (low nibble) and 16 b + 8 z + 4 + 2 h + i of row 32 p + 16 g + 4 u + r; scales uint8
        [P, K / 16, 32].
    """
    rows, blocks = scale.shape
    panels = -(-rows // PANEL)
    padding = (0, 0, 0, panels * PANEL - rows)
    codes = unpack(F.pad(packed, padding)).view(panels, 2, 4, 4, blocks, 2, 2, 2, 2)  # p g u r b z nibble h i
    low_high = codes.permute(0, 4, 1, 5, 2, 7, 3, 8, 6).flatten(-2)
    scales = F.pad(scale.view(torch.uint8), padding).view(panels, PANEL, blocks)
    return pack(low_high), scales.transpose(1, 2).contiguous()


def from_panels(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`to_panels` was given."""
    panels, blocks = scales.shape[:2]
    low_high = unpack(codes).view(panels, blocks, 2, 2, 4, 2, 4, 2, 2)
    packed = pack(low_high.permute(0, 2, 4, 6, 1, 3, 8, 5, 7).reshape(panels * PANEL, blocks * BLOCK_SIZE))
    scale = scales.transpose(1, 2).reshape(panels * PANEL, blocks)
    return packed[:rows], scale[:rows].view(torch.float8_e4m3fn)


@dataclass
class CpuWeight(PreparedWeight):
    """``codes`` and ``scales`` as :func:`to_panels` lays them out, 0.5625 byte per parameter; ``column_scale`` float32
    [N]; ``source`` without codes."""

    codes: torch.Tensor
    scales: torch.Tensor
    column_scale: torch.Tensor
    source: NvFp4Weight


def cpu_fp4_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    column_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``round(sums * scale) + bias`` on the threads that torch uses.

    Args:
        x: [M, K] float32, bfloat16 or float16, any strides.
        codes, scales: see :func:`to_panels`.
        column_scale: float32 [N].
        input_scale, input_scale_inv: float32 scalars that x is quantised with; None: x is kept.
        bias: [N] of the dtype of x, or None.

    Returns:
        [M, N] of the dtype of x.
    """
    rows, columns = x.shape[0], column_scale.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype)
    error = cpu_extension.load().sglang_fp4_gemm(
        x.data_ptr(),
        x.stride(0),
        codes.data_ptr(),
        scales.data_ptr(),
        column_scale.data_ptr(),
        None if input_scale is None else input_scale.data_ptr(),
        None if input_scale_inv is None else input_scale_inv.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        scales.shape[1],
        _DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    if error:
        raise MemoryError(f"no memory for the operand of a product of {list(x.shape)} and [{columns}, {x.shape[1]}]")
    return out


_operator = torch.library.custom_op("sglang::cpu_fp4_gemm", cpu_fp4_gemm, mutates_args=(), device_types="cpu")


@_operator.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    column_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], column_scale.shape[0])


class CpuBackend(Fp4GemmBackend):
    """The C++ kernel, compiled on first use."""

    name = "cpu"
    per_column_scale = True

    @classmethod
    def priority(cls, target: Target) -> int:
        return 10 if target.device == "cpu" else -1

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        if target.device != "cpu":
            return f"needs a CPU; this device is {target.device}"
        if target.dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16, not {target.dtype}"
        return target.cpu_kernel

    @classmethod
    def fix(cls, target: Target) -> str | None:
        return cpu_extension.fix() if target.device == "cpu" and target.cpu_kernel else None

    def prepare(self, weight: NvFp4Weight) -> CpuWeight:
        codes, scales = to_panels(weight.packed, weight.scale)
        return CpuWeight(self.name, codes, scales, weight.column_scale(), weight.without_codes())

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        weight.check_owner(self)
        assert isinstance(weight, CpuWeight)
        source, input_scale, input_scale_inv = weight.source, None, None
        if source.activation is not Activation.NONE:
            input_scale, input_scale_inv = source.activation_scales(x)
        # A custom operator costs microseconds per call: only where a compiler must not look inside.
        multiply = _operator if torch.compiler.is_compiling() else cpu_fp4_gemm
        return multiply(x, weight.codes, weight.scales, weight.column_scale, input_scale, input_scale_inv, bias)
