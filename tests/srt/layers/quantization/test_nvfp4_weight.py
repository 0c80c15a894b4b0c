import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.layers.quantization.nvfp4_utils import to_e2m1
from sglang.srt.layers.quantization.nvfp4_weight import (
    _to_e2m1,
    global_scale_from_amax,
    quantize_nvfp4_weight,
    unify_fused_amax,
)

REFERENCE = runpy.run_path(str(Path(__file__).parents[3] / "fixtures" / "scripts" / "reference_model.py"))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_recipe_against_numpy() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 48, generator=generator) * torch.logspace(-7, 1, 70).unsqueeze(1)
    weight[3] = 0
    weight[4, :16] = -0.0
    weight[5, 1::2] = -0.0
    scale2 = global_scale_from_amax(float(weight.abs().max()) * 1.5)
    packed, scales = quantize_nvfp4_weight(weight, scale2)

    f = np.float32
    blocks = weight.numpy().reshape(70, 3, 16)
    wanted = np.abs(blocks).max(-1) / f(6 * scale2.numpy())
    wanted = np.clip(np.where(wanted == 0, f(1), wanted), f(2**-9), f(448))
    byte = REFERENCE["e4m3_byte"](wanted)
    scaled = blocks / (REFERENCE["E4M3"][byte].astype(f) * scale2.numpy())[..., None]
    codes = REFERENCE["e2m1_code"](np.where(scaled == 0, f(0), scaled)).reshape(70, 48)
    assert (scales.view(torch.uint8).numpy() == byte).all()
    assert (packed.numpy() == REFERENCE["pack"](codes)).all()
    # Blocks that the smallest scale can't reach become zero, zero blocks keep the scale 1.
    assert byte.min() == 1 and (byte[3] == 0x38).all() and not packed[3].any() and not packed[4, :8].any()


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64, dtype=torch.bfloat16)
    whole = quantize_nvfp4_weight(weight, torch.tensor(0.002))
    monkeypatch.setattr("sglang.srt.layers.quantization.nvfp4_weight._PIECE", 130)
    pieces = quantize_nvfp4_weight(weight, torch.tensor(0.002))
    assert same(whole[0], pieces[0]) and same(whole[1], pieces[1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_cuda_makes_the_same_bytes() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = (torch.randn(300, 4096) * torch.logspace(-6, 0, 300).unsqueeze(1)).to(dtype)
        scale2 = global_scale_from_amax(float(weight.abs().max()))
        on_cpu, on_gpu = quantize_nvfp4_weight(weight, scale2), quantize_nvfp4_weight(weight.cuda(), scale2)
        assert same(on_cpu[0], on_gpu[0].cpu()) and same(on_cpu[1], on_gpu[1].cpu())


def test_encoding_is_that_of_nvfp4_utils_but_for_minus_zero() -> None:
    points = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30, 1e-30])
    points = torch.cat([points, torch.nextafter(points, torch.zeros(())), torch.nextafter(points, 2 * points)])
    points = torch.cat([points, -points, torch.randn(1000) * 3])
    assert torch.equal(_to_e2m1(points), to_e2m1(points))
    assert _to_e2m1(torch.tensor([-0.0, 0.0])).tolist() == [0, 0]


def test_weight_shape_is_checked() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16.*\[4, 24\]"):
        quantize_nvfp4_weight(torch.zeros(4, 24), torch.ones(()))


def test_unify_takes_the_largest_of_what_is_there() -> None:
    amax = {"l.0.q_proj": 1.0, "l.0.v_proj": 3.0, "l.1.q_proj": 2.0, "l.0.gate_proj": 5.0, "l.0.up_proj": 4.0}
    amax |= {"l.0.o_proj": 9.0, "l.0.down_proj": 8.0}
    fused = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    assert unify_fused_amax(amax, fused) == amax | {
        "l.0.q_proj": 3.0,
        "l.0.up_proj": 5.0,
    }


def test_global_scale_is_always_usable() -> None:
    assert global_scale_from_amax(2688.0) == 1
    assert global_scale_from_amax(0.0) == 1
    assert torch.isfinite(1 / global_scale_from_amax(1e-40))
