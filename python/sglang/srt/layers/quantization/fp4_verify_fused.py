"""Holding what a backend computes together with a product (``sglang.srt.layers.fusion``) against the product, which has
been held against the exact one, and that step by itself.

A sum and what it is multiplied with are rounded where torch rounds them, so they have its bits. A gate is rounded twice
and a division once more or less than it would be alone, each time by at most half a unit in the last place. Beside a
gate a product may be added in another order, as gates and what they are for are computed side by side: so it may be as
far off as the product may, which shows in few elements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.fusion import SUMMED, AddRMSNorm, Rows, SiluAndMul, UnscaledRows
from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Linear

# Sums of squares are float32, added in any order.
SQUARES_TOLERANCE = 1e-5
# Part of the gates whose product may be another one after rounding.
REORDERED = 0.01
# Below, a device may have a sigmoid of float32 that is 0.
_SMALLEST_SIGMOID = 2.0**-120


def check_fused(linear: NvFp4Linear, x: torch.Tensor, bias: torch.Tensor | None, limit: torch.Tensor) -> str:
    """ "ok", or the first thing that is wrong with what ``linear`` computes together with its product for ``x`` [M, K],
    M > 0; "ok" as well if that is nothing.

    Args:
        limit: float64 [M, N], how far off each element of the product may be.

    Raises:
        Exception: whatever the backend raises.
    """
    rows = x.shape[0]
    if not any(linear.fuses(step, rows) for step in (UnscaledRows, SiluAndMul, AddRMSNorm)):
        return "ok"
    inputs: list[tuple[str, Rows, torch.Tensor]] = [("", x, linear(x, bias))]
    if linear.fuses(UnscaledRows, rows):
        unscaled, roots = _unscaled(x)
        quotient, y = linear(x).double() / roots, linear.fused(unscaled, bias)
        assert isinstance(y, torch.Tensor)
        wanted = quotient if bias is None else quotient + bias.double()
        finfo = torch.finfo(x.dtype)
        rounding = 2.5 * (finfo.eps / 2) * (quotient.abs() + wanted.abs()) + finfo.smallest_normal
        if verdict := _beyond(y, wanted, rounding, "a product that is divided by the norm of its input"):
            return verdict
        inputs.append((" of an input that is not divided", unscaled, y))
    for what, values, y in inputs:
        if linear.fuses(SiluAndMul, rows):
            gated = linear.fused(values, bias, SiluAndMul())
            assert isinstance(gated, torch.Tensor)
            if verdict := _gate(gated, y, limit, what):
                return verdict
        if linear.fuses(AddRMSNorm, rows):
            weight = torch.linspace(0.5, 1.5, y.shape[1], device=y.device).to(y.dtype)
            residual = y.roll(1, 1) / 3
            total = y + residual
            found = linear.fused(values, bias, AddRMSNorm(residual, weight, 1e-6))
            assert isinstance(found, UnscaledRows)
            if verdict := _norm(found, residual, total, weight, what):
                return verdict
    return "ok"


def _unscaled(x: torch.Tensor) -> tuple[UnscaledRows, torch.Tensor]:
    """``x`` with squares of which the mean is a power of four in every row, and their roots, float64 [M, 1]: 2, 4, 8,
    16, 1 and so on."""
    roots = 2.0 ** (torch.arange(1, x.shape[0] + 1, device=x.device, dtype=torch.float64) % 5).unsqueeze(1)
    squares = (SUMMED * roots.square()).float().expand(-1, x.shape[1] // SUMMED).contiguous()
    return UnscaledRows(x, squares, 0.0), roots


def _gate(found: torch.Tensor, y: torch.Tensor, limit: torch.Tensor, what: str) -> str:
    name = f"the gate{what}"
    if 2 * found.shape[1] != y.shape[1]:
        return f"{name} has {found.shape[1]} columns, not {y.shape[1] // 2}"
    first, second = y.float().chunk(2, dim=1)
    first_off, second_off = (2 * limit).chunk(2, dim=1)
    silu, second = F.silu(first).double(), second.double()
    moved = [(F.silu(first.double() + off) - silu).abs() for off in (first_off, -first_off)]
    wanted, finfo = silu * second, torch.finfo(y.dtype)
    rounding = 2.5 * (finfo.eps / 2) * wanted.abs() + finfo.smallest_normal * (1 + finfo.eps * second.abs())
    reordered = torch.maximum(*moved) * (second.abs() + second_off) + silu.abs() * second_off
    # Not where the result can't be held, nor where the sigmoid is next to nothing.
    ignored = (wanted.abs() >= finfo.max / 2) | ((silu.abs() <= _SMALLEST_SIGMOID) & (first != 0))
    rounding = rounding.masked_fill(ignored, torch.inf)
    if verdict := _beyond(found, wanted, rounding + reordered, name):
        return verdict
    off = int(((found.double() - wanted).abs() > rounding).sum())
    return f"{name}: {off} of {found.numel()} are not rounded" if off > 1 + REORDERED * found.numel() else ""


def _norm(found: UnscaledRows, residual: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, what: str) -> str:
    if not torch.equal(residual, total):
        return f"the sum with the residual{what} is not the product's"
    if not torch.equal(found.values, total * weight):
        return f"the sum times the norm's weight{what} is wrong"
    squares = total.float().square().unflatten(1, (-1, SUMMED)).sum(-1)
    limit = SQUARES_TOLERANCE * squares.double() + torch.finfo(torch.float32).smallest_normal
    return _beyond(found.squares, squares.double(), limit, f"the squares of the sum{what}")


def _beyond(found: torch.Tensor, wanted: torch.Tensor, limit: torch.Tensor, what: str) -> str:
    """What is wrong; empty if nothing is."""
    if found.shape != wanted.shape:
        return f"{what} has shape {list(found.shape)}, not {list(wanted.shape)}"
    # Written so that NaN is wrong.
    wrong = ~((found.double() - wanted).abs() <= limit) & ~limit.isinf()
    if not bool(wrong.any()):
        return ""
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} are wrong; [{row}, {column}] is "
        f"{float(found[row, column]):.6g}, exactly {float(wanted[row, column]):.6g}"
    )
