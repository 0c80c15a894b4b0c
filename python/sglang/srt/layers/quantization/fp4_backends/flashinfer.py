"""Backends ``cudnn``, ``cutlass``, ``cutedsl``, ``trtllm`` and ``b12x``: FlashInfer's ``mm_fp4`` on Blackwell, and its
``mm_bf16_fp4`` for weight-only layers.

They differ in data only: where they run since which release, what they pad to, how rows are ordered, what FlashInfer
calls them. Releases are what FlashInfer's wheels from 0.6.13 to 0.7.4 say themselves. FlashInfer is imported when a
weight is prepared, never at selection.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization.flashinfer_ops import fp4_errors, mm_bf16_fp4, mm_fp4
from sglang.srt.layers.quantization.flashinfer_requirements import (
    MINIMUM_CUDA,
    Capability,
    Obstacle,
    cubin_command,
    declared,
    dsl_obstacle,
    flashinfer_obstacle,
    nvcc_obstacle,
    torch_obstacle,
)
from sglang.srt.layers.quantization.fp4_target import Target, at_least
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import shuffle_rows, swizzle_scale

logger = logging.getLogger(__name__)

_EVERYWHERE = dict.fromkeys(((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)), "0.6.13") | {(10, 7): "0.6.16"}


# ------------------------------------------------------------------------------------------------- auto's choice
@dataclass(frozen=True)
class AutoRow:
    """``auto``'s order on devices of one compute capability, best first, where the versions are at least these (None:
    any). The first row that fits counts; a backend that can't run is passed over."""

    capability: Capability
    order: tuple[str, ...]
    reason: str
    source: str
    cuda: str | None = None
    cudnn: str | None = None
    flashinfer: str | None = None

    @property
    def condition(self) -> str:
        """ "CUDA 13.0, cuDNN 9.23.1"; empty without one."""
        named = (("CUDA", self.cuda), ("cuDNN", self.cudnn), ("FlashInfer", self.flashinfer))
        return ", ".join(f"{name} {version}" for name, version in named if version is not None)

    def fits(self, target: Target) -> bool:
        wanted = ((self.cuda, target.cuda), (self.cudnn, target.cudnn), (self.flashinfer, target.flashinfer))
        return self.capability == target.capability and all(
            minimum is None or at_least(version, minimum) for minimum, version in wanted
        )


# trtllm is never chosen unasked: it fetches its kernels over the network at first use.
AUTO_TABLE: tuple[AutoRow, ...] = (
    AutoRow(
        (10, 0),
        ("cutedsl", "cutlass", "cudnn"),
        "fastest on two thirds of the measured shapes, and SGLang's choice; cuDNN last, since before FlashInfer 0.7.0 "
        "a CUDA graph could replay into a workspace that had moved, and before cuDNN 9.23.1 every new M builds a plan",
        "vllm-project/vllm#42235, sgl-project/sglang#38170, flashinfer-ai/flashinfer#4553, #4666, #4165",
    ),
    AutoRow(
        (10, 3),
        ("cutedsl", "cutlass", "cudnn"),
        "fastest in serving from 1 to 512 requests at once, and SGLang's choice; cuDNN, measured behind CUTLASS and "
        "ahead of it, is last for what is said of 10.0",
        "vllm-project/vllm#42235, ai-dynamo/aiconfigurator#1304, flashinfer-ai/flashinfer#2404, #2664",
    ),
    AutoRow(
        (10, 7),
        ("cudnn", "cutlass", "cutedsl"),
        "FlashInfer's own order for this device, from the versions on with which cuDNN is safe under CUDA graphs",
        "mm_fp4's heuristic in FlashInfer 0.7.4; no measurement has been published",
        cuda="13.0",
        cudnn="9.23.1",
        flashinfer="0.7.0",
    ),
    AutoRow(
        (10, 7),
        ("cutlass", "cutedsl", "cudnn"),
        "FlashInfer's own order without a recent cuDNN, which is last for what is said of 10.0",
        "mm_fp4's heuristic in FlashInfer 0.7.4; no measurement has been published",
    ),
    AutoRow(
        (11, 0),
        ("cutlass", "cudnn"),
        "SGLang's choice for devices of which nothing else is known; it has served an NVFP4 model on Thor",
        "sgl-project/sglang#20047, #35080",
    ),
    AutoRow(
        (12, 0),
        ("b12x", "cutlass", "cutedsl", "cudnn"),
        "made for this device: 89 % of the memory bandwidth at M=9 where CUTLASS has 63 %, the same bits, and "
        "FlashInfer's own first choice; cuDNN last for what is said of 10.0",
        "sgl-project/sglang#38170, flashinfer-ai/flashinfer#3051",
        flashinfer="0.6.14",
    ),
    AutoRow(
        (12, 0),
        ("cutlass", "b12x", "cudnn"),
        "SGLang's choice with such a release; b12x had an older kernel then, made for K in multiples of 128",
        "sgl-project/sglang#38170, flashinfer-ai/flashinfer#3646",
    ),
    AutoRow(
        (12, 1),
        ("cutlass", "cutedsl", "cudnn", "b12x"),
        "FlashInfer leaves b12x out of its own choice here, CUTLASS and cuDNN being mostly faster; vLLM takes CUTLASS",
        "mm_fp4's heuristic in FlashInfer 0.7.4, vllm-project/vllm#55397, flashinfer-ai/flashinfer#5100",
    ),
)


