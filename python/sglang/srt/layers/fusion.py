"""What a linear layer may compute together with its product, where its kernel can: what stands around it in a
transformer. Each saves a launch and a way through memory, which at few rows is what a step consists of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUMMED = 16  # squares in a sum


@dataclass(frozen=True)
class UnscaledRows:
    """A layer's normalised input before the division: row i stands for
    ``values[i] / sqrt(squares[i].sum() / n + eps)``, by which a product can be divided instead.

    Attributes:
        values: [T, n], ``(x + residual) * weight``.
        squares: float32 [T, n / SUMMED], of ``x + residual``, neighbours summed.
    """

    values: torch.Tensor
    squares: torch.Tensor
    eps: float


@dataclass(frozen=True)
class AddRMSNorm:
    """What follows a product: it is added to ``residual`` [T, n], in place, and the sum is normalised, as
    :class:`UnscaledRows`."""

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class SiluAndMul:
    """What follows a product of two equal halves: ``silu(first) * second``."""


Rows = torch.Tensor | UnscaledRows
Then = SiluAndMul | AddRMSNorm | None
# What can be asked for together with a product: its input, or what follows it.
Step = type[UnscaledRows] | type[SiluAndMul] | type[AddRMSNorm]


def count_of(rows: Rows) -> int:
    """T."""
    return (rows.values if isinstance(rows, UnscaledRows) else rows).shape[0]
