"""Decode steps for the tests of ``decode_attention.cu``, and where they run: on a GPU, or compiled for the CPU."""

from collections.abc import Callable

import torch
from host_cuda import NEEDS_A_GPU

from attention_steps import FP8, Step, World
from sglang.srt.layers.attention.decode_kernel import DecodeKernel, NewTokens

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16-fp8": (BF16, FP8), "fp16-fp8": (FP16, FP8)}
PROCESSORS = 8


def decode(world: World, lengths: list[int], padding: int = 0) -> Step:
    """A step of one new token per request, with the cache as it is when attention begins."""
    step = world.step([(length - 1, 1) for length in lengths], padding, rotate=False)
    for layer, qkv in zip(world.layers, step.qkv, strict=True):
        k, v = qkv[:, world.shape.heads :].chunk(2, dim=1)
        world.pool.set_kv_buffer(layer, step.batch.out_cache_loc, k, v)
    return step


def scales_of(world: World, layer_id: int) -> tuple[float, float]:
    layer = world.layers[layer_id]
    return (layer.k_scale or 1.0, layer.v_scale or 1.0) if world.shape.kv_dtype == FP8 else (1.0, 1.0)


def attend(
    kernel: DecodeKernel,
    step: Step,
    layer_id: int = 0,
    q: torch.Tensor | None = None,
    factor: float = 1.0,
    new: NewTokens | None = None,
) -> torch.Tensor:
    world, batch = step.world, step.batch
    layer = world.layers[layer_id]
    if q is None:
        q = step.qkv[layer_id][:, : world.shape.heads]
    scales = scales_of(world, layer_id)
    where = world.rows.req_to_token, batch.req_pool_indices, batch.seq_lens
    out = kernel(q, *world.buffers(layer), *where, layer.sliding_window, layer.scaling * factor, *scales, new)
    assert not kernel._arrived.any()
    return out


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_A_GPU:
        test = mark(test)
    return test
