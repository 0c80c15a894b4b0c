"""Quantising a bf16 or fp16 checkpoint to NVFP4 while it loads (``--quantization nvfp4`` or ``w4a16_nvfp4``)."""

from __future__ import annotations

from math import isfinite

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.modelopt_quant import PACKED_MODULES
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4LinearMethodBase, NvFp4Weight, install
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax, quantize_nvfp4_weight
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod


class OnlineNvFp4LinearMethod(NvFp4LinearMethodBase, UnquantizedLinearMethod):
    """Loads like an unquantised layer, then rounds its weight to NVFP4 by the recipe of ``sglang.quantize``.

    Fused parts share one global scale, as exporters make them. The activation scale of W4A4 is computed from each
    call's input, since no calibration has been run.
    """

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: K is not a multiple of 16, or the weight holds NaN or infinity.
        """
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        columns = weight.shape[1]
        if columns % BLOCK_SIZE:
            raise CheckpointError(f"layer {name}: NVFP4 needs K to be a multiple of {BLOCK_SIZE}, it is {columns}")
        amax = float(weight.abs().amax())
        if not isfinite(amax):
            raise CheckpointError(f"layer {name}: the weight holds NaN or infinity")
        global_scale = global_scale_from_amax(amax)
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
