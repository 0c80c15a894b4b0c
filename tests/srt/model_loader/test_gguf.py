"""The GGUF reader against files written by the gguf package, whose content is known."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang.srt.errors import CheckpointError
from sglang.srt.model_loader.gguf import convert_gguf, undo_rope_permutation
from tiny_gguf import CHAT_TEMPLATE, HEADS, KV_HEADS, MERGES, SPECIAL, float_tensors, vocabulary, write_tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint converted from a tiny file that stores fp32."""
    base = tmp_path_factory.mktemp("gguf")
    write_tiny_gguf(base / "model.gguf", quantised=False)
    convert_gguf(base / "model.gguf", base / "hf")
    return base / "hf"


def test_rope_permutation_is_undone_head_by_head() -> None:
    # GGUF's rows of a head of six: 0, 3, 1, 4, 2, 5 in Hugging Face's numbering.
    stored = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15], np.float32)[:, None]
    expected = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert undo_rope_permutation(stored, num_heads=2)[:, 0].tolist() == expected


def test_tensors_are_bf16_under_their_names_in_order(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    source = float_tensors()
    assert len(weights) == len(source)
    for i in range(2):
        for ours, theirs in {
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items():
            expected = torch.from_numpy(source[f"blk.{i}.{theirs}.weight"]).bfloat16()
            assert torch.equal(weights[f"model.layers.{i}.{ours}.weight"], expected)
        for ours, theirs, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)):
            stored = torch.from_numpy(source[f"blk.{i}.{theirs}.weight"]).bfloat16()
            rows = [h * 16 + j * 2 + half for h in range(heads) for half in (0, 1) for j in range(8)]
            assert torch.equal(weights[f"model.layers.{i}.self_attn.{ours}.weight"], stored[rows])
    assert torch.equal(weights["model.norm.weight"], torch.from_numpy(source["output_norm.weight"]).bfloat16())
    names = list(json.loads((folder / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}"))
    assert names[0] == "__metadata__" and names[1:] == sorted(names[1:])


def test_quantised_storage_is_dequantised(tmp_path: Path, folder: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", quantised=True)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    exact = load_file(folder / "model.safetensors")
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        error = (tensor.float() - exact[name].float()).norm() / exact[name].float().norm()
        assert error == 0 if tensor.ndim == 1 else 0 < error < (0.01 if "embed" in name else 0.1)


def test_config_says_what_the_file_says_and_transformers_loads_it(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, LlamaConfig)
    assert config.rope_parameters["rope_theta"] == 12345.0
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.tie_word_embeddings is True and config.dtype == torch.bfloat16
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2


def test_an_output_tensor_unties_the_head(tmp_path: Path) -> None:
    tensors = float_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    write_tiny_gguf(tmp_path / "model.gguf", tensors, quantised=False)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False
    head = load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, torch.from_numpy(tensors["output.weight"]).bfloat16())


def test_tokenizer_splits_digits_applies_merges_and_keeps_special_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = vocabulary()
    ids = tokenizer("hello w12<|im_end|>é").input_ids
    # "1 2" is a merge and must not be taken: digits stand alone.
    assert [vocab[i] for i in ids] == ["hell", "o", "Ġw", "1", "2", "<|im_end|>", "Ã", "©"]
    assert tokenizer.decode(ids) == "hello w12<|im_end|>é"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello w12é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length) == (len(SPECIAL) + 256 + len(MERGES), 512)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>hi<|im_end|>\n"
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only 'llama'"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'; only 'smollm'"),
        ({"extra": {"llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor"),
        ({"token_types": [3] * 3 + [1] * 260 + [6]}, r"token types \[6\]"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "tensor rope_freqs.weight has no place"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "tensor blk.0.attn_q.bias has no place"),
    ],
)
def test_what_cannot_be_carried_over_is_named(tmp_path: Path, options: dict, message: str) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")


@pytest.mark.parametrize("length", [0, 3, 100, 4000, 9000, 20000])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    assert path.stat().st_size > 20000
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path / "hf")
