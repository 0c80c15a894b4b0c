"""A GPU that is not there: the real ``flashinfer`` runs on CPU tensors down to its compiled kernels.

Replaced are what asks the driver (compute capability, CUDA and cuDNN versions, streams), the compilers' results
(:class:`stand_in_kernels.Kernels`) and, for the CuTe-DSL backends, the runner that would compile. Validation, the
choice of a backend, buffers, views and the calls of the kernels are FlashInfer's own.
"""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import flashinfer
import pytest
import torch
from cut_source import without_device_check
from packaging.version import Version
from stand_in_kernels import V07 as V07
from stand_in_kernels import CudnnGraph, Kernels

from sglang.srt.layers.quantization.fp4_target import Target
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, backends

gemm = importlib.import_module("flashinfer.gemm.gemm_base")
quantization = importlib.import_module("flashinfer.quantization.fp4_quantization")
# What FlashInfer would import later, with whatever stands for a function then.
_LATER = ["compilation_context", "jit.cpp_ext"]
if V07:
    _LATER += ["gemm.kernels.sm12x_cute.runner", "gemm.gemm_bf16_fp4_cudnn", "gemm.gemm_bf16_fp4_cute_dsl"]
    _LATER += ["gemm.kernels.native_bf16_fp4.runner", "gemm.kernels.native_bf16_fp4.support"]
for _name in _LATER:
    importlib.import_module(f"flashinfer.{_name}")

# Our names, and FlashInfer's.
MM_FP4 = {"cudnn": "cudnn", "cutlass": "cutlass", "cutedsl": "cute-dsl", "trtllm": "trtllm", "b12x": "b12x"}


def home(name: str) -> tuple[int, int]:
    """A device that the backend runs on."""
    return (12, 0) if name == "b12x" else (10, 0)


