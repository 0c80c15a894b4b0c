"""The same server on a GPU: every ModelOpt fixture over ``/generate``, within the CPU test's bounds."""

from pathlib import Path

import pytest
import torch
from launched_server import FIXTURES, launched
from test_fixture_logprobs import check_prompts, flags

from fixture_logprobs import CASES, IDS
from sglang.srt.layers.quantization.fp4_backends.w4a16 import W4A16Backend
from sglang.srt.layers.quantization.fp4_utils import Target

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


REASON = (
    W4A16Backend.unsupported_reason(Target.current("cuda"))
    or (Target.current("cuda").capability >= (10, 0) and "auto multiplies FP4 with FP4 here")
    if torch.cuda.is_available()
    else "no CUDA GPU"
)


@pytest.mark.skipif(bool(REASON), reason=str(REASON))
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "modelopt-w4a16"])
def test_w4a16_is_what_auto_takes(name: str, tmp_path: Path) -> None:
    """For W4A4 layers too, which keep their activations: the logits are those of weight-only layers."""
    arguments = ("--dtype", "bfloat16", "--device", "cuda", "--max-total-tokens", "4096")
    with launched(FIXTURES / f"tiny-llama-{name}", tmp_path, *arguments) as server:
        check_prompts(server, "modelopt-nvfp4.w4a16", "bfloat16", (0, 1, 2))
        assert "FP4 GEMM backend: w4a16 (requested: auto)" in server.log
        said = server.log.count("w4a16: W4A4 layers keep their activations in 16 bits")
        assert said == (name == "modelopt-nvfp4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "expected", "arguments", "tight"), CASES, ids=IDS)
def test_log_probabilities(
    name: str, expected: str, arguments: dict[str, str], tight: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    gpu = ("--device", "cuda", "--fp4-gemm-backend", "torch", "--max-total-tokens", "4096")
    with launched(FIXTURES / f"tiny-llama-{name}", tmp_path, "--dtype", dtype, *gpu, *flags(arguments)) as server:
        check_prompts(server, expected, dtype, tight)
