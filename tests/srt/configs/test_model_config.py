import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.models.registry import SUPPORTED_ARCHITECTURES
from sglang.srt.server_args import ServerArgs, prepare_server_args

FIXTURES = Path(__file__).parents[2] / "fixtures"

# What an exporter of 2023 wrote, before transformers 5.
OLD_STYLE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 30000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def checkpoint(tmp_path):
    def make(generation=None, drop=(), **changes):
        config = {key: value for key, value in (OLD_STYLE | changes).items() if key not in drop}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return make


def read(folder, text="") -> ModelConfig:
    return ModelConfig.from_server_args(prepare_server_args(["--model-path", str(folder), *text.split()]))


def refusal(folder, text="", kind=CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        read(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tiny-llama-modelopt-nvfp4", "tiny-llama-ct-nvfp4"])
def test_both_styles_of_config(name):
    config = read(FIXTURES / name)
    assert config.hf_config.rope_parameters["rope_theta"] == 50000
    assert config.hf_config.rope_parameters["rope_type"] == "default"
    assert config.architecture == "LlamaForCausalLM"
    assert (config.context_len, config.vocab_size, config.hidden_size, config.num_hidden_layers) == (2048, 320, 256, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert config.eos_token_ids == {1}
    assert config.model_path == str(FIXTURES / name)


def test_quantisation_is_kept_raw():
    folder = FIXTURES / "tiny-llama-modelopt-nvfp4-kvfp8"
    config = read(folder)
    assert config.quantization_config == json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config.hf_quant_config == json.loads((folder / "hf_quant_config.json").read_text())
    assert not hasattr(config.hf_config, "quantization_config")
    plain = read(FIXTURES / "tiny-llama-bf16")
    assert plain.quantization_config is plain.hf_quant_config is None


def test_old_style(checkpoint):
    config = read(checkpoint())
    assert config.hf_config.rope_parameters["rope_theta"] == 30000
    assert config.head_dim == 16
    assert config.eos_token_ids == {2}


def test_key_value_heads_default_to_heads(checkpoint):
    assert read(checkpoint(drop=["num_key_value_heads"])).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, 3, {2, 3}), ([2, 4], None, {2, 4}), (None, [5, 6], {5, 6}), (None, None, set()), (2, [2], {2})],
)
def test_eos_tokens_are_united(checkpoint, config, generation, expected):
    assert read(checkpoint(generation={"eos_token_id": generation}, eos_token_id=config)).eos_token_ids == expected


def test_eos_token_of_a_wrong_type(checkpoint):
    assert "eos_token_id" in refusal(checkpoint(generation={"eos_token_id": ["</s>"]}))


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("float32", "auto", torch.float16),
        (None, "auto", torch.float16),
        ("float32", "float32", torch.float32),
        ("bfloat16", "half", torch.float16),
        ("bfloat16", "float", torch.float32),
    ],
)
def test_dtype(checkpoint, stored, asked, expected, caplog):
    with caplog.at_level(logging.INFO):
        assert read(checkpoint(torch_dtype=stored), f"--dtype {asked}").dtype is expected
    # Whatever differs from what is stored is said.
    assert bool(caplog.messages) == (f"torch.{stored}" != str(expected))


def test_a_dtype_of_null_is_none(checkpoint):
    assert read(checkpoint(dtype=None, torch_dtype="bfloat16")).dtype is torch.bfloat16
    assert read(checkpoint(dtype="bfloat16", torch_dtype="float16")).dtype is torch.bfloat16


def test_unknown_dtype(checkpoint):
    assert "'int8'" in refusal(checkpoint(torch_dtype="int8"))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 1024),
        ({"type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"type": "yarn", "factor": 4.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            1024,
        ),
    ],
)
def test_context_length_follows_rope_scaling(checkpoint, rope, expected):
    folder = checkpoint(rope_scaling=rope)
    assert read(folder).context_len == expected
    assert read(folder, f"--context-length {expected}").context_len == expected
    assert read(folder, "--context-length 5").context_len == 5
    message = refusal(folder, f"--context-length {expected + 1}", ArgumentError)
    assert f"--context-length {expected + 1} is more than {expected}" in message
    assert "rope scaling" in message


