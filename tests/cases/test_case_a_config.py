"""Group A: where the quantisation config lies, what it calls its algorithms, and which layer gets which."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, base, copy_of, ct_twin
from harness import assert_layers_match, assert_refused, linear_layers, load, logits_of
from oracle import Oracle, relative_error

from sglang.srt.errors import ArgumentError
from sglang.srt.server_args import ServerArgs

Written = Callable[..., Path]
DOWN = "model.layers.0.mlp.down_proj"


def none(name: str) -> str:
    return "none"


def plain_checkpoint() -> Checkpoint:
    """The same model without any quantisation."""
    checkpoint = base()
    checkpoint.make_plain("*")
    checkpoint.hf_quant_config = None
    return checkpoint


def mixed(table: dict[str, str], **section: Any) -> dict[str, Any]:
    layers = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in table.items()}
    return {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **section}}


def test_a1_three_places_for_the_config(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    own, flat, nested, both = base(), base(), base(), base()
    flat.move_config(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])
    nested.move_config(quant_method="modelopt", quantization={"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]})
    expected = assert_layers_match(written(own), dtypes=["bfloat16"])
    for checkpoint in (flat, nested):
        assert torch.equal(logits_of(written(checkpoint)), expected)
    assert "disagree" not in caplog.text
    both.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}
    assert torch.equal(logits_of(written(both)), expected)
    assert "hf_quant_config.json and config.json's quantization_config disagree" in caplog.text


@pytest.mark.parametrize("flag", [None, "modelopt"])
def test_a2_modelopt_is_dispatched_by_algorithm(flag: str | None, written: Written) -> None:
    checkpoint = base()
    checkpoint.move_config(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])
    assert_layers_match(written(checkpoint), quantization=flag)


@pytest.mark.parametrize(("stored", "flag"), [("modelopt_fp4", "modelopt"), ("modelopt", "modelopt_fp4")])
def test_a3_spellings_of_one_family_agree(stored: str, flag: str, written: Written) -> None:
    checkpoint = base()
    checkpoint.move_config(quant_method=stored, quant_algo="NVFP4", ignore=["lm_head"])
    folder = written(checkpoint)
    assert_layers_match(folder, quantization=flag)
    with pytest.raises(ArgumentError, match="awq"):
        ServerArgs.from_kwargs(model_path=str(folder), quantization="awq")
    words = (f"--quantization {flag}", "compressed-tensors")
    assert_refused(written(ct_twin(base())), *words, error=ArgumentError, quantization=flag)


@pytest.mark.parametrize("flag", ["modelopt", "modelopt_fp4"])
def test_a4_flag_for_a_checkpoint_that_is_not_quantised(flag: str, written: Written) -> None:
    folder = written(plain_checkpoint())
    (folder / "model.safetensors").write_bytes(b"never read")
    words = (f"--quantization {flag} says that the checkpoint is quantised already", "--quantization nvfp4")
    assert_refused(folder, *words, error=ArgumentError, quantization=flag)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-part"])
def test_a5_awq_pre_scale_is_applied(shared: bool, written: Written) -> None:
    checkpoint = base()
    checkpoint.section["quant_algo"] = "NVFP4_AWQ"
    del checkpoint.section["group_size"]
    g = torch.Generator().manual_seed(1)
    for name in checkpoint.layers("*"):
        if "layers.0" in name:  # the other layer has none: exporters fold it into the norm before
            k = checkpoint.shape.linears()[name][1]
            scale = torch.exp2(torch.rand(k, generator=g) * 4 - 2)
            first = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
            reused = checkpoint.tensors.get(f"{first}.pre_quant_scale") if shared else None
            checkpoint.tensors[f"{name}.pre_quant_scale"] = scale if reused is None else reused.clone()
    assert_layers_match(written(checkpoint))
    assert_layers_match(written(checkpoint), dtypes=["float32"], tp_size=2)
    checkpoint.section["quant_algo"] = "NVFP4"
    assert_refused(written(checkpoint), "model.layers.0.", ".pre_quant_scale", "no layer reads it")


def test_a6_mixed_precision_without_a_table(written: Written) -> None:
    for empty in (None, dict[str, str]()):
        checkpoint = plain_checkpoint()
        checkpoint.hf_quant_config = mixed({}, quantized_layers=empty)
        assert_refused(written(checkpoint), "MIXED_PRECISION needs a table quantized_layers")
    checkpoint = base()
    for name in checkpoint.layers("*"):
        if name != DOWN:
            checkpoint.make_plain(name)
    checkpoint.hf_quant_config = mixed({DOWN: "NVFP4"})
    assert_layers_match(written(checkpoint))


def test_a7_mixed_table_nested_once_and_twice(written: Written) -> None:
    checkpoint = base()
    checkpoint.make_fp8("model.layers.0.self_attn.*")
    checkpoint.make_plain("model.layers.1.*")
    table = {name: "NVFP4" if "mlp" in name else "FP8" for name in checkpoint.layers("model.layers.0.*")}
    once = mixed(table)
    checkpoint.hf_quant_config = once
    expected = assert_layers_match(written(checkpoint), dtypes=["float32", "bfloat16"])
    assert_layers_match(written(checkpoint), tp_size=2)
    twice = {"quantized_layers": once["quantization"]["quantized_layers"]}
    checkpoint.hf_quant_config = mixed({}, quantized_layers=twice)
    assert torch.equal(logits_of(written(checkpoint)), expected)


@pytest.mark.parametrize("algorithm", ["MXFP8", "NVFP5"])
def test_a8_unknown_algorithm_of_one_layer(algorithm: str, written: Written) -> None:
    checkpoint = base()
    table = dict.fromkeys(checkpoint.layers("*"), "NVFP4")
    checkpoint.hf_quant_config = mixed({**table, DOWN: algorithm})
    assert_refused(written(checkpoint), f"layer {DOWN}", repr(algorithm), "not served")


def test_a9_excluded_but_stored_as_fp8(written: Written) -> None:
    checkpoint = base()
    checkpoint.make_fp8("*self_attn*")
    table = {name: "NVFP4" if "mlp" in name else "FP8" for name in checkpoint.layers("*")}
    checkpoint.hf_quant_config = mixed(table, exclude_modules=["lm_head", "*self_attn*"])
    assert_layers_match(written(checkpoint))
    mlp = {name: algorithm for name, algorithm in table.items() if algorithm == "NVFP4"}
    checkpoint.hf_quant_config = mixed(mlp, exclude_modules=["lm_head", "*self_attn*"])
    assert_refused(written(checkpoint), "self_attn", "_proj.weight", "torch.float8_e4m3fn")
    checkpoint.hf_quant_config = base().hf_quant_config
    checkpoint.section["exclude_modules"].append("*self_attn*")
    assert_refused(written(checkpoint), "self_attn", "_proj.weight", "torch.float8_e4m3fn")


def test_a10_weight_only_layers_beside_w4a4(written: Written) -> None:
    checkpoint = base()
    table = {name: "W4A16_NVFP4" if "down_proj" in name else "NVFP4" for name in checkpoint.layers("*")}
    checkpoint.hf_quant_config = mixed(table)
    folder = written(checkpoint)

    def activation(name: str) -> str:
        return "none" if "down_proj" in name else "static"

    assert_layers_match(folder, activation)
    oracle = Oracle(folder / "model.safetensors", activation)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 7] = 60 * 6.0
    y = linear_layers(load(folder))[DOWN](x)
    assert relative_error(y, oracle.outputs([DOWN], x)[0]) < 0.003
    clipped = Oracle(folder / "model.safetensors").outputs([DOWN], x)[0]
    assert relative_error(y, clipped) > 0.5  # what quantised activations would give


def test_a11_weight_only_model_with_left_over_input_scales(written: Written) -> None:
    checkpoint = base()
    checkpoint.section["quant_algo"] = "W4A16_NVFP4"
    kept = assert_layers_match(written(checkpoint), none)
    checkpoint.drop("*.input_scale")
    assert torch.equal(assert_layers_match(written(checkpoint)), kept)


@pytest.mark.parametrize("stored", [True, False], ids=["placeholder", "absent"])
def test_a13_dynamic_activation_scales(stored: bool, written: Written) -> None:
    checkpoint = base()
    checkpoint.section["activation_scheme"] = "dynamic"
    for name in checkpoint.names("*.input_scale"):
        checkpoint.tensors[name] = torch.tensor(1.0)
    if not stored:
        checkpoint.drop("*.input_scale")
    assert_layers_match(written(checkpoint), lambda name: "dynamic")


def test_a13_absent_scales_are_no_request_for_dynamic_ones(written: Written) -> None:
    checkpoint = base()
    checkpoint.drop("*.input_scale")
    assert_refused(written(checkpoint), "lacks", ".input_scale")
    checkpoint.section["activation_scheme"] = "foo"
    assert_refused(written(checkpoint), "activation_scheme 'foo'")


def test_a14_no_quantisation_config_at_all(written: Written) -> None:
    checkpoint = base()
    checkpoint.hf_quant_config = None
    assert_refused(written(checkpoint), "_proj.weight", "torch.uint8", "quantis")


def test_a18_group_size_and_padded_scales(written: Written) -> None:
    checkpoint = base()
    del checkpoint.section["group_size"]
    assert_layers_match(written(checkpoint))
    checkpoint.section["group_size"] = 32
    assert_refused(written(checkpoint), "group_size is 32")
    checkpoint.section["group_size"] = 16
    key = DOWN + ".weight_scale"
    padded = torch.nn.functional.pad(checkpoint.tensors[key].view(torch.uint8), (0, 1))
    checkpoint.tensors[key] = padded.view(torch.float8_e4m3fn)
    assert_refused(written(checkpoint), key, "expected shape [256, 32], found [256, 33]")


def test_quantization_flag_overrides_to_weight_only(written: Written) -> None:
    """Not a public row: the documented meaning of ``--quantization w4a16_nvfp4`` for a W4A4 file."""
    assert_layers_match(written(base()), none, quantization="w4a16_nvfp4")


def fp8_beside_nvfp4() -> Checkpoint:
    """FP8 attention with one scale a tensor, the head in bf16."""
    checkpoint = base()
    checkpoint.make_fp8("*self_attn*")
    table = {name: "NVFP4" if "mlp" in name else "FP8" for name in checkpoint.layers("*")}
    checkpoint.hf_quant_config = mixed(table)
    return checkpoint


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_flag_leaves_activations_of_fp8_layers_alone_too(tp_size: int, written: Written) -> None:
    checkpoint = fp8_beside_nvfp4()
    folder = written(checkpoint)
    kept = assert_layers_match(folder, none, quantization="w4a16_nvfp4", tp_size=tp_size)
    assert not torch.equal(kept, assert_layers_match(folder, dtypes=["float32"], tp_size=tp_size))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dynamic_activation_scales_are_those_of_fp8_layers_too(tp_size: int, written: Written) -> None:
    checkpoint = fp8_beside_nvfp4()
    checkpoint.section["activation_scheme"] = "dynamic"
    for name in checkpoint.names("*.input_scale"):
        checkpoint.tensors[name] = torch.tensor(1.0)
    assert_layers_match(written(checkpoint), lambda name: "dynamic", tp_size=tp_size)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn", "model.layers.1.mlp", "model.norm"]
)
def test_a_table_may_not_name_what_is_not_quantised_so(name: str, written: Written) -> None:
    checkpoint = base()
    checkpoint.make_plain("model.layers.1.*")
    table = dict.fromkeys(checkpoint.layers("model.layers.0.*"), "NVFP4")
    checkpoint.hf_quant_config = mixed({**table, name: "FP8" if "mlp" in name or "norm" in name else "NVFP4"})
    words = (
        (name,)
        if not name.endswith("qkv_proj")
        else ("model.layers.1.self_attn.", "_proj.weight: expected dtype torch.uint8, found torch.bfloat16")
    )
    assert_refused(written(checkpoint), *words)


@pytest.mark.parametrize("named", ["fused", "parts"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_fused_layer_that_is_stored_whole_in_fp8(named: str, tp_size: int, written: Written) -> None:
    """By its own name in the table, or by its parts' names."""
    source = fp8_beside_nvfp4()
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    fused = "model.layers.0.self_attn.qkv_proj"
    for tensor in ("weight_scale", "input_scale"):
        for part in parts:
            source.tensors[f"{part}.{tensor}"] = source.tensors[f"{parts[0]}.{tensor}"].clone()
    whole = copy_of(source)
    whole.tensors[f"{fused}.weight"] = torch.cat([whole.tensors.pop(f"{part}.weight") for part in parts])
    for tensor in ("weight_scale", "input_scale"):
        whole.tensors[f"{fused}.{tensor}"] = source.tensors[f"{parts[0]}.{tensor}"]
        whole.drop(f"model.layers.0.self_attn.[qkv]_proj.{tensor}")
    table = whole.section["quantized_layers"]
    if named == "fused":
        for part in parts:
            del table[part]
        table[fused] = {"quant_algo": "FP8"}
    assert_layers_match(written(whole), source=written(source), tp_size=tp_size)


