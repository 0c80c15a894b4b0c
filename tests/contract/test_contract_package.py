"""Which FlashInfer is under test, and that it changes nothing where there is no GPU."""

import os
from importlib import metadata

import pytest

from sglang.srt.layers.quantization.fp4_target import Target
from sglang.srt.layers.quantization.fp4_utils import unsupported_reasons


def test_flashinfer_is_the_version_asked_for(flashinfer_missing: str | None) -> None:
    if flashinfer_missing:
        pytest.fail(flashinfer_missing, pytrace=False)
    import flashinfer

    assert flashinfer.__version__ == os.environ.get("CONTRACT_FLASHINFER", flashinfer.__version__)
    assert metadata.version("flashinfer-python") == flashinfer.__version__  # what Target reads


def test_a_cpu_gets_no_flashinfer_backend() -> None:
    reasons = unsupported_reasons(Target.current("cpu"))
    for name in ("cudnn", "cutlass", "cutedsl", "trtllm", "b12x"):
        assert "CUDA GPU" in (reasons[name] or "")
    assert reasons["torch"] is None
