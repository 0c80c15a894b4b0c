"""Prompts that are captured between their attentions, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runner import GPU, MB, NEEDS_FLASHINFER, assert_close, make_gpu_runner

from sglang.srt.model_executor.device_graph import CudaGraphCapture, Cut, borrowed
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import available_memory, release_unused_memory
from step_harness import Stepper, random_tokens

pytestmark = NEEDS_FLASHINFER


def make(folder: str, **args: Any) -> ModelRunner:
    return make_gpu_runner(folder, max_total_tokens=4096, context_len=1024, **args)


@pytest.mark.parametrize("attention_backend", ["flashinfer", "torch_native"])
@pytest.mark.parametrize("folder", ["tiny-llama-bf16", "tiny-llama-modelopt-w4a16", "tiny-llama-modelopt-nvfp4-kvfp8"])
def test_replayed_prompts_are_the_eager_ones(folder: str, attention_backend: str) -> None:
    """Parts of prompts and decode steps of several requests. The first has as many tokens as a size: the same bits."""
    sizes = {"attention_backend": attention_backend, "cuda_graph_bs_prefill": [8, 64, 300]}
    runner = make(folder, **sizes)
    other = make(folder, attention_backend=attention_backend, cuda_graph_backend_prefill="disabled")
    assert runner.prefill_graphs is not None and list(runner.prefill_graphs.sizes) == [8, 64, 300]
    assert other.prefill_graphs is None and other.why_no_prefill_graphs == "--cuda-graph-backend-prefill disabled"
    graphs, steps = Stepper(runner), Stepper(other)
    for turn, lengths in enumerate(
        [
            {0: 64},
            {1: 5},
            {0: 20, 1: 20, 2: 24},
            {0: 1, 1: 1, 2: 1},
            {3: 300},
            {3: 301},
            {4: 250},
            {4: 6, 5: 2},
            {5: 33},
        ]
    ):
        tokens = {row: random_tokens(length, 320, seed=10 * turn + row) for row, length in lengths.items()}
        found, wanted = (one.step(tokens)[0].next_token_logits for one in (graphs, steps))
        assert_close(found, wanted)
        assert turn or torch.equal(found, wanted), "64 tokens: the same kernels in the same order"


def test_pieces_share_one_memory() -> None:
    """Sixteen pieces of 64 MB each, in four sizes."""
    capture = CudaGraphCapture(GPU)
    x = torch.ones(1 << 24, device=GPU)
    kept: list[torch.Tensor] = []

    def recorded(size: int) -> Any:
        def run(cut: Cut) -> torch.Tensor:
            y = x[:size] + 0
            kept.clear()
            for _ in range(15):
                kept.append(borrowed(y))
                cut()
                y = y * 2
            return y

        return *capture.in_pieces(run), [*kept]

    release_unused_memory(GPU)
    before = available_memory(GPU)
    steps = {size: recorded(size) for size in (1 << 24, 1 << 23, 1 << 22, 100)}
    release_unused_memory(GPU)
    assert before - available_memory(GPU) < 256 * MB
    for size, value in ((100, 3.0), (1 << 24, 1.0), (1 << 22, 2.0)):
        x.fill_(value)
        pieces, result, between = steps[size]
        for index, piece in enumerate(pieces):
            piece.replay()
            if index == 4:
                assert torch.equal(between[4], torch.full_like(between[4], value * 16))
                between[4].add_(1.0)
        assert torch.equal(result, torch.full((size,), (value * 16 + 1) * 2**11, device=GPU))