def test_a_table_names_a_layer_once(written: Written) -> None:
    checkpoint = fp8_beside_nvfp4()
    fused = "model.layers.0.self_attn.qkv_proj"
    checkpoint.section["quantized_layers"][fused] = {"quant_algo": "NVFP4"}
    assert_refused(written(checkpoint), f"names {fused}", "otherwise too")
    del checkpoint.section["quantized_layers"]["model.layers.0.self_attn.k_proj"]
    checkpoint.section["quantized_layers"][fused] = {"quant_algo": "FP8"}  # what the table says of k_proj now
    assert_layers_match(written(checkpoint))


@pytest.mark.parametrize("missing", ["gate_proj", "up_proj", "k_proj"])
def test_a5_awq_pre_scale_of_some_parts_only(missing: str, written: Written) -> None:
    checkpoint = base()
    checkpoint.section["quant_algo"] = "NVFP4_AWQ"
    g = torch.Generator().manual_seed(1)
    for name in checkpoint.layers("model.layers.0.*"):
        if not name.endswith(missing):
            k = checkpoint.shape.linears()[name][1]
            checkpoint.tensors[f"{name}.pre_quant_scale"] = torch.exp2(torch.rand(k, generator=g) * 4 - 2)
    parent = "self_attn" if missing == "k_proj" else "mlp"
    assert_refused(written(checkpoint), f"lacks model.layers.0.{parent}.{missing}.pre_quant_scale, while other parts")


@pytest.mark.parametrize("method", ["compressed-tensors", "awq"])
def test_a_left_over_modelopt_file(method: str, written: Written, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = ct_twin(base())
    expected = logits_of(written(checkpoint))
    checkpoint.hf_quant_config = base().hf_quant_config
    checkpoint.config["quantization_config"]["quant_method"] = method
    folder = written(checkpoint)
    if method == "awq":
        assert_refused(folder, "quant_method 'awq' is not served")
    else:
        assert torch.equal(logits_of(folder), expected)
    assert f"hf_quant_config.json is not read: the quant_method in config.json's quantization_config is {method!r}" in (
        caplog.text
    )
