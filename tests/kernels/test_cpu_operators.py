"""Every operator of ``kernels/cpu`` against torch's, on every instruction set that runs here."""

from collections.abc import Callable, Iterator

import pytest
import torch
from greedy_rows import special_rows, wanted_token

from sglang.kernels import cpu_extension
from sglang.srt.layers.cpu_operators import CpuOperators
from sglang.srt.layers.operators import TORCH_OPERATORS, Operators, operators_for

DTYPES = [torch.float32, torch.bfloat16]
# Four units in the last place; in bfloat16 one, where the unrounded values lie at either side of a tie.
TOLERANCE = {torch.float32: 4 * 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=cpu_extension.isas(), ids=lambda isa: isa.name)
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOperators:
    library = cpu_extension.load(request.param)
    monkeypatch.setattr(cpu_extension, "load", lambda: library)
    return CpuOperators()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_threads(compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The result, which has the same bits on one thread and on two."""
    torch.set_num_threads(1)
    wanted = compute()
    torch.set_num_threads(2)
    assert all(map(torch.equal, compute(), wanted))
    return wanted


def rows_of(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Random values in a contiguous tensor, in rows of a wider one, or with rows one behind another in columns."""
    if layout == "contiguous":
        return torch.randn(shape).to(dtype)
    if layout == "wide":
        return torch.randn(*shape[:-1], shape[-1] + 9).to(dtype)[..., 4 : 4 + shape[-1]]
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)


Case = Callable[[Operators, torch.Tensor, torch.dtype], tuple[torch.Tensor, ...]]


def _weight(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.5, 2.0, x.shape[-1]).to(x.dtype)


