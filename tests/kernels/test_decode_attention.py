"""``decode_attention.cu`` against the formula in float32: on a GPU, and compiled for the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_steps import KINDS, PROCESSORS, attend, decode, on_gpu
from host_cuda import COMPILER, HostKernels

from attention_steps import FP8, Shape, Step, World, error
from sglang.kernels import layers
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.attention.decode_kernel import MOST_SPLITS, DecodeKernel, splits_of
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

BF16, FP16 = torch.bfloat16, torch.float16
# Weights and output are rounded to the type.
BOUND = {BF16: 0.004, FP16: 0.001}
WINDOWS = (None, 1, 100)


def check(kernel: DecodeKernel, step: Step) -> None:
    shape = step.world.shape
    for layer_id, wanted in enumerate(step.reference()):
        out = attend(kernel, step, layer_id)
        assert out.dtype == shape.dtype and out.shape == (len(step.batch.seq_lens_list), shape.heads * shape.dim)
        assert error(out, wanted, shape.heads) < BOUND[shape.dtype], f"window {shape.windows[layer_id]}"


@pytest.mark.parametrize(
    ("kind", "dim", "group"),
    [
        *(("bf16", dim, group) for dim, group in ((64, 1), (64, 7), (128, 4), (128, 8), (256, 3))),
        *(("fp16", dim, group) for dim, group in ((64, 3), (128, 8))),
        *(("bf16-fp8", dim, group) for dim, group in ((64, 5), (128, 4), (256, 8))),
        ("fp16-fp8", 128, 2),
    ],
)
def test_steps(device: str, kind: str, dim: int, group: int) -> None:
    """One block per KV head and many, more than tiles of tokens, tiles that are not full, unused slots of NaN."""
    dtype, kv_dtype = KINDS[kind]
    shape = Shape(2 * group, 2, dim, dtype, kv_dtype, 1, WINDOWS, device=device)
    world = World(shape, 8, 1100)
    few, some, many = (DecodeKernel(shape.target(), 16, processors) for processors in (1, PROCESSORS, 132))
    for kernel, lengths in (
        (some, [17, 63, 1, 64, 65, 129, 3, 257]),
        (few, [2, 15, 16, 500]),
        (many, [1100]),
        (many, [1]),
    ):
        check(kernel, decode(world, lengths))
    check(some, decode(world, [400, 5], padding=1))


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_number_of_heads_and_requests(device: str, kv_heads: int) -> None:
    shape = Shape(4 * kv_heads, kv_heads, 64, page_size=16, device=device)
    world = World(shape, 8, 400)
    kernel = DecodeKernel(shape.target(), 8 * kv_heads, PROCESSORS)
    for requests in range(1, 9):
        check(kernel, decode(world, [1 + 57 * number for number in range(requests)]))


def test_the_largest_score_may_be_anywhere(device: str) -> None:
    """Of the tokens that a warp has, of those of a block and of all."""
    shape = Shape(device=device)
    world, kernel = World(shape, 4, 1300), DecodeKernel(shape.target(), 8, 132)
    step = decode(world, [1300] * 4)
    for number, place in enumerate((0, 40, 700, 1299)):
        world.buffers(world.layers[0])[0][world.slots[number, place]] *= 4
    check(kernel, step)


def test_the_same_bits_again_whatever_came_between(device: str) -> None:
    shape = Shape(device=device)
    world, kernel = World(shape, 8, 900), DecodeKernel(shape.target(), 16, PROCESSORS)
    short, long = decode(world, [30] * 8), decode(world, [900, 300, 1])
    first = attend(kernel, long)
    for _ in range(3):
        attend(kernel, short)
        assert torch.equal(attend(kernel, long), first)


@pytest.mark.parametrize("kind", ["bf16", "bf16-fp8"])
def test_what_is_no_number_stays_in_its_request(device: str, kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    shape = Shape(8, 2, 64, dtype, kv_dtype, device=device)
    world, kernel = World(shape, 5, 300), DecodeKernel(shape.target(), 10, PROCESSORS)
    step = decode(world, [300, 40, 300, 7, 1])
    wanted = attend(kernel, step)
    q = step.qkv[0][:, :8].clone()
    q[1, :, 3] = torch.nan
    keys, values = (buffer.view(torch.uint8) for buffer in world.buffers(world.layers[0]))
    keys[world.slots[2, 123]] = 0xFF
    values[world.slots[3, 6]] = 0xFF
    out = attend(kernel, step, q=q)
    assert torch.equal(out[[0, 4]], wanted[[0, 4]]) and wanted.isfinite().all()
    assert out[1:4].isnan().all()


def test_queries_of_any_size_meet_an_fp8_cache(device: str) -> None:
    """They are multiplied in float16: a power of two must change nothing, whatever the other heads are."""
    shape = Shape(8, 2, 64, BF16, FP8, device=device)
    world, kernel = World(shape, 2, 300), DecodeKernel(shape.target(), 4, PROCESSORS)
    step = decode(world, [300, 21])
    wanted, q = attend(kernel, step).view(2, 8, 64), step.qkv[0][:, :8]
    for power in (60, -60):
        assert torch.equal(attend(kernel, step, q=q * 2.0**power, factor=2.0**-power).view(2, 8, 64), wanted)
    mixed = q.clone()
    mixed[:, ::2] *= 2.0**60
    mixed[:, 1] = 0.0
    assert torch.equal(attend(kernel, step, q=mixed).view(2, 8, 64)[:, 3::2], wanted[:, 3::2])


def test_every_fp8_value(device: str) -> None:
    """The output of a request of one token is its value."""
    shape = Shape(1, 1, 64, BF16, FP8, device=device)
    world, kernel = World(shape, 4, 1), DecodeKernel(shape.target(), 4, PROCESSORS)
    step = decode(world, [1] * 4)
    world.layers[0].v_scale = 0.5
    stored = torch.arange(256, dtype=torch.uint8, device=device).view(4, 1, 64)
    world.buffers(world.layers[0])[1].view(torch.uint8)[world.slots[:4, 0]] = stored
    wanted = (stored.view(FP8).float() * 0.5).to(BF16)
    torch.testing.assert_close(attend(kernel, step).view(4, 1, 64), wanted, rtol=0, atol=0, equal_nan=True)


def test_heads_of_queries_may_lie_apart(device: str) -> None:
    shape = Shape(device=device)
    world, kernel = World(shape, 3, 100), DecodeKernel(shape.target(), 6, PROCESSORS)
    step = decode(world, [100, 3, 64])
    wide = torch.full((3, 8, 192), torch.nan, dtype=BF16, device=device)
    wide[..., 64:128] = step.qkv[0][:, :8]
    assert torch.equal(attend(kernel, step, q=wide[..., 64:128]), attend(kernel, step))


def test_splits() -> None:
    assert [splits_of(pairs, 3 * 132) for pairs in (8, 16, 64, 128, 256, 396, 4000)] == [24, 24, 6, 3, 3, 1, 2]
    for pairs in range(1, 1000):
        assert 1 <= splits_of(pairs, 300) <= MOST_SPLITS


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "unavailable", lambda index: "old" if index else None)
    target = replace(Shape().target(), device=torch.device("cuda", 0))
    assert DecodeKernel.takes(target) and DecodeKernel.takes(replace(target, kv_cache_dtype=FP8, num_heads=16))
    for change in (
        {"device": torch.device("cpu")}, {"device": torch.device("cuda", 1)}, {"dtype": torch.float32},
        {"kv_cache_dtype": FP16}, {"head_dim": 80}, {"num_heads": 18},
    ):  # fmt: skip
        assert not DecodeKernel.takes(replace(target, **change))


# ------------------------------------------------------------------------------------------------ attention backend
class NoKernels:
    """In the place of FlashInfer's wrappers: notes how many requests are planned for, and computes nothing."""

    planned: list[int]

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self._int_workspace_buffer = workspace

    def plan(self, **arguments: Any) -> None:
        indptr = arguments.get("indptr", arguments.get("paged_kv_indptr"))
        self.planned.append(len(indptr) - 1)

    def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
        pass

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], **options: Any) -> None:
        options["out"].fill_(torch.nan)


