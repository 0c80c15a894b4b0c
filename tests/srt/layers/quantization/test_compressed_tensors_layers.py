"""Layers of compressed-tensors checkpoints, NVFP4 and FP8, against float64 of their bytes."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_compressed_tensors import A16, FP8, FP8_DYNAMIC, NVFP4, raw
from test_linear_io import FIXTURES, LINEAR_IO, relative_error
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.nvfp4_utils import quantize_nvfp4
from thread_ranks import on_every_rank, thread_groups

CASES = sorted({key.rsplit(".", 1)[0] for key in LINEAR_IO if key.startswith("ct-nvfp4")})
FOLDER = FIXTURES / "tiny-llama-ct-nvfp4"


# ----------------------------------------------------------------------------------------------- linears of the fixture
def fixture_linear(case: str, dtype: torch.dtype, weight_only: bool = False) -> tuple[nn.Module, Any]:
    """The layer as an importer builds it: a bare module, the config from the folder, tensors copied in."""
    tensors = load_file(FOLDER / "model.safetensors")
    raw_config = json.loads((FOLDER / "config.json").read_text())["quantization_config"]
    config = CompressedTensorsConfig.from_config(raw_config, weight_only)
    layer, prefix = nn.Module(), "model." + case.partition(".")[2]
    method = config.get_quant_method(layer, prefix)
    n, k = LINEAR_IO[case + ".y_w4a16"].shape[1], LINEAR_IO[case + ".x"].shape[1]
    method.create_weights(layer, k, [n], k, n, dtype, weight_loader=None)
    assert {key for key, _ in layer.named_parameters()} == {
        "weight_packed", "weight_scale", "weight_global_scale", *([] if weight_only else ["input_global_scale"])
    }  # fmt: skip
    for key, param in list(layer.named_parameters()):
        param.data.copy_(tensors[f"{prefix}.{key}"])
    method.process_weights_after_loading(layer)
    return layer, method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str, dtype: torch.dtype) -> None:
    for weight_only, key in ((False, ".y_w4a4"), (True, ".y_w4a16")):
        layer, method = fixture_linear(case, dtype, weight_only)
        y = method.apply(layer, LINEAR_IO[case + ".x"].to(dtype))
        assert y.dtype == dtype
        assert relative_error(y, LINEAR_IO[case + key]) < (1e-6 if dtype == torch.float32 else 0.0025)
    assert relative_error(LINEAR_IO[case + ".y_w4a4"], LINEAR_IO[case + ".y_w4a16"]) > 0.02  # they can be told apart


@pytest.mark.parametrize("case", CASES)
def test_activation_codes_use_the_stored_divisor_itself(case: str) -> None:
    stored = load_file(FOLDER / "model.safetensors")[f"model.{case.partition('.')[2]}.input_global_scale"]
    layer, _ = fixture_linear(case, torch.bfloat16)
    source = layer.nvfp4.segments[0].prepared.source
    assert float(source.input_scale_inv) == float(stored)
    packed, scale = quantize_nvfp4(LINEAR_IO[case + ".x"], source.input_scale_inv)
    assert torch.equal(packed, LINEAR_IO[case + ".x_packed"])
    assert torch.equal(scale.view(torch.uint8), LINEAR_IO[case + ".x_scale"].view(torch.uint8))


def test_divisors_of_fused_parts_stay_apart_and_inputs_share_the_largest_scale() -> None:
    config = CompressedTensorsConfig.from_config(raw((NVFP4, ["Linear"])))
    layer = MergedColumnParallelLinear(
        32, [16, 48], params_dtype=torch.float32, quant_config=config, prefix="gate_up_proj"
    )
    for shard, (weight, inputs) in enumerate(((37.0, 100.0), (1300.0, 64.0))):
        n = (16, 48)[shard]
        layer.weight_loader(layer.weight_packed, torch.full((n, 16), 0x22, dtype=torch.uint8), shard)  # 1.0 everywhere
        layer.weight_loader(layer.weight_scale, torch.ones(n, 2).to(torch.float8_e4m3fn), shard)
        layer.weight_loader(layer.weight_global_scale, torch.tensor([weight]), shard)
        layer.weight_loader(layer.input_global_scale, torch.tensor([inputs]), shard)
    layer.quant_method.process_weights_after_loading(layer)
    source = layer.nvfp4.segments[0].prepared.source
    assert float(source.input_scale_inv) == 64.0  # the smallest divisor is the largest scale
    y = layer(torch.full((1, 32), 3.0))
    assert torch.allclose(y[0, :16], torch.tensor(96 / 37.0)) and torch.allclose(y[0, 16:], torch.tensor(96 / 1300.0))


# ----------------------------------------------------------------------------------------------------------- FP8 layers
def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()


def fp8_layer(group: dict[str, Any], bias: bool) -> tuple[LinearBase, torch.Tensor, torch.Tensor | None]:
    """A fused layer whose parts have scales of their own, its weight [N, K] in float64 and its bias."""
    generator = torch.Generator().manual_seed(2)
    config = CompressedTensorsConfig.from_config(raw((group, ["Linear"])))
    layer = QKVParallelLinear(48, 8, 4, 2, bias, torch.bfloat16, config, "qkv_proj")
    weights = []
    for part, rows, inputs in (("q", 32, 0.01), ("k", 16, 0.02), ("v", 16, 0.015)):
        weight = torch.randn(rows, 48, generator=generator).mul(60).to(torch.float8_e4m3fn)
        channel = group["weights"]["strategy"] == "channel"
        scale = torch.rand(*((rows, 1) if channel else (1,)), generator=generator).add(0.1).mul(1e-2).bfloat16()
        layer.weight_loader(layer.weight, weight, part)
        layer.weight_loader(layer.weight_scale, scale, part)
        if hasattr(layer, "input_scale"):
            layer.weight_loader(layer.input_scale, torch.tensor([inputs]), part)
        weights.append(weight.double() * scale.double())
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(64, generator=generator))
    layer.quant_method.process_weights_after_loading(layer)
    return layer, torch.cat(weights), layer.bias


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("activation", ["static", "dynamic", "none"])
def test_fp8_layers(strategy: str, activation: str) -> None:
    inputs = {"static": FP8, "dynamic": FP8_DYNAMIC, "none": A16}[activation]["input_activations"]
    group = {"weights": {**FP8["weights"], "strategy": strategy}, "input_activations": inputs}
    for bias in (False, True):
        layer, weight, b = fp8_layer(group, bias)
        # Rows of very different size, one of them zero: a scale that is not the row's own would show.
        x = (torch.randn(5, 48) * torch.tensor([1e-3, 1.0, 0.0, 30.0, 1.0])[:, None]).bfloat16().reshape(1, 5, 48)
        if activation == "static":
            scale = torch.tensor(0.02).double()
        else:
            scale = (x.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30).float().double()
        a = x.double() if activation == "none" else e4m3(x.double() / scale) * scale
        expected = a @ weight.T + (0 if b is None else b.double())
        y = layer(x)
        assert y.shape == (1, 5, 64) and y.dtype == torch.bfloat16
        for row in range(5):
            if not bool(expected[0, row].any()):
                assert not bool(y[0, row].any())
                continue
            assert relative_error(y[0, row], expected[0, row]) < 0.004
        assert layer(x[:, :0]).shape == (1, 0, 64)


def test_fp8_scales_of_rows_span_all_ranks() -> None:
    """A row-parallel layer's rows lie on several ranks; each quantises its columns with the whole row's scale."""
    config = CompressedTensorsConfig.from_config(raw((FP8_DYNAMIC, ["Linear"])))
    weight, scale = torch.randn(24, 64).mul(60).to(torch.float8_e4m3fn), torch.rand(24, 1).add(0.1)
    x = torch.randn(3, 64)
    x[:, 5] *= 50  # the largest values are on the first rank

    groups = thread_groups(2)

    def run(rank: int) -> torch.Tensor:
        layer = RowParallelLinear(
            64, 24, params_dtype=torch.float32, quant_config=config, prefix="o_proj", tp=groups[rank]
        )
        layer.weight_loader(layer.weight, weight)
        layer.weight_loader(layer.weight_scale, scale)
        layer.quant_method.process_weights_after_loading(layer)
        result: torch.Tensor = layer(x[:, rank * 32 : rank * 32 + 32])
        return result

    row_scale = (x.abs().amax(-1, keepdim=True) / 448).double()
    expected = (e4m3(x.double() / row_scale) * row_scale) @ (weight.double() * scale.double()).T
    for y in on_every_rank(2, run):
        assert relative_error(y, expected) < 1e-5


@pytest.mark.parametrize("bad", [0.0, float("nan"), -1.0])
def test_fp8_scale_per_channel_is_checked(bad: float) -> None:
    config = CompressedTensorsConfig.from_config(raw((FP8_DYNAMIC, ["Linear"])))
    layer = RowParallelLinear(16, 16, params_dtype=torch.bfloat16, quant_config=config, prefix="o_proj")
    layer.weight_loader(layer.weight, torch.ones(16, 16).to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=r"expected shape \[16, 1\], found \[1\]"):
        layer.weight_loader(layer.weight_scale, torch.ones(1))
    scale = torch.ones(16, 1)
    scale[7] = bad
    layer.weight_loader(layer.weight_scale, scale)
    with pytest.raises(CheckpointError, match="layer o_proj: weight_scale was not loaded or is illegal"):
        layer.quant_method.process_weights_after_loading(layer)
