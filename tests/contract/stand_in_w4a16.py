"""FlashInfer's weight-only products (0.7) on the stand-in GPU: what their kernels read, multiplied in float64."""

import importlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from cut_source import function, without_device_check
from exact_fp4 import codes, dequantize, product, swizzled_offsets
from flashinfer.autotuner import TunableRunner
from stand_in_kernels import Kernels, Product, check, check_input, memory, scale_bytes

if TYPE_CHECKING:
    import pytest


def multiply(
    kernels: Kernels,
    kernel: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    alpha: torch.Tensor,
    out: torch.Tensor,
    swizzled: bool,
) -> None:
    """``out`` = alpha * a b^T for bfloat16 ``a`` [M, K] and the packed bytes of ``b`` [N, K / 2]."""
    check_input(a, b, out)
    (m, k), n = a.shape, b.shape[0]
    if kernels.error is not None:
        raise kernels.error
    check(m > 0 and out.shape == (m, n) and b.shape[1] * 2 == k, "shapes")
    kernels.products.append(Product(kernel, m, n, k, out.dtype))
    code = codes(memory(b, n * k // 2).reshape(n, k // 2))
    if swizzled:
        rows = memory(scale, scale_bytes(n, k, 128))[swizzled_offsets(n, k // 16)]
    else:
        rows = memory(scale, n * k // 16).reshape(n, k // 16)
    kernels.weight_bytes = code, rows
    out.copy_(product(a.double().numpy(), dequantize(code, rows)) * float(alpha.reshape(-1)[0]))


def runner(kernels: Kernels, kernel: str, places: tuple[int, ...]) -> TunableRunner:
    """A runner whose inputs are a, b, scales, alpha and out, at these places; it reads 128x4 scales."""

    class Runner(TunableRunner):  # type: ignore[misc]
        def get_valid_tactics(self, inputs: list[Any], profile: Any) -> list[int]:
            return [-1]

        def forward(
            self, inputs: list[Any], tactic: int = -1, do_preparation: bool = False, **kwargs: Any
        ) -> torch.Tensor:
            a, b, scale, alpha, out = (inputs[place] for place in places)
            multiply(kernels, kernel, a, b, scale, alpha, out, swizzled=True)
            return out  # type: ignore[no-any-return]

    return Runner()


def install(patch: "pytest.MonkeyPatch", kernels: Kernels, cudnn: Any | None) -> None:
    """Replace what ``mm_bf16_fp4`` would compile; ``cudnn`` is the frontend's module, None where there is none."""
    api, graphs, dsl, native, support = (
        importlib.import_module(f"flashinfer.gemm.{name}")
        for name in (
            "gemm_bf16_fp4",
            "gemm_bf16_fp4_cudnn",
            "gemm_bf16_fp4_cute_dsl",
            "kernels.native_bf16_fp4.runner",
            "kernels.native_bf16_fp4.support",
        )
    )
    base = importlib.import_module("flashinfer.gemm.gemm_base")
    utils = importlib.import_module("flashinfer.utils")

    def execute(
        graph: object, a: Any, b: Any, scale: Any, alpha: Any, out: Any, workspace: object, **options: object
    ) -> None:
        multiply(kernels, "cudnn-bf16", a, b, scale, alpha, out, swizzled=False)

    for name in ("execute_cudnn_bf16_fp4_graph", "execute_cudnn_bf16_fp4_graph_override_shape"):
        patch.setattr(graphs, name, execute)
    for name in ("build_cudnn_bf16_fp4_graph", "build_cudnn_bf16_fp4_graph_override_shape"):
        patch.setattr(graphs, name, lambda **options: None)
    patch.setattr(graphs, "_get_stream_cache_buf", utils._get_cache_buf)
    if cudnn is not None:
        for module in (api, graphs):
            patch.setattr(module, "cudnn", cudnn, raising=False)
    patch.setattr(graphs, "CUDNN_AVAILABLE", base.CUDNN_AVAILABLE)
    sm100 = runner(kernels, "cute-dsl-bf16", (0, 1, 2, 3, 5))
    patch.setattr(dsl, "_cute_dsl_sm100_bf16_fp4_runner", lambda **options: sm100)
    layout = function("cute_dsl/utils.py", "convert_sf_to_mma_layout")
    patch.setitem(sys.modules, "flashinfer.cute_dsl.utils", SimpleNamespace(convert_sf_to_mma_layout=layout))
    sm12x = runner(kernels, "cute-dsl-native-bf16", (0, 1, 2, 3, 4))
    patch.setattr(native, "get_runner", lambda: sm12x)
    checks = without_device_check(support, "check_weights", 'b.device.type != "cuda" or ')
    patch.setattr(support, "check_weights", checks)