def test_new_style_rope_scaling(checkpoint):
    folder = checkpoint(drop=["rope_theta"], rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0})
    config = read(folder)
    assert config.context_len == 3072
    assert config.hf_config.rope_parameters["rope_theta"] == 77


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 256},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "sliding_window": 256,
            "use_sliding_window": True,
            "max_window_layers": 0,
        },
    ],
)
def test_a_sliding_window_does_not_limit_the_context(checkpoint, changes):
    assert read(checkpoint(**changes)).context_len == 1024


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": ["architectures"]}, ["names no architecture", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": []}, ["names no architecture"]),
        ({"architectures": ["FooForCausalLM"]}, ["FooForCausalLM is not supported", *SUPPORTED_ARCHITECTURES]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["partial_rotary_factor 0.25"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["'longrope'", "yarn"]),
        ({"rope_scaling": {"type": "mrope"}}, ["'mrope'"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["differ between layers"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be an object"]),
        ({"quantization_config": []}, ["quantization_config must be an object"]),
        ({"drop": ["hidden_size"]}, ["has no hidden_size"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, ["hidden size (64)"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
            },
            ["hidden_size 64", "num_attention_heads 3"],
        ),
        ({"model_type": "no_such_type"}, ["config.json can't be read by transformers"]),
        ({"drop": ["model_type"]}, ["config.json can't be read by transformers"]),
    ],
)
def test_config_that_would_be_served_wrong_is_refused(checkpoint, changes, words):
    folder = checkpoint(**changes)
    message = refusal(folder)
    assert str(folder) in message
    for word in words:
        assert word in message


def test_broken_files(tmp_path):
    assert "there is no such folder" in refusal(tmp_path / "missing")
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert "config.json is not valid JSON (line 1" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "can't be read" in refusal(tmp_path)


def test_broken_side_files(checkpoint):
    for name in ("generation_config.json", "hf_quant_config.json"):
        folder = checkpoint()
        (folder / name).write_text("{")
        assert f"{name} is not valid JSON" in refusal(folder)
        (folder / name).unlink()


def test_dummy_and_remote_code_choose_what_is_downloaded(monkeypatch):
    wanted = []

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns):
        wanted.append(allow_patterns)
        return str(FIXTURES / "tiny-llama-bf16")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    ModelConfig.from_server_args(ServerArgs(model_path="org/name"))
    ModelConfig.from_server_args(ServerArgs(model_path="org/name", load_format="dummy", trust_remote_code=True))
    assert ["*.safetensors" in patterns for patterns in wanted] == [True, False]
    assert ["*.py" in patterns for patterns in wanted] == [False, True]


CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
    came_from_the_folder = True
"""


def test_remote_code_needs_the_flag(checkpoint, monkeypatch, tmp_path_factory):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    folder = checkpoint(model_type="own", auto_map={"AutoConfig": "own_config.OwnConfig"})
    (folder / "own_config.py").write_text(CODE)
    assert "--trust-remote-code" in refusal(folder)
    config = read(folder, "--trust-remote-code")
    assert config.hf_config.came_from_the_folder
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


@pytest.mark.parametrize(
    ("name", "flags", "dtype"),
    [
        ("tiny-llama-modelopt-nvfp4", "--device cpu", torch.float32),
        ("tiny-llama-ct-nvfp4", "--device cpu", torch.float32),
        ("tiny-llama-bf16", "--device cpu", torch.bfloat16),
        ("tiny-llama-bf16", "--device cpu --quantization nvfp4", torch.float32),
        ("tiny-llama-modelopt-nvfp4", "--device cpu --dtype bfloat16", torch.bfloat16),
    ],
)
def test_auto_dtype_on_a_cpu(name, flags, dtype):
    assert read(FIXTURES / name, flags).dtype is dtype


def test_ranks_that_can_share_the_model(checkpoint):
    folder = checkpoint()  # 4 heads, 2 KV heads, an MLP of 128
    for size in (1, 2, 4):
        read(folder, f"--device cpu --tp-size {size}")

    def refused_with(ranks, **changes):
        return refusal(checkpoint(**changes), f"--device cpu --tp-size {ranks}", ArgumentError)

    assert "--tp-size 3: the model's num_attention_heads 4" in refused_with(3)
    assert "--tp-size 4: the model's intermediate_size 130" in refused_with(4, intermediate_size=130)
    message = refused_with(4, num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    assert "--tp-size 4: the model's num_key_value_heads 6 is neither a multiple nor a divisor of 4" in message
