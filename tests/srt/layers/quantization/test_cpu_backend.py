"""The CPU kernel: its bits against exact twins in torch, on every instruction set that this CPU has."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang.kernels import cpu_extension
from sglang.srt.layers.quantization.fp4_backends import cpu
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4

GOLDEN = load_file(Path(__file__).parents[3] / "fixtures" / "numerics.safetensors")
GOLDEN_X = sorted(
    {key.rsplit(".", 1)[0] for key in GOLDEN if key.startswith(("quant.", "nan_inf")) and "fast" not in key}
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.skipif(
    (reason := cpu.CpuBackend.unsupported_reason(Target.current("cpu"))) is not None, reason=str(reason)
)


@pytest.fixture(params=cpu_extension.isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpu_extension.load(request.param)
    monkeypatch.setattr(cpu_extension, "load", lambda: library)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_block_order(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``a W^T`` with one float32 addition per block of 16 columns. Of e2m1 times e4m3 values a block is exact."""
    sums = torch.zeros(a.shape[0], w.shape[0])
    for block in range(0, a.shape[1], 16):
        sums += a[:, block : block + 16] @ w[:, block : block + 16].T
    return sums


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32 ``a * b + c`` rounded once: the product is exact in float64, and the sum there is rounded to odd."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    bits = total.view(torch.int64)
    away = (error.sign() * total.sign()).long()
    return torch.where(bits % 2 == 0, bits + away, bits).view(torch.float64).float()


