"""Frequencies against transformers' own functions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.rotary_embedding import ROPE_TYPES, RotaryEmbedding, apply_rotary, get_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 1024},
    "llama3-original-from-config": LLAMA3,
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-shrinking": {**YARN, "factor": 0.5},
    "yarn-original-from-config": {"rope_type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def config_of(case: str, theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters={**CASES[case], "rope_theta": theta},
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (50.0, 10)])
def test_frequencies_equal_transformers(case: str, theta: float, head_dim: int) -> None:
    config = config_of(case, theta, head_dim)
    theirs = LlamaRotaryEmbedding(config)
    ours = get_rope(config, head_dim)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type != "default":
        assert torch.equal(theirs.inv_freq, ROPE_INIT_FUNCTIONS[rope_type](config)[0])
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=3e-7, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)

    positions = torch.tensor([0, 1, 7, 500, 2047])
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    rotated = apply_rotary(x.clone(), *ours(positions, torch.float32))
    torch.testing.assert_close(rotated, expected[0], rtol=0, atol=2e-3 if case == "dynamic" else 1e-3)
    torch.testing.assert_close(rotated[:3], expected[0, :3], rtol=0, atol=5e-6)


@pytest.mark.parametrize("length", [2048, 2049, 3000, 8000])
def test_dynamic_position_rotates_like_a_sequence_that_ends_there(length: int) -> None:
    config = config_of("dynamic", 10000.0, 64)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    cos, sin = get_rope(config, 64)(torch.tensor([5, length - 1]), torch.float32)
    angles = (length - 1) * expected
    torch.testing.assert_close(cos[1, 0, :32], angles.cos(), rtol=0, atol=3e-3)
    torch.testing.assert_close(sin[1, 0, 32:], angles.sin(), rtol=0, atol=3e-3)
    # An early position is not touched by how long the sequence gets.
    torch.testing.assert_close(cos[0, 0, :32], (5 * LlamaRotaryEmbedding(config).inv_freq).cos(), rtol=0, atol=1e-6)


def test_cosines_are_computed_in_fp32_whatever_the_dtype() -> None:
    rope = RotaryEmbedding(64, 2048, {"rope_theta": 10000.0})
    positions = torch.tensor([1537])  # not a bfloat16
    exact, _ = rope(positions, torch.float32)
    rounded, _ = rope(positions, torch.bfloat16)
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_refusals() -> None:
    assert set(ROPE_TYPES) == {"default", "linear", "dynamic", "llama3", "yarn"}
    with pytest.raises(CheckpointError, match="rope_type 'longrope' is not supported; supported: default, linear"):
        RotaryEmbedding(64, 2048, {"rope_type": "longrope", "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.5"):
        RotaryEmbedding(64, 2048, {"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(CheckpointError, match=r"rope_parameters\.factor of rope_type 'linear' is None"):
        RotaryEmbedding(64, 2048, {"rope_type": "linear", "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_theta .* is '10000'"):
        RotaryEmbedding(64, 2048, {"rope_theta": "10000"})
