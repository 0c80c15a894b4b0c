"""Backends ``cudnn``, ``cutlass``, ``cutedsl`` and ``trtllm``: FlashInfer's ``mm_fp4`` on Blackwell.

They differ in data only: where they run, what they pad to, how rows are ordered, what FlashInfer calls them.
FlashInfer is imported when a weight is prepared, never at selection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar

import torch

from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization.fp4_target import Target, at_least
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight
from sglang.srt.layers.quantization.nvfp4 import NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import shuffle_rows, swizzle_scale

MINIMUM_FLASHINFER = "0.6.13"
Capability = tuple[int, int]

# The first CUDA toolkit that compiles for a device.
MINIMUM_CUDA: dict[Capability, str] = {
    (10, 0): "12.8",
    (10, 3): "12.9",
    (11, 0): "13.0",
    (12, 0): "12.8",
    (12, 1): "12.9",
}

# ``auto``'s order per device, best first; trtllm is never chosen unasked, since its kernels are fetched at first use.
# Sources: SGLang's own default over 2026 (cute-dsl on SM100 since May; cutlass again on SM12x since June, after cuDNN
# there; cutlass on SM103, where cuDNN was measured slower, as FlashInfer's heuristic says too).
AUTO_ORDER: dict[Capability, tuple[str, ...]] = {
    (10, 0): ("cutedsl", "cutlass", "cudnn"),
    (10, 3): ("cutlass", "cutedsl", "cudnn"),
    (11, 0): ("cutlass", "cudnn"),
    (12, 0): ("cutlass", "cudnn"),
    (12, 1): ("cutlass", "cudnn"),
}


@cache
def _flashinfer() -> ModuleType:
    try:
        import flashinfer
    except Exception as error:  # a broken CUDA set-up raises many types
        raise StartupError(f"flashinfer is installed but can't be imported: {error}") from error
    return flashinfer  # type: ignore[no-any-return]


@dataclass
class FlashInferWeight(PreparedWeight):
    """``packed`` uint8 [N, K / 2] and ``scale`` uint8 [round_up(N, 128), round_up(K / 16, 4)], both handed over as
    transposed views; ``alpha`` float32 [1] for static activations, else None."""

    packed: torch.Tensor
    scale: torch.Tensor
    source: NvFp4Weight
    alpha: torch.Tensor | None


class FlashInferBackend(Fp4GemmBackend):
    """What the four have in common.

    Attributes:
        capabilities: devices whose kernels FlashInfer ships.
        flashinfer_name: what ``mm_fp4`` calls the backend.
        out_dtypes: output dtypes of its kernels.
        shuffled: whether weight rows are in trtllm's order.
    """

    capabilities: ClassVar[tuple[Capability, ...]] = tuple(MINIMUM_CUDA)
    flashinfer_name: ClassVar[str]
    out_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    shuffled: ClassVar[bool] = False

    @classmethod
    def priority(cls, target: Target) -> int:
        order = AUTO_ORDER.get(target.capability or (0, 0), ())
        return 10 + len(order) - order.index(cls.name) if cls.name in order else -1

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        if target.device != "cuda" or target.capability is None:
            return f"needs a CUDA GPU with FP4 units (Blackwell); this is {target}"
        listed = ", ".join(f"{major}.{minor}" for major, minor in cls.capabilities)
        if target.capability not in cls.capabilities:
            return f"needs compute capability {listed}; this device has {target.capability[0]}.{target.capability[1]}"
        if target.flashinfer is None:
            return "needs FlashInfer: pip install 'sglang-nvfp4[cuda13]' (or [cuda12])"
        if not at_least(target.flashinfer, MINIMUM_FLASHINFER):
            return f"needs FlashInfer {MINIMUM_FLASHINFER} or newer, {target.flashinfer} is installed"
        minimum_cuda = MINIMUM_CUDA[target.capability]
        if not at_least(target.cuda, minimum_cuda):
            return f"needs a torch built with CUDA {minimum_cuda} or newer, this one has {target.cuda}"
        if target.weight_only:
            return "multiplies FP4 with FP4; this layer is weight-only (W4A16)"
        if target.dtype not in cls.out_dtypes:
            return f"writes {' or '.join(str(dtype) for dtype in cls.out_dtypes)}, the model runs in {target.dtype}"
        return cls._missing_library(target)

    @classmethod
    def _missing_library(cls, target: Target) -> str | None:
        return None

    def prepare(self, weight: NvFp4Weight) -> FlashInferWeight:
        _flashinfer()
        packed, scale = weight.packed, weight.scale.view(torch.uint8)
        if self.shuffled:
            packed, scale = shuffle_rows(packed), shuffle_rows(scale)
        alpha = None if weight.input_scale is None else (weight.global_scales * weight.input_scale).reshape(1)
        return FlashInferWeight(self.name, packed.contiguous(), swizzle_scale(scale), weight.without_codes(), alpha)

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        weight.check_owner(self)
        assert isinstance(weight, FlashInferWeight)
        flashinfer = _flashinfer()
        source = weight.source
        input_scale, input_scale_inv = source.activation_scales(x)
        alpha = weight.alpha if weight.alpha is not None else (source.global_scales * input_scale).reshape(1)
        rows, columns = x.shape
        packed, scale = flashinfer.fp4_quantize(x.contiguous(), input_scale_inv)
        # mm_fp4 checks the size of a scale buffer nowhere: a short one would be read out of bounds.
        expected = (-(-rows // 128) * 128, -(-columns // 64) * 4)
        scale = scale.view(torch.uint8).reshape(-1, expected[1])
        if scale.shape[0] != expected[0]:
            raise RuntimeError(f"fp4_quantize returned {list(scale.shape)} block scales, expected {list(expected)}")
        y: torch.Tensor = flashinfer.mm_fp4(
            packed,
            weight.packed.T,
            scale,
            weight.scale.T,
            alpha,
            source.dtype,
            backend=self.flashinfer_name,
        )
        return y if bias is None else y + bias


class CudnnBackend(FlashInferBackend):
    name = "cudnn"
    aliases = ("flashinfer_cudnn",)
    flashinfer_name = "cudnn"
    in_multiple = 32
    out_multiple = 32

    @classmethod
    def _missing_library(cls, target: Target) -> str | None:
        if not at_least(target.cudnn, "9.10.2"):
            return f"needs cuDNN 9.10.2 or newer, {target.cudnn or 'none'} is loaded"
        if not at_least(target.cudnn_frontend, "1.13"):
            return f"needs nvidia-cudnn-frontend 1.13 or newer, {target.cudnn_frontend or 'none'} is installed"
        return None


class CutlassBackend(FlashInferBackend):
    name = "cutlass"
    aliases = ("flashinfer_cutlass",)
    flashinfer_name = "cutlass"
    in_multiple = 32
    out_multiple = 32


class CuteDslBackend(FlashInferBackend):
    name = "cutedsl"
    aliases = ("flashinfer_cutedsl", "cute-dsl", "cute_dsl")
    flashinfer_name = "cute-dsl"
    capabilities = ((10, 0), (10, 3))
    in_multiple = 32
    out_multiple = 32

    @classmethod
    def _missing_library(cls, target: Target) -> str | None:
        return None if target.cutlass_dsl else "needs nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl"


class TrtllmBackend(FlashInferBackend):
    name = "trtllm"
    aliases = ("flashinfer_trtllm",)
    flashinfer_name = "trtllm"
    capabilities = ((10, 0), (10, 3))
    out_dtypes = (torch.bfloat16,)
    in_multiple = 64
    out_multiple = 128
    shuffled = True
