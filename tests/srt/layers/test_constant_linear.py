import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers import constant_linear as constant_linear_module
from sglang.srt.layers.constant_linear import Bf16Linear, ConstantLinear, constant_linear
from sglang.srt.layers.operators import TORCH_OPERATORS
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k"), [(0, 8, 16), (1, 33, 576), (5, 64, 70), (70, 31, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_linear(
    packs: bool, dtype: torch.dtype, rows: int, n: int, k: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(constant_linear_module, "_works", lambda dtype: False)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if with_bias else None
    x = torch.randn(rows + 2, k + 6).to(dtype)[1:-1, 3:-3]  # rows of a larger tensor
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    linear = ConstantLinear(weight.clone())
    ours = linear(x, bias)
    assert ours.dtype == dtype and ours.shape == exact.shape
    error = (ours.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    assert linear.nbytes == weight.nbytes


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8, device="meta"), torch.zeros(0, 8)]
)
def test_what_can_not_be_packed_is_kept(weight: torch.Tensor) -> None:
    assert ConstantLinear(weight)._weight is weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float32_output_is_not_rounded(dtype: torch.dtype) -> None:
    weight, x, bias = torch.randn(64, 80).to(dtype), torch.randn(2, 3, 80).to(dtype), torch.randn(64).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    y = ConstantLinear(weight, float32_output=True)(x, bias)
    assert y.dtype == torch.float32
    assert (y.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_float32_output_on_a_gpu() -> None:
    weight, x = torch.randn(64, 80).bfloat16().cuda(), torch.randn(2, 3, 80).bfloat16().cuda()
    y = ConstantLinear(weight, float32_output=True)(x)
    exact = F.linear(x.double(), weight.double())
    assert y.dtype == torch.float32 and (y.double() - exact).norm() / exact.norm() < 1e-5


def test_what_is_kept_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, inexact = torch.randn(40, 70).bfloat16().float(), torch.randn(40, 70)
    x, bias = torch.randn(2, 3, 70), torch.randn(40)
    linear = constant_linear(exact)
    assert isinstance(linear, Bf16Linear) and linear.weight.dtype == torch.bfloat16 and linear.nbytes == 2 * 40 * 70
    torch.testing.assert_close(linear(x, bias), F.linear(x, exact, bias), rtol=1e-5, atol=1e-5)
    assert isinstance(constant_linear(inexact), ConstantLinear)
    inexact = exact.clone()
    inexact[3, 4] = 1.0 + 2.0**-8
    assert isinstance(constant_linear(inexact), ConstantLinear)
    assert isinstance(constant_linear(exact.bfloat16()), ConstantLinear)  # its result is rounded to bfloat16
    head = constant_linear(exact.bfloat16(), float32_output=True)
    assert isinstance(head, Bf16Linear)
    y = head(x.bfloat16(), bias.bfloat16())
    torch.testing.assert_close(y, F.linear(x.bfloat16().float(), exact, bias.bfloat16().float()), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(constant_linear_module, "operators_for", lambda device_type: TORCH_OPERATORS)
    assert isinstance(constant_linear(exact), ConstantLinear)
    assert isinstance(constant_linear(exact.bfloat16(), float32_output=True), ConstantLinear)


@pytest.mark.parametrize("exact", [True, False])
def test_tied_head_of_a_float32_model(exact: bool) -> None:
    embedding = VocabParallelEmbedding(50, 16, params_dtype=torch.float32, is_head=True)
    weight = torch.randn(50, 16).bfloat16().float() if exact else torch.randn(50, 16)
    embedding.weight.data.copy_(weight)
    embedding.quant_method.process_weights_after_loading(embedding)
    rows, logits = embedding(torch.tensor([4, 49])), embedding.logits(weight[:3])
    assert torch.equal(rows, weight[[4, 49]]) and rows.dtype == torch.float32
    torch.testing.assert_close(logits, weight[:3] @ weight.T)
    assert embedding.weight.dtype == (torch.bfloat16 if exact else torch.float32)
    if exact:  # one copy
        assert isinstance(embedding.head, Bf16Linear)
        assert embedding.head.weight.data_ptr() == embedding.weight.data_ptr()


def test_tied_head() -> None:
    embedding = VocabParallelEmbedding(50, 16, params_dtype=torch.bfloat16, is_head=True)
    embedding.weight.data.normal_()
    embedding.quant_method.process_weights_after_loading(embedding)
    hidden = torch.randn(3, 16).bfloat16()
    logits = embedding.logits(hidden)
    torch.testing.assert_close(logits, hidden.float() @ embedding.weight.float().T)
    assert torch.equal(embedding(torch.tensor([4, 49])), embedding.weight[[4, 49]])
    assert [name for name, _ in embedding.named_parameters()] == ["weight"]
