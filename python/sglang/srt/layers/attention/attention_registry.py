"""The attention backends by their names in ``--attention-backend``."""

from __future__ import annotations

import logging

from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.attention import cpu_backend as _cpu  # noqa: F401  importing registers
from sglang.srt.layers.attention import flashinfer_backend as _flashinfer  # noqa: F401
from sglang.srt.layers.attention import torch_native_backend as _torch_native  # noqa: F401
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget, registry
from sglang.srt.layers.backend_registry import ranked

logger = logging.getLogger(__name__)

FLAG = "--attention-backend"


def attention_backends() -> dict[str, type[AttentionBackend]]:
    """Every registered backend by name, the highest priority first."""
    return dict(sorted(registry.backends().items(), key=lambda item: -item[1].priority))


def unsupported_reasons(target: AttentionTarget) -> dict[str, str]:
    """The backends that can't run on ``target``, each with its reason."""
    reasons = {name: backend.unsupported_reason(target) for name, backend in attention_backends().items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def create_attention_backend(name: str, target: AttentionTarget) -> AttentionBackend:
    """The backend called ``name`` ("auto": the first that can run on ``target``). The choice is logged.

    Raises:
        ArgumentError: unknown name, or the backend can't run here; the text lists every backend with its reason.
        StartupError: the backend called ``name`` does not start. "auto" takes the next one then, with a warning.
    """
    backends, reasons = attention_backends(), unsupported_reasons(target)
    if name != "auto":
        if name not in backends:
            raise ArgumentError(f"{FLAG} {name!r} is not an attention backend; valid: auto, {', '.join(backends)}")
        if name in reasons:
            raise ArgumentError(registry.refusal(f"{FLAG} {name}", target, reasons, backends))
        started = backends[name](target)
        logger.info(registry.choice(name, f"{name}, from {FLAG}", reasons))
        return started
    for backend in ranked(backends.values(), lambda one: one.priority):
        if backend.name in reasons:
            continue
        try:
            started = backend(target)
        except StartupError as error:
            logger.warning("%s", error)
            reasons[backend.name] = "does not start, see above"
        else:
            logger.info(registry.choice(backend.name, name, reasons))
            return started
    raise StartupError(f"no attention backend runs on {target}: {reasons}")
