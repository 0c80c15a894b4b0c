"""That these tests can fail: a buffer that is wrong in one way gives numbers that are far off, or an error."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import flashinfer
import pytest
import torch
from contract_layers import random_input, random_weight
from exact_fp4 import assert_product, exact_product
from stand_in_gpu import MM_FP4, StandInGpu, backend, home
from stand_in_kernels import OutOfBoundsError

from sglang.srt.errors import Fp4GemmError
from sglang.srt.layers.quantization.fp4_backends.flashinfer import FlashInferWeight
from sglang.srt.layers.quantization.nvfp4 import NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import shuffle_rows, swizzle_scale

Gpu = Callable[..., StandInGpu]
# cuDNN's runner tries once more before it gives up.
pytestmark = pytest.mark.filterwarnings("ignore:cuDNN fp4 GEMM tactic failed")


def bytes_of(weight: NvFp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.packed, weight.scale.view(torch.uint8)


def unswizzled(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    scale = bytes_of(weight)[1]
    return {"scale": shuffle_rows(scale) if shuffled else scale}


def swizzled_as_8x4(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    return {"scale": swizzle_scale(unswizzled(weight, shuffled)["scale"], 8)}


def codes_in_other_order(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    packed = bytes_of(weight)[0]
    return {"packed": packed if shuffled else shuffle_rows(packed)}


def scales_in_other_order(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    scale = bytes_of(weight)[1]
    return {"scale": swizzle_scale(scale if shuffled else shuffle_rows(scale))}


def both_in_other_order(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    """What the other kind of backend prepares: the product is right, its columns are permuted."""
    return codes_in_other_order(weight, shuffled) | scales_in_other_order(weight, shuffled)


def swapped_nibbles(weight: NvFp4Weight, shuffled: bool) -> dict[str, torch.Tensor]:
    packed = bytes_of(weight)[0]
    packed = shuffle_rows(packed) if shuffled else packed
    return {"packed": packed >> 4 | packed << 4}


FAULTS = [unswizzled, swizzled_as_8x4, codes_in_other_order, scales_in_other_order, both_in_other_order]
FAULTS += [swapped_nibbles]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", MM_FP4)
def test_wrong_bytes_give_wrong_numbers(gpu: Gpu, name: str, fault: Callable[..., dict[str, torch.Tensor]]) -> None:
    gpu(home(name))
    weight = random_weight("256x512").segments(False)[0]
    x = random_input(7, 512, torch.bfloat16)
    prepared = backend(name)().prepare(weight)
    assert isinstance(prepared, FlashInferWeight)
    assert_product(backend(name)().apply(x, prepared, None), x, weight)
    wrong: FlashInferWeight = replace(prepared, **cast(Any, fault(weight, name == "trtllm")))
    y = backend(name)().apply(x, wrong, None)
    with pytest.raises(AssertionError, match="differ by more than a rounding"):
        assert_product(y, x, weight)
    exact = exact_product(x, weight)
    assert float((y.double() - exact).norm() / exact.norm()) > 0.3


@pytest.mark.parametrize("name", MM_FP4)
def test_short_scales_are_refused_by_us_and_would_be_read_past_their_end(gpu: Gpu, name: str) -> None:
    gpu(home(name))
    weight = random_weight("256x512")
    cut = replace(weight, packed=weight.packed[:160], scale=weight.scale[:160], part_sizes=(160,))
    cut = replace(cut, global_scales=cut.global_scales[:1]).padded(backend(name).out_multiple, 16)
    n = cut.out_features
    x = random_input(1, 512, torch.bfloat16)
    prepared = backend(name)().prepare(cut)
    assert isinstance(prepared, FlashInferWeight) and prepared.scale.shape == (256, 32)
    short = prepared.scale.flatten()[: (n - 1) * 32].clone().view(-1, 32)
    with pytest.raises(Fp4GemmError, match=rf"scales of the weight: expected .*\[256, 32\].*\[{n - 1}, 32\]"):
        backend(name)().apply(x, replace(prepared, scale=short), None)
    packed, scale = flashinfer.fp4_quantize(x, torch.ones(1))
    with pytest.raises((OutOfBoundsError, ValueError, RuntimeError), match="bytes of a buffer|physical|dimensions"):
        flashinfer.mm_fp4(
            packed, prepared.packed.T, scale, short.T, prepared.alpha, torch.bfloat16, backend=MM_FP4[name]
        )


@pytest.mark.parametrize("name", MM_FP4)
def test_unpadded_shapes_are_refused(gpu: Gpu, name: str) -> None:
    """K = 48 as it is: every backend's kernel, or the check before it, says no."""
    gpu(home(name))
    weight = random_weight("96x48").segments(False)[0]
    prepared = backend(name)().prepare(weight)
    with pytest.raises(Fp4GemmError, match=f"backend {name} failed at M=1, N=96, K=48"):
        backend(name)().apply(random_input(1, 48, torch.bfloat16), prepared, None)


def test_poisoned_padding_of_scales_shows(gpu: Gpu) -> None:
    """A kernel reads whole tiles of scales: NaN beside the last column is NaN in every sum."""
    gpu()
    weight = random_weight("1000x96").segments(False)[0].padded(32, 32)
    x = random_input(7, 96, torch.bfloat16)
    prepared = backend("cutlass")().prepare(weight)
    y = backend("cutlass")().apply(x, prepared, None)
    assert bool(y.isnan().all())  # FlashInfer's quantiser leaves that of the input as it finds it
    padded = weight.padded(32, 64)
    y = backend("cutlass")().apply(torch.nn.functional.pad(x, (0, 32)), backend("cutlass")().prepare(padded), None)
    assert_product(y, torch.nn.functional.pad(x, (0, 32)), padded)
