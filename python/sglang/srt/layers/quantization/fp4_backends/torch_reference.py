"""Backend ``torch``: exact, slow, runs on any device. What every other backend is held against.

W4A4 on a CPU adds in a defined order, so that its bits are those of backend ``cpu``, on any machine:

    sum = +0; for each block of 16 columns, in ascending order: sum = float32(sum + a_block . w_block)
    y = dtype(sum * float32(column scale * input scale)), then y = dtype(y + bias)

A block's product is exact in float32, in any order: it is an integer of at most 2304 quarters times two E4M3 scales,
20 bits. So only the additions between blocks round, whatever library multiplies. Weight-only and FP8 products on a CPU,
and all on a GPU, add in the order of the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.constant_linear import ConstantLinear
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, Target
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE, dequantize_nvfp4, quantize_nvfp4

_ROWS = 64  # whose products stay in the cache


@torch.library.custom_op("sglang::block_order_mm", mutates_args=(), device_types="cpu")
def block_order_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product in the order that the head of this file defines; one operator to a compiler.

    Args:
        x: float32 [M, K].
        w: float32 [K, N].

    Returns:
        [M, N].
    """
    sums = x.new_zeros(x.shape[0], w.shape[1])
    for rows, total in zip(x.split(_ROWS), sums.split(_ROWS), strict=True):
        product = torch.empty_like(total)
        for columns, block in zip(rows.split(BLOCK_SIZE, dim=1), w.split(BLOCK_SIZE), strict=True):
            torch.mm(columns, block, out=product)
            total += product  # addmm may add one product after the other
    return sums


@block_order_mm.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


class BlockOrderLinear:
    """``x W^T`` by :func:`block_order_mm`, for dequantised NVFP4 without its global scales: float32 [N, K]."""

    def __init__(self, values: torch.Tensor) -> None:
        self._weight = values.T.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = block_order_mm(x, self._weight)
        return sums

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


class ExactLinear:
    """``round((x W^T) * scale) + bias``: products and sums in float32, one rounding, the bias in the output's dtype.

    Args:
        values: float32 [N, K], every value exact in bfloat16. Kept as float32 on a CPU, where converting on every call
            would cost more than the product, and as bfloat16 elsewhere, where memory is scarce.
        block_order: on a CPU, multiply by :class:`BlockOrderLinear`.
    """

    def __init__(self, values: torch.Tensor, block_order: bool = False) -> None:
        on_cpu = values.device.type == "cpu"
        self._linear = (BlockOrderLinear if block_order else ConstantLinear)(values) if on_cpu else None
        self._values = None if on_cpu else values.bfloat16()

    def __call__(
        self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """``x`` [M, K], ``scale`` float32 scalar, [N] or [M, N], ``bias`` [N]: [M, N] in ``dtype``."""
        if self._linear is not None:
            sums = self._linear(x.float())
        else:
            assert self._values is not None
            sums = x.float() @ self._values.float().T
        y = (sums * scale).to(dtype)
        return y if bias is None else y + bias

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes if self._linear is not None else 2 * self._values.numel()  # type: ignore[union-attr]


@dataclass
class TorchWeight(PreparedWeight):
    """``linear`` multiplies with the exact products of code and block scale; ``column_scale`` float32 [N]."""

    linear: ExactLinear
    source: NvFp4Weight
    column_scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes + super().nbytes


class TorchBackend(Fp4GemmBackend):
    """W4A4 as Blackwell computes it (activations quantised with the checkpoint's scale, float32 sums, one rounding,
    bias after); weight-only layers with exact dequantised weights."""

    name = "torch"
    per_column_scale = True

    @classmethod
    def priority(cls, target: Target) -> int:
        return 0

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        return None

    def prepare(self, weight: NvFp4Weight) -> TorchWeight:
        w4a4 = weight.activation is not Activation.NONE
        linear = ExactLinear(dequantize_nvfp4(weight.packed, weight.scale, 1.0), block_order=w4a4)
        return TorchWeight(self.name, linear, weight.without_codes(), weight.column_scale())

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        weight.check_owner(self)
        assert isinstance(weight, TorchWeight)
        source, scale = weight.source, weight.column_scale
        if source.activation is not Activation.NONE:
            input_scale, input_scale_inv = source.activation_scales(x)
            x = dequantize_nvfp4(*quantize_nvfp4(x, input_scale_inv), 1.0)
            scale = scale * input_scale
        return weight.linear(x, scale, bias, source.dtype)
