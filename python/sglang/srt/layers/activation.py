"""Gated activation of the MLP."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.operators import operators_for


class SiluAndMul(nn.Module):
    """``silu(x[..., :n]) * x[..., n:]`` for x [..., 2n]: the output of a fused gate/up projection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return operators_for(x.device.type).silu_and_mul(x)
