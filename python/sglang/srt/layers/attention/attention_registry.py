"""The attention backends by their names in ``--attention-backend``."""

from __future__ import annotations

import logging

import torch

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

logger = logging.getLogger(__name__)

# Best first: "auto" takes the first that can run.
ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": CpuAttnBackend, "torch_native": TorchNativeAttnBackend}


def create_attention_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called ``name`` ("auto": the first that can run), for activations of ``dtype`` on ``device``.

    Raises:
        ArgumentError: unknown name, or the backend can't run here; the text says why and lists those that can.
    """
    reasons = {key: backend.unsupported_reason(device, dtype) for key, backend in ATTENTION_BACKENDS.items()}
    usable = [key for key, reason in reasons.items() if reason is None]
    chosen = usable[0] if name == "auto" else name
    if chosen not in usable:
        reason = reasons.get(name, "unknown backend")
        raise ArgumentError(f"--attention-backend {name}: {reason}; usable here: {', '.join(usable)}")
    logger.info("Attention backend: %s", chosen)
    return ATTENTION_BACKENDS[chosen]()
