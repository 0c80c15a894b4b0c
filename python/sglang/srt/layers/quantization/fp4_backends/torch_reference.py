"""Backend ``torch``: exact, slow, runs on any device. What every other backend is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, Target
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``(x W^T) * scale`` in float32, rounded once to ``dtype``; then ``bias`` is added in ``dtype``.

    Args:
        x: [M, K], float32 or a dtype that it holds exactly.
        weight: [N, K], likewise.
        scale: float32 [N] or scalar.
    """
    y = ((x.float() @ weight.float().T) * scale).to(dtype)
    return y if bias is None else y + bias


@dataclass
class TorchWeight(PreparedWeight):
    """``values`` [N, K] without the global scale: exact in bfloat16. float32 on a CPU, where converting on every call
    would cost more than the product; bfloat16 elsewhere, where memory is scarce."""

    values: torch.Tensor
    source: NvFp4Weight
    column_scale: torch.Tensor


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
        dtype = torch.float32 if weight.packed.device.type == "cpu" else torch.bfloat16
        values = dequantize_nvfp4(weight.packed, weight.scale, 1.0).to(dtype)
        return TorchWeight(self.name, values, weight.without_codes(), weight.column_scale())

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(weight, TorchWeight)
        source, scale = weight.source, weight.column_scale
        if source.activation is not Activation.NONE:
            input_scale, input_scale_inv = source.activation_scales(x)
            x = dequantize_nvfp4(*quantize_nvfp4(x, input_scale_inv), 1.0)
            scale = scale * input_scale
        return scaled_linear(x, weight.values, scale, bias, source.dtype)
