"""Why FlashInfer's attention can't run on a machine or for a model, and what would change that."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.quantization.flashinfer_requirements import (
    MINIMUM_CUDA,
    Obstacle,
    flashinfer_obstacle,
    nvcc_obstacle,
)
from sglang.srt.layers.quantization.fp4_target import Target

# The release whose wrappers are called as they are here.
SINCE = "0.6.13"
MINIMUM_CAPABILITY = (8, 0)
# The oldest toolkit that FlashInfer supports, for devices that need no newer one.
OLDEST_CUDA = "12.6"
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def obstacle(target: AttentionTarget) -> Obstacle | None:
    """The first thing in the way, None if there is nothing."""
    if target.device.type != "cuda":
        return Obstacle(f"needs a CUDA GPU; this device is {target.device.type}")
    machine = Target.current(target.device, target.dtype)
    capability = machine.capability or (0, 0)
    if capability < MINIMUM_CAPABILITY:
        wanted, found = (".".join(map(str, one)) for one in (MINIMUM_CAPABILITY, capability))
        return Obstacle(f"needs compute capability {wanted} or newer; this device has {found}")
    return model_obstacle(target) or flashinfer_obstacle(machine, SINCE) or _compiler_obstacle(machine, capability)


def model_obstacle(target: AttentionTarget) -> Obstacle | None:
    """What no installation changes."""
    dtype, cache = (str(one).removeprefix("torch.") for one in (target.dtype, target.kv_cache_dtype))
    if target.dtype not in DTYPES:
        return Obstacle(f"takes float16 and bfloat16, not {dtype}", "--dtype bfloat16")
    if target.kv_cache_dtype not in (target.dtype, torch.float8_e4m3fn):
        reason = f"reads a KV cache in the model's {dtype} or in float8_e4m3fn, not in {cache}"
        return Obstacle(reason, "--kv-cache-dtype auto")
    if target.head_dim not in HEAD_DIMS:
        return Obstacle(f"has kernels for heads of {', '.join(map(str, HEAD_DIMS))} values, not of {target.head_dim}")
    return None


def _compiler_obstacle(machine: Target, capability: tuple[int, int]) -> Obstacle | None:
    """FlashInfer compiles its kernels at first use, unless a package brings them."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    # Whether its quantiser was compiled before, which is what the target knows, says nothing of these kernels.
    found = nvcc_obstacle(replace(machine, prebuilt=False), MINIMUM_CUDA.get(capability, OLDEST_CUDA))
    if found is not None:
        return found
    for tool, fix in ((os.environ.get("CXX", "c++"), "apt-get install g++"), ("ninja", "pip install ninja")):
        if shutil.which(tool) is None:
            return Obstacle(f"needs kernels that FlashInfer compiles at first use, and {tool} is not on PATH", fix)
    return None
