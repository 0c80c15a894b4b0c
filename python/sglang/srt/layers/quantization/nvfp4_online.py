"""Quantising a bf16 or fp16 checkpoint to NVFP4 while it loads (``--quantization nvfp4`` or ``w4a16_nvfp4``)."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import torch
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import PACKED_MODULES, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.nvfp4 import (
    Activation,
    NvFp4LinearMethodBase,
    NvFp4Weight,
    check_columns,
    install,
)
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax, quantize_nvfp4_weight
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod


class OnlineNvFp4LinearMethod(NvFp4LinearMethodBase, UnquantizedLinearMethod):
    """Loads like an unquantised layer, in the model's dtype, then rounds its weight to NVFP4 by the recipe of
    ``sglang.quantize``: with its result where the checkpoint has that dtype.

    Fused parts and ranks share one global scale, as exporters make them. The activation scale of W4A4 is computed from
    each call's input, since no calibration has been run.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

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
        """Raises:
        CheckpointError: K, or this rank's piece of it, is not a multiple of 16.
        """
        check_columns(layer, input_size_per_partition, input_size)
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: the weight holds NaN or infinity.
        RankFailedError: another rank has given up loading.
        """
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        amax = float(weight.abs().amax())
        ranks: TensorParallelGroup = getattr(layer, "tp", SINGLE)
        amax = ranks.largest(amax if isfinite(amax) else inf)
        if not isfinite(amax):
            raise CheckpointError(f"layer {name}: the weight holds NaN or infinity")
        global_scale = global_scale_from_amax(amax).to(weight.device)
        packed, scale = quantize_nvfp4_weight(weight, global_scale)
        delattr(layer, "weight")
        install(
            layer,
            NvFp4Weight(
                packed=packed,
                scale=scale,
                global_scales=global_scale.reshape(1),
                part_sizes=(packed.shape[0],),
                activation=self.activation,
                dtype=weight.dtype,
            ),
        )


class OnlineNvFp4Config(QuantizationConfig):
    """Every linear layer becomes NVFP4 but the output head, which exporters leave alone too."""

    packed_modules_mapping = PACKED_MODULES

    def __init__(self, weight_only: bool) -> None:
        self.activation = Activation.NONE if weight_only else Activation.DYNAMIC

    @classmethod
    def get_name(cls) -> str:
        return "nvfp4"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase:
        if prefix.rpartition(".")[2] == "lm_head":
            return UnquantizedLinearMethod()
        return OnlineNvFp4LinearMethod(self.activation)
