"""Whatever FlashInfer raises, in its checks or below them, is one error that names backend, shape and cause."""

from collections.abc import Callable

import flashinfer
import pytest
import torch
from contract_layers import random_input, random_weight
from stand_in_gpu import MM_FP4, V07, StandInGpu, backend, gemm, home

from sglang.srt.errors import Fp4GemmError
from sglang.srt.layers.quantization.nvfp4 import NvFp4Linear

Gpu = Callable[..., StandInGpu]
# cuDNN's runner tries once more before it gives up.
pytestmark = pytest.mark.filterwarnings("ignore:cuDNN fp4 GEMM tactic failed")
utils = flashinfer.utils
RAISED = [
    utils.BackendSupportedError("not on this device"),
    utils.LibraryError("cudnn is too old"),
    utils.GPUArchitectureError("no such architecture"),
    ValueError("a bad size"),
    RuntimeError("Check failed: mat1 must be contiguous"),
    AssertionError("Failed to get cubin"),
    TypeError("Mismatched type on argument #4"),
    NotImplementedError("not yet"),
    KeyError("sm_999"),
]


def failure(name: str, dtype: torch.dtype = torch.bfloat16) -> Fp4GemmError:
    linear = NvFp4Linear(random_weight("256x512", dtype), backend(name)())
    with pytest.raises(Fp4GemmError, match=f"backend {name} failed at M=7, N=256, K=512, {dtype}: ") as caught:
        linear(random_input(7, 512, dtype))
    assert caught.value.backend == name
    return caught.value


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", MM_FP4)
def test_an_exception_of_a_kernel(gpu: Gpu, name: str, raised: Exception) -> None:
    gpu(home(name)).kernels.error = raised
    error = failure(name)
    assert f"{type(raised).__name__}: {raised}" in str(error)
    assert error.__cause__ is raised
    assert f"--backend {name}" in str(error) and "--fp4-gemm-backend" in str(error)


def test_out_of_memory_stays_what_it_is(gpu: Gpu) -> None:
    """Those who can free memory and try again look for it."""
    gpu().kernels.error = torch.OutOfMemoryError("out of memory")
    linear = NvFp4Linear(random_weight("256x512"), backend("cutlass")())
    with pytest.raises(torch.OutOfMemoryError):
        linear(random_input(7, 512, torch.bfloat16))


@pytest.mark.parametrize("name", MM_FP4)
def test_a_device_that_flashinfer_refuses(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(home(name))
    linear = NvFp4Linear(random_weight("256x512"), backend(name)())
    packed, scale = flashinfer.fp4_quantize(random_input(7, 512, torch.bfloat16), torch.ones(1))
    monkeypatch.setattr(flashinfer, "fp4_quantize", lambda *args, **kwargs: (packed, scale))
    device.capability = (9, 0)
    with pytest.raises(Fp4GemmError, match="capability 90") as caught:
        linear(random_input(7, 512, torch.bfloat16))
    assert isinstance(caught.value.__cause__, utils.BackendSupportedError)


@pytest.mark.parametrize("name, fact", [("cudnn", "cudnn_frontend"), ("cutedsl", "cute_dsl"), ("b12x", "cute_dsl")])
def test_a_library_that_is_missing(gpu: Gpu, name: str, fact: str) -> None:
    gpu(home(name), **{fact: None})
    error = failure(name)
    assert ("cuDNN" if name == "cudnn" else "CuTe DSL") + " is not available" in str(error)
    assert isinstance(error.__cause__, ValueError if V07 and name != "cudnn" else RuntimeError)


def test_a_dtype_that_flashinfer_refuses(gpu: Gpu) -> None:
    gpu()
    assert "ValueError: Unsupported output dtype: torch.float16" in str(failure("trtllm", torch.float16))


def test_kernels_that_can_not_be_downloaded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()

    def offline(*args: object, **kwargs: object) -> None:
        raise AssertionError("Failed to get checksums.txt from the artifactory")

    monkeypatch.setattr(gemm, "gen_trtllm_gen_gemm_module", offline)
    error = failure("trtllm")
    assert "AssertionError: Failed to get checksums.txt" in str(error) and "flashinfer-cubin" in str(error)