class HostDecodeKernel(DecodeKernel):
    def __init__(self, target: AttentionTarget, most_pairs: int) -> None:
        super().__init__(target, most_pairs, PROCESSORS)

    @staticmethod
    def takes(target: AttentionTarget) -> bool:
        return True


@pytest.fixture
def planned(host_kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What ``NoKernels`` note."""
    if COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(layers, "launch", host_kernels.launch)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1 << 10)
    package = flashinfer_backend.Package(NoKernels, NoKernels, lambda wrapper, **step: wrapper.plan(**step))
    monkeypatch.setattr(flashinfer_backend, "package", lambda: package)
    sizes: list[int] = []
    monkeypatch.setattr(NoKernels, "planned", sizes, raising=False)
    monkeypatch.setattr(FlashInferAttnBackend, "own_decode_pairs", 6)
    return sizes


def test_steps_of_few_requests_are_not_planned(
    planned: list[int], host_kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(windows=(None, 20), page_size=4)
    world = World(shape, 8, 300)
    for kernel, largest in ((HostDecodeKernel, 3), (DecodeKernel, 0)):
        monkeypatch.setattr(flashinfer_backend, "DecodeKernel", kernel)
        backend = FlashInferAttnBackend(shape.target())
        backend.init_cuda_graph_state(8, 300)
        for lengths, padding in (([300], 0), ([20, 1, 299], 0), ([65], 2), ([9] * 4, 0), ([9], 3)):
            for prepare in (backend.init_forward_metadata, backend.init_graph_metadata):
                step = world.step([(length - 1, 1) for length in lengths], padding)
                planned.clear()
                host_kernels.launched.clear()
                prepare(step.batch)
                outputs = step.forward(backend)
                requests = len(lengths) + padding
                if requests > largest:
                    assert set(planned) == {requests} and outputs[0].isnan().all()
                    continue
                assert not planned
                assert [name for name, *_ in host_kernels.launched] == ["decode_attention"] * len(shape.windows)
                for ours, wanted in zip(outputs, step.reference(), strict=True):
                    assert error(ours, wanted, shape.heads) < BOUND[BF16]
        planned.clear()
        world.step([(0, 5)]).run(backend)
        assert planned == [1, 1]


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernel_does_not_read_is_stored_before(
    kind: str, rotate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a projection that are no multiples of 16 bytes."""
    monkeypatch.setattr(flashinfer_backend, "DecodeKernel", HostDecodeKernel)
    stored: list[bool] = []
    attention = HostDecodeKernel.__call__

    def noting(self: DecodeKernel, *arguments: Any) -> torch.Tensor:
        stored.append(arguments[-2] is None)
        return attention(self, *arguments)

    monkeypatch.setattr(HostDecodeKernel, "__call__", noting)
    dtype, kv_dtype = KINDS[kind]
    shape = Shape(dtype=dtype, kv_dtype=kv_dtype)
    world, backend = World(shape, 3, 100), FlashInferAttnBackend(shape.target())
    step = world.step([(99, 1), (0, 1), (64, 1)], rotate=rotate)
    backend.init_forward_metadata(step.batch)
    (qkv,), (layer,) = step.qkv, world.layers
    whole = torch.zeros(3, 12 * 64 + 4, dtype=dtype)
    apart = whole[:, : 12 * 64].unflatten(1, (12, 64))
    stored.clear()
    for rows in (qkv.clone(), apart):
        rows.copy_(qkv)
        q, k, v = rows.clone()[:, :8], rows[:, 8:10], rows[:, 10:]
        for buffer in world.buffers(layer):
            buffer.view(torch.uint8)[step.batch.out_cache_loc] = 0xFF
        out = torch.empty(3, 8 * 64, dtype=dtype)
        assert backend.forward(q, k, v, layer, step.batch, step.rotary, out) is out
        assert error(out, step.reference()[0], shape.heads) < BOUND[dtype]
    assert stored == [False, True]


# --------------------------------------------------------------------------------------------------- on a GPU alone
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 4)])
def test_long_requests(kind: str, dim: int, group: int) -> None:
    dtype, kv_dtype = KINDS[kind]
    shape = Shape(2 * group, 2, dim, dtype, kv_dtype, 1, (None, 3000), 9000, "cuda")
    world, kernel = World(shape, 8, 9000), DecodeKernel(shape.target(), 16)
    for lengths in ([9000], [8192, 1, 3123], [700 * number + 1 for number in range(8)]):
        check(kernel, decode(world, lengths))


