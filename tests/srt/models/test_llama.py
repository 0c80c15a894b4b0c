"""Every architecture and rope type against its transformers class, in fp32, through the loader and the paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from sglang.srt.errors import CheckpointError
from sglang.srt.models.registry import SUPPORTED_ARCHITECTURES, get_model_class
from step_harness import Stepper, make_model, make_runner, random_tokens

VOCAB = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
}


def rope(rope_type: str, theta: float = 700.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **ROPE.get(rope_type, {}), **more}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6, "head_dim": None}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"head_dim": 10}),
    "qwen2-tied": ("qwen2", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"head_dim": 10, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "linear": ("llama", rope("linear")),
    "llama3": ("llama", rope("llama3")),
    "yarn": ("llama", rope("yarn")),
    "yarn-attention-factor": ("qwen3", rope("yarn", attention_factor=1.3, truncate=False)),
    "yarn-mscale": ("llama", rope("yarn", mscale=0.7, mscale_all_dim=0.4, beta_fast=20, beta_slow=2)),
    "dynamic": ("llama", rope("dynamic")),
}


def build(name: str, folder: Path) -> Any:
    model_type, changes = MODELS[name]
    return make_model(AutoConfig.for_model(model_type, **{**SMALL, **changes}), folder)


def assert_logits(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(name, tmp_path, "cpu", 1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3-tied-bias", "mistral-window", "yarn-mscale", "dynamic"])
def test_logits_equal_transformers_on_gpu(name: str, tmp_path: Path) -> None:
    check_logits(name, tmp_path, "cuda", 1e-4)


def check_logits(name: str, tmp_path: Path, device: str, tolerance: float) -> None:
    """Prefill at once, prefill in chunks, decode token by token, and all three in one batch."""
    theirs = build(name, tmp_path)
    tokens = random_tokens(40, VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3  # else the tolerance would say nothing

    stepper = Stepper(make_runner(tmp_path, page_size=4, device=device))
    output, _ = stepper.step({0: tokens[:29]})
    assert_logits(output.next_token_logits[0], expected[28], tolerance)
    for begin, end in ((0, 1), (1, 13), (13, 28), (28, 29)):
        output, _ = stepper.step({1: tokens[begin:end]})
        assert_logits(output.next_token_logits[0], expected[end - 1], tolerance)
    # Rows in another order than their numbers; a chunk, a new request and a single token together.
    output, _ = stepper.step({1: tokens[29:31], 2: tokens[:17], 0: tokens[29:30]})
    assert_logits(output.next_token_logits, expected[[30, 16, 29]], tolerance)
    for position in range(17, 22):
        output, _ = stepper.step({2: tokens[position : position + 1], 0: tokens[position + 13 : position + 14]})
        assert_logits(output.next_token_logits, expected[[position, position + 13]], tolerance)


def test_long_prompt_crosses_query_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.layers.attention.torch_native_backend.QUERY_BLOCK", 8)
    for name in ("llama", "mistral-window"):
        theirs = build(name, tmp_path / name)
        tokens = random_tokens(61, VOCAB)
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        stepper = Stepper(make_runner(tmp_path / name))
        for begin, end in ((0, 27), (27, 46), (46, 61)):
            output, _ = stepper.step({0: tokens[begin:end]})
            assert_logits(output.next_token_logits[0], expected[end - 1])


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_dynamic_rope_beyond_the_original_length(tmp_path: Path) -> None:
    """As transformers decodes with its cache, whatever our chunks are."""
    theirs = build("dynamic", tmp_path)
    tokens = random_tokens(90, VOCAB)
    expected = []
    cache = DynamicCache(config=theirs.config)
    with torch.inference_mode():
        expected.append(theirs(torch.tensor([tokens[:64]]), past_key_values=cache).logits[0, -1])
        for token in tokens[64:]:
            expected.append(theirs(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    stepper = Stepper(make_runner(tmp_path))
    for begin, end in ((0, 64), (64, 65), (65, 80), (80, 90)):
        output, _ = stepper.step({0: tokens[begin:end]})
        assert_logits(output.next_token_logits[0], expected[end - 64])
    output, _ = stepper.step({1: tokens})
    assert_logits(output.next_token_logits[0], expected[-1])


def test_input_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities behind a cached prefix, for some requests of a batch, in chunks of the vocabulary."""
    monkeypatch.setattr("sglang.srt.layers.logits_processor.MAX_CHUNK_ELEMENTS", 5 * VOCAB)
    theirs = build("llama", tmp_path)
    tokens = random_tokens(30, VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    stepper = Stepper(make_runner(tmp_path))
    stepper.step({0: tokens[:9]})
    output, _ = stepper.step(
        {0: tokens[9:29], 1: tokens[:6], 2: tokens[:12]},
        logprob_starts=[2, 0, 0],
        logprob_targets=[tokens[12:27], [], tokens[1:12]],
        tops=[3, 2, 0],
    )
    assert output.input_logprobs is not None
    positions = output.input_logprobs.lists()
    assert [len(wanted) for wanted in positions] == [15, 0, 11]
    for request, first in ((0, 11), (2, 0)):
        for i, (value, top, own) in enumerate(positions[request], first):
            assert value == pytest.approx(float(expected[i, tokens[i + 1]]), abs=1e-4)
            best, ids = expected[i].topk(3 if request == 0 else 0)
            assert [token for _, token in top] == ids.tolist() and own == []
            assert [value for value, _ in top] == pytest.approx(best.tolist(), abs=1e-4)
    assert_logits(output.next_token_logits.log_softmax(-1), expected[[28, 5, 11]])


def test_bfloat16_is_close(tmp_path: Path) -> None:
    theirs = build("llama-tied", tmp_path)
    tokens = random_tokens(40, VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
    stepper = Stepper(make_runner(tmp_path, dtype="bfloat16"))
    output, _ = stepper.step({0: tokens})
    error = (output.next_token_logits[0] - expected).norm() / expected.norm()
    assert error < 0.03


def test_tied_checkpoint_with_a_copy_of_the_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = build("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = theirs(torch.tensor([[5, 6]])).logits[0, -1]
    output, _ = Stepper(make_runner(tmp_path)).step({0: [5, 6]})
    assert_logits(output.next_token_logits[0], expected)


def test_registry() -> None:
    for architecture in SUPPORTED_ARCHITECTURES:
        assert get_model_class(architecture).__name__ == architecture
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"):
        get_model_class("GPT2LMHeadModel")


def test_registry_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, sglang.srt.models.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unsupported_activation_is_refused() -> None:
    config = AutoConfig.for_model("llama", **{**SMALL, "hidden_act": "gelu"})
    with pytest.raises(CheckpointError, match="hidden_act 'gelu'"):
        get_model_class("LlamaForCausalLM")(config)
