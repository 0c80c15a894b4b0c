import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.operators import operators_for


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
def test_rms_norm_equals_transformers(dtype: torch.dtype, tolerance: float) -> None:
    theirs = LlamaRMSNorm(37, eps=1e-3).to(dtype)
    theirs.weight.data.uniform_(0.5, 1.5)
    ours = RMSNorm(37, eps=1e-3).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(2, 5, 37).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)
        total = x + residual
        normed, new_residual = ours(x.clone(), residual)
        assert torch.equal(new_residual, total)
        torch.testing.assert_close(normed, theirs(total), rtol=tolerance, atol=tolerance)


def test_rms_norm_statistics_are_fp32() -> None:
    """300 squared is more than float16 holds."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(RMSNorm(64).to(torch.float16)(x), torch.ones_like(x))


def test_silu_and_mul_is_gate_then_up() -> None:
    x = torch.randn(3, 14)
    before = x.clone()
    torch.testing.assert_close(operators_for("cpu").silu_and_mul(x), x[:, :7] * x[:, :7].sigmoid() * x[:, 7:])
    assert torch.equal(x, before)
