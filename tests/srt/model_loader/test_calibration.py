import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.quantize import quantize_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax
from sglang.srt.model_loader import calibration
from sglang.srt.model_loader.calibration import (
    calibrate_input_amax,
    read_calibration_text,
    tokenize_calibration_text,
)
from sglang.srt.model_loader.checkpoint_reader import CheckpointReader

FIXTURES = Path(__file__).parents[2] / "fixtures"
TINY = FIXTURES / "tiny-llama-bf16"
CPU = torch.device("cpu")


def test_calibration_equals_modelopt() -> None:
    token_ids = torch.randint(0, 320, (16, 128), generator=torch.Generator().manual_seed(7))
    config = ModelConfig.from_folder(TINY).hf_config
    amax = calibrate_input_amax(config, CheckpointReader(TINY), token_ids, CPU, show_progress=False)
    expected = load_file(FIXTURES / "tiny-llama-modelopt-nvfp4" / "model.safetensors")
    scales = {name.removesuffix(".input_scale"): t for name, t in expected.items() if name.endswith(".input_scale")}
    assert amax.keys() == scales.keys()
    for name, scale in scales.items():
        # Equal on the machine that was tried; another bf16 matrix product may round the last bit otherwise.
        assert global_scale_from_amax(amax[name]) == pytest.approx(scale.item(), rel=2**-7), name


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_streamed_calibration_equals_the_whole_model(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, f"{architecture}Config")(**(COMMON | options))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases and norms too, so that leaving one out shows
    model.save_pretrained(tmp_path / "m", max_shard_size="60KB")
    assert CheckpointReader(tmp_path / "m").tensors.keys() <= model.state_dict().keys()
    token_ids = torch.randint(0, 100, (5, 40))

    expected: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            expected[name] = max(expected.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        whole(token_ids)
    config = ModelConfig.from_folder(tmp_path / "m").hf_config
    streamed = calibrate_input_amax(
        config, CheckpointReader(tmp_path / "m"), token_ids, CPU, batch_size=2, show_progress=False
    )
    assert streamed == pytest.approx(expected, rel=1e-4)

    # The whole path too, for this architecture's names and shapes.
    shutil.copy(TINY / "tokenizer.json", tmp_path / "m")
    shutil.copy(TINY / "tokenizer_config.json", tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"token \d+ .*has 100 rows"):
        quantize_checkpoint(str(tmp_path / "m"), str(tmp_path / "out"), "nvfp4", show_progress=False)
    quantize_checkpoint(str(tmp_path / "m"), str(tmp_path / "out"), "w4a16_nvfp4", show_progress=False)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(name.endswith(".weight_scale_2") for name in ours) == 21
    biases = [name for name in ours if name.endswith(".bias")]
    assert len(biases) == (9 if architecture == "Qwen2" else 0)


def test_one_layer_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[nn.Module] = []
    load = calibration._StreamedLayer._load

    def watched(layer: calibration._StreamedLayer, dtype: torch.dtype) -> None:
        reached.append(layer)
        assert all(parameter.is_meta for other in reached for parameter in other.parameters())
        load(layer, dtype)

    monkeypatch.setattr(calibration._StreamedLayer, "_load", watched)
    config = ModelConfig.from_folder(TINY).hf_config
    calibrate_input_amax(config, CheckpointReader(TINY), torch.ones(9, 8, dtype=torch.int64), CPU, show_progress=False)
    assert len(reached) == 2


def test_built_in_text_becomes_equal_sequences() -> None:
    text = read_calibration_text(None)
    assert 3000 < len(text.encode()) < 6000
    token_ids = tokenize_calibration_text(TINY, text, 2048)
    assert token_ids.shape[1] == 512 and token_ids.shape[0] > 4
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    body = tokenizer(text, add_special_tokens=False)["input_ids"]
    plain, chat = token_ids[:-1], token_ids[-1]
    assert (plain[:, 0] == tokenizer.bos_token_id).all()
    assert plain[0, 1:].tolist() == body[:511] and plain[1, 1:].tolist() == body[511:1022]
    assert plain[-1, 1:].tolist() == body[-511:]
    role = tokenizer.convert_tokens_to_ids("<|user|>")
    assert chat[:2].tolist() == [tokenizer.bos_token_id, role]
    assert tokenize_calibration_text(TINY, text, 100).shape[1] == 100
    short = tokenize_calibration_text(TINY, "a few words", 2048)
    assert short.shape[1] < 20 and len(short) == 2
