"""Chains of kernels that begin before the previous one has ended, and CUDA graphs of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from sglang.kernels import layers, w4a16
from sglang.kernels.w4a16_layout import pack
from sglang.srt.layers.cuda_operators import CudaOperators
from sglang.srt.layers.operators import TORCH_OPERATORS, Operators, operators_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, SLOTS = 1024, 12, 2, 64, 2048, 512


class Product:
    """x W^T with random NVFP4 weights, as the backend w4a16 computes it."""

    def __init__(self, n: int, k: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        packed = torch.randint(0, 256, (n, k // 2), device="cuda", generator=generator, dtype=torch.uint8)
        scale = torch.randint(40, 56, (n, k // 16), device="cuda", generator=generator, dtype=torch.uint8)
        self.value = 0.3 / k**0.5
        self.weight = pack(packed, scale.view(torch.float8_e4m3fn), torch.bfloat16)
        self.scale = torch.full((n,), self.value, device="cuda")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = self.scale.shape[0]
        y = torch.empty(x.shape[0], n, device="cuda", dtype=x.dtype)
        way = w4a16.device(0).choose(x.shape[0], n, x.shape[1])
        w4a16.gemm(x, self.weight, self.scale, None, [(n, self.value)], y, way)
        return y


class Layers:
    """Decoder layers whose attention is replaced by the keys and values that were just cached."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.norms = [torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5 for _ in range(2 * count + 1)]
        self.head_norms = [torch.rand(DIM, device="cuda").bfloat16() + 0.5 for _ in range(2 * count)]
        heads = HEADS + 2 * KV_HEADS
        sizes = ((heads * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
        self.products = [[Product(*size, 10 * i + j) for j, size in enumerate(sizes)] for i in range(count)]
        self.table = torch.randn(1000, HIDDEN, device="cuda").bfloat16()
        self.head = torch.randn(1000, HIDDEN, device="cuda").bfloat16()
        self.cache = [
            [torch.zeros(SLOTS, KV_HEADS, DIM, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
            for _ in range(count)
        ]
        self.inv_freq = 10000.0 ** -(torch.arange(0, DIM, 2, device="cuda") / DIM)

    def __call__(
        self, operators: Operators, ids: torch.Tensor, positions: torch.Tensor, loc: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = operators.embedding(ids, self.table, torch.bfloat16)
        rotary = operators.cos_sin(positions, self.inv_freq, 1.0, torch.bfloat16)
        residual = x
        x = operators.rms_norm(x, self.norms[0], 1e-5)
        for i, (qkv_proj, o_proj, gate_up_proj, down_proj) in enumerate(self.products):
            heads = qkv_proj(x).unflatten(1, (-1, DIM))
            q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q, k = operators.norm_heads(q, k, *self.head_norms[2 * i : 2 * i + 2], 1e-5)
            operators.rotate_and_store(q, k, v, *rotary, *self.cache[i], loc, 0.5, 0.25)
            stored = [buffer.view(torch.uint8)[loc].view(buffer.dtype).bfloat16() for buffer in self.cache[i]]
            mixed = torch.cat(stored * (HEADS // KV_HEADS // 2), dim=1)
            x, residual = operators.add_rms_norm(o_proj((q + mixed).flatten(1)), residual, self.norms[2 * i + 1], 1e-5)
            x = down_proj(operators.silu_and_mul(gate_up_proj(x)))
            x, residual = operators.add_rms_norm(x, residual, self.norms[2 * i + 2], 1e-5)
        logits = torch.mm(x, self.head.T, out_dtype=torch.float32)
        return x, logits, *operators.greedy(logits)


@pytest.fixture(scope="module")
def model() -> Layers:
    return Layers(25)  # 200 launches of ours


def inputs(batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(0, 1000, (batch,), device="cuda", generator=generator)
    positions = torch.randint(0, 5000, (batch,), device="cuda", generator=generator)
    return ids, positions, torch.randperm(SLOTS, device="cuda", generator=generator)[:batch]


@contextmanager
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launch of ours begins when all before it have ended."""

    def after_all(call: Callable[..., None]) -> Callable[..., None]:
        def waiting(*arguments: object) -> None:
            torch.cuda.synchronize()
            call(*arguments)
            torch.cuda.synchronize()

        return waiting

    with monkeypatch.context() as patch:
        patch.setattr(layers, "launch", after_all(layers.launch))
        patch.setattr(w4a16, "gemm", after_all(w4a16.gemm))
        yield


def test_the_gpu_has_our_operators() -> None:
    assert type(operators_for("cuda")) is CudaOperators


@pytest.mark.parametrize("batch", [1, 3, 8, 40, 300])
def test_kernels_that_overlap_compute_what_they_compute_alone(
    model: Layers, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = CudaOperators()
    given = [inputs(batch, seed) for seed in range(20)]
    with one_at_a_time(monkeypatch):
        alone = [model(operators, *one) for one in given]
    together = [model(operators, *one) for one in given]  # enqueued as fast as Python can
    for found, wanted in zip(together, alone, strict=True):
        assert all(map(torch.equal, found, wanted))
        assert wanted[1].isfinite().all()
    assert len({tuple(one[3].tolist()) for one in alone}) > 1


@pytest.mark.parametrize("batch", [1, 8, 40])
def test_a_graph_replays_them_with_other_inputs(model: Layers, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, static = CudaOperators(), inputs(batch, 0)
    given = [inputs(batch, seed) for seed in range(100, 120)]
    with one_at_a_time(monkeypatch):
        alone = [model(operators, *one) for one in given]
    model(operators, *static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = model(operators, *static)
    for one, wanted in zip(given, alone, strict=True):
        for buffer, values in zip(static, one, strict=True):
            buffer.copy_(values)
        graph.replay()
        assert all(map(torch.equal, results, wanted))
    for _ in range(200):  # back to back
        graph.replay()
    assert all(map(torch.equal, results, alone[-1]))
    assert not layers.greedy_plan(torch.device("cuda", 0)).arrived.any()


def test_the_chain_is_what_torch_computes(model: Layers) -> None:
    """Of one layer: roundings that differ in the last place grow from layer to layer."""
    first = Layers.__new__(Layers)
    first.__dict__ = {**model.__dict__, "products": model.products[:1]}
    given = inputs(7, 5)
    found, wanted = (first(operators, *given)[1] for operators in (CudaOperators(), TORCH_OPERATORS))
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.005


def test_another_stream(model: Layers) -> None:
    operators, given = CudaOperators(), inputs(4, 3)
    wanted = model(operators, *given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        copies = [tensor + 0 for tensor in given]
        found = model(operators, *copies)
    stream.synchronize()
    assert all(map(torch.equal, found, wanted))
