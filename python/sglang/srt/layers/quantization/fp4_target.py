"""What a backend's answer may depend on: the machine, and optionally one layer on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

from sglang.kernels import cpu_extension, nvrtc


@dataclass(frozen=True)
class Target:
    """A machine, and optionally one linear layer on it: everything that a backend's answer may depend on.

    ``capability`` is the compute capability as (major, minor), None off CUDA. Versions are None where the package is
    absent (``cudnn`` is the backend library, ``cuda`` the toolkit torch was built with, ``nvcc`` the release of the
    compiler that FlashInfer would call, ``nvrtc`` the library that compiles ours). ``prebuilt``: FlashInfer's kernels
    need no compiler. ``cpu_kernel``: why backend ``cpu`` can't have its library, None if it can. ``weight_only`` None
    and sizes 0 mean: no layer in particular.
    """

    device: str
    capability: tuple[int, int] | None = None
    cuda: str | None = None
    flashinfer: str | None = None
    cudnn: str | None = None
    cudnn_frontend: str | None = None
    cutlass_dsl: str | None = None
    dtype: torch.dtype = torch.bfloat16
    in_features: int = 0
    out_features: int = 0
    weight_only: bool | None = None
    flashinfer_cubin: str | None = None
    flashinfer_jit_cache: str | None = None
    nvcc: str | None = None
    prebuilt: bool = True
    cpu_kernel: str | None = None
    nvrtc: str | None = None

    @staticmethod
    def current(device: str | torch.device, dtype: torch.dtype = torch.bfloat16) -> Target:
        """The machine this process runs on. For a CPU, compiles its kernel unless that was done before."""
        device = torch.device(device)
        if device.type != "cuda":
            return Target(
                device=device.type,
                dtype=dtype,
                flashinfer=_installed("flashinfer-python"),
                cpu_kernel=cpu_extension.unavailable() if device.type == "cpu" else None,
            )
        unchecked = bool(os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"))
        return Target(
            device="cuda",
            capability=torch.cuda.get_device_capability(device),
            cuda=torch.version.cuda,
            flashinfer=_installed("flashinfer-python"),
            cudnn=_cudnn_version(),
            cudnn_frontend=_installed("nvidia-cudnn-frontend"),
            cutlass_dsl=_installed("nvidia-cutlass-dsl"),
            dtype=dtype,
            flashinfer_cubin=None if unchecked else _installed("flashinfer-cubin"),
            flashinfer_jit_cache=None if unchecked else _installed("flashinfer-jit-cache"),
            nvcc=_nvcc_version(),
            prebuilt=_installed("flashinfer-jit-cache") is not None or _compiled_before(),
            nvrtc=nvrtc.version() or None,
        )

    def for_layer(self, in_features: int, out_features: int, weight_only: bool, dtype: torch.dtype) -> Target:
        return replace(self, in_features=in_features, out_features=out_features, weight_only=weight_only, dtype=dtype)

    def __str__(self) -> str:
        capability = self.capability
        return self.device + (f" with compute capability {capability[0]}.{capability[1]}" if capability else "")


@cache
def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> str | None:
    """Version of the cuDNN that loads in this process, "9.10.2"."""
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@cache
def _nvcc_version() -> str | None:
    """Release of the nvcc that FlashInfer calls, "13.0"; None if there is none where it looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+),", text)
    return release[1] if release else None


@cache
def _compiled_before() -> bool:
    """Whether FlashInfer's cache holds its quantiser, which every W4A4 product needs, for the installed version."""
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", str(Path.home()))) / ".cache" / "flashinfer"
    version = _installed("flashinfer-python")
    return version is not None and any(folder.glob(f"{version}/*/cached_ops/fp4_quantization_*/*.so"))


def at_least(version: str | None, minimum: str) -> bool:
    """Whether ``version`` is known and not older than ``minimum``."""
    try:
        return version is not None and Version(version).release >= Version(minimum).release
    except InvalidVersion:
        return False
