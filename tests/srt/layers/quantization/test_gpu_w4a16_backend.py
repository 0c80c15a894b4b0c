"""Layers on backend ``w4a16`` on a GPU: against the exact product in every variant, captured, compiled and tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4_fakes import make_weight
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_autotune import Autotuner
from sglang.srt.layers.quantization.fp4_backends.w4a16 import W4A16Backend
from sglang.srt.layers.quantization.fp4_utils import Target
from sglang.srt.layers.quantization.fp4_verify import check_layer, make_batch, random_layers
from sglang.srt.layers.quantization.nvfp4 import install
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear, NvFp4Weight, warm_up_fp4_gemm

GPU = torch.device("cuda", 0)
REASON = W4A16Backend.unsupported_reason(Target.current(GPU)) if torch.cuda.is_available() else "no CUDA GPU"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
VARIANTS = W4A16Backend.variants(Target("cuda", (9, 0)))
DTYPES = [torch.bfloat16, torch.float16]


def on_gpu(weight: NvFp4Weight) -> NvFp4Weight:
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(
        weight, **{name: value.to(GPU) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda backend: backend.label)
def test_layers_are_exact(variant: W4A16Backend, dtype: torch.dtype) -> None:
    """Fused parts with unequal scales, biases, N and K that no tile divides, 1 to 300 rows; W4A4 and weight-only."""
    for n, k in ((77, 48), (520, 3696)):
        for layer in random_layers(n, k, dtype, torch.Generator(GPU).manual_seed(0)):
            layer = replace(layer, activations_kept=layer.weight.activation is not Activation.NONE)
            linear = NvFp4Linear(layer.weight, variant)
            for rows in (1, 5, 16, 40, 300):
                finding = check_layer(linear, layer, *make_batch(layer, rows, seed=rows))
                assert finding.ok, (layer.kind, rows, finding)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.T.contiguous().T,
    "row step is no multiple of 8": lambda x: torch.cat((x, x[:, :3]), dim=1)[:, : x.shape[1]],
    "unaligned": lambda x: torch.cat((x[:, :3], x), dim=1)[:, 3:],
    "rows far apart": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("how", STRIDED)
def test_any_strides_give_the_same_bits(how: str) -> None:
    linear = NvFp4Linear(on_gpu(make_weight([64, 32], 256, [0.01, 0.02])), W4A16Backend())
    bias = torch.randn(2 * 96, device=GPU).bfloat16()[::2]
    for rows in (1, 7, 130):
        x = torch.randn(rows, 256, device=GPU).bfloat16()
        strided = STRIDED[how](x)
        assert torch.equal(strided, x)
        assert torch.equal(linear(strided, bias), linear(x, bias.contiguous()))
    assert linear(x[:0], bias).shape == (0, 96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_layer_is_the_eager_one(dtype: torch.dtype) -> None:
    sizes = [1, 5, 64, 130, 3000]
    linear = NvFp4Linear(on_gpu(make_weight([64, 32], 256, [0.01, 0.02], dtype=dtype)), *VARIANTS[:3])
    assert warm_up_fp4_gemm([linear], sizes) == 1
    for rows in sizes:
        x, bias = torch.randn(rows, 256, device=GPU).to(dtype), torch.randn(96, device=GPU).to(dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = linear(x, bias)
        for _ in range(2):
            x.normal_()
            graph.replay()
            assert torch.equal(y, linear(x, bias))


def test_the_operator_is_what_its_fake_says() -> None:
    linear = NvFp4Linear(on_gpu(make_weight([64, 32], 256, [0.01, 0.02])), W4A16Backend())
    (segment,) = linear.segments
    prepared = segment.prepared
    for rows in (0, 1, 33):
        x = torch.randn(rows, 256, device=GPU).bfloat16()
        operands = (x, prepared.packed, prepared.scale, None, list(prepared.sizes), list(prepared.scales), 0)
        torch.library.opcheck(
            torch.ops.sglang.w4a16_gemm.default, operands, test_utils=("test_schema", "test_faketensor")
        )


def test_tuning_measures_graphs_and_keeps_the_arithmetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    tuner = Autotuner("on", GPU, 128)
    layer = nn.Module()
    layer.prefix = "a"
    with tuner.active(measure=True):
        install(layer, on_gpu(make_weight([4096], 4096)))
    (measurement,) = tuner.products.values()
    assert measurement is not None and measurement.dropped == {}
    assert set(measurement.timing) == {backend.label for backend in VARIANTS}
    assert set(measurement.timing.values()) == {"graph"}
    print(layer.nvfp4.choices, measurement.microseconds, tuner._seconds)