# ------------------------------------------------------------------------------------------------------ backends
@cache
def _flashinfer() -> ModuleType:
    try:
        import flashinfer
    except Exception as error:  # a broken CUDA set-up raises many types
        raise StartupError(f"flashinfer is installed but can't be imported: {error}") from error
    return flashinfer  # type: ignore[no-any-return]


@dataclass
class FlashInferWeight(PreparedWeight):
    """``packed`` uint8 [N, K / 2]; ``alpha`` float32 [1], None where inputs are scaled dynamically.

    W4A4: ``scale`` is uint8 [round_up(N, 128), round_up(K / 16, 4)], in the 128x4 layout. Weight-only: ``bf16_kernel``
    names the one of ``mm_bf16_fp4``, and ``scale`` is in the layout of that.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    source: NvFp4Weight
    alpha: torch.Tensor | None
    bf16_kernel: str = ""

    def shared_with(self, backend: Fp4GemmBackend) -> PreparedWeight | None:
        return None if self.bf16_kernel else super().shared_with(backend)


class FlashInferBackend(Fp4GemmBackend):
    """What the five have in common.

    N and K are padded to 64, the most that one of them needs but for trtllm's N, so that they share prepared weights.
    Then no column of the block scales is padding either, and nobody depends on what is in it (vllm-project/vllm#48898).

    Attributes:
        kernels: devices whose W4A4 kernels FlashInfer ships, and since which release.
        bf16_kernels: the same of weight-only kernels: release, and what ``mm_bf16_fp4`` calls the kernel.
        flashinfer_name: what ``mm_fp4`` calls the backend.
        bfloat16_only: major compute capabilities on which its kernels write nothing else.
        shuffled: whether weight rows are in trtllm's order.
    """

    kernels: ClassVar[dict[Capability, str]] = _EVERYWHERE
    bf16_kernels: ClassVar[dict[Capability, tuple[str, str]]] = {}
    flashinfer_name: ClassVar[str]
    bfloat16_only: ClassVar[tuple[int, ...]] = ()
    shuffled: ClassVar[bool] = False
    layout = "nvfp4_128x4"
    in_multiple = 64
    out_multiple = 64

    @classmethod
    def priority(cls, target: Target) -> int:
        order = next((row.order for row in AUTO_TABLE if row.fits(target)), ())
        return 10 + len(order) - order.index(cls.name) if cls.name in order else -1

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        obstacle = cls.obstacle(target)
        return obstacle.reason if obstacle else None

    @classmethod
    def fix(cls, target: Target) -> str | None:
        obstacle = cls.obstacle(target)
        return obstacle.fix if obstacle else None

    @classmethod
    def obstacle(cls, target: Target) -> Obstacle | None:
        """The first thing in the way, hardware first."""
        capability = target.capability
        if target.device != "cuda" or capability is None:
            return Obstacle(f"needs a CUDA GPU with FP4 units (Blackwell); this is {target}")
        if capability not in cls.kernels:
            listed = ", ".join(f"{major}.{minor}" for major, minor in sorted(cls.kernels))
            return Obstacle(f"needs compute capability {listed}; this device has {capability[0]}.{capability[1]}")
        since = cls.kernels[capability]
        if target.weight_only:
            if capability not in cls.bf16_kernels:
                where = f" on compute capability {capability[0]}.{capability[1]}" if cls.bf16_kernels else ""
                return Obstacle(f"multiplies FP4 with FP4{where}; this layer is weight-only (W4A16)")
            since = cls.bf16_kernels[capability][0]
        cuda = MINIMUM_CUDA[capability]
        obstacle = (
            flashinfer_obstacle(target, since)
            or torch_obstacle(target, cuda)
            or nvcc_obstacle(target, cuda)
            or cls.library_obstacle(target)
        )
        if obstacle is not None:
            return (
                obstacle._replace(reason=obstacle.reason + " for weight-only layers")
                if target.weight_only
                else obstacle
            )
        narrow = target.weight_only or capability[0] in cls.bfloat16_only
        dtypes = (torch.bfloat16,) if narrow else (torch.bfloat16, torch.float16)
        if target.dtype not in dtypes:
            return Obstacle(f"writes {' or '.join(map(str, dtypes))}, the model runs in {target.dtype}")
        return None

    @classmethod
    def library_obstacle(cls, target: Target) -> Obstacle | None:
        """What the backend needs beside FlashInfer and CUDA."""
        return None

    @classmethod
    def tuning(cls, cache: Path | None, measure: bool) -> AbstractContextManager[object]:
        path = None if cache is None else str(cache.with_name(f"{cache.stem}-flashinfer.json"))
        context: AbstractContextManager[object] = _flashinfer().autotune(measure, cache=path)
        return context

    def prepare(self, weight: NvFp4Weight) -> FlashInferWeight:
        flashinfer = _flashinfer()
        packed, scale, source = weight.packed, weight.scale.view(torch.uint8), weight.without_codes()
        with fp4_errors(self.name, None, weight.out_features, weight.in_features, weight.dtype):
            if weight.activation is Activation.NONE:
                kernel = self.bf16_kernels[Target.current(packed.device).capability or (0, 0)][1]
                alpha = weight.global_scales.reshape(1).clone()  # of its own: a slice need not be aligned
                buffers = (packed.contiguous(), swizzle_scale(scale), alpha)
                prepared = flashinfer.prepare_bf16_fp4_weights(*buffers, backend=kernel)
                return FlashInferWeight(self.name, prepared[0], prepared[1], source, prepared[2], kernel)
            if self.shuffled:
                packed, scale = shuffle_rows(packed), shuffle_rows(scale)
            static = weight.input_scale
            static_alpha = None if static is None else (weight.global_scales * static).reshape(1)
            return FlashInferWeight(self.name, packed.contiguous(), swizzle_scale(scale), source, static_alpha)

    def apply(self, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        weight.check_owner(self)
        assert isinstance(weight, FlashInferWeight)
        source, alpha = weight.source, weight.alpha
        if weight.bf16_kernel:
            y = mm_bf16_fp4(x, weight.packed, weight.scale, alpha, self.name, weight.bf16_kernel)
        else:
            input_scale, input_scale_inv = source.activation_scales(x)
            if alpha is None:
                alpha = (source.global_scales * input_scale).reshape(1)
            y = mm_fp4(x, weight.packed, weight.scale, input_scale_inv, alpha, self.name, self.flashinfer_name)
        return y if bias is None else y + bias


class CudnnBackend(FlashInferBackend):
    name = "cudnn"
    aliases = ("flashinfer_cudnn",)
    flashinfer_name = "cudnn"
    bf16_kernels = dict.fromkeys(((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)), ("0.6.14", "cudnn")) | {
        (10, 7): ("0.7.2", "cudnn")
    }

    @classmethod
    def library_obstacle(cls, target: Target) -> Obstacle | None:
        cudnn, frontend = "9.23.1" if target.weight_only else "9.10.2", declared(target)[1]
        if not at_least(target.cudnn, cudnn):
            reason = f"needs cuDNN {cudnn} or newer, {target.cudnn or 'none'} is loaded"
            return Obstacle(reason, f"pip install 'nvidia-cudnn-cu{(target.cuda or '').split('.')[0]}>={cudnn}'")
        if not at_least(target.cudnn_frontend, frontend):
            reason = f"needs nvidia-cudnn-frontend {frontend} or newer, {target.cudnn_frontend or 'none'} is installed"
            return Obstacle(reason, f"pip install 'nvidia-cudnn-frontend>={frontend}'")
        return None


class CutlassBackend(FlashInferBackend):
    name = "cutlass"
    aliases = ("flashinfer_cutlass",)
    flashinfer_name = "cutlass"


class CuteDslBackend(FlashInferBackend):
    """On 12.0 and 12.1 its older weight-only kernel rounds inputs to float16, which overflows; ``cute-dsl-native``, the
    newer one, does not."""

    name = "cutedsl"
    aliases = ("flashinfer_cutedsl", "cute-dsl", "cute_dsl")
    flashinfer_name = "cute-dsl"
    kernels: ClassVar = {(10, 0): "0.6.13", (10, 3): "0.6.13", (10, 7): "0.6.18", (12, 0): "0.7.1", (12, 1): "0.7.1"}
    bf16_kernels: ClassVar = {
        (10, 0): ("0.6.18", "cute-dsl"),
        (10, 3): ("0.6.18", "cute-dsl"),
        (10, 7): ("0.7.2", "cute-dsl"),
        (12, 0): ("0.7.1", "cute-dsl-native"),
        (12, 1): ("0.7.1", "cute-dsl-native"),
    }
    bfloat16_only = (12,)

    @classmethod
    def library_obstacle(cls, target: Target) -> Obstacle | None:
        if target.capability is not None and target.capability[0] == 12:
            if target.in_features * target.out_features >= 2**31:
                shape = f"{target.out_features} x {target.in_features}"
                return Obstacle(f"takes fewer than 2^31 weights, this layer has {shape}")
            return torch_obstacle(target, "13.0") or dsl_obstacle(target)
        return dsl_obstacle(target)


class TrtllmBackend(FlashInferBackend):
    name = "trtllm"
    aliases = ("flashinfer_trtllm",)
    flashinfer_name = "trtllm"
    kernels: ClassVar = {(10, 0): "0.6.13", (10, 3): "0.6.13", (10, 7): "0.6.16"}
    bfloat16_only = (10,)
    layout = "nvfp4_128x4_shuffled"
    out_multiple = 128
    shuffled = True

    def prepare(self, weight: NvFp4Weight) -> FlashInferWeight:
        _warn_about_downloads(Target.current(weight.packed.device))
        return super().prepare(weight)


@cache
def _warn_about_downloads(target: Target) -> None:
    version = target.flashinfer
    if version is not None and target.flashinfer_cubin != version:
        logger.warning(
            "FP4 GEMM backend trtllm: FlashInfer downloads its kernels at first use, unless they are in its cache, and "
            "without a network fails after about 50 s; this installs them: %s",
            cubin_command(version) or "flashinfer download-cubin",
        )


class B12xBackend(FlashInferBackend):
    name = "b12x"
    aliases = ("flashinfer_b12x",)
    flashinfer_name = "b12x"
    kernels: ClassVar = {(12, 0): "0.6.13", (12, 1): "0.6.13"}

    @classmethod
    def library_obstacle(cls, target: Target) -> Obstacle | None:
        # Its tile has 128 columns; that the rest of one is computed right is said and tested since 0.6.14.
        if -(-target.in_features // 64) % 2 and not at_least(target.flashinfer, "0.6.14"):
            reason = f"takes K in multiples of 128 before FlashInfer 0.6.14, this layer has {target.in_features}"
            return Obstacle(reason, "pip install 'flashinfer-python>=0.6.14,<0.8'")
        minimum = "12.9" if at_least(target.flashinfer, "0.7.0") else "13.0"
        return torch_obstacle(target, minimum) or nvcc_obstacle(target, minimum, True) or dsl_obstacle(target)