class StandInGpu:
    """The facts that FlashInfer finds, and the kernels that it calls.

    Args:
        cuda: of torch and of nvcc.
        cudnn, cudnn_frontend, cute_dsl: versions; None where frontend or nvidia-cutlass-dsl are not installed.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capability: tuple[int, int] = (10, 0),
        cuda: str = "13.0",
        cudnn: str | None = "9.23.1",
        cudnn_frontend: str | None = "1.32.0",
        cute_dsl: str | None = "4.8.0",
    ) -> None:
        self.capability, self.cuda, self.cudnn, self.cudnn_frontend = capability, cuda, cudnn, cudnn_frontend
        self.cute_dsl = cute_dsl
        self.kernels = Kernels()
        self._patch = monkeypatch
        self._everywhere(flashinfer.utils.get_compute_capability, lambda device: self.capability)
        cpp_ext = sys.modules["flashinfer.jit.cpp_ext"]
        self._everywhere(cpp_ext.get_cuda_version, lambda: Version(cuda))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for name in ("is_current_stream_capturing", "current_device"):
            monkeypatch.setattr(torch.cuda, name, lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        # Ours look there too: which weight-only kernel a weight is prepared for follows from the device.
        monkeypatch.setattr(Target, "current", lambda device, dtype=torch.bfloat16: self.target(dtype))
        self._compiled()
        self._cudnn()
        if V07:
            availability = importlib.import_module("flashinfer.cute_dsl.availability")
            monkeypatch.setattr(availability, "is_cute_dsl_available", lambda: cute_dsl is not None)
            self._only_in_v07()
        else:  # the module imports nvidia-cutlass-dsl
            stand_in = SimpleNamespace(is_cute_dsl_available=lambda: cute_dsl is not None)
            monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl.utils", stand_in)

    def target(self, dtype: torch.dtype = torch.bfloat16) -> Target:
        """The same facts as our registry would find them."""
        return Target(
            device="cuda",
            capability=self.capability,
            cuda=self.cuda,
            flashinfer=flashinfer.__version__,
            cudnn=self.cudnn,
            cudnn_frontend=self.cudnn_frontend,
            cutlass_dsl=self.cute_dsl,
            dtype=dtype,
            nvcc=self.cuda,
        )

    def refusal(self, name: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Exception | None:
        """What the real ``mm_fp4`` raises for a product of this size; None where it multiplies."""
        columns = -(-k // 64) * 4
        b, b_scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(-(-n // 128) * 128, columns)
        try:
            flashinfer.mm_fp4(
                torch.zeros(1, k // 2, dtype=torch.uint8),
                b.T,
                torch.zeros(128, columns, dtype=torch.uint8),
                b_scale.byte().T,
                torch.ones(1),
                dtype,
                backend=MM_FP4[name],
            )
        except Exception as error:  # every type is a refusal
            return error
        return None

    def _everywhere(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        name = original.__name__
        for module in [m for key, m in sys.modules.items() if key.startswith("flashinfer")]:
            if vars(module).get(name) is original:
                self._patch.setattr(module, name, replacement)

    def _compiled(self) -> None:
        def specification(*args: Any, **kwargs: Any) -> Kernels:
            return self.kernels

        set_ = self._patch.setattr
        loaders = ["get_gemm_sm100_module_cutlass_fp4", "get_gemm_sm103_module_cutlass_fp4"]
        loaders += ["get_gemm_sm120_module_cutlass_fp4"]
        loaders += ["_get_trtllm_gemm_module_impl" if V07 else "get_trtllm_gemm_module"]
        for name in loaders:
            set_(gemm, name, getattr(gemm, name).__wrapped__)  # not from the cache of another test
        for sm in ("sm100", "sm103", "sm120"):
            set_(gemm, f"gen_gemm_{sm}_module_cutlass_fp4", specification)
        set_(gemm, "gen_trtllm_gen_gemm_module", specification)
        set_(gemm, "setup_cubin_loader", lambda path: None)
        set_(quantization, "get_fp4_quantization_module", quantization.get_fp4_quantization_module.__wrapped__)
        for name in [name for name in vars(quantization) if name.startswith("gen_fp4_quantization_sm")]:
            set_(quantization, name, specification)
        on_sm12x = self.capability[0] == 12
        dsl = self.kernels.dsl_runner("cute-dsl", *((64, 64) if on_sm12x else (8, 32)))
        b12x = self.kernels.dsl_runner("b12x", 8, 32 if V07 else 128)
        set_(gemm, "_cute_dsl_gemm_fp4_runner", lambda *args: dsl)
        set_(gemm, "_b12x_gemm_fp4_runner", lambda *args: b12x)

    def _only_in_v07(self) -> None:
        self._patch.setattr(gemm, "_get_stream_cache_buf", flashinfer.utils._get_cache_buf)
        runner = importlib.import_module("flashinfer.gemm.kernels.sm12x_cute.runner")
        checks = without_device_check(runner, "check_inputs", 'a.device.type != "cuda" or ')
        self._patch.setattr(runner, "check_inputs", checks)
        import stand_in_w4a16

        stand_in_w4a16.install(self._patch, self.kernels, getattr(gemm, "cudnn", None))

    def _cudnn(self) -> None:
        self._patch.setattr(gemm, "CUDNN_AVAILABLE", self.cudnn_frontend is not None)
        if self.cudnn_frontend is None:
            return
        module = MagicMock(name="cudnn")
        module.__version__ = self.cudnn_frontend
        major, minor, patch = (self.cudnn or "0.0.0").split(".")
        module.backend_version = lambda: int(major) * 10000 + int(minor) * 100 + int(patch)
        self._patch.setattr(gemm, "cudnn", module, raising=False)
        self._patch.setattr(gemm, "_get_cudnn_handle", lambda device, stream: 0)

        def build(a: Any, a_strides: Any, b: Any, b_strides: Any, sa: Any, sas: Any, sb: Any, sbs: Any, *rest: Any,
                  **options: Any) -> CudnnGraph:  # fmt: skip
            dims = {"a": (a, a_strides), "b": (b, b_strides), "a_scale": (sa, sas), "b_scale": (sb, sbs)}
            return CudnnGraph(self.kernels, gemm.UIDs, dims)

        def build_override(**options: Any) -> CudnnGraph:
            return CudnnGraph(self.kernels, gemm.UIDs, None)

        self._patch.setattr(gemm, "build_cudnn_gemm_fp4_graph", build)
        self._patch.setattr(gemm, "build_cudnn_gemm_fp4_graph_override_shape", build_override)


def backend(name: str) -> type[Fp4GemmBackend]:
    return backends()[name]
