"""What our registry says can run, and what FlashInfer's own checks say, agree on every machine, version and shape."""

import inspect
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import flashinfer
import pytest
import torch
from cut_source import can_implement
from exact_fp4 import round_up
from packaging.requirements import Requirement
from stand_in_gpu import MM_FP4, V07, StandInGpu, backend, home

Gpu = Callable[..., StandInGpu]
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]
CAPABILITIES += [(13, 0)]


def sm(capability: tuple[int, int]) -> str:
    return f"sm{capability[0]}{capability[1]}"


def ours(device: StandInGpu, name: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    return backend(name).unsupported_reason(device.target(dtype))


def declared(distribution: str, version: str | None) -> bool:
    """Whether FlashInfer's own metadata takes that version of a package beside it."""
    wanted = [Requirement(text) for text in metadata.requires("flashinfer-python") or []]
    return version is not None and all(r.name != distribution or r.specifier.contains(version) for r in wanted)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=sm)
@pytest.mark.parametrize("name", MM_FP4)
def test_capabilities(gpu: Gpu, name: str, capability: tuple[int, int]) -> None:
    device = gpu(capability)
    theirs = flashinfer.mm_fp4.is_backend_supported(MM_FP4[name], capability[0] * 10 + capability[1])
    reason = ours(device, name)
    assert (reason is None) == theirs, reason
    assert reason is None or "compute capability" in reason or "needs FlashInfer" in reason
    refusal = device.refusal(name, 256, 256)
    assert (refusal is None) == theirs, refusal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)], ids=sm)
@pytest.mark.parametrize("name", MM_FP4)
def test_dtypes(gpu: Gpu, name: str, capability: tuple[int, int], dtype: torch.dtype) -> None:
    device = gpu(capability)
    reason, refusal = ours(device, name, dtype), device.refusal(name, 256, 256, dtype)
    assert (reason is None) == (refusal is None), (reason, refusal)


@pytest.mark.parametrize("cudnn", ["9.10.1", "9.10.2", "9.15.0", "9.21.0", "9.23.1"])
@pytest.mark.parametrize("frontend", [None, "1.9.0", "1.12.1", "1.13.0", "1.31.0", "1.32.0", "2.0.0"])
def test_cudnn_versions(gpu: Gpu, frontend: str | None, cudnn: str) -> None:
    device = gpu(cudnn=cudnn, cudnn_frontend=frontend)
    refusal = device.refusal("cudnn", 256, 256)
    reason = ours(device, "cudnn")
    theirs = refusal is None and declared("nvidia-cudnn-frontend", frontend)
    assert (reason is None) == theirs, (reason, refusal)
    assert reason is None or "cuDNN" in reason or "nvidia-cudnn-frontend" in reason


@pytest.mark.parametrize("version", [None, "4.4.0", "4.5.0", "4.7.9", "4.8.0", "5.0.0"])
@pytest.mark.parametrize("name", MM_FP4)
def test_cute_dsl_versions(gpu: Gpu, name: str, version: str | None) -> None:
    device = gpu(home(name), cute_dsl=version)
    refusal = device.refusal(name, 256, 256)
    needed = name in ("cutedsl", "b12x")
    assert (refusal is None) == (version is not None or not needed), refusal
    reason = ours(device, name)
    assert (reason is None) == (not needed or declared("nvidia-cutlass-dsl", version)), reason
    assert reason is None or "nvidia-cutlass-dsl" in reason


def can_compile(capability: tuple[int, int]) -> bool:
    """Whether FlashInfer's own functions say that the CUDA toolkit at hand compiles for the device."""
    utils = flashinfer.utils
    check = {10: utils.is_sm100a_supported, 11: utils.is_sm110a_supported, 12: utils.is_sm12x_supported}
    newer = {(10, 3): utils.is_sm100f_supported, (10, 7): utils.is_sm100f_supported}
    supported = newer.get(capability, check[capability[0]])
    if not inspect.unwrap(supported)(torch.device("cuda")):  # without its cache
        return False
    try:
        flashinfer.compilation_context.CompilationContext._normalize_cuda_arch(*capability)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("cuda", ["12.6", "12.8", "12.9", "13.0", "13.2"])
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if (10, 0) <= c < (13, 0)], ids=sm)
@pytest.mark.parametrize("name", MM_FP4)
def test_cuda_versions(gpu: Gpu, name: str, capability: tuple[int, int], cuda: str) -> None:
    """Every backend needs the quantiser, which is compiled for the device; some have a minimum of their own."""
    device = gpu(capability, cuda=cuda)
    theirs = can_compile(capability) and device.refusal(name, 256, 256) is None
    reason = ours(device, name)
    if capability == (12, 0) and cuda == "12.8" and theirs:
        # FlashInfer 0.7 compiles there, but without the device's FP4 conversions: ours asks for more.
        assert V07 and reason is not None and "CUDA 12.9" in reason
        return
    assert (reason is None) == theirs, reason


