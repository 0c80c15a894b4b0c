"""Linear layers whose weight is stored and multiplied in the model's own dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.layers.quantization.base_config import LinearMethodBase, register_weight


class UnquantizedLinearMethod(LinearMethodBase):
    """``weight`` [N, K] in ``params_dtype``; the product is torch's."""

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

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return F.linear(x, weight, bias)
