"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import overload

import torch
from torch import nn

from sglang.srt.layers.operators import operators_for


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension; statistics in fp32, one rounding to ``x``'s dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.variance_epsilon = eps

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise ``x`` [..., hidden_size].

        With ``residual``, returns (norm(x + residual), x + residual); the sum is written into ``x``, which the caller
        must not use again.
        """
        if residual is None:
            return operators_for(x.device.type).rms_norm(x, self.weight, self.variance_epsilon)
        return operators_for(x.device.type).add_rms_norm(x, residual, self.weight, self.variance_epsilon)


def norm_heads(q: torch.Tensor, k: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Every head of ``q`` [T, heads, dim] and ``k`` [T, kv_heads, dim] normalised by itself.

    The results may be written into ``q`` and ``k``, which the caller must not use again.
    """
    return operators_for(q.device.type).norm_heads(q, k, q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
