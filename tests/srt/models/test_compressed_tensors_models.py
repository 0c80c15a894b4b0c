"""Whole compressed-tensors checkpoints: the exporter's, and mixed ones, against logits computed in float64."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.errors import CheckpointError
from step_harness import Stepper, make_runner

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPECTED = load_file(FIXTURES / "expected.safetensors")
FOLDER = FIXTURES / "tiny-llama-ct-nvfp4"
A16_FOLDER = FIXTURES / "tiny-llama-ct-nvfp4a16"
CONFIG = json.loads((FOLDER / "config.json").read_text())["quantization_config"]
NVFP4 = CONFIG["config_groups"]["group_0"]
A16 = {**NVFP4, "input_activations": None}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
PER_TENSOR = {**E4M3, "strategy": "tensor", "dynamic": False}
FP8 = {"weights": PER_TENSOR, "input_activations": PER_TENSOR, "format": "float-quantized"}
FP8_DYNAMIC = {
    "weights": {**E4M3, "strategy": "channel", "dynamic": False},
    "input_activations": {**E4M3, "strategy": "token", "dynamic": True},
    "format": "float-quantized",
}


def config_of(*groups: tuple[dict[str, Any], list[str]], **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": {**scheme, "targets": targets} for i, (scheme, targets) in enumerate(groups)}
    return {**CONFIG, "format": "mixed-precision", "config_groups": named, **more}


def all_logits(folder: Path, ids: torch.Tensor, **args: Any) -> torch.Tensor:
    """Logits after every token of the prompt [T, vocabulary]."""
    runner = make_runner(folder, **args)
    hidden: list[torch.Tensor] = []
    runner.model.model.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    last, _ = Stepper(runner).step({0: ids.tolist()})
    with torch.inference_mode():
        logits = runner.model.lm_head(hidden[0]).float()
    assert torch.allclose(logits[-1], last.next_token_logits[0], atol=1e-4)
    return logits


def relative_rms(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize(
    ("folder", "args", "expected", "bound"),
    [
        (FOLDER, {}, "ct-nvfp4.w4a4", 1e-3),
        (FOLDER, {"quantization": "w4a16_nvfp4"}, "ct-nvfp4.w4a16", 1e-4),
        (A16_FOLDER, {"quantization": "compressed-tensors"}, "ct-nvfp4.w4a16", 1e-4),
    ],
    ids=["w4a4", "w4a4-as-w4a16", "w4a16"],
)
def test_logits_of_the_fixtures(folder: Path, args: dict[str, Any], expected: str, bound: float) -> None:
    for prompt in (0, 1):
        ids, wanted = EXPECTED[f"prompt{prompt}"], EXPECTED[f"{expected}.prompt{prompt}"]
        assert (all_logits(folder, ids, **args) - wanted).abs().max() <= bound
        y = all_logits(folder, ids, dtype="bfloat16", **args)
        if expected.endswith("w4a16"):
            assert relative_rms(y, wanted) <= 0.02 and (y - wanted).abs().max() <= 0.4
        else:
            assert relative_rms(y, wanted) <= 0.25


def write(folder: Path, source: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """A copy of the checkpoint ``source`` with other tensors and another quantisation config."""
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("hf_quant_config.json"))
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def reference_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_model", FIXTURES / "scripts" / "reference_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_model"] = module
    spec.loader.exec_module(module)
    return module


def quantise_fp8(tensors: dict[str, torch.Tensor], name: str, weight: torch.Tensor, channel: bool) -> None:
    """Store ``name`` as compressed-tensors does: scales in bf16, [N, 1] or [1]."""
    for key in [key for key in tensors if key.startswith(name + ".")]:
        del tensors[key]
    amax = weight.float().abs().amax(dim=1, keepdim=True) if channel else weight.float().abs().amax().reshape(1)
    scale = (amax / 448).bfloat16()
    tensors[name + ".weight"] = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors[name + ".weight_scale"] = scale
    if not channel:
        tensors[name + ".input_scale"] = torch.tensor([4.0 / 448]).bfloat16()


@pytest.mark.parametrize("nvfp4", [NVFP4, A16], ids=["w4a4", "w4a16"])
def test_fp8_beside_nvfp4(nvfp4: dict[str, Any], tmp_path: Path) -> None:
    """Layer 0: FP8 attention with v in bf16, NVFP4 MLP; layer 1: NVFP4, but gate and up FP8 with scales per channel."""
    source = FOLDER if nvfp4 is NVFP4 else A16_FOLDER
    tensors, plain = load_file(source / "model.safetensors"), load_file(FIXTURES / "tiny-llama-bf16/model.safetensors")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"):
        quantise_fp8(tensors, f"model.layers.0.{name}", plain[f"model.layers.0.{name}.weight"], channel=False)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        quantise_fp8(tensors, f"model.layers.1.{name}", plain[f"model.layers.1.{name}.weight"], channel=True)
    v = "model.layers.0.self_attn.v_proj"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(v + ".")}
    tensors[v + ".weight"] = plain[v + ".weight"]
    config = config_of(
        (FP8_DYNAMIC, ["re:.*layers.1.mlp.(gate|up)_proj$"]),
        (nvfp4, ["Linear"]),
        (FP8, [f"model.layers.0.self_attn.{part}_proj" for part in "qko"]),
        ignore=["lm_head", v],
    )
    folder = write(tmp_path, source, tensors, config)
    reference = reference_model()
    ids = EXPECTED["prompt0"]
    wanted = torch.from_numpy(reference.forward(reference.Checkpoint(str(folder)), ids.numpy(), mode="w4a4"))
    assert (all_logits(folder, ids) - wanted).abs().max() <= 1e-3
    unquantised = torch.from_numpy(reference.forward(reference.Checkpoint(str(folder)), ids.numpy(), mode="w4a16"))
    assert relative_rms(wanted, unquantised) > 0.02  # activation scales matter to this test


def test_kv_cache_scales_below_the_attention(tmp_path: Path) -> None:
    """The FP8-cache fixture as compressed-tensors would store it: other names, divisors, scales in self_attn."""
    source = FIXTURES / "tiny-llama-modelopt-nvfp4-kvfp8"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, key = name.rpartition(".")
        if key == "weight_scale_2":
            tensors[f"{module}.weight_global_scale"] = (1 / tensor).reshape(1)
        elif key in ("k_scale", "v_scale"):
            tensors[f"{module.rpartition('.')[0]}.{key}"] = tensor.reshape(1)
        elif key == "weight" and tensor.dtype == torch.uint8:
            tensors[f"{module}.weight_packed"] = tensor
        elif key != "input_scale":
            tensors[name] = tensor
    folder = write(tmp_path, source, tensors, config_of((A16, ["Linear"]), kv_cache_scheme=PER_TENSOR))
    for prompt in (0, 1):
        logits = all_logits(folder, EXPECTED[f"prompt{prompt}"])
        error = (logits - EXPECTED[f"modelopt-nvfp4-kvfp8.w4a16.prompt{prompt}"]).abs()
        # The largest of prompt 0 is one cached value at a rounding boundary of FP8; without it they are 1e-5.
        assert error.max() <= 5e-4 and error.mean() <= 2e-5
    # Stored but not asked for: the cache stays in the model's dtype, the scales are not an error.
    write(tmp_path, source, tensors, config_of((A16, ["Linear"])))
    logits = all_logits(folder, EXPECTED["prompt0"])
    assert (logits - EXPECTED["modelopt-nvfp4.w4a16.prompt0"]).abs().max() <= 1e-3


def test_dummy_weights_of_fp8_groups(tmp_path: Path) -> None:
    """Legal scales, one for each channel among them, without any weight file."""
    for number, scheme in enumerate((FP8, FP8_DYNAMIC)):
        config = config_of((scheme, ["re:.*self_attn.*"]), (NVFP4, ["Linear"]))
        folder = write(tmp_path / str(number), FOLDER, {}, config)
        logits = all_logits(folder, EXPECTED["prompt0"], load_format="dummy")
        assert logits.isfinite().all() and logits.any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weight_packed", "weight_packed_x"),
        ("weight_global_scale", None),
        ("input_global_scale", None),
    ],
)
def test_an_incomplete_layer_is_named(old: str, new: str | None, tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    tensor = tensors.pop(f"model.layers.1.mlp.up_proj.{old}")
    if new is not None:
        tensors[f"model.layers.1.mlp.up_proj.{new}"] = tensor
    folder = write(tmp_path, FOLDER, tensors, CONFIG)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.up_proj\.{new or old}"):
        make_runner(folder)
