"""What a linear layer may compute together with its product, where its kernel can: what stands around it in a
transformer. Each saves a launch and a way through memory, which at few rows is what a step consists of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

SUMMED = 32  # squares in a sum


class Fusable(Enum):
    """Steps beside a product: its input comes as :class:`UnscaledRows`, or what follows it."""

    UNSCALED_INPUT = "unscaled input"
    SILU_AND_MUL = "silu and mul"
    ADD_RMS_NORM = "add and RMS norm"


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


Rows = torch.Tensor | UnscaledRows


def count_of(rows: Rows) -> int:
    """T."""
    return (rows.values if isinstance(rows, UnscaledRows) else rows).shape[0]
