"""``decode_attention.cu`` that rotates and stores has the bits of ``rotate_and_store`` and then attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_steps import BF16, KINDS, PROCESSORS, attend, on_gpu, scales_of
from host_cuda import NEEDS_COMPILER, HostKernels

from attention_steps import Shape, Step, World
from sglang.kernels import layers
from sglang.srt.layers.attention.base_attn_backend import Rotary
from sglang.srt.layers.attention.decode_kernel import DecodeKernel, NewTokens
from sglang.srt.layers.cuda_operators import CudaOperators
from sglang.srt.layers.operators import TORCH_OPERATORS

# Of 97 tokens the newest is alone in its tile of 16.
WINDOWS = (None, 1, 97)


def new_step(world: World, lengths: list[int], padding: int = 0) -> Step:
    """A step whose new tokens are not in the cache yet: their slots have NaN. Some values saturate in e4m3."""
    step = world.step([(length - 1, 1) for length in lengths], padding, rotate=False)
    for layer, qkv in zip(world.layers, step.qkv, strict=True):
        qkv[:, -world.shape.kv_heads :] *= 10
        for buffer in world.buffers(layer):
            buffer.view(torch.uint8)[step.batch.out_cache_loc] = 0xFF
    return step


def rotary_of(step: Step) -> Rotary:
    shape, positions = step.world.shape, step.batch.seq_lens * 37
    inv_freq = 10000.0 ** -(torch.arange(0, shape.dim, 2, device=shape.device) / shape.dim)
    return TORCH_OPERATORS.cos_sin(positions, inv_freq, 1.0, shape.dtype)


def check(kernel: DecodeKernel, step: Step) -> None:
    world, loc, rotary = step.world, step.batch.out_cache_loc, rotary_of(step)
    parts = (world.shape.heads, world.shape.kv_heads, world.shape.kv_heads)
    for layer_id, (layer, qkv) in enumerate(zip(world.layers, step.qkv, strict=True)):
        buffers = world.buffers(layer)
        stored = [buffer.view(torch.uint8) for buffer in buffers]
        before = [bytes_.clone() for bytes_ in stored]
        q, k, v = qkv.clone().split_with_sizes(parts, dim=1)
        CudaOperators().rotate_and_store(q, k, v, *rotary, *buffers, loc, *scales_of(world, layer_id))
        wanted, then = attend(kernel, step, layer_id, q), [bytes_.clone() for bytes_ in stored]
        for bytes_, old in zip(stored, before, strict=True):
            bytes_.copy_(old)
        given = qkv.clone()
        q, k, v = given.split_with_sizes(parts, dim=1)
        found = attend(kernel, step, layer_id, q, new=NewTokens(k, v, rotary))
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)) and wanted.isfinite().all()
        assert all(map(torch.equal, stored, then)) and torch.equal(given, qkv)


@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 4), (256, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_two_launches(device: str, kind: str, dim: int, group: int) -> None:
    """The newest token alone, first or last in its tile, in the first of a warp's tiles and in a later one."""
    shape = Shape(2 * group, 2, dim, *KINDS[kind], 1, WINDOWS, device=device)
    world = World(shape, 8, 700)
    few, some, many = (DecodeKernel(shape.target(), 16, processors) for processors in (1, PROCESSORS, 132))
    for kernel, lengths, padding in (
        (some, [1, 16, 17, 18, 65, 129, 300], 1),
        (few, [2, 33, 500], 0),
        (many, [700], 0),
        (many, [641], 0),
        (many, [1], 0),
    ):
        check(kernel, new_step(world, lengths, padding))


