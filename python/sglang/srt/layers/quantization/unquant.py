"""Linear layers whose weight is stored and multiplied in the model's own dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.layers.constant_linear import Bf16Linear, ConstantLinear, constant_linear
from sglang.srt.layers.quantization.base_config import LinearMethodBase, register_weight


class UnquantizedLinearMethod(LinearMethodBase):
    """``weight`` [N, K] in ``params_dtype``; the product is torch's, in ``params_dtype`` or (a head's) in float32."""

    def __init__(self, float32_output: bool = False) -> None:
        self.float32_output = float32_output

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        register_weight(layer, "weight", weight, output_dim=0, input_dim=1, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        linear = constant_linear(layer.weight.data, self.float32_output)  # type: ignore[arg-type]
        delattr(layer, "weight")
        layer.linear = linear  # type: ignore[assignment]

    def weight_bytes(self, layer: nn.Module) -> int:
        linear: ConstantLinear | Bf16Linear | None = getattr(layer, "linear", None)
        return (linear.nbytes if linear else 0) + super().weight_bytes(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear: ConstantLinear | Bf16Linear = layer.linear  # type: ignore[assignment]
        return linear(x, bias)
