"""Single linear layers of the exporters' checkpoints against inputs and outputs computed in float64 from the files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.nvfp4_utils import quantize_nvfp4

FIXTURES = Path(__file__).parents[3] / "fixtures"
LINEAR_IO = load_file(FIXTURES / "linear_io.safetensors")
CASES = sorted({key.rsplit(".", 1)[0] for key in LINEAR_IO if key.startswith("modelopt")})


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def make_layer(case: str, dtype: torch.dtype, weight_only: bool = False) -> tuple[torch.nn.Module, object]:
    """The layer as an importer builds it: a bare module, the config from the folder, tensors copied in."""
    import json

    checkpoint, _, name = case.partition(".")
    folder = FIXTURES / f"tiny-llama-{checkpoint}"
    tensors = load_file(folder / "model.safetensors")
    config = ModelOptFp4Config.from_config(json.loads((folder / "hf_quant_config.json").read_text()), weight_only)
    layer = torch.nn.Module()
    prefix = f"model.{name}"
    method = config.get_quant_method(layer, prefix)
    n, k = LINEAR_IO[case + ".y_w4a16"].shape[1], LINEAR_IO[case + ".x"].shape[1]
    method.create_weights(layer, k, [n], k, n, dtype, weight_loader=None)
    for key, param in list(layer.named_parameters()):
        param.data.copy_(tensors[f"{prefix}.{key}"].reshape(param.shape))
    method.process_weights_after_loading(layer)
    return layer, method


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs(case: str, dtype: torch.dtype) -> None:
    layer, method = make_layer(case, dtype)
    key = ".y_w4a4" if case + ".y_w4a4" in LINEAR_IO else ".y_w4a16"
    y = method.apply(layer, LINEAR_IO[case + ".x"].to(dtype))
    assert y.dtype == dtype
    assert relative_error(y, LINEAR_IO[case + key]) < (1e-6 if dtype == torch.float32 else 0.0025)


@pytest.mark.parametrize("case", [case for case in CASES if case + ".x_packed" in LINEAR_IO])
def test_activation_codes(case: str) -> None:
    layer, _ = make_layer(case, torch.bfloat16)
    prepared = layer.nvfp4.segments[0].prepared
    packed, scale = quantize_nvfp4(LINEAR_IO[case + ".x"], prepared.source.input_scale_inv)
    assert torch.equal(packed, LINEAR_IO[case + ".x_packed"])
    assert torch.equal(scale.view(torch.uint8), LINEAR_IO[case + ".x_scale"].view(torch.uint8))


def test_weight_only_on_request() -> None:
    case = "modelopt-nvfp4.layers.0.mlp.down_proj"
    layer, method = make_layer(case, torch.float32, weight_only=True)
    y = method.apply(layer, LINEAR_IO[case + ".x"].float())
    assert relative_error(y, LINEAR_IO[case + ".y_w4a16"]) < 1e-6
    assert relative_error(y, LINEAR_IO[case + ".y_w4a4"]) > 0.02  # the two modes can be told apart


def test_every_backend_is_reachable_by_name() -> None:
    assert {"torch", "cudnn", "cutlass", "cutedsl", "trtllm"} <= set(backends())
    assert backends()["torch"].unsupported_reason(Target("cpu")) is None