@NEEDS_COMPILER
@pytest.mark.parametrize("length", [1, 17, 65, 300])
def test_only_what_the_previous_kernel_does_not_write_is_read_before_it_ends(
    host_kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(layers, "launch", host_kernels.launch)
    shape = Shape(8, 2, 64)
    world, kernel = World(shape, 2, 400), DecodeKernel(shape.target(), 4, PROCESSORS)
    step = new_step(world, [length, 400])
    q, k, v = (part.clone() for part in step.qkv[0].split_with_sizes((8, 2, 2), dim=1))
    new, ended = NewTokens(k, v, rotary_of(step)), [part.clone() for part in (q, k, v)]
    wanted = attend(kernel, step, 0, q, new=new)

    def previous(has_ended: bool) -> None:
        for part, value in zip((q, k, v), ended, strict=True):
            part.copy_(value if has_ended else torch.full_like(value, torch.nan))

    monkeypatch.setattr(host_kernels, "previous", previous)
    assert torch.equal(attend(kernel, step, 0, q, new=new), wanted) and wanted.isfinite().all()


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_number_of_heads_and_requests(device: str, kv_heads: int) -> None:
    shape = Shape(5 * kv_heads, kv_heads, 64, page_size=16, device=device)
    world, kernel = World(shape, 8, 400), DecodeKernel(shape.target(), 8 * kv_heads, PROCESSORS)
    for requests in range(1, 9):
        check(kernel, new_step(world, [1 + 57 * number for number in range(requests)]))


@pytest.mark.parametrize("length", [1, 300])
def test_padding_may_repeat_a_request(device: str, length: int) -> None:
    """As ``DecodeGraphRunner`` pads where rows depend on each other."""
    shape = Shape(device=device)
    world, kernel = World(shape, 1, 300), DecodeKernel(shape.target(), 16, PROCESSORS)
    one = new_step(world, [length])
    cos, signed_sin = (x.repeat(8, 1, 1) for x in rotary_of(one))
    batch = replace(
        one.batch, req_pool_indices=one.batch.req_pool_indices.repeat(8), seq_lens=one.batch.seq_lens.repeat(8)
    )
    many = replace(one, batch=batch, qkv=[one.qkv[0].repeat(8, 1, 1)])
    k, v = many.qkv[0][:, 8:].chunk(2, dim=1)
    found = attend(kernel, many, new=NewTokens(k, v, (cos, signed_sin)))
    assert torch.equal(found, found[:1].expand_as(found)) and found.isfinite().all()
    check(kernel, one)
    q = CudaOperators().rotate(many.qkv[0][:, :8].clone(), cos, signed_sin)
    assert torch.equal(attend(kernel, many, q=q), found)


@pytest.mark.parametrize("kind", KINDS)
def test_without_angles_it_only_stores(device: str, kind: str) -> None:
    shape = Shape(8, 2, 64, *KINDS[kind], device=device)
    world, kernel = World(shape, 3, 100), DecodeKernel(shape.target(), 6, PROCESSORS)
    layer = world.layers[0]
    # Powers of two: torch on a CPU divides by them, the kernel multiplies by the reciprocals.
    layer.k_scale, layer.v_scale = 0.5, 0.25
    step = new_step(world, [100, 1, 65])
    k, v = step.qkv[0][:, 8:].chunk(2, dim=1)
    found = attend(kernel, step, new=NewTokens(k, v, None))
    stored = [buffer.view(torch.uint8).clone() for buffer in world.buffers(layer)]
    world.pool.set_kv_buffer(layer, step.batch.out_cache_loc, k, v)
    assert all(torch.equal(x, y.view(torch.uint8)) for x, y in zip(stored, world.buffers(layer), strict=True))
    assert torch.equal(found, attend(kernel, step)) and found.isfinite().all()


def test_what_it_reads() -> None:
    k, v = torch.zeros(3, 8, 64, dtype=BF16)[:, 4:].chunk(2, dim=1)
    cos = torch.zeros(3, 1, 64, dtype=BF16)
    assert NewTokens(k, v, (cos, cos)).readable(BF16) and NewTokens(k, v, None).readable(BF16)
    assert NewTokens(k[:, ::2], v[:, ::2], (cos, cos)).readable(BF16)  # one head: how far from the next means nothing
    odd, wide = torch.zeros(3 * 128 + 1, dtype=BF16)[1:], torch.zeros(3, 132, dtype=BF16)[:, :128]
    for other in (
        k.float(), torch.zeros(3, 4, 64, dtype=BF16)[:, ::2], torch.zeros(3, 2, 128, dtype=BF16)[..., ::2],
        odd.view(3, 2, 64), wide.unflatten(1, (2, 64)),
    ):  # fmt: skip
        assert not NewTokens(other, v, None).readable(BF16) and not NewTokens(k, other, None).readable(BF16)
    for angles in (cos.float(), cos[:1], cos.expand(3, 2, 64), odd[:192].view(3, 1, 64), cos[..., :32]):
        for rotary in ((angles, cos), (cos, angles)):
            assert not NewTokens(k, v, rotary).readable(BF16)


# --------------------------------------------------------------------------------------------------- on a GPU alone
@contextmanager
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launch of ours begins when all before it have ended."""
    launch = layers.launch

    def waiting(*arguments: Any) -> None:
        torch.cuda.synchronize()
        launch(*arguments)
        torch.cuda.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(layers, "launch", waiting)
        yield


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("requests", [1, 5, 8])
def test_a_chain_of_kernels_that_begin_early(requests: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation and writes to the cache right before it or in it, and what reads its output right behind it."""
    shape = Shape(16, 4, 128, BF16, BF16, 1, (None,) * 24, 2048, "cuda")
    world, kernel, operators = World(shape, requests, 2048), DecodeKernel(shape.target(), 32), CudaOperators()
    step = world.step([(max(0, 1500 - 190 * number), 1) for number in range(requests)], rotate=False)
    weight = torch.ones(16 * 128, dtype=BF16, device="cuda")
    where = world.rows.req_to_token, step.batch.req_pool_indices, step.batch.seq_lens
    rotary = rotary_of(step)

    def run(start: torch.Tensor, fused: bool = fused) -> torch.Tensor:
        x = start
        for layer, qkv in zip(world.layers, step.qkv, strict=True):
            k, v = (x[:, : 4 * 128].view(requests, 4, 128) + one for one in qkv[:, 16:].chunk(2, dim=1))
            q = operators.rms_norm(x, weight, 1e-5).view(requests, 16, 128)
            buffers = world.buffers(layer)
            new = NewTokens(k, v, rotary) if fused else None
            if new is None:
                operators.rotate_and_store(q, k, v, *rotary, *buffers, step.batch.out_cache_loc)
            x = operators.rms_norm(kernel(q, *buffers, *where, None, layer.scaling, new=new), weight, 1e-5)
        return x

    starts = [torch.randn(requests, 16 * 128, device="cuda").to(BF16) for _ in range(12)]
    with one_at_a_time(monkeypatch):
        alone = [run(start, fused=False) for start in starts]
    assert all(map(torch.equal, [run(start) for start in starts], alone))
    static, graph = starts[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(static)
    for start, wanted in zip(starts, alone, strict=True):
        static.copy_(start)
        graph.replay()
        assert torch.equal(result, wanted) and wanted.isfinite().all()
    assert not kernel._arrived.any()
