"""The w4a16 kernels on a GPU against float64 on the exact weights, in every tiling, over shapes and traps."""

import dataclasses

import pytest
import torch

from sglang.kernels import w4a16
from sglang.kernels.w4a16_layout import pack
from sglang.kernels.w4a16_tilings import SMALL, WIDE, SmallTiling, WideTiling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
SHAPES = [(16, 64), (100, 192), (77, 1088), (1000, 2048), (4097, 576), (1032, 1088)]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def weight_of(n: int, k: int, scales: tuple[int, int] = (0, 0x7F), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and block scales with bytes in the range ``scales``."""
    g = torch.Generator("cuda").manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), device="cuda", generator=g, dtype=torch.uint8)
    scale = torch.randint(*scales, (n, k // 16), device="cuda", generator=g, dtype=torch.uint8)
    return packed, scale.view(torch.float8_e4m3fn)


def exact_values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    return torch.tensor(E2M1, dtype=torch.float64, device="cuda")[codes] * scale.double().repeat_interleave(16, dim=1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def run(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    parts: list[tuple[int, float]],
    bias: torch.Tensor | None,
    tiling: SmallTiling | WideTiling | None,
) -> torch.Tensor:
    columns = torch.cat([torch.full((size,), value, device="cuda") for size, value in parts])
    y = torch.full((x.shape[0], packed.shape[0]), float("nan"), device="cuda", dtype=x.dtype)
    w4a16.gemm(x, pack(packed, scale, x.dtype), columns, bias, parts, y, tiling)
    return y


def check(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    parts: list[tuple[int, float]],
    bias: torch.Tensor | None,
    tiling: SmallTiling | WideTiling | None,
) -> None:
    """Rounding the result is the only error, where cuBLAS adds a bias rounding before it too; what it makes of bfloat16
    weights is never better."""
    y = run(x, packed, scale, parts, bias, tiling)
    columns = torch.cat([torch.full((size,), value, device="cuda") for size, value in parts]).double()
    weight = exact_values(packed, scale) * columns[:, None]
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    bound = 1.02 * error(expected.to(x.dtype), expected)
    if tiling is None and bias is not None:  # 1.4 times that, or with few values what it happens to be
        twice = ((x.double() @ weight.T).to(x.dtype).double() + bias.double()).to(x.dtype)
        bound = max(1.5 / 1.02 * bound, 1.02 * error(twice, expected))
    assert error(y, expected) <= bound + 2e-6
    if bias is None and x.dtype == torch.bfloat16:
        assert error(y, expected) <= 1.02 * error(x @ weight.bfloat16().T, expected)
    assert torch.equal(y, run(x, packed, scale, parts, bias, tiling)), "the result depends on timing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiling", w4a16.tilings(CAPABILITY), ids=str)
def test_every_tiling_is_exact(tiling: SmallTiling | WideTiling | None, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for seed, (n, k) in enumerate(SHAPES):
        packed, scale = weight_of(n, k, seed=seed)
        cut = n // 3
        parts = [(cut, 3e-4), (n - cut, 1.1e-3)] if seed % 2 else [(n, 1e-3)]
        bias = torch.randn(n, device="cuda", generator=generator).to(dtype) if seed % 3 else None
        most = 8 * tiling.nb if isinstance(tiling, SmallTiling) else tiling.columns if tiling else 64
        one_row = isinstance(tiling, SmallTiling) and tiling.one_row
        for m in (1,) if one_row else (1, most - 3, 2 * most + 5):
            x = torch.randn(m, k + 24, device="cuda", generator=generator).to(dtype)[
                :, 8 : 8 + k
            ]  # rows are not contiguous
            check(x, packed, scale, parts, bias, tiling)


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="wgmma is of compute capability 9.0")
@pytest.mark.parametrize("split", range(2, 9))
@pytest.mark.parametrize("tiling", [tiling for tiling in WIDE if tiling.share == 1], ids=str)
def test_blocks_of_a_cluster_add_up(tiling: WideTiling, split: int) -> None:
    packed, scale = weight_of(300, 1152)
    x = torch.randn(70, 1152, device="cuda", dtype=torch.bfloat16)
    check(x, packed, scale, [(300, 1e-3)], None, dataclasses.replace(tiling, split=split))


@pytest.mark.parametrize("tiling", [tiling for tiling in SMALL if tiling.cut], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4097, 4096), (20000, 1024), (128, 16384), (129, 8192)])
def test_blocks_that_share_a_tile_add_up(tiling: SmallTiling, n: int, k: int) -> None:
    """Of few stages and of many, a tile for a block or for more than two; no block leaves its flag set."""
    if not tiling.fits(CAPABILITY, k):
        pytest.skip("needs more shared memory")
    packed, scale = weight_of(n, k)
    bias = torch.randn(n, device="cuda").bfloat16()
    for m in (1,) if tiling.one_row else (1, 5, 8):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        check(x, packed, scale, [(n, 1e-3)], bias, tiling)
        assert not w4a16.device(0).ready.any()


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="wgmma is of compute capability 9.0")
@pytest.mark.parametrize(
    "tiling", [dataclasses.replace(tiling, share=2) for tiling in WIDE if tiling.share == 1], ids=str
)
def test_blocks_that_share_x_agree(tiling: WideTiling) -> None:
    """Also where the second of two blocks has no weights, and where there are more tiles than blocks."""
    for n, k, m in ((64, 128, 3), (1000, 1088, 300), (20000, 192, 700)):
        packed, scale = weight_of(n, k)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        check(x, packed, scale, [(n, 1e-3)], None, tiling)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 16, 33, 64, 200])
@pytest.mark.parametrize(
    ("scales", "global_scale", "size"),
    [
        ((1, 8), 1.0, 1.0),  # subnormal block scales only
        ((0, 0x7F), 1e-9, 1e3),
        ((0, 0x7F), 1e-6, 6e4),  # activations near the limit of float16; products are far above it
        ((0x7E, 0x7F), 1.0, 1e-3),
    ],
)
def test_traps(scales: tuple[int, int], global_scale: float, size: float, m: int, dtype: torch.dtype) -> None:
    n, k = 512, 1024
    packed, scale = weight_of(n, k, scales)
    x = ((torch.rand(m, k, device="cuda") - 0.5) * 2 * size).to(dtype)
    expected = x.double() @ exact_values(packed, scale).T * global_scale
    tiling = w4a16.device(0).choose(m, n, k)
    for way in (tiling, None):
        y = run(x, packed, scale, [(n, global_scale)], None, way)
        rounding = error(expected.to(dtype), expected)
        assert y.isfinite().all()
        assert error(y, expected) <= 1.02 * rounding + 2e-6


@pytest.mark.parametrize("m", [1, 24, 48, 300])
def test_a_graph_replays_it(m: int) -> None:
    n, k = 640, 1024
    packed, scale = weight_of(n, k)
    weight, columns = pack(packed, scale, torch.bfloat16), torch.full((n,), 1e-3, device="cuda")
    x, y = (
        torch.zeros(m, k, device="cuda", dtype=torch.bfloat16),
        torch.empty(m, n, device="cuda", dtype=torch.bfloat16),
    )
    tiling = w4a16.device(0).choose(m, n, k)
    w4a16.gemm(x, weight, columns, None, [(n, 1e-3)], y, tiling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            w4a16.gemm(x, weight, columns, None, [(n, 1e-3)], y, tiling)
    for seed in range(3):
        x.copy_(torch.randn(m, k, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = x.double() @ exact_values(packed, scale).T * 1e-3
        assert error(y, expected) <= 1.02 * error(expected.bfloat16(), expected)
