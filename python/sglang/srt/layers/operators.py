"""What a transformer computes between its products, behind one object per kind of device.

:class:`Operators` is torch's own: it runs anywhere, and every other implementation is held against it by one test.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from sglang.kernels import cpu_extension

logger = logging.getLogger(__name__)


class Operators:
    """torch's operators. In bfloat16 and float16 every result is rounded once, except where a line says otherwise."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight`` over the last dimension of x [..., n]; statistics in float32."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded, and may be written into x."""
        x.add_(residual)
        return self.rms_norm(x, weight, eps), x

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :n]) * x[..., n:]`` for x [..., 2n]; both steps are rounded."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        """``x * cos`` (rounded) ``+ roll(x, dim / 2) * signed_sin`` for x [T, heads, dim]; the others are [T, 1, dim].

        May be written into x.
        """
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)

    def max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest value of each row of x [rows, n] and the first index that has it, int64. A row with a NaN has
        NaN and an index that means nothing."""
        values, ids = x.max(dim=-1)
        return values, ids

    def bf16_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x weight^T + bias`` in float32: x [M, K] and bias [N] float32, weight [N, K] bfloat16."""
        return F.linear(x, weight.float(), bias)


TORCH_OPERATORS = Operators()


@cache
def operators_for(device_type: str) -> Operators:
    """The operators for tensors on a "cpu", "cuda", ... device. For a CPU the first call compiles ours, or says in the
    log why torch's are used."""
    if device_type != "cpu":
        return TORCH_OPERATORS
    if cpu_extension.unavailable() is not None:
        logger.warning(
            "torch computes everything on this CPU, our faster kernels can't be had: `python -m sglang.check_env` says "
            "why (backend cpu) and what would change it"
        )
        return TORCH_OPERATORS
    from sglang.srt.layers.cpu_operators import CpuOperators

    return CpuOperators()
