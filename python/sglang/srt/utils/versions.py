"""Versions of everything that decides what runs here, for reports and for the stamps of cached measurements."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata

import torch

import sglang

# Packages that hold kernels, compile them, or read and write what the server does.
DISTRIBUTIONS = (
    "transformers",
    "tokenizers",
    "safetensors",
    "msgspec",
    "xgrammar",
    "triton",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "cuda-python",
    "cuda-bindings",
    "cuda-core",
)


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Version of everything that decides what runs here; None for what is absent."""
    cudnn = torch.backends.cudnn.version()
    found: dict[str, str | None] = {
        "sglang-nvfp4": sglang.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (of torch)": torch.version.cuda,
        "NVIDIA driver": driver_version(),
        "cuDNN (loaded)": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }
    return found | {name: distribution_version(name) for name in DISTRIBUTIONS}


def driver_version() -> str | None:
    """Version of the NVIDIA driver, as nvidia-smi says; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(output.split()), None)
