"""Every operator of ``layers.cu`` and ``greedy.cu`` against torch's: on a GPU, and compiled for the CPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
from greedy_rows import special_rows, wanted_token

from sglang.kernels import layers
from sglang.srt.layers.cuda_operators import CudaOperators
from sglang.srt.layers.operators import TORCH_OPERATORS, Operators
from sglang.srt.mem_cache.memory_pool import store_rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Four units in the last place; in 16 bits one, where the unrounded values lie at either side of a tie.
TOLERANCE = {torch.float32: 4 * 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.fixture
def device(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.manual_seed(0)
    if device == "cpu":
        plan = layers.GreedyPlan(8, torch.empty(32, dtype=torch.int64), torch.zeros(16, dtype=torch.int32))
        monkeypatch.setattr(layers, "greedy_plan", lambda device: plan)
    with torch.device(device):
        yield device


@pytest.fixture
def ours(device: str, monkeypatch: pytest.MonkeyPatch) -> "Counted":
    return Counted(monkeypatch)


class Counted(CudaOperators):
    """Notes which kernels ran: what torch computed would pass every comparison."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[str] = []
        launch = layers.launch

        def noted(name: str, *rest: object) -> None:
            self.kernels.append(name)
            launch(name, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(layers, "launch", noted)


def rows_of(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Random values: contiguous, in rows of a wider tensor that are aligned or not, or in columns."""
    if layout == "contiguous":
        return torch.randn(shape).to(dtype)
    if layout == "columns":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
    margin = 8 if layout == "wide" else 5
    return torch.randn(*shape[:-1], shape[-1] + 3 * margin).to(dtype)[..., margin : margin + shape[-1]]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert found.dtype == torch.float32 or (found != wanted).sum() <= 0.003 * found.numel() + 1


Case = Callable[[Operators, torch.Tensor], tuple[torch.Tensor, ...]]


def _weight(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.5, 2.0, x.shape[-1]).to(x.dtype)


def _norm(operators: Operators, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (operators.rms_norm(x, _weight(x), 1e-5),)


def _add_norm(operators: Operators, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    residual = ((torch.arange(x.numel()).reshape(x.shape) % 37 - 18) * 0.37).to(x.dtype)
    return operators.add_rms_norm(x, residual, _weight(x), 1e-5)


def _silu(operators: Operators, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (operators.silu_and_mul(x),)


ROWWISE: dict[str, Case] = {"rms_norm": _norm, "add_rms_norm": _add_norm, "silu_and_mul": _silu}
SHAPES = [(0, 64), (1, 576), (7, 4096), (3, 10), (2, 5120), (1, 16384), (1, 33000), (5, 9, 64), (2, 3, 34)]


@pytest.mark.parametrize("layout", ["contiguous", "wide", "odd", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise(ours: Counted, name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    base = rows_of(shape, layout, dtype)
    kept, x, y = base.clone(), base, rows_of(shape, layout, dtype)
    y.copy_(kept)
    found, wanted = ROWWISE[name](ours, x), ROWWISE[name](TORCH_OPERATORS, y)
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs)
    assert torch.equal(x, found[1] if name == "add_rms_norm" else kept)
    if layout != "columns" and len(shape) == 2 and x.numel():
        assert len(ours.kernels) == 1
    if shape[0] > 1 and layout == "contiguous":  # a row alone has the same bits
        alone = ROWWISE[name](ours, kept[:1].clone())
        assert name == "add_rms_norm" or torch.equal(alone[0], found[0][:1])


@pytest.mark.parametrize(
    ("n", "dtype", "kernel"),
    [
        (4096, torch.bfloat16, "rms_norm_1"),
        (5120, torch.float16, "rms_norm_2"),
        (16384, torch.bfloat16, "rms_norm_4"),
        (16384, torch.float32, "rms_norm_4"),
        (40000, torch.bfloat16, "rms_norm_any"),
        (4100, torch.bfloat16, "rms_norm_any"),
        (4100, torch.float32, "rms_norm_4"),
    ],
)
def test_rows_take_the_kernel_that_holds_them(ours: Counted, n: int, dtype: torch.dtype, kernel: str) -> None:
    x = torch.randn(2, n).to(dtype)
    ours.rms_norm(x, _weight(x), 1e-5)
    ours.rms_norm(x[:, 1:], _weight(x)[1:].clone(), 1e-5)
    assert ours.kernels == [kernel, "rms_norm_any"]


def test_silu_of_extreme_values(ours: Counted) -> None:
    inf = torch.inf
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 88.0, 104.0, 3e38, inf, -88.0, -95.0, -104.0, -3e38, -inf, torch.nan, 1.0, -1.0]
    )
    for dtype in DTYPES:
        x = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).to(dtype)
        found, wanted = ours.silu_and_mul(x), TORCH_OPERATORS.silu_and_mul(x)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=1e-36, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------- heads
def qkv_of(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, shift: int = 0
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A projection's output [tokens, ...] and its three parts; ``shift`` values stand before them in each row."""
    sizes = (heads, kv_heads, kv_heads)
    whole = torch.randn(tokens, shift + sum(sizes) * dim).to(dtype)
    return whole, whole[:, shift:].unflatten(1, (-1, dim)).split_with_sizes(sizes, dim=1)


def angles(operators: Operators, tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    return operators.cos_sin(torch.arange(tokens) * 37 + 5, inv_freq, 1.0, dtype)


HEADS = [(1, 32, 8, 128), (7, 4, 4, 64), (3, 9, 3, 80), (2, 2, 1, 6), (300, 3, 1, 64), (0, 4, 2, 64), (2, 5, 1, 256)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_norm_heads(ours: Counted, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    whole, (q, k, v) = qkv_of(*shape, dtype)
    kept, kept_v = whole.clone(), v.clone()
    weights = _weight(q), _weight(q).flip(0).contiguous()
    wanted = [TORCH_OPERATORS.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True)]
    for mine, theirs in zip(ours.norm_heads(q, k, *weights, 1e-6), wanted, strict=True):
        assert_close(mine, theirs)
    assert torch.equal(v, kept_v)
    fits = shape[3] * dtype.itemsize % 16 == 0 and shape[3] * dtype.itemsize <= 512
    assert ours.kernels == (["norm_heads"] if fits and shape[0] else [])
    whole.copy_(kept)
    assert_close(ours.rms_norm(q, weights[0], 1e-6), wanted[0])  # out of place, from strided heads
    assert torch.equal(whole, kept)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotate(ours: Counted, shape: tuple[int, int, int, int], dtype: torch.dtype, shift: int) -> None:
    whole, (_, k, v) = qkv_of(*shape, dtype, shift)
    kept = whole.clone()
    rotary = angles(TORCH_OPERATORS, shape[0], shape[3], dtype)
    wanted = TORCH_OPERATORS.rotate(k, *rotary)
    assert ours.rotate(k, *rotary) is k
    assert_close(k, wanted)
    assert ours.kernels == ([] if not shape[0] else ["rotate_any"] if shift or shape[3] == 6 else ["rotate"])
    k.copy_(qkv_of(*shape, dtype)[1][1])
    q_end = shift + shape[1] * shape[3]
    assert torch.equal(whole[:, :q_end], kept[:, :q_end]) and torch.equal(v, kept[:, -shape[2] * shape[3] :].view_as(v))


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("cache", ["same", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotate_and_store(
    ours: Counted, shape: tuple[int, int, int, int], dtype: torch.dtype, cache: str, shift: int
) -> None:
    tokens, _, kv_heads, dim = shape
    cache_dtype = torch.float8_e4m3fn if cache == "e4m3" else dtype
    scales = (0.5, 2.0)  # powers of two: on a GPU torch multiplies by the reciprocal, elsewhere it divides
    rotary, slots = angles(TORCH_OPERATORS, tokens, dim, dtype), 2 * tokens + 3
    loc = torch.randperm(slots)[:tokens]
    q, k, v = qkv_of(*shape, dtype, shift)[1]
    if tokens:
        v[0, 0, :5] = torch.tensor([1e4, -1e4, torch.nan, torch.inf, 2.0**-10]).to(dtype)
        k[0, 0] *= 300
    wanted = [TORCH_OPERATORS.rotate(x, *rotary) for x in (q, k)]
    kept_v = v.clone()
    mine, theirs = ([torch.full((slots, kv_heads, dim), 7.0).to(cache_dtype) for _ in range(2)] for _ in range(2))
    ours.rotate_and_store(q, k, v, *rotary, *mine, loc, *scales)
    assert ours.kernels == ([] if not tokens else ["rotate_any"] if shift or dim == 6 else ["rotate"])
    for found, expected in zip((q, k), wanted, strict=True):
        assert_close(found / 300, expected / 300)
    assert torch.equal(v.nan_to_num(), kept_v.nan_to_num())
    for buffer, x, scale in zip(theirs, (k, v), scales, strict=True):
        store_rows(buffer, loc, x, scale)
    for found, expected in zip(mine, theirs, strict=True):
        assert found.dtype == cache_dtype
        assert torch.equal(found.float().nan_to_num(1e3), expected.float().nan_to_num(1e3))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("unaligned", ["keys", "values", "slots", "angles"])
def test_what_is_not_aligned_is_not_read_in_vectors(ours: Counted, unaligned: str, cache_dtype: torch.dtype) -> None:
    q, k, v = qkv_of(3, 4, 2, 64, torch.bfloat16)[1]
    rotary = angles(TORCH_OPERATORS, 3, 64, torch.bfloat16)
    if unaligned == "angles":
        rotary = tuple(torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x) for x in rotary)  # type: ignore[assignment]
    width = 128 + (unaligned == "slots")
    buffers = []
    for name in ("keys", "values"):
        shift = int(unaligned == name)
        flat = torch.zeros(9 * width + 1).to(cache_dtype)
        buffers.append(flat[shift : shift + 9 * width].view(9, width)[:, :128].unflatten(1, (2, 64)))
    loc = torch.tensor([8, 0, 3])
    ours.rotate_and_store(q, k, v, *rotary, *buffers, loc)
    assert ours.kernels == ["rotate_any"]
    for buffer, x in zip(buffers, (k, v), strict=True):
        wanted = torch.zeros(9, 2, 64).to(cache_dtype)
        store_rows(wanted, loc, x, 1.0)
        assert torch.equal(buffer.float(), wanted.float())


def test_every_float_is_stored_as_torch_stores_it(ours: Counted) -> None:
    """All bfloat16 values, among them both zeros, subnormal results, ties, infinities and NaNs."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 8, 64)
    rotary = torch.ones(128, 1, 64, dtype=torch.bfloat16), torch.zeros(128, 1, 64, dtype=torch.bfloat16)
    for scale in (1.0, 0.25, 3.0):
        keys, mine, theirs = (torch.zeros(128, 8, 64).to(torch.float8_e4m3fn) for _ in range(3))
        loc = torch.arange(128)
        zeros = torch.zeros_like(values)
        ours.rotate_and_store(zeros, zeros.clone(), values, *rotary, keys, mine, loc, 1.0, scale)
        # As a kernel of torch's on a GPU divides.
        wanted = (values.float() * (1 / torch.tensor(scale))).clamp(-448, 448).to(torch.float8_e4m3fn)
        theirs.copy_(wanted)
        number = ~values.isnan()
        assert torch.equal(mine.view(torch.uint8)[number], theirs.view(torch.uint8)[number])
        assert mine.float()[~number].isnan().all()
        assert not keys.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(0, 64), (1, 128), (7, 6), (300, 64)])
@pytest.mark.parametrize("per_position", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_cos_sin(ours: Counted, dtype: torch.dtype, tokens: int, dim: int, per_position: bool, factor: float) -> None:
    positions = torch.randint(0, 131072, (tokens,))
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    if per_position:
        inv_freq = inv_freq / torch.linspace(1, 3, tokens).unsqueeze(1)
    found = ours.cos_sin(positions, inv_freq, factor, dtype)
    for mine, theirs in zip(found, TORCH_OPERATORS.cos_sin(positions, inv_freq, factor, dtype), strict=True):
        assert_close(mine, theirs)
        assert mine.is_contiguous()
    assert ours.kernels == (["cos_sin"] if tokens else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "n"), [(50, 64), (50, 4096), (7, 5)])
def test_embedding(ours: Counted, dtype: torch.dtype, size: int, n: int) -> None:
    weight = torch.randn(size, n).to(dtype)
    for tokens in (0, 1, 7, 300):
        ids = torch.randint(0, size, (tokens,))
        assert torch.equal(ours.embedding(ids, weight, dtype), weight[ids])
        others = torch.randint(0, 3 * size, (tokens,))
        wanted = TORCH_OPERATORS.embedding(others, weight, dtype, size)
        assert torch.equal(ours.embedding(others, weight, dtype, size), wanted)
        mine = (others >= size) & (others < 2 * size)
        assert torch.equal(wanted[mine], weight[others[mine] - size]) and not wanted[~mine].any()
    assert len(ours.kernels) == 6


# --------------------------------------------------------------------------------------------------- greedy choice
@pytest.mark.parametrize(
    ("rows", "n"), [(0, 5), (1, 1), (3, 7), (2, 33), (1, 4097), (2, 128256), (17, 49152), (20, 5000), (3, 6001)]
)
@pytest.mark.parametrize("layout", ["contiguous", "wide", "odd"])
def test_greedy(ours: Counted, rows: int, n: int, layout: str) -> None:
    x = rows_of((rows, n), layout, torch.float32).round(decimals=1)  # many equal values
    if layout != "contiguous":
        x = torch.nn.functional.pad(x, (4, 9) if layout == "wide" else (3, 8))[:, 4 if layout == "wide" else 3 :][:, :n]
    values, ids = ours.greedy(x)
    wanted = x.max(dim=1).values
    assert torch.equal(values, wanted) and values.dtype == torch.float32 and ids.dtype == torch.int64
    first = torch.arange(n).expand(rows, n).masked_fill(x != wanted.unsqueeze(1), n).amin(dim=1)
    assert torch.equal(ids, first)
    assert ours.kernels == ["greedy"] * bool(rows)
    assert not layers.greedy_plan(x.device).arrived.any()


@pytest.mark.parametrize("n", [1, 2, 7, 130, 9001])
def test_greedy_codes(ours: Counted, n: int) -> None:
    x = special_rows(n)
    values, ids = ours.greedy(x)
    torch.testing.assert_close(values, x.max(dim=1).values, rtol=0, atol=0, equal_nan=True)
    assert ids.tolist() == list(map(wanted_token, x.tolist()))
    assert ours.kernels == ["greedy"]


@pytest.mark.parametrize("why", ["type", "order of values", "distance of values"])
def test_what_the_kernels_do_not_take_is_torchs(ours: Counted, why: str) -> None:
    x = torch.randn(4, 3, 32).bfloat16()
    if why == "type":
        x = x.double()
    elif why == "order of values":
        x = torch.randn(4, 32, 3).bfloat16().transpose(1, 2)
    else:
        x = torch.randn(4, 3, 64).bfloat16()[..., ::2]
    weight = torch.linspace(1, 2, 32).to(x.dtype)
    rotary = angles(TORCH_OPERATORS, 4, 32, x.dtype)
    found = [ours.rms_norm(x, weight, 1e-5), *ours.norm_heads(x, x, weight, weight, 1e-5)]
    found += [ours.rotate(x.clone(memory_format=torch.preserve_format), *rotary)]
    wanted = [TORCH_OPERATORS.rms_norm(x, weight, 1e-5)] * 3 + [TORCH_OPERATORS.rotate(x.clone(), *rotary)]
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert why == "distance of values" or not ours.kernels
