"""The attention backends by their names in ``--attention-backend``."""

from __future__ import annotations

import torch

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {"torch_native": TorchNativeAttnBackend}


def create_attention_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called ``name``, for activations of ``dtype`` on ``device``.

    Raises:
        ArgumentError: unknown name, or the backend can't run here; the text says why and lists those that can.
    """
    backend = ATTENTION_BACKENDS.get(name)
    reason = "unknown backend" if backend is None else backend.unsupported_reason(device, dtype)
    if backend is None or reason is not None:
        usable = [key for key, value in ATTENTION_BACKENDS.items() if value.unsupported_reason(device, dtype) is None]
        raise ArgumentError(f"--attention-backend {name}: {reason}; usable here: {', '.join(usable)}")
    return backend()
