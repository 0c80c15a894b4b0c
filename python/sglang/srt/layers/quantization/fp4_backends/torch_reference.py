"""Backend ``torch``: exact, slow, runs on any device. What every other backend is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.constant_linear import ConstantLinear
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, Target
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4


class ExactLinear:
    """``round((x W^T) * scale) + bias``: products and sums in float32, one rounding, the bias in the output's dtype.

    Args:
        values: float32 [N, K], every value exact in bfloat16. Kept as float32 on a CPU, where converting on every call
            would cost more than the product, and as bfloat16 elsewhere, where memory is scarce.
    """

    def __init__(self, values: torch.Tensor) -> None:
        on_cpu = values.device.type == "cpu"
        self._linear = ConstantLinear(values) if on_cpu else None
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
        linear = ExactLinear(dequantize_nvfp4(weight.packed, weight.scale, 1.0))
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
