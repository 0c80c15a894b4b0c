"""Weight-only layers on Blackwell: FlashInfer's real ``prepare_bf16_fp4_weights`` and ``mm_bf16_fp4``, from 0.7 on."""

from collections.abc import Callable

import flashinfer
import pytest
import torch
from contract_layers import ROWS, SHAPES, random_input, random_weight
from exact_fp4 import assert_product
from stand_in_gpu import MM_FP4, V07, StandInGpu, backend

from sglang.srt.errors import Fp4GemmError
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear

Gpu = Callable[..., StandInGpu]
CAPABILITIES = [(9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1), (13, 0)]
# Our backends that multiply weight-only layers, and what mm_bf16_fp4 calls their kernels.
KERNELS = {"cudnn": ("cudnn",), "cutedsl": ("cute-dsl", "cute-dsl-native")}
needs_v07 = pytest.mark.skipif(not V07, reason=f"FlashInfer {flashinfer.__version__} has no mm_bf16_fp4")


def reason_for(device: StandInGpu, name: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    return backend(name).unsupported_reason(device.target().for_layer(512, 256, True, dtype))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c[0]}{c[1]}")
@pytest.mark.parametrize("name", MM_FP4)
def test_requirements(gpu: Gpu, name: str, capability: tuple[int, int]) -> None:
    reason = reason_for(gpu(capability), name)
    cc = capability[0] * 10 + capability[1]
    if not V07:
        assert reason is not None
        if name in KERNELS and flashinfer.mm_fp4.is_backend_supported(MM_FP4[name], cc):
            assert "needs FlashInfer 0." in reason
        return
    theirs = [k for k in KERNELS.get(name, ()) if flashinfer.mm_bf16_fp4.is_backend_supported(k, cc)]
    if name == "cutedsl" and capability == (11, 0):
        assert theirs == ["cute-dsl"] and reason is not None  # it says so, and its preparation refuses the device
        return
    assert (reason is None) == bool(theirs), reason
    assert theirs or "compute capability" in (reason or "") or "weight-only" in (reason or "")


@needs_v07
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_only_bfloat16(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    assert "torch.bfloat16" in (reason_for(gpu(), name, dtype) or "")
    with pytest.raises(TypeError, match="bfloat16"):
        a, b = torch.zeros(1, 64, dtype=dtype), torch.zeros(64, 32, dtype=torch.uint8)
        flashinfer.mm_bf16_fp4(a, b, torch.zeros(64, 4, dtype=torch.float8_e4m3fn), backend="cudnn")


@needs_v07
@pytest.mark.parametrize("cudnn", ["9.10.2", "9.23.0", "9.23.1"])
def test_cudnn_version(gpu: Gpu, cudnn: str) -> None:
    device = gpu(cudnn=cudnn)
    linear = NvFp4Linear(random_weight("256x512", activation=Activation.NONE), backend("cudnn")())
    x = random_input(1, 512, torch.bfloat16)
    if reason_for(device, "cudnn") is None:
        linear(x)
        assert cudnn == "9.23.1"
    else:
        with pytest.raises(Fp4GemmError, match="9.23.1"):
            linear(x)


@needs_v07
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)], ids=lambda c: f"sm{c[0]}{c[1]}")
@pytest.mark.parametrize("name", KERNELS)
def test_layer_is_exact(gpu: Gpu, name: str, capability: tuple[int, int], shape: str, equal: bool) -> None:
    device = gpu(capability)
    weight = random_weight(shape, activation=Activation.NONE, equal_scales=equal)
    linear = NvFp4Linear(weight, backend(name)())
    bias = random_input(1, weight.out_features, weight.dtype, seed=3)[0]
    for rows in ROWS:
        x = random_input(rows, weight.in_features, weight.dtype)
        for b in (None, bias):
            y = linear(x, b)
            assert y.shape == (rows, weight.out_features)
            if rows:
                assert_product(y, x, weight, b)
    kernel = "cudnn" if name == "cudnn" else "cute-dsl-native" if capability[0] == 12 else "cute-dsl"
    assert {product.kernel for product in device.kernels.products} == {kernel + "-bf16"}


@needs_v07
@pytest.mark.parametrize("name", KERNELS)
def test_a_weight_only_layer_is_shared_with_no_other_backend(gpu: Gpu, name: str) -> None:
    gpu()
    linear = NvFp4Linear(random_weight("256x512", activation=Activation.NONE), backend(name)())
    for other in set(MM_FP4) - {name}:
        assert linear.segments[0].prepared.shared_with(backend(other)()) is None