def _norm(operators: Operators, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (operators.rms_norm(x, _weight(x), 1e-5),)


def _add_norm(operators: Operators, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    residual = (torch.arange(x.numel()).reshape(x.shape) % 37 - 18).to(dtype) * 0.37
    return operators.add_rms_norm(x.clone(), residual, _weight(x), 1e-5)


def _silu(operators: Operators, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (operators.silu_and_mul(x),)


CASES: dict[str, Case] = {"rms_norm": _norm, "add_rms_norm": _add_norm, "silu_and_mul": _silu}


@pytest.mark.parametrize("layout", ["contiguous", "wide", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (3, 10), (70, 1536), (5, 9, 64), (2, 3, 34)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rowwise(operators: CpuOperators, name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    x = rows_of(shape, layout, dtype)
    before = x.clone()
    ours = on_threads(lambda: CASES[name](operators, x, dtype))
    theirs = CASES[name](TORCH_OPERATORS, x, dtype)
    assert torch.equal(x, before) and len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype and mine.shape == wanted.shape
        torch.testing.assert_close(mine, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert dtype == torch.float32 or (mine != wanted).sum() <= 0.003 * mine.numel()
    if shape[0] > 1:  # a row alone has the same bits
        alone = CASES[name](operators, x[:1].clone(), dtype)
        assert all(torch.equal(one, mine[:1]) for one, mine in zip(alone, ours, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_ours_do_not_take_is_torchs(operators: CpuOperators, name: str) -> None:
    x = torch.randn(4, 3, 32).half()
    for mine, wanted in zip(CASES[name](operators, x, x.dtype), CASES[name](TORCH_OPERATORS, x, x.dtype), strict=True):
        assert mine.dtype == torch.float16 and torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_of_extreme_values(operators: CpuOperators, dtype: torch.dtype) -> None:
    inf = float("inf")
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 88.0, 104.0, 3e38, inf, -88.0, -95.0, -104.0, -3e38, -inf, float("nan")]
    )
    x = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).to(dtype)
    torch.testing.assert_close(
        operators.silu_and_mul(x), TORCH_OPERATORS.silu_and_mul(x), rtol=TOLERANCE[dtype], atol=1e-36, equal_nan=True
    )


@pytest.mark.parametrize(("rows", "n"), [(0, 5), (1, 1), (3, 7), (2, 33), (9, 49152)])
@pytest.mark.parametrize("layout", ["contiguous", "wide", "columns"])
def test_greedy(operators: CpuOperators, rows: int, n: int, layout: str) -> None:
    x = rows_of((rows, n), layout, torch.float32).round(decimals=1)  # many equal values
    values, ids = on_threads(lambda: operators.greedy(x))
    wanted = x.max(dim=1).values
    assert torch.equal(values, wanted) and values.dtype == torch.float32 and ids.dtype == torch.int64
    assert ids.tolist() == [row.index(best) for row, best in zip(x.tolist(), wanted.tolist(), strict=True)]


@pytest.mark.parametrize("n", [1, 2, 7, 130, 9001])
def test_greedy_codes(operators: CpuOperators, n: int) -> None:
    x = special_rows(n)
    for implementation in (operators, TORCH_OPERATORS):
        values, ids = implementation.greedy(x)
        torch.testing.assert_close(values, x.max(dim=1).values, rtol=0, atol=0, equal_nan=True)
        assert ids.dtype == torch.int64 and ids.tolist() == list(map(wanted_token, x.tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_position", [False, True])
@pytest.mark.parametrize("half", [5, 32, 64])
def test_cos_sin(operators: CpuOperators, half: int, per_position: bool, dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1], [1, 1], [7, 1], [511, 1], [8191, 1], [131071, 1]])[:, 0]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(half) / half)
    if per_position:
        inv_freq = inv_freq * torch.linspace(0.5, 1.0, len(positions)).unsqueeze(1)
    for factor in (1.0, 0.7):
        ours = on_threads(lambda: operators.cos_sin(positions, inv_freq, factor, dtype))  # noqa: B023
        for mine, wanted in zip(ours, TORCH_OPERATORS.cos_sin(positions, inv_freq, factor, dtype), strict=True):
            assert mine.dtype == dtype and mine.shape == wanted.shape == (len(positions), 1, 2 * half)
            torch.testing.assert_close(mine, wanted, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(operators: CpuOperators, stored: torch.dtype, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(50, 70).to(stored), torch.tensor([3, 49, 0, 3, 1])[::2]
    (rows,) = on_threads(lambda: (operators.embedding(ids, weight, dtype),))
    assert rows.dtype == dtype and torch.equal(rows, weight[ids].to(dtype))
    for bad in (-1, 50):
        with pytest.raises(IndexError, match="outside the vocabulary of 50"):
            operators.embedding(torch.tensor([0, bad]), weight, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 8, 16), (1, 1, 1), (2, 33, 70), (7, 5, 576), (50, 130, 64), (3, 6, 5000), (400, 3, 2049)]
)
def test_bf16_linear(operators: CpuOperators, m: int, n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = rows_of((m, k), "wide", dtype), torch.randn(n, k).bfloat16()
    bias = torch.randn(2 * n)[::2] if with_bias else None
    (ours,) = on_threads(lambda: (operators.bf16_linear(x, weight, bias),))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert ours.dtype == torch.float32 and ours.shape == (m, n)
    # K products and sums in float32, of which LANES run beside each other.
    bound = (x.double().abs() @ weight.double().abs().T + 1) * 2.0**-24 * (k / 4 + 16)
    assert ((ours - exact).abs() <= bound).all()
    if m:
        assert torch.equal(operators.bf16_linear(x[-1:], weight, bias), ours[-1:])


def test_who_computes_where(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    operators_for.cache_clear()
    try:
        assert operators_for("meta") is TORCH_OPERATORS
        assert isinstance(operators_for("cpu"), CpuOperators) and operators_for("cpu") is operators_for("cpu")
        operators_for.cache_clear()
        monkeypatch.setattr(cpu_extension, "unavailable", lambda: "needs a C++ compiler")
        assert not caplog.records
        assert operators_for("cpu") is operators_for("cpu") is TORCH_OPERATORS
        assert [record.getMessage() for record in caplog.records] == [
            "torch computes everything on this CPU, our faster kernels can't be had: `python -m sglang.check_env` says "
            "why (backend cpu) and what would change it"
        ]
    finally:
        operators_for.cache_clear()
