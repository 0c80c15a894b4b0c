"""FP8 layers with unequal fused scales, and quantisation at load, against float64."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_linear_io import FIXTURES, relative_error
from torch import nn

from fp4_fakes import make_weight
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.nvfp4_online import OnlineNvFp4Config
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4
from sglang.srt.model_loader.loader import load_weights

FP8 = ModelOptFp4Config("MIXED_PRECISION", quantized_layers=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "FP8"))


def fp8_layer() -> tuple[QKVParallelLinear, dict[str, dict[str, torch.Tensor]]]:
    layer = QKVParallelLinear(32, 8, 4, 2, params_dtype=torch.float32, quant_config=FP8, prefix="qkv_proj")
    files = {}
    for part, rows, scale, input_scale in (("q", 32, 1e-3, 0.01), ("k", 16, 9e-4, 0.02), ("v", 16, 1.5e-2, 0.015)):
        files[part] = {
            "weight": torch.randn(rows, 32).mul(50).to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(scale),
            "input_scale": torch.tensor(input_scale),
        }
        for key, value in files[part].items():
            layer.weight_loader(getattr(layer, key), value, part)
    return layer, files


def test_fp8_parts_keep_their_scales_and_share_the_input_scale() -> None:
    layer, files = fp8_layer()
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(2, 3, 32)
    x[0, 0, 0] = 1e6  # saturates instead of becoming NaN
    a = (x.double() / 0.02).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * 0.02
    w = torch.cat([file["weight"].double() * file["weight_scale"].double() for file in files.values()])
    assert relative_error(layer(x), a @ w.T) < 1e-6


def test_fp8_refusals() -> None:
    layer, _ = fp8_layer()
    layer.weight.data.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(CheckpointError, match="layer qkv_proj: the FP8 weight holds NaN"):
        layer.quant_method.process_weights_after_loading(layer)
    layer, _ = fp8_layer()
    layer.weight_scale.data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="layer qkv_proj: weight_scale was not loaded"):
        layer.quant_method.process_weights_after_loading(layer)


ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("weight_only", [True, False])
def test_quantising_at_load_gives_the_exporters_weights(weight_only: bool, device: str) -> None:
    source = load_file(FIXTURES / "tiny-llama-bf16" / "model.safetensors")
    exported = load_file(FIXTURES / "tiny-llama-modelopt-nvfp4" / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    layer = QKVParallelLinear(
        256,
        64,
        4,
        2,
        params_dtype=torch.float32,
        quant_config=OnlineNvFp4Config(weight_only),
        prefix=prefix + "qkv_proj",
    ).to(device)
    expected = []
    for part in "qkv":
        name = f"{prefix}{part}_proj.weight"
        layer.weight_loader(layer.weight, source[name], part)
        expected.append(dequantize_nvfp4(exported[name], exported[name + "_scale"], exported[name + "_scale_2"]))
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "weight")
    x = torch.randn(5, 256)
    y = layer(x.to(device)).cpu()
    error = relative_error(y, x.double() @ torch.cat(expected).double().T)
    assert error < 1e-6 if weight_only else 0.02 < error < 0.2  # 4-bit activations show, and no more than they should


def test_quantising_at_load_refuses_by_name() -> None:
    config = OnlineNvFp4Config(weight_only=True)
    with pytest.raises(CheckpointError, match="layer a.down_proj: NVFP4 needs K to be a multiple of 16, it is 24"):
        ReplicatedLinear(24, 8, quant_config=config, prefix="a.down_proj")
    layer = ReplicatedLinear(32, 8, quant_config=config, prefix="a.down_proj")
    layer.weight.data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="layer a.down_proj: the weight holds NaN"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_weight_is_on_one_device() -> None:
    weight = make_weight([16, 16], 32, [0.1, 0.2])
    with pytest.raises(ValueError, match="global_scales: expected on cpu like packed, got meta"):
        replace(weight, global_scales=weight.global_scales.to("meta")).check()


def test_an_all_zero_weight_gives_zeros() -> None:
    layer = ReplicatedLinear(32, 8, quant_config=OnlineNvFp4Config(False), prefix="a.b")
    nn.init.zeros_(layer.weight)
    layer.quant_method.process_weights_after_loading(layer)
    assert not layer(torch.randn(3, 32)).any()


def test_parts_of_a_fused_layer_may_differ() -> None:
    """q NVFP4, k not quantised, v FP8: one layer, loaded under the parts' names, multiplied part by part."""
    table = {"a.q_proj": "W4A16_NVFP4", "a.v_proj": "FP8"}
    config = ModelOptFp4Config("MIXED_PRECISION", quantized_layers=table)
    model = split_model(config)
    layer = model.a.qkv_proj
    packed = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    scale = torch.rand(32, 2).to(torch.float8_e4m3fn)
    k, v = torch.randn(16, 32), torch.randn(16, 32).mul(50).to(torch.float8_e4m3fn)
    bias = torch.randn(64)
    tensors = {
        "a.q_proj.weight": packed,
        "a.q_proj.weight_scale": scale,
        "a.q_proj.weight_scale_2": torch.tensor(0.5),
        "a.k_proj.weight": k,
        "a.v_proj.weight": v,
        "a.v_proj.weight_scale": torch.tensor(1e-2),
        "a.v_proj.input_scale": torch.tensor(1e-2),
        "a.q_proj.bias": bias[:32],
        "a.k_proj.bias": bias[32:48],
        "a.v_proj.bias": bias[48:],
    }
    load_weights(model, tensors.items())
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    x = torch.randn(3, 32)
    a = (x.double() / 0.01).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * 0.01
    expected = torch.cat(
        (
            x.double() @ dequantize_nvfp4(packed, scale, 0.5).double().T,
            x.double() @ k.double().T,
            a @ v.double().T * 1e-2,
        ),
        1,
    )
    assert relative_error(layer(x), expected + bias.double()) < 1e-6
    for name in tensors:
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            load_weights(split_model(config), {key: value for key, value in tensors.items() if key != name}.items())


def split_model(config: ModelOptFp4Config) -> nn.Module:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.a = nn.Module()
    model.a.qkv_proj = QKVParallelLinear(32, 8, 4, 2, True, torch.float32, config, "a.qkv_proj")
    return model
