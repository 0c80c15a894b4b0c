"""The same server on a GPU: every ModelOpt fixture over ``/generate``, within the CPU test's bounds."""

from pathlib import Path

import pytest
import torch
from launched_server import FIXTURES, launched
from test_fixture_logprobs import CASES, check_log_probabilities

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "expected", "arguments", "tight"), CASES, ids=[f"{c[1]}-{c[0]}" for c in CASES])
def test_log_probabilities(
    name: str, expected: str, arguments: tuple[str, ...], tight: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    gpu = ("--device", "cuda", "--fp4-gemm-backend", "torch", "--max-total-tokens", "4096")
    with launched(FIXTURES / f"tiny-llama-{name}", tmp_path, "--dtype", dtype, *gpu, *arguments) as server:
        check_log_probabilities(server, expected, dtype, tight)
