"""Prompts that are captured between their attentions, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.model_executor.device_graph import CudaGraphCapture, Cut, borrowed
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import available_memory, release_unused_memory
from step_harness import Stepper, make_runner, random_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
GPU = torch.device("cuda", 0)
TARGET = AttentionTarget(GPU, torch.float16, torch.float16, 4, 2, 64)
REASON = FlashInferAttnBackend.unsupported_reason(TARGET) if torch.cuda.is_available() else "no CUDA GPU"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

# Of the largest logit: float16 activations, and other kernels where a step is padded.
TOLERANCE = 3e-3
MB = 1 << 20


def make(folder: str, **args: Any) -> ModelRunner:
    given = {
        "device": "cuda", "dtype": "float16", "attention_backend": "flashinfer", "max_running_requests": 18,
        "max_total_tokens": 4096, "context_len": 1024, **args,
    }  # fmt: skip
    return make_runner(FIXTURES / folder, **given)


@pytest.mark.parametrize("attention_backend", ["flashinfer", "torch_native"])
@pytest.mark.parametrize("folder", ["tiny-llama-bf16", "tiny-llama-modelopt-w4a16", "tiny-llama-modelopt-nvfp4-kvfp8"])
def test_replayed_prompts_are_the_eager_ones(folder: str, attention_backend: str) -> None:
    """Parts of prompts and decode steps of several requests; as many tokens as a size has bit for bit."""
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
        error = (found - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE, f"turn {turn}: off by {error:.1e} of the largest value"
        if turn < 3 and sum(lengths.values()) == 64:
            assert torch.equal(found, wanted) or turn == 2, "the same kernels in the same order"


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