def kept_in_block_order(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The documented arithmetic of weight-only layers."""
    codes = dequantize_nvfp4(packed, torch.ones_like(scale.float()).to(E4M3), 1.0)
    scale = scale.float()
    sums = torch.zeros(x.shape[0], packed.shape[0])
    if x.dtype == torch.bfloat16:
        weights = codes * scale.repeat_interleave(16, dim=1)
        for start in range(0, x.shape[1], 32):
            parts = [torch.zeros_like(sums), torch.zeros_like(sums)]
            for k in range(start, min(start + 32, x.shape[1])):
                parts[k % 2] = fused(x[:, k, None], weights[:, k], parts[k % 2])
            sums += parts[0] + parts[1]
        return sums
    for b in range(scale.shape[1]):
        part = torch.zeros_like(sums)
        for k in range(16 * b, 16 * b + 16):
            part = fused(x[:, k, None], codes[:, k], part)
        sums = fused(part, scale[:, b], sums)
    return sums


@st.composite
def cases(draw: st.DrawFn) -> tuple[NvFp4Weight, torch.Tensor, torch.Tensor | None]:
    """A weight, an input with strides of its own, perhaps a bias."""
    n, blocks, m = draw(st.integers(1, 75)), draw(st.integers(1, 70)), draw(st.integers(1, 15))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    packed = torch.randint(0, 256, (n, blocks * 8), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (n, blocks), generator=g, dtype=torch.uint8)
    for byte in draw(st.lists(st.sampled_from([0, 1, 7, 8, 0x7E]), max_size=2)):
        scale[torch.rand(n, blocks, generator=g) < 0.3] = byte
    if draw(st.booleans()):
        packed[:, : draw(st.integers(0, blocks)) * 8] = 0
    x = torch.randn(m, 16 * blocks, generator=g)
    if draw(st.booleans()):
        x = x * torch.exp2(torch.randint(-12, 5, (m, 16 * blocks), generator=g))
    if draw(st.booleans()):
        x = x * (torch.rand(m, blocks, generator=g) < 0.5).repeat_interleave(16, 1)
    bias = torch.randn(n, 2, generator=g).to(dtype)[:, 0] * 100 if draw(st.booleans()) else None
    global_scale = torch.rand(2, generator=g) * 1e-4 + 1e-7
    input_scale = x.abs().max() / 2688 + 1e-9
    parts = (n // 2, n - n // 2)
    static = Activation.STATIC
    weight = NvFp4Weight(packed, scale.view(E4M3), global_scale, parts, static, dtype, input_scale, 1.0 / input_scale)
    x = x.to(dtype)
    if draw(st.booleans()):
        wider = torch.zeros(m, 16 * blocks + 16, dtype=dtype)
        wider[:, 8:-8] = x
        x = wider[:, 8:-8]
    elif draw(st.booleans()):
        x = x.T.contiguous().T
    return weight, x, bias


hypothesis = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@hypothesis
@given(cases(), st.integers(1, 2))
def test_w4a4_bits(isa: None, case: tuple[NvFp4Weight, torch.Tensor, torch.Tensor | None], threads: int) -> None:
    weight, x, bias = case
    torch.set_num_threads(threads)
    y = NvFp4Linear(weight, cpu.CpuBackend())(x, bias)
    a = dequantize_nvfp4(*quantize_nvfp4(x, weight.input_scale_inv), 1.0)
    sums = in_block_order(a, dequantize_nvfp4(weight.packed, weight.scale, 1.0))
    expected = (sums * (weight.column_scale() * weight.input_scale)).to(x.dtype)
    assert torch.equal(y, expected if bias is None else expected + bias)
    assert torch.equal(y, NvFp4Linear(weight, backends()["torch"]())(x, bias))
    dynamic = dataclasses.replace(weight, activation=Activation.DYNAMIC, input_scale=None, input_scale_inv=None)
    y, expected = (NvFp4Linear(dynamic, backends()[name]())(x, bias) for name in ("cpu", "torch"))
    assert torch.equal(y, expected)


@hypothesis
@given(cases(), st.integers(1, 2))
def test_weight_only_bits_and_error(
    isa: None, case: tuple[NvFp4Weight, torch.Tensor, torch.Tensor | None], threads: int
) -> None:
    weight, x, bias = case
    weight = dataclasses.replace(weight, activation=Activation.NONE)
    torch.set_num_threads(threads)
    y = NvFp4Linear(weight, cpu.CpuBackend())(x, bias)
    sums = kept_in_block_order(x, weight.packed, weight.scale)
    expected = (sums * weight.column_scale()).to(x.dtype)
    assert torch.equal(y, expected if bias is None else expected + bias)
    # Against float64: a float32 rounding for each product of a block and for each block.
    a, w = x.double(), dequantize_nvfp4(weight.packed, weight.scale, 1.0).double()
    bound = (16 + a.shape[1] // 16) * 2.0**-24 * (a.abs() @ w.abs().T)
    assert bool(((sums.double() - a @ w.T).abs() <= bound).all())
    # Backend torch is as far off at most, and rounds the result, and the sum with the bias, as this one does.
    reference = NvFp4Linear(weight, backends()["torch"]())(x, bias).double()
    rounding = 2 * torch.finfo(x.dtype).eps * (expected.double().abs() + reference.abs()) + torch.finfo(x.dtype).tiny
    columns = a.shape[1] * 2.0**-24 * (a.abs() @ w.abs().T)
    assert bool(((y.double() - reference).abs() <= (bound + columns) * weight.column_scale() + rounding).all())


@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.NONE], ids=["w4a4", "weight_only"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(isa: None, activation: Activation, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (70, 1040), generator=g, dtype=torch.uint8)  # more than one chunk of K
    scale = torch.randint(0, 0x7F, (70, 130), generator=g, dtype=torch.uint8).view(E4M3)
    one = torch.tensor(0.01)
    weight = NvFp4Weight(packed, scale, torch.tensor([1e-5]), (70,), activation, dtype, one, 1 / one)
    linear = NvFp4Linear(weight, cpu.CpuBackend())
    x = torch.randn(523, 2080, generator=g).to(dtype)  # more than one tile of rows
    torch.set_num_threads(2)
    y = linear(x)
    if activation is Activation.STATIC:
        assert torch.equal(y, NvFp4Linear(weight, backends()["torch"]())(x))
    torch.set_num_threads(1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 23, 24, 40, 200):
        assert torch.equal(linear(x[-rows:]), y[-rows:])
    assert linear(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("value", [2.0**-100, 2.0**-101, 2.0**-126, 2.0**-133, 2.0**100, 2.0**101, 3e38, torch.inf])
def test_rows_with_values_of_any_size(isa: None, value: float) -> None:
    """Many rows may be computed by instructions that know no subnormal numbers."""
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (40, 64), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (40, 8), generator=g, dtype=torch.uint8).view(E4M3)
    weight = NvFp4Weight(packed, scale, torch.tensor([1.0]), (40,), Activation.NONE, torch.bfloat16)
    linear = NvFp4Linear(weight, cpu.CpuBackend())
    x = torch.randn(33, 128, generator=g).bfloat16()
    x[7:9] *= value
    x[30, 100] = -value
    y, alone = linear(x), torch.cat([linear(row.unsqueeze(0)) for row in x])
    assert torch.equal(y.isnan(), alone.isnan()) and torch.equal(y.nan_to_num(), alone.nan_to_num())
    expected = (kept_in_block_order(x, packed, scale) * weight.column_scale()).bfloat16()
    finite = torch.arange(33) != 30
    finite[7:9] = value < 2.0**100
    assert torch.equal(y[finite], expected[finite])


@pytest.mark.parametrize("name", GOLDEN_X)
def test_quantiser_matches_golden_vectors(isa: None, name: str) -> None:
    """A product with the identity shows the quantised blocks."""
    x, inverse = GOLDEN[f"{name}.x"].view(-1, 16), GOLDEN[f"{name}.global_scale"]
    packed, scale = quantize_nvfp4(torch.eye(16), torch.tensor(448.0 * 6))
    one = torch.ones(())
    weight = NvFp4Weight(packed, scale, torch.full((1,), 1 / 2688), (16,), Activation.STATIC, x.dtype, one, inverse)
    expected = dequantize_nvfp4(GOLDEN[f"{name}.packed"], GOLDEN[f"{name}.scale"].view(E4M3), 1.0)
    expected = expected.view(-1, 16).to(x.dtype)
    rows = expected.isnan().any(1)
    y = NvFp4Linear(weight, cpu.CpuBackend())(x)
    assert torch.equal(y[~rows], expected[~rows]) and bool(y[rows].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_stay_in_their_row(isa: None, dtype: torch.dtype) -> None:
    packed = torch.full((40, 32), 0x22, dtype=torch.uint8)  # ones
    packed[7] = 0
    scale = torch.full((40, 4), 0x38, dtype=torch.uint8).view(E4M3)
    weight = NvFp4Weight(packed, scale, torch.ones(1), (40,), Activation.NONE, dtype)
    x = torch.ones(5, 64, dtype=dtype)
    x[1, 3], x[3, 40] = float("inf"), float("nan")
    y = NvFp4Linear(weight, cpu.CpuBackend())(x)
    expected = torch.full((5, 40), 64, dtype=dtype)
    expected[:, 7], expected[1], expected[1, 7], expected[3] = 0, float("inf"), float("nan"), float("nan")
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())


def test_float16_and_bfloat16_round_as_torch_does(isa: None) -> None:
    """Every exponent, ties, subnormals, overflow: through a product with 1."""
    packed, scale = torch.full((1, 8), 0x20, dtype=torch.uint8), torch.full((1, 1), 0x38, dtype=torch.uint8).view(E4M3)
    mantissas = torch.tensor([0, 1, 2**12, 2**12 + 1, 3 * 2**12, 2**15, 2**15 + 1, 3 * 2**15, 2**23 - 1])
    bits = (torch.arange(255)[:, None] * 2**23 + mantissas).flatten().int()
    columns = bits.view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        n = columns.numel()
        weight = NvFp4Weight(packed.expand(n, 8), scale.expand(n, 1), columns, (1,) * n, Activation.NONE, dtype)
        x = torch.zeros(2, 16, dtype=dtype)
        x[0, 1], x[1, 1] = 1, -1
        y = NvFp4Linear(weight, cpu.CpuBackend())(x)
        assert torch.equal(y[0], columns.to(dtype)) and torch.equal(y[1], -columns.to(dtype))
        every = torch.arange(2**16).int().short().view(dtype)  # every value as an input
        every = every[every.isfinite()].unsqueeze(1) * torch.eye(16)[1].to(dtype)
        one = dataclasses.replace(weight, packed=packed, scale=scale, global_scales=torch.ones(1), part_sizes=(1,))
        assert torch.equal(NvFp4Linear(one, cpu.CpuBackend())(every)[:, 0], every[:, 1])


@given(st.integers(1, 130), st.integers(1, 9), st.integers(0, 2**31))
def test_layout_round_trip(rows: int, blocks: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks * 8), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (rows, blocks), generator=g, dtype=torch.uint8).view(E4M3)
    codes, scales = cpu.to_panels(packed, scale)
    again = cpu.from_panels(codes, scales, rows)
    assert torch.equal(again[0], packed) and torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))
    panels = -(-rows // 32)
    assert codes.nbytes + scales.nbytes == panels * 32 * blocks * 16 * 0.5625


def test_torch_compile_sees_one_operator() -> None:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (48, 32), generator=g, dtype=torch.uint8)
    scale = torch.full((48, 4), 0x38, dtype=torch.uint8).view(E4M3)
    one = torch.tensor(0.01)
    weight = NvFp4Weight(packed, scale, torch.ones(1), (48,), Activation.STATIC, torch.float32, one, 1 / one)
    backend = cpu.CpuBackend()
    prepared = backend.prepare(weight)
    x, bias = torch.randn(3, 64, generator=g), torch.randn(48, 2, generator=g)[:, 0]
    assert torch.equal(backend.apply(x, prepared, bias), NvFp4Linear(weight, backend)(x, bias.contiguous()))
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(lambda x: backend.apply(x, prepared, bias), backend=record, fullgraph=True)
    assert torch.equal(compiled(x), backend.apply(x, prepared, bias))
    assert [len(nodes) for nodes in graphs] == [1] and "cpu_fp4_gemm" in graphs[0][0]
    arguments = (x, prepared.codes, prepared.scales, prepared.column_scale, one, 1 / one, bias)
    torch.library.opcheck(torch.ops.sglang.cpu_fp4_gemm.default, arguments)


def test_reasons() -> None:
    reason = cpu.CpuBackend.unsupported_reason
    assert reason(Target("cuda", (9, 0))) == "needs a CPU; this device is cuda"
    assert reason(Target("cpu", dtype=torch.float64)) == "takes float32, bfloat16 and float16, not torch.float64"
    assert all(reason(Target("cpu", dtype=dtype)) is None for dtype in DTYPES)
    assert reason(Target("cpu", cpu_kernel="needs a C++ compiler")) == "needs a C++ compiler"
    assert cpu.CpuBackend.fix(Target("cpu")) is None and cpu.CpuBackend.fix(Target("cuda")) is None
    weight = NvFp4Weight(
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.zeros(1, 1).to(E4M3),
        torch.ones(1),
        (1,),
        Activation.NONE,
        DTYPES[0],
    )
    with pytest.raises(ValueError, match="prepared for backend torch, not for cpu"):
        cpu.CpuBackend().apply(torch.zeros(1, 16), backends()["torch"]().prepare(weight), None)
