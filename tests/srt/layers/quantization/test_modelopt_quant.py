"""ModelOpt's configs: where they lie, what they may say, which method each layer gets."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4Config,
    ModelOptFp4LinearMethod,
    find_modelopt_config,
)
from sglang.srt.layers.quantization.nvfp4 import Activation
from sglang.srt.layers.quantization.nvfp4_online import OnlineNvFp4Config, OnlineNvFp4LinearMethod
from sglang.srt.layers.quantization.patterns import ModulePatterns
from sglang.srt.layers.quantization.split import SplitLinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

FIXTURES = Path(__file__).parents[3] / "fixtures"
LAYERS = [
    f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def both_files(name: str) -> tuple[dict[str, object], dict[str, object]]:
    folder = FIXTURES / f"tiny-llama-modelopt-{name}"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return json.loads((folder / "hf_quant_config.json").read_text()), config


def methods(config: ModelOptFp4Config, names: list[str]) -> list[str]:
    result = []
    for name in names:
        method = config.get_quant_method(nn.Module(), name)
        activation = f":{method.activation.value}" if isinstance(method, ModelOptFp4LinearMethod) else ""
        result.append(type(method).__name__ + activation)
    return result


@pytest.mark.parametrize("name", ["nvfp4", "w4a16", "mixed", "nvfp4-kvfp8"])
def test_every_place_says_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    own, flat = both_files(name)
    nested = {"quant_method": "modelopt", "quantization": own["quantization"]}
    found = [
        find_modelopt_config(own, None),
        find_modelopt_config(None, flat),
        find_modelopt_config(None, nested),
        find_modelopt_config(own, flat),
    ]
    names = [*LAYERS, "lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.o_proj"]
    first = methods(found[0], names)
    assert all(methods(config, names) == first for config in found)
    assert all(config.kv_cache_dtype == (torch.float8_e4m3fn if "kvfp8" in name else None) for config in found)
    assert not caplog.records


def test_mixed_layers() -> None:
    config = find_modelopt_config(*both_files("mixed"))
    nvfp4, fp8, plain = "ModelOptFp4LinearMethod:static", "Fp8LinearMethod", "UnquantizedLinearMethod"
    assert methods(config, LAYERS) == [fp8, nvfp4, nvfp4, plain, fp8, "ModelOptFp4LinearMethod:none"]
    assert methods(config, ["model.layers.1.self_attn.o_proj", "lm_head"]) == [nvfp4, plain]
    twice = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}},
    }
    assert methods(ModelOptFp4Config.from_config(twice), ["lm_head", LAYERS[0]]) == [nvfp4, plain]


def test_disagreement_has_a_winner_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    own, flat = both_files("nvfp4")
    config = find_modelopt_config(own, {**flat, "ignore": []})
    assert config.exclude.match("lm_head")
    assert "disagree" in caplog.text and "hf_quant_config.json" in caplog.text
    caplog.clear()
    own["quantization"]["activation_scheme"] = "dynamic"
    assert find_modelopt_config(own, flat).activation_of("NVFP4") is Activation.DYNAMIC
    assert "dynamic activation scales" in caplog.text and "static activation scales" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_algo": "NVFP5"}, "quant_algo 'NVFP5' is not served"),
        ({"quant_algo": "NVFP4_SVD"}, "'NVFP4_SVD' is not served; served are NVFP4"),
        ({}, "has no quant_algo"),
        ({"quant_algo": None}, r"no quant_algo \(found None\)"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not served"),
        ({"quant_algo": "NVFP4", "activation_scheme": "foo"}, "activation_scheme 'foo'"),
        ({"quant_algo": "NVFP4", "exclude_modules": "lm_head"}, "exclude_modules must be a list"),
        ({"quant_algo": "NVFP4", "ignore": ["re:("]}, r"pattern 're:\(' is not valid"),
        ({"quant_algo": "MIXED_PRECISION"}, "needs a table quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": None}, "needs a table quantized_layers"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "MXFP8"}}},
            "layer a.b: ModelOpt quant_algo 'MXFP8' is not served",
        ),
    ],
)
def test_refusals(config: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelOptFp4Config.from_config(config)


def test_group_size_may_be_absent_and_the_scheme_dynamic() -> None:
    config = ModelOptFp4Config.from_config({"quant_algo": "nvfp4", "activation_scheme": "dynamic"})
    assert config.activation_of("NVFP4") is Activation.DYNAMIC
    assert (
        ModelOptFp4Config.from_config({"quant_algo": "NVFP4"}, weight_only=True).activation_of("NVFP4")
        is Activation.NONE
    )


@pytest.mark.parametrize("key", ["exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert"])
def test_every_name_of_the_exclusion_list(key: str) -> None:
    config = ModelOptFp4Config.from_config({"quant_algo": "NVFP4", key: ["lm_head", "model.layers.0.mlp*"]})
    plain = [
        name
        for name in [*LAYERS, "lm_head"]
        if isinstance(config.get_quant_method(nn.Module(), name), UnquantizedLinearMethod)
    ]
    assert plain == ["model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj", "lm_head"]


def test_excluding_parts_of_a_fused_layer() -> None:
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    config = ModelOptFp4Config(exclude_modules=parts)
    assert methods(config, LAYERS[:1]) == ["UnquantizedLinearMethod"]
    config = ModelOptFp4Config(exclude_modules=["model.layers.0.self_attn.qkv_proj"])
    assert methods(config, LAYERS[:1]) == ["UnquantizedLinearMethod"]
    method = ModelOptFp4Config(exclude_modules=parts[1:2]).get_quant_method(nn.Module(), LAYERS[0])
    with pytest.raises(CheckpointError, match=r"quantised differently .*k_proj: not quantised, .*v_proj: NVFP4"):
        method.create_weights(nn.Module(), 32, [8, 8, 8], 32, 24, torch.bfloat16)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("*v_proj", "v"),
        ("re:.*v_proj$", "v"),
        ("*.self_attn.[qk]_proj", "qk"),
        ("*qkv_proj", "qkv"),
        ("*self_attn*", "qkv"),
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("*down_proj", ""),
    ],
)
def test_a_pattern_for_one_part_is_not_for_the_fused_layer(pattern: str, named: str) -> None:
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    found = ModulePatterns([pattern]).match_parts(LAYERS[0], parts)
    assert found == {f"model.layers.0.self_attn.{part}_proj" for part in named}


@pytest.mark.parametrize(
    ("pattern", "matches", "misses"),
    [
        ("lm_head", "lm_head", "model.lm_head"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("mlp", "mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("*mlp*", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"),
        ("model.layers.?.mlp.down_proj", "model.layers.3.mlp.down_proj", "model.layers.13.mlp.down_proj"),
        ("*down_proj", "a.down_proj", "a.down_proj_2"),
        (r"re:.*down_proj$", "a.down_proj", "a.down_proj.x"),
        ("a.b", "a.b", "axb"),
    ],
)
def test_patterns(pattern: str, matches: str, misses: str) -> None:
    assert ModulePatterns([pattern]).match(matches)
    assert not ModulePatterns([pattern]).match(misses)


def get(flag: str | None, own: object = None, flat: object = None) -> object:
    return get_quantization(
        SimpleNamespace(hf_quant_config=own, quantization_config=flat),  # type: ignore[arg-type]
        SimpleNamespace(quantization=flag),  # type: ignore[arg-type]
    )


def test_flag_and_checkpoint() -> None:
    own, flat = both_files("nvfp4")
    for flag in (None, "modelopt", "modelopt_fp4", "nvfp4"):
        config = get(flag, own, flat)
        assert isinstance(config, ModelOptFp4Config) and config.activation_of("NVFP4") is Activation.STATIC
    assert get("w4a16_nvfp4", own, flat).activation_of("NVFP4") is Activation.NONE
    assert get(None) is None
    for flag, activation in (("nvfp4", Activation.DYNAMIC), ("w4a16_nvfp4", Activation.NONE)):
        online = get(flag)
        assert isinstance(online, OnlineNvFp4Config) and online.activation is activation
        assert isinstance(online.get_quant_method(nn.Module(), "a.qkv_proj"), OnlineNvFp4LinearMethod)
        assert type(online.get_quant_method(nn.Module(), "lm_head")) is UnquantizedLinearMethod
    for flag in ("modelopt", "modelopt_fp4"):
        with pytest.raises(ArgumentError, match="use --quantization nvfp4 or w4a16_nvfp4"):
            get(flag)
    with pytest.raises(ArgumentError, match="weight-only"):
        get("nvfp4", *both_files("w4a16"))
    with pytest.raises(ArgumentError, match="'awq' is unknown; valid: modelopt"):
        get("awq", own, flat)
    with pytest.raises(CheckpointError, match="'awq' is not served"):
        get(None, None, {"quant_method": "awq"})


@pytest.mark.parametrize(
    ("flag", "scheme", "activation"),
    [(None, "static", "static"), ("w4a16_nvfp4", "static", "none"), (None, "dynamic", "dynamic")],
)
def test_fp8_layers_treat_their_input_as_flag_and_scheme_say(flag: str | None, scheme: str, activation: str) -> None:
    own, flat = both_files("mixed")
    own["quantization"]["activation_scheme"] = scheme
    method = get(flag, own, flat).get_quant_method(nn.Module(), LAYERS[0])
    assert isinstance(method, Fp8LinearMethod) and method.activation.value == activation


@pytest.mark.parametrize(
    ("algorithms", "flag", "words"),
    [
        (["FP8"], "nvfp4", "has no NVFP4 layer"),
        (["FP8"], "w4a16_nvfp4", "has no NVFP4 layer"),
        (["FP8", "W4A16_NVFP4"], "nvfp4", "weight-only in its NVFP4 layers"),
    ],
)
def test_flag_and_the_algorithms_of_a_table(algorithms: list[str], flag: str, words: str) -> None:
    table = {f"model.layers.{i}.mlp.down_proj": {"quant_algo": algorithm} for i, algorithm in enumerate(algorithms)}
    own = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": table}}
    assert get(None, own).algorithms == set(algorithms)
    with pytest.raises(ArgumentError, match=f"--quantization {flag}: .*{words}"):
        get(flag, own)


def test_a_table_may_name_a_fused_layer() -> None:
    def mixed(**layers: str) -> ModelOptFp4Config:
        return ModelOptFp4Config("MIXED_PRECISION", quantized_layers={f"a.{k}": v for k, v in layers.items()})

    names = {"a", "a.qkv_proj", "a.q_proj", "a.k_proj", "a.v_proj"}
    config = mixed(qkv_proj="FP8")
    assert methods(config, ["a.qkv_proj", "a.k_proj"]) == ["Fp8LinearMethod"] * 2
    config.check_names(names)
    config = mixed(qkv_proj="FP8", k_proj="NVFP4")
    method = config.get_quant_method(nn.Module(), "a.qkv_proj")
    assert isinstance(method, SplitLinearMethod)
    assert method.kinds == {"a.q_proj": "FP8", "a.k_proj": "NVFP4", "a.v_proj": "FP8"}
    config.check_names(names)
    config = mixed(qkv_proj="FP8", q_proj="NVFP4", k_proj="NVFP4", v_proj="NVFP4")
    assert methods(config, ["a.qkv_proj"]) == ["ModelOptFp4LinearMethod:static"]
    with pytest.raises(CheckpointError, match="names a.qkv_proj, which is no linear layer, or one that"):
        config.check_names(names)


@pytest.mark.parametrize("name", ["model.norm", "model.embed_tokens", "model.layers.0.self_attn", "model"])
def test_a_table_may_not_name_what_is_no_linear_layer(name: str) -> None:
    config = ModelOptFp4Config("MIXED_PRECISION", quantized_layers={name: "FP8"})
    assert methods(config, LAYERS) == ["UnquantizedLinearMethod"] * len(LAYERS)
    with pytest.raises(CheckpointError, match=f"names {name}, which is no linear layer"):
        config.check_names({*LAYERS, "model", "model.norm", "model.embed_tokens", "model.layers.0.self_attn"})


NAMES = {
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.mlp",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.up_proj",
}


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.language_model.layers.0.mlp.up_proj",
        "model.layers.1*",
        "re:.*o_proj$",
        "model.layers.0.mlp.up",
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    config = ModelOptFp4Config(exclude_modules=["lm_head", pattern])
    with pytest.raises(CheckpointError) as info:
        config.check_names(NAMES)
    assert f"excludes {pattern!r}, which matches no layer" in str(info.value)


def test_patterns_that_match_or_may_be_absent_pass() -> None:
    patterns = ["lm_head", "model.embed_tokens*", "*mlp*", "model.vision_tower*", "mtp.fc", "re:.*gate_up_proj"]
    ModelOptFp4Config(exclude_modules=patterns).check_names(NAMES - {"lm_head"})
    table = {"model.layers.9.mlp.up_proj": "NVFP4"}
    with pytest.raises(CheckpointError, match="names model.layers.9.mlp.up_proj, which does not exist"):
        ModelOptFp4Config("MIXED_PRECISION", quantized_layers=table).check_names(NAMES)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_the_text_part_of_a_larger_model(prefix: str) -> None:
    config = ModelOptFp4Config(exclude_modules=[prefix + "layers.0.mlp*"])
    assert methods(config, LAYERS[1:2]) == ["UnquantizedLinearMethod"]
    config.check_names(NAMES)
    table = {prefix + "layers.0.mlp.down_proj": "FP8"}
    mixed = ModelOptFp4Config("MIXED_PRECISION", quantized_layers=table)
    assert methods(mixed, LAYERS[2:3]) == ["Fp8LinearMethod"]
    mixed.check_names({"model.layers.0.mlp.down_proj"})
