"""The arithmetic against golden vectors made by FlashInfer's exact reference and compiled layout functions."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang.srt.layers.quantization import nvfp4_utils as fp4

GOLDEN = load_file(Path(__file__).parents[3] / "fixtures" / "numerics.safetensors")
QUANT = sorted({key.split(".")[1] for key in GOLDEN if key.startswith("quant.")})
WEIGHTS = sorted({key.split(".")[1] for key in GOLDEN if key.startswith("weight.")})


@pytest.mark.parametrize("name", QUANT)
def test_quantize_matches_golden_vectors(name: str) -> None:
    part = {key.split(".", 2)[2]: value for key, value in GOLDEN.items() if key.startswith(f"quant.{name}.")}
    packed, scale = fp4.quantize_nvfp4(part["x"], part["global_scale"])
    assert torch.equal(packed, part["packed"])
    assert torch.equal(scale.view(torch.uint8), part["scale"])
    assert torch.equal(fp4.swizzle_scale(scale).view(torch.uint8).flatten(), part["scale_128x4"].flatten())
    assert torch.equal(fp4.swizzle_scale(scale, 8).view(torch.uint8).flatten(), part["scale_8x4"].flatten())
    dequantized = fp4.dequantize_nvfp4(packed, scale, 1.0 / part["global_scale"])
    assert torch.equal(dequantized, part["dequant"])


def test_nan_and_infinity() -> None:
    part = {key.split(".", 1)[1]: value for key, value in GOLDEN.items() if key.startswith("nan_inf")}
    part = {key.rsplit(".", 1)[-1]: value for key, value in part.items()}
    packed, scale = fp4.quantize_nvfp4(part["x"], part["global_scale"])
    assert torch.equal(packed, part["packed"])
    assert torch.equal(scale.view(torch.uint8), part["scale"])


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_layouts(name: str) -> None:
    part = {key.split(".", 2)[2]: value for key, value in GOLDEN.items() if key.startswith(f"weight.{name}.")}
    packed, scale = fp4.quantize_nvfp4(part["w"], part["global_scale"])
    assert torch.equal(packed, part["packed"])
    assert torch.equal(scale.view(torch.uint8), part["scale"])
    assert torch.equal(fp4.swizzle_scale(scale).view(torch.uint8).flatten(), part["scale_128x4"].flatten())
    if "trtllm.packed" in part:
        assert torch.equal(fp4.shuffle_rows(packed), part["trtllm.packed"])
        shuffled = fp4.swizzle_scale(fp4.shuffle_rows(scale.view(torch.uint8)))
        assert torch.equal(shuffled.flatten(), part["trtllm.scale"].flatten())


def test_tables() -> None:
    assert torch.equal(torch.tensor(fp4.E2M1_VALUES), GOLDEN["tables.e2m1"])
    bytes_ = torch.arange(256, dtype=torch.uint8)
    ours = bytes_.view(torch.float8_e4m3fn).float()
    assert torch.equal(ours.nan_to_num(9999.0), GOLDEN["tables.e4m3"].nan_to_num(9999.0))


@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from([128, 8]))
def test_swizzle_round_trip_and_documented_offset(rows: int, columns: int, tile: int) -> None:
    scale = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    swizzled = fp4.swizzle_scale(scale, tile)
    assert torch.equal(fp4.unswizzle_scale(swizzled, rows, columns, tile), scale)
    c4 = swizzled.shape[1]
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    if tile == 128:
        offset = (r // 128) * 128 * c4 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    else:
        offset = (r // 8) * 8 * c4 + (c // 4) * 32 + (r % 8) * 4 + c % 4
    assert torch.equal(swizzled.flatten()[offset], scale)
    assert int(swizzled.count_nonzero()) == scale.numel()  # everything else is padding, and zero


@given(st.integers(0, 2**31 - 1))
def test_every_code_is_a_fixed_point(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, 32), generator=generator, dtype=torch.uint8)
    values = torch.tensor(fp4.E2M1_VALUES)[codes.int()]
    assert torch.equal(fp4.to_e2m1(values), codes)
    assert torch.equal(fp4.unpack(fp4.pack(codes)), codes)


def test_dequantised_values_are_exact_in_bfloat16() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(127, 1).repeat(1, 32)
    values = fp4.dequantize_nvfp4(packed, scale.view(torch.uint8).view(torch.float8_e4m3fn), 1.0)
    assert torch.equal(values.bfloat16().float(), values)
