"""What contradicts a ModelOpt config's algorithm is refused, with file and key; what exporters write is not."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, find_modelopt_config

FIXTURES = Path(__file__).parents[3] / "fixtures"
CONFIG, OWN = "config.json's quantization_config", "hf_quant_config.json"
E4M3 = {"dynamic": False, "num_bits": 8, "type": "float"}
E2M1 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def files(name: str = "nvfp4") -> dict[str, dict[str, Any]]:
    folder = FIXTURES / f"tiny-llama-modelopt-{name}"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {OWN: json.loads((folder / OWN).read_text()), CONFIG: config}


def put(config: dict[str, Any], path: str, value: object) -> None:
    """Set what lies at ``path``; ``...`` deletes it."""
    *above, last = path.split("/")
    for key in above:
        config = config[key]
    if value is ...:
        del config[last]
    else:
        config[last] = value


@pytest.mark.parametrize(
    ("file", "path", "value", "words"),
    [
        (
            CONFIG,
            "config_groups/group_0/weights",
            {"num_bits": 8, "type": "int", "group_size": 128},
            "config_groups.group_0.weights.type is 'int'",
        ),
        (CONFIG, "config_groups/group_0/weights/num_bits", 8, "config_groups.group_0.weights.num_bits is 8"),
        (CONFIG, "config_groups/group_0/weights/group_size", 32, "config_groups.group_0.weights.group_size is 32"),
        (CONFIG, "config_groups/group_0/weights/symmetric", False, "group_0.weights.symmetric is False"),
        (CONFIG, "config_groups/group_0/weights/codebook", "nf4", "group_0.weights.codebook is 'nf4'"),
        (CONFIG, "config_groups/group_0/weights", ..., "group_0.weights is None"),
        (CONFIG, "config_groups/group_0/input_activations/dynamic", True, "input_activations.dynamic is True"),
        (CONFIG, "config_groups/group_0/input_activations/num_bits", 8, "input_activations.num_bits is 8"),
        (CONFIG, "config_groups/group_0/input_activations", ..., "group_0.input_activations is None"),
        (CONFIG, "config_groups/group_0/input_activations", None, "group_0.input_activations is None"),
        (CONFIG, "config_groups/group_0/output_activations", E4M3, "group_0.output_activations is {'dynamic'"),
        (CONFIG, "config_groups/group_0/targets", ["model.layers.0.mlp.up_proj"], "targets is ['model.layers.0.mlp."),
        (CONFIG, "config_groups/group_0/transform", "R1", "config_groups.group_0.transform is 'R1'"),
        (CONFIG, "config_groups/group_0", "NVFP4", "config_groups.group_0 must be a dict"),
        (CONFIG, "group_size", 32, "group_size is 32"),
        (CONFIG, "kv_cache_scheme", {**E4M3, "strategy": "channel", "symmetric": False}, "kv_cache_scheme.symmetric"),
        (CONFIG, "kv_cache_scheme", {**E4M3, "strategy": "channel"}, "kv_cache_scheme.strategy is 'channel'"),
        (CONFIG, "kv_cache_scheme", {**E4M3, "dynamic": True}, "kv_cache_scheme.dynamic is True"),
        (CONFIG, "activation_scheme", "dynamic", f"activation_scheme is 'dynamic', which {OWN} does not say"),
        (OWN, "quantization/has_zero_point", True, "has_zero_point is True"),
        (OWN, "quantization/pre_quant_scale", True, "pre_quant_scale is True"),
        (
            OWN,
            "quantization/quantized_layers",
            {"lm_head": {"quant_algo": "FP8"}},
            "quantized_layers names layers, but",
        ),
        (OWN, "activation_scheme", "dynamic", "activation_scheme is 'dynamic' beside quantization and None in it"),
        (OWN, "quantization/activation_scheme", "foo", "activation_scheme 'foo' is not served"),
    ],
)
def test_what_contradicts_nvfp4(file: str, path: str, value: object, words: str) -> None:
    both = files()
    put(both[file], path, value)
    with pytest.raises(CheckpointError) as error:
        find_modelopt_config(both[OWN], both[CONFIG])
    assert str(error.value).startswith(file + ": ") and words in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("config_groups/group_0/weights", E2M1, "config_groups.group_0.weights.num_bits is 4"),
        ("config_groups/group_0/input_activations/dynamic", True, "input_activations.dynamic is True"),
        ("config_groups/group_0/targets/0", "model.layers.1.mlp.down_proj", "group_0.weights.num_bits is 8"),
        (
            "config_groups/group_0/targets/0",
            "model.norm",
            "targets is 'model.norm', which is not served; served: layers",
        ),
        ("config_groups/group_1", ..., "names model.layers.0.mlp.gate_proj, which no entry of config_groups has"),
        ("config_groups/group_2/input_activations", E2M1, "config_groups.group_2.input_activations is {"),
        ("config_groups/group_2/quant_algo", "NVFP4", "config_groups.group_2.quant_algo is 'NVFP4'"),
        (
            "quantized_layers/model.layers.1.mlp.down_proj/has_zero_point",
            True,
            "quantized_layers.model.layers.1.mlp.down_proj.has_zero_point is True",
        ),
        (
            "quantized_layers/model.layers.1.mlp.down_proj/group_size",
            32,
            "quantized_layers.model.layers.1.mlp.down_proj.group_size is 32",
        ),
        (
            "quantized_layers/model.layers.1.mlp.down_proj/lora_rank",
            8,
            "quantized_layers.model.layers.1.mlp.down_proj.lora_rank is 8",
        ),
    ],
)
def test_what_contradicts_a_table(path: str, value: object, words: str) -> None:
    config = files("mixed")[CONFIG]
    if path.endswith("/0"):
        config["config_groups"]["group_0"]["targets"][0] = value
    else:
        put(config, path, value)
    with pytest.raises(CheckpointError) as error:
        find_modelopt_config(None, config)
    assert str(error.value).startswith(CONFIG + ": ") and words in str(error.value)


def test_what_the_converter_writes_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """ModelOpt's own ``convert_hf_quant_config_format``, for a table with AWQ and with what it does not know."""
    table: dict[str, dict[str, object]] = {
        "a": {"quant_algo": "NVFP4_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True},
        "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    groups = {
        "group_0": {"input_activations": {**E2M1, "num_bits": 8}, "weights": E2M1, "targets": ["a"]},
        "group_1": {"quant_algo": "W4A16_NVFP4", "targets": ["b"]},
    }
    flat = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table, "ignore": []}
    config = ModelOptFp4Config.from_config({**flat, "config_groups": groups, "kv_cache_scheme": E4M3})
    assert config.algorithms == {"NVFP4_AWQ", "W4A16_NVFP4"} and config.kv_cache_quant_algo == "FP8"
    scheme = {"quant_algo": "NVFP4", "activation_scheme": "dynamic", "has_zero_point": False, "pre_quant_scale": False}
    group = {"weights": E2M1, "input_activations": {**E2M1, "dynamic": True}, "targets": ["Linear"]}
    assert ModelOptFp4Config.from_config({**scheme, "config_groups": {"group_0": group}}).dynamic_activations
    assert not caplog.records


def test_repeating_a_key_beside_quantization_is_no_contradiction() -> None:
    both = files()[OWN]
    both["quant_algo"] = "NVFP4"
    assert find_modelopt_config(both, None).quant_algo == "NVFP4"


def test_unknown_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(files()[OWN])
    config["quantization"]["rotation"] = "hadamard"
    with caplog.at_level(logging.WARNING):
        find_modelopt_config(config, None)
    assert f"{OWN}: the field rotation is not known and not read" in caplog.text
