"""Layouts: ours, FlashInfer's own functions and golden vectors agree byte for byte; and so do the tests' decoders."""

from collections.abc import Callable
from pathlib import Path

import flashinfer
import numpy as np
import pytest
import torch
from exact_fp4 import E2M1, E4M3, codes, quantize, shuffled_row, swizzled_offsets
from flashinfer.tllm_enums import SfLayout
from safetensors.torch import load_file
from stand_in_gpu import MM_FP4, V07, StandInGpu, backend, home

from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import shuffle_rows, swizzle_scale, unswizzle_scale

Gpu = Callable[..., StandInGpu]
GOLDEN = load_file(Path(__file__).parents[1] / "fixtures" / "numerics.safetensors")
QUANT = sorted({key.split(".")[1] for key in GOLDEN if key.startswith("quant.")})
WEIGHTS = sorted({key.split(".")[1] for key in GOLDEN if key.startswith("weight.")})


def golden(kind: str, name: str) -> dict[str, torch.Tensor]:
    prefix = f"{kind}.{name}."
    return {key.removeprefix(prefix): value for key, value in GOLDEN.items() if key.startswith(prefix)}


# ------------------------------------------------------------------------------------------- the tests' own decoders
def test_tables() -> None:
    assert np.array_equal(E2M1, GOLDEN["tables.e2m1"].double().numpy())
    assert np.array_equal(E4M3, GOLDEN["tables.e4m3"].double().numpy(), equal_nan=True)


@pytest.mark.parametrize("name", QUANT)
def test_decoders_match_golden_vectors(name: str) -> None:
    part = golden("quant", name)
    code, scale = quantize(part["x"], part["global_scale"].numpy())
    assert np.array_equal(code, codes(part["packed"].numpy()))
    assert np.array_equal(scale, part["scale"].numpy())
    for tile, layout in ((128, part["scale_128x4"]), (8, part["scale_8x4"])):
        assert np.array_equal(layout.numpy().flatten()[swizzled_offsets(scale.shape[0], scale.shape[1], tile)], scale)


@pytest.mark.skipif(not V07, reason="FlashInfer has a reference quantiser from 0.7 on")
@pytest.mark.parametrize("name", QUANT)
def test_decoders_match_the_reference_quantiser(name: str) -> None:
    from flashinfer.batch_invariant.quantization import nvfp4_reference

    part = golden("quant", name)
    packed, swizzled, _ = nvfp4_reference.quantize_reference(part["x"], part["global_scale"])
    code, scale = quantize(part["x"], part["global_scale"].numpy())
    assert np.array_equal(code, codes(packed.numpy()))
    assert np.array_equal(scale, swizzled.numpy().flatten()[swizzled_offsets(*scale.shape)])


# ----------------------------------------------------------------------------------------------- our layout functions
@pytest.mark.parametrize("rows", [32, 128, 384])
def test_rows_are_shuffled_as_flashinfer_shuffles_them(rows: int) -> None:
    matrix = torch.arange(rows * 3).view(rows, 3)
    theirs = flashinfer.shuffle_matrix_a(matrix, 128)
    assert torch.equal(shuffle_rows(matrix), theirs)
    assert torch.equal(theirs[shuffled_row(np.arange(rows))], matrix)


@pytest.mark.parametrize("columns", [1, 4, 7, 231])
def test_scales_of_shuffled_rows_as_flashinfer_lays_them_out(gpu: Gpu, columns: int) -> None:
    gpu()
    scale = torch.arange(256 * columns).remainder(127).to(torch.uint8).view(256, columns)
    theirs = flashinfer.shuffle_matrix_sf_a(scale, 128)
    ours = swizzle_scale(shuffle_rows(scale))
    assert torch.equal(ours.flatten(), theirs)


@pytest.mark.parametrize("rows, columns", [(1, 1), (128, 4), (200, 7), (129, 231)])
def test_scales_are_swizzled_as_flashinfer_swizzles_them(rows: int, columns: int) -> None:
    scale = torch.arange(1, rows * columns + 1).remainder(127).to(torch.uint8).view(rows, columns)
    swizzled = swizzle_scale(scale)
    assert np.array_equal(swizzled.numpy().flatten()[swizzled_offsets(rows, columns)], scale.numpy())
    padding = np.ones(swizzled.numel(), bool)
    padding[swizzled_offsets(rows, columns)] = False
    assert not swizzled.numpy().flatten()[padding].any()
    assert torch.equal(unswizzle_scale(swizzled, rows, columns), scale)
    if V07:
        from flashinfer.batch_invariant.quantization import nvfp4_reference
        from flashinfer.gemm.gemm_bf16_fp4 import _unswizzle_sf_128x4

        assert torch.equal(swizzled, nvfp4_reference.swizzle_sf_128x4(scale, rows, columns * 16))
        assert torch.equal(_unswizzle_sf_128x4(swizzled, rows, columns), scale)


# ------------------------------------------------------------------------------------------- what reaches the kernels
@pytest.mark.parametrize("name", MM_FP4)
@pytest.mark.parametrize("shape", WEIGHTS)
def test_kernels_get_what_flashinfers_recipe_gives(gpu: Gpu, name: str, shape: str) -> None:
    """The bytes of weight and scales that a kernel reads are those of golden vectors, and of the calls that the
    documentation of ``mm_fp4`` prescribes."""
    device = gpu(home(name))
    part = golden("weight", shape)
    columns = part["w"].shape[1]
    if backend(name).unsupported_reason(device.target().for_layer(columns, 128, False, torch.bfloat16)):
        assert name == "b12x" and columns % 128 and not V07
        return
    trtllm = name == "trtllm"
    scales = part["global_scale"]
    weight = NvFp4Weight(
        packed=part["packed"],
        scale=part["scale"].view(torch.float8_e4m3fn),
        global_scales=(1.0 / scales).reshape(1),
        part_sizes=(part["w"].shape[0],),
        activation=Activation.STATIC,
        dtype=torch.bfloat16,
        input_scale=torch.tensor(0.01),
        input_scale_inv=torch.tensor(100.0),
    )
    NvFp4Linear(weight, backend(name)())(torch.ones(2, weight.in_features, dtype=torch.bfloat16))
    got_packed, got_scale = device.kernels.weight_bytes
    prefix = "trtllm." if trtllm else ""
    packed, scale = part[prefix + "packed"].numpy(), part[prefix + ("scale" if trtllm else "scale_128x4")].numpy()
    if columns % backend(name).in_multiple == 0:
        aligned = part["w"].clone()
        theirs = flashinfer.nvfp4_quantize(aligned, scales, sfLayout=SfLayout.layout_128x4, do_shuffle=trtllm)
        assert np.array_equal(got_packed, theirs[0].numpy())
        assert np.array_equal(got_scale, theirs[1].numpy().flatten())
    assert np.array_equal(got_packed[:, : columns // 2], packed)
    assert not got_packed[:, columns // 2 :].any()
    assert np.array_equal(got_scale, scale.flatten())
