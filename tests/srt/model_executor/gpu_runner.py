"""Small models on a GPU with FlashInfer's attention, in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.model_executor.model_runner import ModelRunner
from step_harness import make_runner

FIXTURES = Path(__file__).parents[2] / "fixtures"
GPU = torch.device("cuda", 0)
TARGET = AttentionTarget(GPU, torch.float16, torch.float16, 4, 2, 64)
REASON = FlashInferAttnBackend.unsupported_reason(TARGET) if torch.cuda.is_available() else "no CUDA GPU"
NEEDS_FLASHINFER = [pytest.mark.cuda, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

# Of the largest logit: float16 activations, and sums in another order where a step is padded.
TOLERANCE = 3e-3
MB = 1 << 20


def make_gpu_runner(folder: str, **args: Any) -> ModelRunner:
    given = {
        "device": "cuda", "dtype": "float16", "attention_backend": "flashinfer", "max_running_requests": 18, **args
    }  # fmt: skip
    return make_runner(FIXTURES / folder, **given)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error < TOLERANCE, f"off by {error:.1e} of the largest value"
