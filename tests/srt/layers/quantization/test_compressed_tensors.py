"""compressed-tensors configs: what they may say, which group a layer belongs to, and what is refused by name."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.split import SplitLinearMethod

FIXTURES = Path(__file__).parents[3] / "fixtures"
CONFIG = json.loads((FIXTURES / "tiny-llama-ct-nvfp4" / "config.json").read_text())["quantization_config"]
NVFP4 = {key: CONFIG["config_groups"]["group_0"][key] for key in ("weights", "input_activations")}
A16 = {"weights": NVFP4["weights"], "input_activations": None}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = {
    "weights": {**E4M3, "strategy": "tensor", "dynamic": False},
    "input_activations": {**E4M3, "strategy": "tensor", "dynamic": False},
}
FP8_DYNAMIC = {
    "weights": {**E4M3, "strategy": "channel", "dynamic": False},
    "input_activations": {**E4M3, "strategy": "token", "dynamic": True},
}
PLAIN: dict[str, Any] = {"weights": None}

QKV, O_PROJ, GATE_UP, DOWN = (
    f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
)
W4A4, W4A16 = "NVFP4 (activation scales: static)", "NVFP4 (activation scales: none)"
W8A8, NONE = "FP8 (activation scales: static)", "not quantised"
W8A16 = "FP8 (activation scales: none)"
W8A8_DYNAMIC = "FP8 with a scale per channel (activation scales: dynamic)"


def raw(*groups: tuple[dict[str, Any], list[str]], **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": {**scheme, "targets": targets} for i, (scheme, targets) in enumerate(groups)}
    return {**CONFIG, "format": "mixed-precision", "config_groups": named, **more}


def parse(*groups: tuple[dict[str, Any], list[str]], **more: Any) -> CompressedTensorsConfig:
    return CompressedTensorsConfig.from_config(raw(*groups, **more))


def scheme(config: CompressedTensorsConfig, name: str) -> str:
    """What the layer's method is, in words; of a split layer each part's."""
    method = config.get_quant_method(nn.Module(), name)
    if isinstance(method, SplitLinearMethod):
        for part, kind in method.kinds.items():  # what the part's own layer will get
            assert str(config.scheme_of(part)) == kind
        return " | ".join(method.kinds.values())
    parts = config.packed_modules_mapping.get(name.rpartition(".")[2])
    said = config.scheme_of(f"{name.rpartition('.')[0]}.{parts[0]}" if parts else name)
    assert type(method) is type(said.method())
    return str(said)


# ------------------------------------------------------------------------------------------------------- what it says
def test_the_exporters_configs() -> None:
    config = CompressedTensorsConfig.from_config(CONFIG)
    assert [scheme(config, name) for name in (QKV, O_PROJ, GATE_UP, DOWN, "lm_head")] == [W4A4] * 4 + [NONE]
    assert config.kv_cache_dtype is None and config.quant_algo == "NVFP4"
    path = FIXTURES / "tiny-llama-ct-nvfp4a16" / "config.json"
    config = CompressedTensorsConfig.from_config(json.loads(path.read_text())["quantization_config"])
    assert scheme(config, QKV) == W4A16 and config.quant_algo == "W4A16_NVFP4"


def test_absent_activations_and_older_spellings() -> None:
    weights = {key: value for key, value in NVFP4["weights"].items() if key not in ("scale_dtype", "zp_dtype")}
    config = parse(({"weights": weights}, ["Linear"]), format="nvfp4-pack-quantized", sparsity_config=None)
    assert scheme(config, DOWN) == W4A16
    del weights["group_size"]
    assert scheme(parse(({"weights": {**weights, "actorder": "static"}}, ["Linear"])), DOWN) == W4A16
    sparsity = {"format": "dense", "global_sparsity": 0.1, "targets": []}
    assert scheme(parse((NVFP4, ["Linear"]), sparsity_config=sparsity, transform_config=None), DOWN) == W4A4


def test_dynamic_is_a_string_or_a_bool() -> None:
    inputs = NVFP4["input_activations"]
    assert inputs["dynamic"] == "local"
    config = parse(({**NVFP4, "input_activations": {**inputs, "dynamic": True}}, ["Linear"]))
    assert scheme(config, DOWN) == "NVFP4 (activation scales: dynamic)"


def test_fp8_and_unquantised_groups() -> None:
    config = parse((FP8, ["re:.*qkv_proj", O_PROJ]), (FP8_DYNAMIC, [GATE_UP]), (PLAIN, [DOWN]), (NVFP4, ["lm_head"]))
    assert [scheme(config, n) for n in (QKV, O_PROJ, GATE_UP, DOWN)] == [W8A8, W8A8, W8A8_DYNAMIC, NONE]
    assert scheme(config, "model.layers.1.mlp.down_proj") == NONE  # no group names it
    weight_only = {**FP8, "input_activations": None, "format": "naive-quantized"}
    assert scheme(parse((weight_only, ["Linear"])), O_PROJ) == "FP8 (activation scales: none)"


def test_kv_cache_scheme() -> None:
    assert parse((NVFP4, ["Linear"]), kv_cache_scheme=FP8["weights"]).kv_cache_dtype == torch.float8_e4m3fn
    config = parse(format="dense", kv_cache_scheme=FP8["weights"])  # the KV cache alone is quantised
    assert config.kv_cache_dtype == torch.float8_e4m3fn and config.quant_algo is None


def test_unknown_top_level_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    parse((NVFP4, ["Linear"]), provider="auto-round")
    assert "field provider is not known" in caplog.text


# --------------------------------------------------------------------------------------------- which group, which order
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("vague", "specific"),
    [
        ("Linear", "re:.*down_proj"),
        ("Linear", "*.down_proj"),
        ("Linear", "model.layers.0.mlp"),
        ("Linear", DOWN),
        ("re:.*down_proj$", "model.layers.0"),
        ("re:.*down_proj$", DOWN),
        ("model.layers.0", "model.layers.0.mlp"),
        ("model.layers.0.mlp", DOWN),
        ("re:.*", "language_model." + DOWN),
    ],
)
def test_the_most_specific_group_wins_in_any_order(vague: str, specific: str, swap: bool) -> None:
    groups = [(FP8, [vague]), (NVFP4, ["model.norm", specific])]
    assert scheme(parse(*(reversed(groups) if swap else groups)), DOWN) == W4A4


@pytest.mark.parametrize("targets", [("Linear", "Linear"), ("re:.*down_proj", "re:.*mlp.*"), (DOWN, DOWN)])
def test_equally_specific_groups_that_differ(targets: tuple[str, str]) -> None:
    config = parse((FP8, [targets[0]]), (NVFP4, [targets[1]]))
    with pytest.raises(CheckpointError) as error:
        config.get_quant_method(nn.Module(), DOWN)
    for words in (f"layer {DOWN}", "group_0", "group_1", repr(targets[0]), repr(targets[1]), W8A8, W4A4):
        assert words in str(error.value)
    assert scheme(parse((NVFP4, [targets[0]]), (NVFP4, [targets[1]])), DOWN) == W4A4  # they say the same


def test_ignore_wins_over_every_target() -> None:
    for entry in (DOWN, "re:.*down_proj$", "model.layers.0.mlp", "*down_proj"):
        config = parse((NVFP4, ["Linear", DOWN]), ignore=[entry])
        assert scheme(config, DOWN) == NONE and scheme(config, O_PROJ) == W4A4
    assert scheme(parse((NVFP4, ["Linear"]), ignore=["down_proj", "re:mlp"]), DOWN) == W4A4  # no substrings
    assert scheme(parse((NVFP4, ["Linear"]), ignore=None), "lm_head") == W4A4


def test_fused_layers_are_matched_by_their_parts() -> None:
    parts = [QKV.replace("qkv", part) for part in "qkv"]
    assert scheme(parse((NVFP4, parts)), QKV) == W4A4
    assert scheme(parse((NVFP4, ["Linear"]), ignore=parts), QKV) == NONE
    assert scheme(parse((NVFP4, ["Linear"]), (FP8, parts[2:])), QKV) == f"{W4A4} | {W4A4} | {W8A8}"
    assert scheme(parse((NVFP4, ["Linear"]), ignore=parts[1:2]), QKV) == f"{W4A4} | {NONE} | {W4A4}"


@pytest.mark.parametrize("entry", ["re:.*v_proj$", "*v_proj"])
def test_an_expression_for_a_part_is_not_one_for_the_fused_layer(entry: str) -> None:
    """Both match the text "qkv_proj"."""
    assert scheme(parse((NVFP4, [entry])), QKV) == f"{NONE} | {NONE} | {W4A4}"
    assert scheme(parse((NVFP4, ["Linear"]), ignore=[entry]), QKV) == f"{W4A4} | {W4A4} | {NONE}"
    assert scheme(parse((NVFP4, ["Linear"]), ignore=["re:.*up_proj"]), GATE_UP) == f"{W4A4} | {NONE}"


def test_a_fused_layer_by_its_own_name() -> None:
    config = parse((NVFP4, ["Linear"]), (FP8, [QKV, "re:.*gate_up_proj$"]))
    assert scheme(config, QKV) == W8A8 and scheme(config, GATE_UP) == W8A8
    assert scheme(parse((NVFP4, ["Linear"]), ignore=[QKV]), QKV) == NONE
    part = QKV.replace("qkv", "k")
    assert scheme(parse((FP8, [QKV]), (NVFP4, [part])), QKV) == f"{W8A8} | {W4A4} | {W8A8}"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_larger_model(prefix: str) -> None:
    config = parse((NVFP4, ["Linear"]), (FP8, [f"re:^{prefix}.*o_proj"]), ignore=[prefix + "layers.0.mlp"])
    assert [scheme(config, name) for name in (QKV, O_PROJ, DOWN)] == [W4A4, W8A8, NONE]


def test_names_that_match_no_layer() -> None:
    names = {QKV, O_PROJ, "lm_head", *(QKV.replace("qkv", part) for part in "qkv")}
    parse((NVFP4, ["Linear"]), (FP8, [O_PROJ, "re:.*vision.*"]), ignore=["lm_head", "re:.*v_proj"]).check_names(names)
    with pytest.raises(CheckpointError, match="config group group_1 targets 're:.*experts.*', which matches no layer"):
        parse((NVFP4, ["Linear"]), (FP8, [O_PROJ, "re:.*experts.*"])).check_names(names)
    with pytest.raises(CheckpointError, match="excludes 'model.layers.7', which matches no layer"):
        parse((NVFP4, ["Linear"]), ignore=["lm_head", "model.layers.7"]).check_names(names)


@pytest.mark.parametrize("target", ["model.norm", "re:.*norm$", "model.embed_tokens"])
def test_targets_that_are_no_linear_layers(target: str) -> None:
    config = parse((NVFP4, [QKV, "model.layers.0.mlp", "re:.*o_proj"]), (FP8, [target]))
    names = {QKV, O_PROJ, GATE_UP, DOWN, *(QKV.replace("qkv", part) for part in "qkv"), "model.norm"}
    for name in (QKV, O_PROJ, GATE_UP, DOWN):
        config.get_quant_method(nn.Module(), name)
    with pytest.raises(
        CheckpointError, match=r"group_1 targets '.*', which matches no layer of this model that can be"
    ):
        config.check_names({*names, "model.embed_tokens"})
    same = parse((NVFP4, [QKV, "model.layers.0.mlp", "re:.*o_proj"]))
    for name in (QKV, O_PROJ, GATE_UP, DOWN):
        same.get_quant_method(nn.Module(), name)
    same.check_names(names)


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("weights.type", "int", "type is 'int', which is not served; served: 'float'"),
        ("weights.num_bits", 6, "num_bits is 6"),
        ("weights.group_size", 32, "group_size is 32, which is not served; served: 16, null or absent"),
        ("weights.strategy", "group", "strategy is 'group', which is not served; served: 'tensor_group'"),
        ("weights.symmetric", False, "symmetric is False"),
        ("weights.actorder", "group", "actorder is 'group'"),
        ("weights.block_structure", [128, 128], "block_structure is [128, 128]"),
        ("weights.dynamic", True, "dynamic is True"),
        ("weights.scale_dtype", "torch.uint8", "scale_dtype is 'torch.uint8'"),
        ("weights.codebook", "nf4", "codebook is 'nf4'"),
        ("weights", "NVFP4", "must be a dict, found 'NVFP4'"),
        ("input_activations.dynamic", False, "dynamic is False, which is not served; served: 'local', True"),
        ("input_activations.dynamic", "global", "dynamic is 'global'"),
        ("input_activations.num_bits", 8, "num_bits is 8, which is not served; served: 4"),
        ("input_activations.type", "int", "type is 'int'"),
        ("input_activations.group_size", 128, "group_size is 128"),
        ("output_activations", {"num_bits": 8}, "output_activations is {'num_bits': 8}"),
        ("weights", None, "weights is None, which is not served; served: quantised weights where activations"),
        ("format", "pack-quantized", "format is 'pack-quantized', which is not served; served: nvfp4-pack-quantized"),
        ("format", "float-quantized", "served: nvfp4-pack-quantized for NVFP4 weights"),
        ("targets", "Linear", "targets must be a list, found 'Linear'"),
        ("targets", [7], "targets must be a str, found 7"),
        ("sparsity", {}, "sparsity is {}"),
    ],
)
def test_refusals_name_group_and_field(path: str, value: object, words: str) -> None:
    config = copy.deepcopy(CONFIG)
    *above, last = path.split(".")
    section = config["config_groups"]["group_0"]
    for key in above:
        section = section[key]
    section[last] = value
    with pytest.raises(CheckpointError) as error:
        CompressedTensorsConfig.from_config(config)
    assert f"config_groups.group_0.{path} " in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("weights", "strategy", "block", "strategy is 'block', which is not served; served: 'tensor', 'channel'"),
        ("weights", "group_size", 128, "group_size is 128"),
        ("weights", "dynamic", True, "dynamic is True"),
        ("weights", "type", "int", "type is 'int'"),
        ("input_activations", "strategy", "token", "strategy is 'token', which is not served; served: 'tensor'"),
        ("input_activations", "dynamic", True, "strategy is 'tensor', which is not served; served: 'token'"),
        ("input_activations", "dynamic", "local", "dynamic is 'local'"),
        ("input_activations", "num_bits", 4, "num_bits is 4, which is not served; served: 8"),
    ],
)
def test_refusals_of_fp8(section: str, key: str, value: object, words: str) -> None:
    group = copy.deepcopy(FP8)
    group[section][key] = value
    with pytest.raises(CheckpointError, match=rf"config_groups\.group_0\.{section}\.\w+ is .*") as error:
        parse((group, ["Linear"]))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format", "int-quantized", "format is 'int-quantized'"),
        ("format", "dense", "format is 'dense'"),
        ("quantization_status", "frozen", "quantization_status is 'frozen', which is not served; served: compressed"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format is 'sparse-24-bitmask'"),
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}, "transform_config is .*hadamard"),
        ("config_groups", None, "config_groups must be a dict, found None"),
        ("config_groups", {"NVFP4": ["Linear"]}, r"config_groups.NVFP4 must be a dict, found \['Linear'\]"),
        ("ignore", "lm_head", "ignore must be a list"),
        ("ignore", ["re:("], r"pattern 're:\(' is not valid"),
        ("kv_cache_scheme", {**E4M3, "num_bits": 4}, "kv_cache_scheme.num_bits is 4"),
        ("kv_cache_scheme", {**E4M3, "type": "int"}, "kv_cache_scheme.type is 'int'"),
        ("kv_cache_scheme", {**E4M3, "dynamic": True}, "kv_cache_scheme.dynamic is True"),
        ("kv_cache_scheme", {**E4M3, "strategy": "attn_head"}, "kv_cache_scheme.strategy is 'attn_head'"),
    ],
)
def test_refusals_of_the_whole_config(field: str, value: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        CompressedTensorsConfig.from_config({**CONFIG, field: value})


# --------------------------------------------------------------------------------------------------------------- flag
def get(flag: str | None, config: dict[str, Any] | None) -> Any:
    return get_quantization(
        SimpleNamespace(hf_quant_config=None, quantization_config=config),  # type: ignore[arg-type]
        SimpleNamespace(quantization=flag),  # type: ignore[arg-type]
    )


def test_flag_and_checkpoint() -> None:
    for flag in (None, "compressed-tensors", "nvfp4"):
        assert scheme(get(flag, CONFIG), DOWN) == W4A4
    assert scheme(get("w4a16_nvfp4", CONFIG), DOWN) == W4A16
    assert get("compressed-tensors", CONFIG).get_name() == "compressed-tensors"
    a16 = raw((A16, ["Linear"]))
    for flag in (None, "w4a16_nvfp4", "compressed-tensors"):
        assert scheme(get(flag, a16), DOWN) == W4A16
    mixed = raw((NVFP4, ["Linear"]), (FP8, [O_PROJ]), (A16, [DOWN]))
    assert [scheme(get("nvfp4", mixed), name) for name in (QKV, O_PROJ, DOWN)] == [W4A4, W8A8, W4A16]
    assert [scheme(get("w4a16_nvfp4", mixed), name) for name in (QKV, O_PROJ, DOWN)] == [W4A16, W8A16, W4A16]
    channels = raw((NVFP4, ["Linear"]), (FP8_DYNAMIC, [O_PROJ]))
    said = scheme(get("w4a16_nvfp4", channels), O_PROJ)
    assert said == "FP8 with a scale per channel (activation scales: none)"


@pytest.mark.parametrize(
    ("flag", "config", "words"),
    [
        ("nvfp4", raw((A16, ["Linear"])), "the checkpoint is weight-only"),
        ("nvfp4", raw((A16, ["Linear"]), (FP8, [O_PROJ])), "the checkpoint is weight-only in its NVFP4 layers"),
        ("modelopt", CONFIG, "the checkpoint is a compressed-tensors one; leave the flag out or use compressed"),
        ("modelopt_fp4", CONFIG, "the checkpoint is a compressed-tensors one"),
        ("w4a16_nvfp4", raw((FP8, ["Linear"])), "has no NVFP4 layer"),
        ("compressed-tensors", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "the checkpoint is a ModelOpt one"),
        ("compressed-tensors", None, "its config has no compressed-tensors quantisation; .* nvfp4 or w4a16_nvfp4"),
    ],
)
def test_flag_against_checkpoint(flag: str, config: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"--quantization {flag}.*{words}"):
        get(flag, config)
