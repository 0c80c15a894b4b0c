"""Where FlashInfer's backends run, why not elsewhere and what would help, and what ``auto`` takes; pure data."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.quantization import fp4_target
from sglang.srt.layers.quantization.flashinfer_requirements import MINIMUM_CUDA
from sglang.srt.layers.quantization.fp4_backends.flashinfer import AUTO_TABLE
from sglang.srt.layers.quantization.fp4_utils import Target, backends, candidates, resolve_fp4_gemm_backend

NAMES = ["cudnn", "cutlass", "cutedsl", "trtllm", "b12x"]
B200 = Target("cuda", (10, 0), "13.0", "0.7.4", "9.23.1", "1.32.0", "4.8.0")
OLD_B200 = Target("cuda", (10, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0")


def test_the_table_of_auto() -> None:
    capabilities = [row.capability for row in AUTO_TABLE]
    assert set(capabilities) == set(MINIMUM_CUDA) and capabilities == sorted(capabilities)
    for row in AUTO_TABLE:
        assert set(row.order) <= set(NAMES) - {"trtllm"} and len(set(row.order)) == len(row.order)
        assert all(row.capability in backends()[name].kernels for name in row.order)  # type: ignore[attr-defined]
        assert row.reason and re.search(r"[\w-]+/[\w-]+#\d+|FlashInfer 0\.7\.4", row.source)
        # Conditions come first, what is left last: every device with a row has one whatever is installed.
        last = max(other for other, c in enumerate(capabilities) if c == row.capability)
        assert (AUTO_TABLE.index(row) == last) == (row.condition == "")


def test_the_rows_of_the_table_are_what_auto_does() -> None:
    for row in AUTO_TABLE:
        target = replace(B200, capability=row.capability)
        if not row.condition:
            target = replace(target, cudnn="9.15.0", flashinfer="0.6.13")
        assert row.fits(target)
        names = [backend.name for backend in candidates(target) if backend.name in NAMES]
        assert tuple(names) == row.order


@pytest.mark.parametrize(
    ("changes", "auto"),
    [
        ({}, "cutedsl"),
        ({"cutlass_dsl": None}, "cutlass"),
        ({"capability": (10, 3)}, "cutedsl"),
        ({"capability": (10, 7)}, "cudnn"),
        ({"capability": (10, 7), "cudnn": "9.20.0"}, "cutlass"),
        ({"capability": (10, 7), "flashinfer": "0.6.16"}, "cutlass"),
        ({"capability": (10, 7), "flashinfer": "0.6.15"}, "torch"),
        ({"capability": (11, 0)}, "cutlass"),
        ({"capability": (12, 0)}, "b12x"),
        ({"capability": (12, 0), "cuda": "12.9"}, "b12x"),
        ({"capability": (12, 0), "flashinfer": "0.6.13"}, "cutlass"),
        ({"capability": (12, 0), "cuda": "12.9", "flashinfer": "0.6.18"}, "cutlass"),
        ({"capability": (12, 0), "nvcc": "12.8", "prebuilt": False}, "torch"),
        ({"capability": (12, 1)}, "cutlass"),
        ({"capability": (13, 0)}, "torch"),
        ({"prebuilt": False}, "torch"),
        ({"prebuilt": False, "nvcc": "13.0"}, "cutedsl"),
    ],
    ids=str,
)
def test_auto(changes: dict[str, Any], auto: str) -> None:
    assert resolve_fp4_gemm_backend("auto", None, replace(B200, **changes)).name == auto


@pytest.mark.parametrize(
    ("changes", "auto"),
    [
        ({}, "cutedsl"),
        ({"flashinfer": "0.6.17"}, "cudnn"),
        ({"flashinfer": "0.6.17", "cudnn": "9.20.0"}, "torch"),
        ({"flashinfer": "0.6.13"}, "torch"),
        ({"capability": (10, 7)}, "cudnn"),
        ({"capability": (10, 7), "flashinfer": "0.7.1"}, "torch"),
        ({"capability": (11, 0)}, "cudnn"),
        ({"capability": (12, 0)}, "cutedsl"),
        ({"capability": (12, 1), "flashinfer": "0.7.0"}, "cudnn"),
        ({"dtype": torch.float16}, "torch"),
        ({"prebuilt": False}, "cutedsl"),
    ],
    ids=str,
)
def test_auto_for_weight_only_layers(changes: dict[str, Any], auto: str) -> None:
    target = replace(B200, weight_only=True, in_features=4096, out_features=4096, **changes)
    ours = [b.name for b in candidates(target) if b.name in (*NAMES, "torch") and b.unsupported_reason(target) is None]
    assert ours[0] == auto


OBSTACLES: list[tuple[str, dict[str, Any], str, str | None]] = [
    (
        "cutlass",
        {"capability": (9, 0)},
        "needs compute capability 10.0, 10.3, 10.7, 11.0, 12.0, 12.1; .* has 9.0",
        None,
    ),
    ("cutedsl", {"capability": (11, 0)}, "needs compute capability 10.0, 10.3, 10.7, 12.0, 12.1; .* has 11.0", None),
    ("b12x", {}, "needs compute capability 12.0, 12.1; this device has 10.0", None),
    ("cutlass", {"flashinfer": None}, "needs FlashInfer, which is not installed", "pip install 'sglang-nvfp4[cuda13]'"),
    ("cutlass", {"flashinfer": None, "cuda": "12.9"}, "not installed", "pip install 'sglang-nvfp4[cuda12]'"),
    ("cutlass", {"flashinfer": "0.5.3"}, "0.6.13 or newer, 0.5.3 is", "pip install 'flashinfer-python>=0.6.13,<0.8'"),
    (
        "cutlass",
        {"flashinfer": "0.6.13", "capability": (10, 7)},
        "needs FlashInfer 0.6.16 or newer, 0.6.13 is installed",
        "pip install 'flashinfer-python>=0.6.16,<0.8'",
    ),
    (
        "cutedsl",
        {"flashinfer": "0.7.0", "capability": (12, 0)},
        "needs FlashInfer 0.7.1 or newer",
        "pip install 'flashinfer-python>=0.7.1,<0.8'",
    ),
    ("cutlass", {"cuda": "12.6"}, "CUDA 12.8 or newer, this one has 12.6", "pip install --upgrade torch"),
    ("cutlass", {"prebuilt": False}, "there is no nvcc", "flashinfer download-kernels"),
    ("cutlass", {"prebuilt": False, "flashinfer": "0.6.13"}, "no nvcc", "apt-get install cuda-toolkit-13-0"),
    ("cutlass", {"prebuilt": False, "nvcc": "12.4"}, "12.8 or newer, .* 12.4", "apt-get install cuda-toolkit-13-0"),
    (
        "cutlass",
        {"flashinfer": "0.6.13", "flashinfer_cubin": "0.6.12"},
        "0.6.13 can't be imported beside flashinfer-cubin 0.6.12",
        "pip install flashinfer-cubin==0.6.13",
    ),
    (
        "cutlass",
        {"flashinfer": "0.6.18", "flashinfer_cubin": "0.6.13"},
        "beside flashinfer-cubin 0.6.13",
        "pip uninstall -y flashinfer-cubin",
    ),
    (
        "cutlass",
        {"flashinfer": "0.6.18", "flashinfer_jit_cache": "0.6.17+cu130"},
        "beside flashinfer-jit-cache",
        "pip uninstall -y flashinfer-jit-cache",
    ),
    ("cudnn", {"cudnn": "9.7.1"}, "cuDNN 9.10.2 or newer, 9.7.1 is loaded", "pip install 'nvidia-cudnn-cu13>=9.10.2'"),
    ("cudnn", {"cudnn": None, "cuda": "12.8"}, "none is loaded", "pip install 'nvidia-cudnn-cu12>=9.10.2'"),
    (
        "cudnn",
        {"cudnn_frontend": "1.18"},
        "nvidia-cudnn-frontend 1.32.0 or newer, 1.18 is",
        "pip install 'nvidia-cudnn-frontend>=1.32.0'",
    ),
    ("cutedsl", {"cutlass_dsl": None}, "4.8.0 or newer, none is", "pip install 'nvidia-cutlass-dsl>=4.8.0'"),
    (
        "cutedsl",
        {"cutlass_dsl": "4.3", "flashinfer": "0.6.13"},
        "4.5.0 or newer, 4.3 is",
        "pip install 'nvidia-cutlass-dsl>=4.5.0'",
    ),
    ("cutedsl", {"capability": (12, 0), "cuda": "12.9"}, "CUDA 13.0 or newer", "pip install --upgrade torch"),
    (
        "cutedsl",
        {"capability": (12, 0), "in_features": 2**16, "out_features": 2**15},
        "fewer than 2\\^31 weights, this layer has 32768 x 65536",
        None,
    ),
    ("cutedsl", {"capability": (12, 0), "dtype": torch.float16}, "writes torch.bfloat16, .* torch.float16", None),
    ("trtllm", {"dtype": torch.float16}, "writes torch.bfloat16, the model runs in torch.float16", None),
    (
        "b12x",
        {"capability": (12, 0), "flashinfer": "0.6.13", "in_features": 192},
        "multiples of 128 before FlashInfer 0.6.14, this layer has 192",
        "pip install 'flashinfer-python>=0.6.14,<0.8'",
    ),
    (
        "b12x",
        {"capability": (12, 0), "nvcc": "12.8"},
        "12.9 or newer, the nvcc that FlashInfer calls is 12.8",
        "apt-get install cuda-toolkit-13-0",
    ),
    ("cutlass", {"weight_only": True}, "multiplies FP4 with FP4; this layer is weight-only", None),
    (
        "cudnn",
        {"weight_only": True, "cudnn": "9.20.0"},
        "cuDNN 9.23.1 or newer, 9.20.0 is loaded for weight-only layers",
        "pip install 'nvidia-cudnn-cu13>=9.23.1'",
    ),
    (
        "cutedsl",
        {"weight_only": True, "flashinfer": "0.6.17"},
        "FlashInfer 0.6.18 or newer, 0.6.17 is installed for weight-only layers",
        "pip install 'flashinfer-python>=0.6.18,<0.8'",
    ),
]


@pytest.mark.parametrize(("name", "changes", "reason", "fix"), OBSTACLES, ids=lambda value: str(value)[:60])
def test_reason_and_fix(name: str, changes: dict[str, Any], reason: str, fix: str | None) -> None:
    target = replace(B200, **changes)
    chosen = backends()[name]
    found = chosen.unsupported_reason(target)
    assert found is not None and re.search(reason, found), found
    assert chosen.fix(target) == fix
    assert "pip install" not in found and "apt-get" not in found  # whoever shows a reason shows its fix beside it


def test_what_runs_has_nothing_to_fix() -> None:
    for target in (B200, OLD_B200, replace(B200, capability=(12, 0)), Target("cpu")):
        for name in NAMES:
            if backends()[name].unsupported_reason(target) is None:
                assert backends()[name].fix(target) is None
    assert backends()["cutlass"].unsupported_reason(replace(B200, flashinfer_cubin="0.6.13")) is None  # only a warning


def test_nvcc_is_found_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        fp4_target._nvcc_version.cache_clear()
        assert fp4_target._nvcc_version() == "12.9"
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    fp4_target._nvcc_version.cache_clear()
    assert fp4_target._nvcc_version() == "12.9"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))  # it wins even if it has none
    fp4_target._nvcc_version.cache_clear()
    assert fp4_target._nvcc_version() is None
    fp4_target._nvcc_version.cache_clear()


def test_kernels_compiled_before_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(fp4_target, "_installed", lambda name: "0.7.4")
    library = tmp_path / ".cache/flashinfer/0.6.13/100a/cached_ops/fp4_quantization_100/fp4_quantization_100.so"
    for version, found in (("0.6.13", False), ("0.7.4", True)):
        path = Path(str(library).replace("0.6.13", version))
        path.parent.mkdir(parents=True)
        path.touch()
        fp4_target._compiled_before.cache_clear()
        assert fp4_target._compiled_before() is found
    fp4_target._compiled_before.cache_clear()