@on_gpu
@pytest.mark.parametrize("requests", [1, 8])
def test_a_graph_fits_other_lengths(requests: int) -> None:
    shape = Shape(32, 8, 128, BF16, BF16, 1, WINDOWS, 4096, "cuda")
    world, kernel = World(shape, requests, 4096), DecodeKernel(shape.target(), 64)
    static, layer_ids = decode(world, [1] * requests), range(len(WINDOWS))

    def run() -> list[torch.Tensor]:
        where = world.rows.req_to_token, static.batch.req_pool_indices, static.batch.seq_lens
        return [
            kernel(static.qkv[i][:, :32], *world.buffers(world.layers[i]), *where, WINDOWS[i], world.layers[i].scaling)
            for i in layer_ids
        ]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for first in (4096, 1, 64, 1024, 17):
        step = decode(world, [max(1, first - 411 * number) for number in range(requests)])
        for name in ("req_pool_indices", "seq_lens"):
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for mine, others in zip(static.qkv, step.qkv, strict=True):
            mine.copy_(others)
        for _ in range(20):  # back to back
            graph.replay()
        for i, wanted in zip(layer_ids, step.reference(), strict=True):
            assert error(outputs[i], wanted, 32) < BOUND[BF16], f"window {WINDOWS[i]}"
            assert torch.equal(outputs[i], attend(kernel, step, i))
