"""The rows about compressed-tensors checkpoints, over a twin of the base with the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import base, ct_twin
from harness import assert_layers_match, assert_refused, linear_layers, load
from oracle import Oracle
from test_case_e_shapes import BACKENDS

Written = Callable[..., Path]
K_PROJ = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


def test_a16_weight_only_is_not_taken_for_int4(written: Written) -> None:
    folder = written(ct_twin(base(), weight_only=True))
    twin = assert_layers_match(folder)
    modelopt = base()
    modelopt.section["quant_algo"] = "W4A16_NVFP4"
    torch.testing.assert_close(twin, assert_layers_match(written(modelopt), lambda name: "none"), rtol=0, atol=1e-4)


def test_a16_int4_is_refused_as_such(written: Written) -> None:
    checkpoint = ct_twin(base(), weight_only=True)
    group = checkpoint.config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["type"] = "int"
    assert_refused(written(checkpoint), "int")


@pytest.mark.parametrize("layer", [DOWN, K_PROJ])
def test_a17_packed_weights_under_another_name(layer: str, written: Written) -> None:
    checkpoint = ct_twin(base())
    checkpoint.tensors[layer + ".weight_packed_x"] = checkpoint.tensors.pop(layer + ".weight_packed")
    assert_refused(written(checkpoint), layer + ".weight_packed_x")
    del checkpoint.tensors[layer + ".weight_packed_x"]
    assert_refused(written(checkpoint), f"lacks {layer}.weight_packed")


def test_a19_the_string_local(written: Written) -> None:
    """A static global scale with block scales from the input. True is both from the input, False is impossible."""
    checkpoint = ct_twin(base())
    group = checkpoint.config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local"
    assert_layers_match(written(checkpoint))
    group["input_activations"]["dynamic"] = True
    checkpoint.drop("*.input_global_scale")
    assert_layers_match(written(checkpoint), lambda name: "dynamic")
    for value in (False, "remote"):
        group["input_activations"]["dynamic"] = value
        assert_refused(written(checkpoint), f"input_activations.dynamic is {value!r}")


def test_b5_ignored_parts_of_a_fused_layer(written: Written) -> None:
    modelopt = base()
    ignored = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    for name in ignored:
        modelopt.make_plain(name)
    checkpoint = ct_twin(modelopt)
    checkpoint.config["quantization_config"]["ignore"] = ["lm_head", *ignored]
    assert_layers_match(written(checkpoint))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-42])
@pytest.mark.parametrize("tensor", ["input_global_scale", "weight_global_scale"])
@pytest.mark.parametrize("layer", [DOWN, K_PROJ])
def test_c7_illegal_reciprocal_scales(layer: str, tensor: str, value: float, written: Written) -> None:
    checkpoint = ct_twin(base())
    name = f"{layer}.{tensor}"
    checkpoint.tensors[name] = torch.tensor([value])
    assert_refused(written(checkpoint), name, "must be positive, finite and not denormal")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_f16_the_global_scale_is_applied_the_right_way_round(dialect: str, tp_size: int, written: Written) -> None:
    checkpoint = base()
    for index, name in enumerate(checkpoint.layers("*")):
        key = name + ".weight_scale_2"
        checkpoint.tensors[key] = checkpoint.tensors[key] * (1 + index % 3)
    if dialect == "compressed-tensors":
        checkpoint = ct_twin(checkpoint)
    assert_layers_match(written(checkpoint), tp_size=tp_size)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_f16_reference_and_kernels_agree(backend: str, written: Written, blackwell: Callable[[str], Any]) -> None:
    folder = written(ct_twin(base()))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    blackwell("torch")
    reference = linear_layers(load(folder))[DOWN](x)
    blackwell(backend)
    assert_layers_match(folder, dtypes=["bfloat16"])
    torch.testing.assert_close(linear_layers(load(folder))[DOWN](x), reference, rtol=0.01, atol=0.01)
    assert Oracle(folder / "model.safetensors").kind(DOWN) == "nvfp4"
