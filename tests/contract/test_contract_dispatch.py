"""Every FlashInfer backend, from a layer through the real ``flashinfer.mm_fp4`` to what its kernel reads."""

import inspect
from collections.abc import Callable
from pathlib import Path

import flashinfer
import pytest
import torch
from contract_layers import ROWS, SHAPES, random_input, random_weight
from exact_fp4 import assert_product
from stand_in_gpu import MM_FP4, V07, StandInGpu, backend, home
from stand_in_kernels import Product

from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear

Gpu = Callable[..., StandInGpu]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def refused(name: str, shape: str, dtype: str) -> str | None:
    """What our registry must say of the layers of this file that can't run on :func:`home`."""
    if name == "trtllm" and dtype == "fp16":
        return "writes torch.bfloat16"
    if name == "b12x" and shape == "96x48" and not V07:
        return "multiples of 128"
    return None


@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.DYNAMIC], ids=lambda a: a.value)
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MM_FP4)
def test_layer_is_exact(gpu: Gpu, name: str, shape: str, dtype: str, equal: bool, activation: Activation) -> None:
    device = gpu(home(name))
    weight = random_weight(shape, DTYPES[dtype], activation, equal)
    target = device.target().for_layer(weight.in_features, weight.out_features, False, weight.dtype)
    reason, expected = backend(name).unsupported_reason(target), refused(name, shape, dtype)
    if expected is not None:
        assert expected in (reason or "")
        return
    assert reason is None
    linear = NvFp4Linear(weight, backend(name)())
    bias = random_input(1, weight.out_features, weight.dtype, seed=3)[0]
    for rows in ROWS:
        x = random_input(rows, weight.in_features, weight.dtype)
        for b in (None, bias):
            y = linear(x, b)
            assert y.shape == (rows, weight.out_features)
            if rows:
                assert_product(y, x, weight, b)
    products = device.kernels.products
    segments = 1 if equal else len(weight.part_sizes)
    assert len(products) == 2 * segments * (len(ROWS) - 1)
    assert {(product.kernel, product.dtype) for product in products} == {(MM_FP4[name], weight.dtype)}


CAPABILITIES = [(10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c[0]}{c[1]}")
@pytest.mark.parametrize("name", MM_FP4)
def test_layer_is_exact_on_every_device(gpu: Gpu, name: str, capability: tuple[int, int]) -> None:
    """FlashInfer takes other kernels, and checks other things, on each; where we say no, so does it."""
    device = gpu(capability)
    weight = random_weight("1000x96", equal_scales=False)
    linear, x = NvFp4Linear(weight, backend(name)()), random_input(7, 96, torch.bfloat16)
    target = device.target().for_layer(weight.in_features, weight.out_features, False, weight.dtype)
    if backend(name).unsupported_reason(target) is None:
        assert_product(linear(x), x, weight)
    else:
        with pytest.raises(
            RuntimeError, match=f"backend {name} failed .*(does not support backend|Invalid backend: 107)"
        ):
            linear(x)


@pytest.mark.parametrize("version", [("9.10.2", "1.32.0"), ("9.23.1", "1.32.0")], ids=lambda v: v[0])
def test_cudnn_with_a_graph_per_shape_and_with_one_for_all(gpu: Gpu, version: tuple[str, str]) -> None:
    device = gpu(cudnn=version[0], cudnn_frontend=version[1])
    weight = random_weight("200x3696")
    linear = NvFp4Linear(weight, backend("cudnn")())
    for rows in (1, 129):
        x = random_input(rows, weight.in_features, weight.dtype)
        assert_product(linear(x), x, weight)
    assert [product.m for product in device.kernels.products] == [1, 129]


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of ``x`` [M, K] with other strides, or at an odd address."""
    rows, columns = x.shape
    if kind == "column":  # for M = 1 that counts as contiguous, with a row stride of 1
        return x.T.clone(memory_format=torch.contiguous_format).T
    if kind == "slice":
        return torch.cat((x, x), dim=1)[:, :columns]
    padded = torch.cat((x.new_zeros(1), x.flatten()))
    return padded[1:].view(rows, columns)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", ["column", "slice", "unaligned"])
@pytest.mark.parametrize("name", MM_FP4)
def test_strides_and_address_of_the_input_do_not_matter(gpu: Gpu, name: str, kind: str, rows: int) -> None:
    gpu(home(name))
    weight = random_weight("256x512")
    x = random_input(rows, weight.in_features, weight.dtype)
    view = strided(x, kind)
    assert torch.equal(view, x)
    assert kind != "column" or view.stride(0) == 1
    linear = NvFp4Linear(weight, backend(name)())
    assert_product(linear(view), x, weight)
    assert_product(linear.backend.apply(view, linear.segments[0].prepared, None), x, weight)


def test_leading_dimensions_are_rows(gpu: Gpu) -> None:
    device = gpu()
    weight = random_weight("256x512")
    x = random_input(6, 512, weight.dtype)
    y = NvFp4Linear(weight, backend("cutlass")())(x.view(2, 3, 512))
    assert y.shape == (2, 3, 256)
    assert_product(y.view(6, 256), x, weight)
    assert device.kernels.products == [Product("cutlass", 6, 256, 512, torch.bfloat16)]


@pytest.mark.parametrize("name", MM_FP4)
def test_flashinfers_tuner_takes_our_cache(gpu: Gpu, name: str, tmp_path: Path) -> None:
    """Timing needs a device; what it is asked with, and a product under what it would have found, do not."""
    gpu(home(name))
    inspect.signature(flashinfer.autotune).bind(True, cache=str(tmp_path / "cache.json"))
    weight = random_weight("256x512")
    x = random_input(7, 512, weight.dtype)
    linear = NvFp4Linear(weight, backend(name)())
    for cache in (None, tmp_path / "cache.json"):
        with backend(name).tuning(cache, measure=False):
            assert_product(linear(x), x, weight)


@pytest.mark.parametrize("name", MM_FP4)
def test_no_rows_reach_no_kernel(gpu: Gpu, name: str) -> None:
    device = gpu(home(name))
    prepared = backend(name)().prepare(random_weight("256x512").segments(False)[0])
    assert backend(name)().apply(random_input(0, 512, torch.bfloat16), prepared, None).shape == (0, 256)
    assert device.kernels.products == [] and device.kernels.quantized == []


@pytest.mark.parametrize("name", MM_FP4)
def test_a_weight_of_another_backend_is_refused(gpu: Gpu, name: str) -> None:
    """trtllm's rows are in another order: its product would be wrong without an error."""
    gpu(home(name))
    prepared = backend(name)().prepare(random_weight("256x512").segments(False)[0])
    for other in set(MM_FP4) - {name}:
        with pytest.raises(ValueError, match=f"prepared for backend {name}, not for {other}"):
            backend(other)().apply(random_input(1, 512, torch.bfloat16), prepared, None)


@pytest.mark.parametrize("name", MM_FP4)
def test_a_shared_weight_is_right_for_both(gpu: Gpu, name: str) -> None:
    """Backends that say they read the same bytes do."""
    gpu(home(name))
    weight = random_weight("1000x96")
    linear = NvFp4Linear(weight, backend(name)())
    x = random_input(7, 96, weight.dtype)
    segment = linear.segments[0].prepared
    for other in MM_FP4:
        shared = segment.shared_with(backend(other)())
        assert (shared is None) == ((name == "trtllm") != (other == "trtllm"))
        if shared is not None and home(name) == home(other):
            padded = torch.nn.functional.pad(x, (0, -96 % backend(other).in_multiple))
            assert_product(backend(other)().apply(padded, shared, None)[:, :1000], x, weight)
