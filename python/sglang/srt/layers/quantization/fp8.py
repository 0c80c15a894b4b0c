"""FP8 (E4M3) layers, which mixed checkpoints hold beside NVFP4 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase, register_weight
from sglang.srt.layers.quantization.fp4_backends.torch_reference import ExactLinear
from sglang.srt.layers.quantization.nvfp4 import Activation, check_global_scale
from sglang.srt.layers.quantization.nvfp4_utils import E4M3_MAX, to_e4m3


class Fp8LinearMethod(LinearMethodBase):
    """``y = (e4m3(x / input_scale) W^T) * (input_scale * weight_scale)``, products and sums in float32.

    ``weight`` float8_e4m3fn [N, K]; ``weight_scale`` float32, one per fused part, or [N, 1]; ``input_scale`` float32,
    one per fused part. Parts may differ: weight scales are applied per output column, inputs share the largest scale.

    Args:
        activation: STATIC: the checkpoint has ``input_scale``; DYNAMIC: it is ``amax / 448`` of each row of x (of the
            whole row, where ranks share it); NONE: x is left alone.
        per_channel: one ``weight_scale`` for each output row.
    """

    def __init__(self, activation: Activation = Activation.STATIC, per_channel: bool = False) -> None:
        self.activation = activation
        self.per_channel = per_channel
        if activation is not Activation.STATIC:
            self.unused_tensors = frozenset({"input_scale"})

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
        attrs: dict[str, Any] = {"check": check_global_scale, **extra_weight_attrs}
        unset = torch.full((len(output_partition_sizes),), float("nan"), dtype=torch.float32)
        if self.per_channel:
            per_row = torch.full((weight.shape[0], 1), float("nan"), dtype=torch.float32)
            register_weight(layer, "weight_scale", per_row, output_dim=0, **attrs)
        else:
            register_weight(layer, "weight_scale", unset, **attrs)
        if self.activation is Activation.STATIC:
            register_weight(layer, "input_scale", unset.clone(), **attrs)
        layer.fp8_part_sizes = tuple(output_partition_sizes)  # type: ignore[assignment]
        layer.fp8_dtype = params_dtype  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: a weight byte is NaN, or a scale was not loaded.
        """
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        values = weight.float()
        if bool(values.isnan().any()):
            raise CheckpointError(f"layer {name}: the FP8 weight holds NaN")
        keys = ["weight_scale", "input_scale"] if self.activation is Activation.STATIC else ["weight_scale"]
        scales: dict[str, torch.Tensor] = {key: getattr(layer, key).data.float() for key in keys}
        for key, scale in scales.items():
            problem = check_global_scale(scale)
            if problem:
                raise CheckpointError(f"layer {name}: {key} was not loaded or is illegal: {problem}")
        column_scale = scales["weight_scale"].flatten()
        if not self.per_channel:
            column_scale = column_scale.repeat_interleave(torch.tensor(layer.fp8_part_sizes, device=weight.device))
        input_scale = scales["input_scale"].amax() if "input_scale" in scales else None
        for key in ("weight", *keys):
            delattr(layer, key)
        layer.fp8 = (ExactLinear(values), input_scale, column_scale)  # type: ignore[assignment]

    def weight_bytes(self, layer: nn.Module) -> int:
        held: tuple[ExactLinear | torch.Tensor | None, ...] = getattr(layer, "fp8", ())
        return sum(tensor.nbytes for tensor in held if tensor is not None) + super().weight_bytes(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear, input_scale, column_scale = layer.fp8  # type: ignore[misc]
        dtype: torch.dtype = layer.fp8_dtype  # type: ignore[assignment]
        rows = x.reshape(-1, x.shape[-1])
        if self.activation is Activation.DYNAMIC:
            input_scale = _row_scales(layer, rows)
        if input_scale is not None:
            rows = to_e4m3(rows.float() / input_scale).float()
            column_scale = input_scale * column_scale
        y: torch.Tensor = linear(rows, column_scale, bias, dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _row_scales(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """``amax / 448`` of each row [M, K], float32 [M, 1]; of the row of all ranks where each has some of the columns."""
    amax = rows.abs().amax(dim=-1, keepdim=True).float()
    if getattr(layer, "input_is_sharded", False):
        group: TensorParallelGroup = layer.tp  # type: ignore[assignment]
        amax = group.all_reduce_max(amax)
    return (amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
