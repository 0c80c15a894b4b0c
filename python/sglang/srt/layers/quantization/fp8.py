"""FP8 (E4M3) layers with one scale per tensor, which mixed ModelOpt checkpoints hold beside NVFP4 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase, register_weight
from sglang.srt.layers.quantization.fp4_backends.torch_reference import ExactLinear
from sglang.srt.layers.quantization.nvfp4 import check_global_scale
from sglang.srt.layers.quantization.nvfp4_utils import to_e4m3


class Fp8LinearMethod(LinearMethodBase):
    """Static W8A8: ``y = (e4m3(x / input_scale) W^T) * (input_scale * weight_scale)``, products and sums in float32.

    ``weight`` float8_e4m3fn [N, K], ``weight_scale`` and ``input_scale`` float32 with one value per fused part. Parts
    may differ in both: weight scales are applied per output column, inputs share the largest scale.
    """

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
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=torch.float8_e4m3fn)
        register_weight(layer, "weight", weight, output_dim=0, input_dim=1, **extra_weight_attrs)
        for key in ("weight_scale", "input_scale"):
            unset = torch.full((len(output_partition_sizes),), float("nan"))
            register_weight(layer, key, unset, check=check_global_scale, **extra_weight_attrs)
        layer.fp8_part_sizes = tuple(output_partition_sizes)  # type: ignore[assignment]
        layer.fp8_dtype = params_dtype  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: a weight byte is NaN, or a scale was not loaded.
        """
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        weight_scale: torch.Tensor = layer.weight_scale.data  # type: ignore[assignment]
        input_scale: torch.Tensor = layer.input_scale.data  # type: ignore[assignment]
        values = weight.float()
        if bool(values.isnan().any()):
            raise CheckpointError(f"layer {name}: the FP8 weight holds NaN")
        for key, scale in (("weight_scale", weight_scale), ("input_scale", input_scale)):
            problem = check_global_scale(scale)
            if problem:
                raise CheckpointError(f"layer {name}: {key} was not loaded or is illegal: {problem}")
        sizes = torch.tensor(layer.fp8_part_sizes, device=weight.device)
        shared_input_scale = input_scale.amax()
        column_scale = torch.repeat_interleave(weight_scale, sizes) * shared_input_scale
        for key in ("weight", "weight_scale", "input_scale"):
            delattr(layer, key)
        layer.fp8 = (ExactLinear(values), shared_input_scale, column_scale)  # type: ignore[assignment]

    def weight_bytes(self, layer: nn.Module) -> int:
        held: tuple[ExactLinear | torch.Tensor, ...] = getattr(layer, "fp8", ())
        return sum(tensor.nbytes for tensor in held) + super().weight_bytes(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear, input_scale, column_scale = layer.fp8  # type: ignore[misc]
        dtype: torch.dtype = layer.fp8_dtype  # type: ignore[assignment]
        rows = x.reshape(-1, x.shape[-1])
        codes = to_e4m3(rows.float() / input_scale).float()
        y: torch.Tensor = linear(codes, column_scale, bias, dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])
