"""What ``w4a16_small.cu`` computes around a product, against the operators that do it one by one: on a GPU, and
compiled for the CPU."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from host_cuda import NEEDS_COMPILER, ON_GPU, ON_HOST, HostKernels

from sglang.kernels import layers, w4a16
from sglang.kernels.w4a16_layout import pack
from sglang.kernels.w4a16_tilings import SMALL, SMALL_ELSEWHERE, SmallTiling
from sglang.srt.layers.cuda_operators import CudaOperators
from sglang.srt.layers.fusion import SUMMED, AddRMSNorm, SiluAndMul, UnscaledRows
from sglang.srt.layers.quantization.fp4_backends.w4a16 import W4A16Backend
from sglang.srt.layers.quantization.fp4_verify import make_batch, random_layers
from sglang.srt.layers.quantization.fp4_verify_fused import check_fused
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
HOST = w4a16.Device(0, (8, 0), 3, ((1, 3),), torch.empty(1 << 22, dtype=torch.uint8), torch.zeros(6, dtype=torch.int32))
# For one row and for each number of columns: row blocks that are odd and even for a warp, and tiles that blocks share.
ON_HOST_TILINGS = (
    *(next(tiling for tiling in SMALL if tiling.one_row and tiling.rb == rb) for rb in (2, 3)),
    next(tiling for tiling in SMALL if tiling.one_row and tiling.cut),
    *(next(tiling for tiling in SMALL if (tiling.one_row, tiling.nb, tiling.rb) == (False, 1, rb)) for rb in (2, 3)),
    next(tiling for tiling in SMALL if not tiling.one_row and tiling.cut),
    *(next(tiling for tiling in SMALL if tiling.nb == nb) for nb in (2, 4)),
    SMALL_ELSEWHERE[0],
)


@pytest.fixture
def on_host(host_kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever ``w4a16`` and ``layers`` launch runs on the host, on a device of three multiprocessors."""

    def kernel_of(tiling: SmallTiling, dtype: torch.dtype, index: int | None) -> SimpleNamespace:
        program, threads = w4a16.program(tiling, dtype, HOST.capability), tiling.threads(HOST.capability)

        def launch(grid: tuple[int, int], shared: int, stream: int, params: object) -> object:
            return lambda: host_kernels.run("w4a16_gemm", program, grid, threads, bytes(params))  # type: ignore[call-overload]

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(layers, "launch", host_kernels.launch)
    monkeypatch.setattr(w4a16, "device", lambda index: HOST)
    monkeypatch.setattr(w4a16, "_kernel_of", kernel_of)
    monkeypatch.setattr(w4a16, "prepare", lambda dtype, index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    w4a16._small.cache_clear()
    yield
    w4a16._small.cache_clear()


@pytest.fixture(params=[ON_HOST, ON_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        request.getfixturevalue("on_host")
    yield request.param
    assert not w4a16.device(0).ready.any()


class Product:
    """An NVFP4 weight and inputs for it."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        packed = torch.randint(0, 256, (n, k // 2), generator=self.generator, dtype=torch.uint8)
        scale = torch.randint(0x20, 0x48, (n, k // 16), generator=self.generator, dtype=torch.uint8)
        self.packed = pack(packed.to(device), scale.view(torch.float8_e4m3fn).to(device), dtype)
        self.columns = self.random(n).abs().float() * k**-0.5 / 4

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.device, self.dtype)

    def run(
        self,
        x: torch.Tensor,
        tiling: SmallTiling,
        fusion: w4a16.Fusion = w4a16.PLAIN,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n = self.n // 2 if fusion.gate else self.n
        y = torch.full((x.shape[0], n), torch.nan, dtype=self.dtype, device=self.device)
        w4a16.gemm(x, self.packed, self.columns, bias, [(self.n, 1.0)], y, tiling, fusion)
        return y


def tilings(device: str) -> tuple[SmallTiling, ...]:
    if device == "cpu":
        return ON_HOST_TILINGS
    return tuple(way for way in w4a16.tilings(torch.cuda.get_device_capability()) if isinstance(way, SmallTiling))


def rows_for(tiling: SmallTiling, rows: int) -> int:
    return 1 if tiling.one_row else rows


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_gate_has_the_bits_of_the_operator(device: str, dtype: torch.dtype) -> None:
    even = [tiling for tiling in tilings(device) if tiling.rows // 16 % 2 == 0]
    for tiling in even[: 3 if dtype == FP16 and device == "cpu" else None]:  # compiling takes seconds
        # A tile that both halves end in, and one that the gates end before.
        for n, k, rows in ((160, 192, 1), (352, 320, 8 * tiling.nb), (64, 1088, 8 * tiling.nb + 1)):
            m = rows_for(tiling, rows)
            product = Product(n, k, dtype, device)
            for bias in (None, product.random(n)):
                x = product.random(m, k)
                wanted = CudaOperators().silu_and_mul(product.run(x, tiling, bias=bias))
                assert torch.equal(product.run(x, tiling, w4a16.Fusion(gate=True), bias), wanted), (tiling, n, k, m)


def test_sums_and_norms_follow_a_product(device: str) -> None:
    for tiling in tilings(device):
        for n, k, rows in ((96, 192, 1), (336, 320, 8 * tiling.nb), (64, 1088, 8 * tiling.nb + 1)):
            m = rows_for(tiling, rows)
            product = Product(n, k, BF16, device)
            x, weight, residual = product.random(m, k), product.random(n), product.random(m, n)
            bias = product.random(n) if m > 1 else None
            total = product.run(x, tiling, bias=bias) + residual
            squares = torch.full((m, n // SUMMED), torch.nan, device=device)
            fusion = w4a16.Fusion(residual=residual, norm_weight=weight, squares=squares)
            y = product.run(x, tiling, fusion, bias)
            assert torch.equal(residual, total)
            assert torch.equal(y, total * weight)
            torch.testing.assert_close(squares, total.float().square().view(m, -1, SUMMED).sum(-1), rtol=1e-5, atol=0)


def test_a_product_is_divided_where_its_input_is_not(device: str) -> None:
    for tiling in tilings(device):
        for n, k, rows in ((96, 192, 1), (336, 320, 8 * tiling.nb), (64, 1088, 8 * tiling.nb + 1)):
            m = rows_for(tiling, rows)
            product = Product(n, k, BF16, device)
            total, bias = product.random(m, k), product.random(n)
            squares = total.float().square().view(m, -1, SUMMED).sum(-1)
            rms = (squares.sum(-1, keepdim=True) / k + EPS).sqrt()
            fusion = w4a16.Fusion(x_squares=squares, x_eps=EPS)
            y = product.run(total, tiling, fusion, bias)
            # The plain product is rounded once more.
            plain = product.run(total, tiling).float() / rms + bias.float()
            assert (y.float() - plain).norm() < 0.004 * plain.norm(), (tiling, n, k, m)
            for power in (50, -50):  # of the first row: no other is harmed
                factor = 2.0 ** (power * torch.eye(m, 1, device=device))
                scaled = w4a16.Fusion(x_squares=squares * factor.square(), x_eps=0.0)
                unscaled = w4a16.Fusion(x_squares=squares, x_eps=0.0)
                x = (total.float() * factor).to(BF16)
                assert torch.equal(product.run(x, tiling, scaled), product.run(total, tiling, unscaled))


@NEEDS_COMPILER
def test_the_previous_kernel_writes_until_it_has_ended(
    host_kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, on_host: None
) -> None:
    product = Product(352, 1088, BF16, "cpu")
    for tiling in ON_HOST_TILINGS:
        m = rows_for(tiling, 3)
        x, squares = product.random(m, 1088), product.random(m, 1088 // SUMMED).float().square()
        fusion = w4a16.Fusion(x_squares=squares, x_eps=EPS)
        wanted, ended = product.run(x, tiling, fusion), (x.clone(), squares.clone())

        def previous(
            has_ended: bool, now: tuple[torch.Tensor, ...] = (x, squares), then: tuple[torch.Tensor, ...] = ended
        ) -> None:
            for part, value in zip(now, then, strict=True):
                part.copy_(value if has_ended else torch.full_like(value, torch.nan))

        with monkeypatch.context() as patch:
            patch.setattr(host_kernels, "previous", previous)
            assert torch.equal(product.run(x, tiling, fusion), wanted) and wanted.isfinite().all(), tiling


@pytest.mark.parametrize("rows", [1, 8, 17])
def test_a_chain_of_layers(device: str, rows: int) -> None:
    """Through the backend, as a model's layer uses it, beside the same steps one by one."""
    hidden, inner = 576, 768
    backend, operators = W4A16Backend(), CudaOperators()
    generator = torch.Generator().manual_seed(1)

    def linear(n: int, k: int, parts: int = 1) -> NvFp4Linear:
        packed = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8).to(device)
        scale = torch.randint(0x28, 0x40, (n, k // 16), generator=generator, dtype=torch.uint8).to(device)
        scales = torch.tensor([0.2, 0.3], device=device)[:parts] * k**-0.5
        sizes = (n // parts,) * parts
        weight = NvFp4Weight(packed, scale.view(torch.float8_e4m3fn), scales, sizes, Activation.NONE, BF16)
        return NvFp4Linear(weight, backend)

    o_proj, gate_up, down, qkv = (
        linear(hidden, 512),
        linear(2 * inner, hidden, 2),
        linear(hidden, inner),
        linear(96, hidden),
    )
    attention = torch.randn(rows, 512, generator=generator).to(device, BF16)
    residual = torch.randn(rows, hidden, generator=generator).to(device, BF16)
    norms = [(1 + 0.1 * torch.randn(hidden, generator=generator)).to(device, BF16) for _ in range(2)]

    x, between = operators.add_rms_norm(o_proj(attention), residual, norms[0], EPS)
    x, after = operators.add_rms_norm(down(operators.silu_and_mul(gate_up(x))), between, norms[1], EPS)
    wanted = qkv(x)

    assert all(layer.fuses(AddRMSNorm, rows) for layer in (o_proj, down))
    assert gate_up.fuses(UnscaledRows, rows) and gate_up.fuses(SiluAndMul, rows)
    assert qkv.fuses(UnscaledRows, rows) and not qkv.fuses(SiluAndMul, rows)
    stream = residual.clone()
    rest = o_proj.fused(attention, None, AddRMSNorm(stream, norms[0], EPS))
    assert isinstance(rest, UnscaledRows) and torch.equal(stream, between)
    inner_values = gate_up.fused(rest, None, SiluAndMul())
    rest = down.fused(inner_values, None, AddRMSNorm(stream, norms[1], EPS))
    found = qkv.fused(rest, None)
    assert isinstance(found, torch.Tensor) and found.shape == wanted.shape
    for ours, theirs in ((stream, after), (found, wanted)):
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_verify_fp4_finds_nothing(device: str, dtype: torch.dtype) -> None:
    """With its own layers: scales from the smallest to the largest, halves with unequal ones, a bias."""
    generator = torch.Generator(device).manual_seed(0)
    *_, layer = random_layers(192, 320, dtype, generator)
    assert layer.kind == "W4A16, 2 parts, bias"
    linear = NvFp4Linear(layer.weight, W4A16Backend())
    for rows in (1, 7, 17) if dtype == BF16 else (1,):
        x, exact = make_batch(layer, rows, seed=rows)
        assert linear.fuses(SiluAndMul, rows) and linear.fuses(AddRMSNorm, rows) == (dtype == BF16)
        assert check_fused(linear, x, layer.bias, exact.limit) == "ok"


def test_what_can_be_fused(device: str) -> None:
    def fuses(rows: int, n: int = 64, k: int = 64, dtype: torch.dtype = BF16, sizes: tuple[int, ...] = (32, 32)) -> str:
        packed = torch.zeros(n, k // 2, dtype=torch.uint8, device=device)
        scale = torch.zeros(n, k // 16, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.ones(len(sizes), device=device)
        layer = NvFp4Linear(NvFp4Weight(packed, scale, scales, sizes, Activation.NONE, dtype), W4A16Backend())
        return " ".join(step.__name__ for step in (UnscaledRows, SiluAndMul, AddRMSNorm) if layer.fuses(step, rows))

    everything = "UnscaledRows SiluAndMul AddRMSNorm"
    assert fuses(1) == fuses(8) == everything
    assert fuses(1, dtype=FP16) == "SiluAndMul", "sums without the division are too large for float16"
    for n, sizes in ((64, (48, 16)), (64, (64,)), (48, (24, 24))):
        assert fuses(1, n, sizes=sizes) == "UnscaledRows AddRMSNorm"
    assert fuses(1, n=40, sizes=(20, 20)) == fuses(1000) == ""
    assert fuses(1, k=48) == "", "the input is padded"