# ---------------------------------------------------------------------------------------------------------- shapes
SIZES = [(n, k) for n in (1, 8, 24, 32, 40, 96, 100, 128, 1000) for k in (16, 32, 48, 64, 80, 112, 128, 3696)]


def padded(name: str, n: int, k: int) -> tuple[int, int]:
    return round_up(n, backend(name).out_multiple), round_up(k, backend(name).in_multiple)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=sm)
@pytest.mark.parametrize("name", MM_FP4)
def test_padded_shapes(gpu: Gpu, name: str, capability: tuple[int, int]) -> None:
    """What we pad a layer to is accepted wherever we say that the layer can run, and only there."""
    device = gpu(capability)
    if ours(device, name) is not None:
        return
    for n, k in SIZES:
        reason = backend(name).unsupported_reason(device.target().for_layer(k, n, False, torch.bfloat16))
        refusal = device.refusal(name, *padded(name, n, k))
        assert (reason is None) == (refusal is None), (n, k, reason, refusal)


@pytest.mark.parametrize("dtype", ["BFloat16", "Float16"])
@pytest.mark.parametrize("name", ["cutedsl", "b12x"])
def test_padded_shapes_suit_the_cute_dsl_kernels(gpu: Gpu, name: str, dtype: str) -> None:
    """The kernels' own rule, for the tile that fits any N; FlashInfer asks it only when it tunes."""
    device = gpu(home(name))
    unpadded = 0
    for n, k in SIZES:
        reason = backend(name).unsupported_reason(device.target().for_layer(k, n, False, torch.bfloat16))
        assert (reason is None) == can_implement(name, *padded(name, n, k), dtype), (n, k, reason)
        unpadded += can_implement(name, n, k, dtype)
    assert 0 < unpadded < len(SIZES) * 3 // 4  # the rule says something


CUTLASS_SOURCES = {
    "csrc/fp4_gemm_cutlass.cu": r"constexpr int alignment = (\d+);",
    "csrc/fp4_gemm_cutlass_sm103.cu": r"constexpr int alignment = (\d+);",
    "include/flashinfer/gemm/fp4_gemm_template_sm120.h": r"int Alignment[AB] = (\d+);",
}


@pytest.mark.parametrize("source", CUTLASS_SOURCES)
def test_padded_shapes_suit_the_cutlass_kernels(gpu: Gpu, source: str) -> None:
    """The rule of the package's C++ source, which a GPU would run and the stand-in repeats."""
    text = (Path(flashinfer.__file__).parent / "data" / source).read_text()
    sizes = {int(size) for size in re.findall(CUTLASS_SOURCES[source], text)}
    assert sizes == {32}
    assert backend("cutlass").in_multiple % 32 == 0 and backend("cutlass").out_multiple % 32 == 0
    device = gpu()
    assert "k to be divisible by 32" in str(device.refusal("cutlass", 128, 48))
    assert "n to be divisible by 32" in str(device.refusal("cutlass", 48, 64))


def test_padded_shapes_suit_the_shuffle() -> None:
    """trtllm's rows and scales can only be shuffled in whole tiles."""
    scale = torch.zeros(backend("trtllm").out_multiple, 4, dtype=torch.uint8)
    flashinfer.utils.get_shuffle_matrix_sf_a_row_indices(scale, 128)
    with pytest.raises(AssertionError):
        flashinfer.utils.get_shuffle_matrix_sf_a_row_indices(scale[:96], 128)


def test_the_real_checks_reject_what_is_not_padded(gpu: Gpu) -> None:
    """Sizes that FlashInfer's Python code itself sends away; the first would be an out-of-bounds store."""
    device = gpu()
    if V07:
        assert "N % 8" in str(device.refusal("cutedsl", 100, 128))
        device.capability = (12, 0)
        assert "K" in str(device.refusal("b12x", 128, 48))
    assert device.refusal("trtllm", 96, 64) is not None
