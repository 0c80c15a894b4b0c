"""torch's operators, against which ours are held, and those of this CPU, against the formulas in float64."""

import pytest
import torch

from sglang.srt.layers.operators import TORCH_OPERATORS, Operators, operators_for

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place


@pytest.fixture(params=["torch", "cpu"])
def operators(request: pytest.FixtureRequest) -> Operators:
    torch.manual_seed(0)
    return TORCH_OPERATORS if request.param == "torch" else operators_for("cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def assert_within(found: torch.Tensor, exact: torch.Tensor, roundings: float, size: torch.Tensor | None = None) -> None:
    """``size``: of what is rounded on the way, the result's own by default."""
    bound = roundings * EPSILON[found.dtype] * (exact.abs() if size is None else size) + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()


def test_norm_heads(operators: Operators, dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 8, 24).to(dtype)
    q, k, _ = qkv.split_with_sizes((5, 2, 1), dim=1)
    weights = [torch.linspace(0.5, 2, 24).to(dtype), torch.linspace(3, -1, 24).to(dtype)]
    exact = [
        x.double() / (x.double().square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for x, weight in zip((q, k), weights, strict=True)
    ]
    for found, wanted in zip(operators.norm_heads(q, k, *weights, 1e-5), exact, strict=True):
        assert found.dtype == dtype
        assert_within(found, wanted, 8 if dtype == torch.float32 else 1.1)


def test_cos_sin(operators: Operators, dtype: torch.dtype) -> None:
    positions, inv_freq = torch.tensor([0, 1, 77, 1000]), torch.tensor([1.0, 0.25, 0.01])
    cos, sin = operators.cos_sin(positions, inv_freq, 1.5, dtype)
    angle = (positions.unsqueeze(1).float() * inv_freq).double()
    assert cos.shape == sin.shape == (4, 1, 6) and cos.dtype == sin.dtype == dtype
    for found, half, sign in ((cos, angle.cos(), 1), (sin, angle.sin(), -1)):
        assert_within(found[:, 0, :3], 1.5 * sign * half, 4 if dtype == torch.float32 else 1.1)
        assert_within(found[:, 0, 3:], 1.5 * half, 4 if dtype == torch.float32 else 1.1)


@pytest.mark.parametrize("cache", ["same", "e4m3"])
def test_rotate_and_store(operators: Operators, dtype: torch.dtype, cache: str) -> None:
    qkv = torch.randn(3, 7, 8).to(dtype)
    kept = qkv.clone()
    q, k, v = qkv.split_with_sizes((3, 2, 2), dim=1)
    v[0, 0, 0] = kept[0, 5, 0] = 3000.0
    cos, sin = operators.cos_sin(torch.tensor([4, 0, 9]), torch.tensor([1.0, 0.5, 0.2, 0.1]), 1.0, dtype)
    cache_dtype = torch.float8_e4m3fn if cache == "e4m3" else dtype
    keys, values = (torch.full((6, 2, 8), 5.0).to(cache_dtype) for _ in range(2))
    operators.rotate_and_store(q, k, v, cos, sin, keys, values, torch.tensor([5, 1, 2]), 0.5, 3.0)

    x, half = kept[:, :5].double(), 4
    paired = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    first, second = x * cos.double(), paired * sin.double()
    assert_within(qkv[:, :5], first + second, 2.1, first.abs() + second.abs())
    assert torch.equal(v, kept[:, 5:])
    for buffer, wanted, scale in ((keys, k, 0.5), (values, v, 3.0)):
        if cache == "e4m3":  # three bits behind the point, of quotients in float32
            wanted = (wanted.double() / scale).clamp(-448, 448)
            found = buffer[[5, 1, 2]].double()
            assert ((found - wanted).abs() <= 2.0**-4 * 1.001 * wanted.abs() + 2.0**-10).all()
        else:
            assert torch.equal(buffer[[5, 1, 2]], wanted)
        assert (buffer[[0, 3, 4]].float() == 5).all()


def test_rows_of_another_rank_are_zero(operators: Operators, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(10, 6).to(dtype), torch.tensor([19, 20, 29, 30, 0, 25])
    found = operators.embedding(ids, weight, dtype, 20)
    assert torch.equal(found[[1, 2, 5]], weight[[0, 9, 5]]) and not found[[0, 3, 4]].any()
    assert torch.equal(ids, torch.tensor([19, 20, 29, 30, 0, 25]))
