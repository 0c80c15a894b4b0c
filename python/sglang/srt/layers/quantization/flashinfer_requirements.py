"""What FlashInfer's kernels need beside the right GPU: releases, toolkits and libraries, each with the command for it.

Every number is what FlashInfer's wheels from 0.6.13 to 0.7.4 check or declare.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.layers.quantization.fp4_target import Target, at_least

Capability = tuple[int, int]


class Obstacle(NamedTuple):
    """Why a backend can't run, as a sentence without its subject, and the command that would change it."""

    reason: str
    fix: str | None = None


# The first CUDA toolkit that compiles for a device (12.8 does for 12.0 too, without its FP4 conversions).
MINIMUM_CUDA: dict[Capability, str] = {
    (10, 0): "12.8",
    (10, 3): "12.9",
    (10, 7): "12.9",
    (11, 0): "13.0",
    (12, 0): "12.9",
    (12, 1): "12.9",
}

# What a FlashInfer release declares: (from release on, nvidia-cutlass-dsl, nvidia-cudnn-frontend).
_DECLARED = (
    ("0.7.4", "4.8.0", "1.32.0"),
    ("0.7.2", "4.6.2", "1.31.0"),
    ("0.7.0", "4.6.2", "1.29.0"),
    ("0.6.18", "4.6.2", "1.25.0"),
    ("0.6.16", "4.5.0", "1.25.0"),
    ("0.6.13", "4.5.0", "1.13.0"),
)


def declared(target: Target) -> tuple[str, str]:
    """The oldest nvidia-cutlass-dsl and nvidia-cudnn-frontend that the installed FlashInfer wants."""
    return next((dsl, frontend) for since, dsl, frontend in _DECLARED if at_least(target.flashinfer, since))


def flashinfer_obstacle(target: Target, since: str) -> Obstacle | None:
    """Whether FlashInfer is there, new enough, and can be imported."""
    version = target.flashinfer
    if version is None:
        extra = "cuda12" if (target.cuda or "").startswith("12.") else "cuda13"
        return Obstacle("needs FlashInfer, which is not installed", f"pip install 'sglang-nvfp4[{extra}]'")
    if not at_least(version, since):
        reason = f"needs FlashInfer {since} or newer, {version} is installed"
        return Obstacle(reason, f"pip install 'flashinfer-python>={since},<0.8'")
    if at_least(version, "0.7.2"):  # from there on it ignores what doesn't match
        return None
    cubin, jit_cache = target.flashinfer_cubin, target.flashinfer_jit_cache
    if cubin not in (None, version):
        reason = f"FlashInfer {version} can't be imported beside flashinfer-cubin {cubin}"
        return Obstacle(reason, cubin_command(version) or "pip uninstall -y flashinfer-cubin")
    if jit_cache is not None and not jit_cache.startswith(version):
        reason = f"FlashInfer {version} can't be imported beside flashinfer-jit-cache {jit_cache}"
        return Obstacle(reason, "pip uninstall -y flashinfer-jit-cache")
    return None


def cubin_command(version: str) -> str | None:
    """Installs the trtllm kernels of that FlashInfer; None where no package has them."""
    return None if at_least(version, "0.6.14") else f"pip install flashinfer-cubin=={version}"


def torch_obstacle(target: Target, minimum: str) -> Obstacle | None:
    """Whether torch brings that CUDA."""
    if at_least(target.cuda, minimum):
        return None
    reason = f"needs a torch built with CUDA {minimum} or newer, this one has {target.cuda}"
    return Obstacle(reason, "pip install --upgrade torch")


def nvcc_obstacle(target: Target, minimum: str, even_prebuilt: bool = False) -> Obstacle | None:
    """Whether FlashInfer can compile what it compiles at first use: its quantiser, and the kernels of some backends.

    ``even_prebuilt``: FlashInfer asks for the release of nvcc even if it has nothing to compile.
    """
    toolkit = f"apt-get install cuda-toolkit-{(target.cuda or minimum).replace('.', '-')}"
    if target.nvcc is None:
        if target.prebuilt or target.weight_only:
            return None
        reason = "needs kernels that FlashInfer compiles at first use, and there is no nvcc"
        # From that release on it can install them compiled.
        return Obstacle(reason, "flashinfer download-kernels" if at_least(target.flashinfer, "0.6.18") else toolkit)
    if at_least(target.nvcc, minimum) or (target.prebuilt and not even_prebuilt):
        return None
    return Obstacle(f"needs CUDA {minimum} or newer, the nvcc that FlashInfer calls is {target.nvcc}", toolkit)


def dsl_obstacle(target: Target) -> Obstacle | None:
    """Whether the compiler of the CuTe-DSL kernels is there."""
    minimum = declared(target)[0]
    if at_least(target.cutlass_dsl, minimum):
        return None
    reason = f"needs nvidia-cutlass-dsl {minimum} or newer, {target.cutlass_dsl or 'none'} is installed"
    return Obstacle(reason, f"pip install 'nvidia-cutlass-dsl>={minimum}'")
