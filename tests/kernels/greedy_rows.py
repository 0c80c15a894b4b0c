"""Rows of logits, and the token that a greedy choice takes of each."""

import math

import torch

from sglang.srt.sampling.sampling_batch_info import BROKEN_LOGITS, NOTHING_POSSIBLE

INF, NAN = math.inf, math.nan


def special_rows(n: int) -> torch.Tensor:
    """[rows, n] float32: rows of one value, and of one value beside others that are finite, -infinity or +infinity;
    NaNs come with either sign."""
    places = sorted({0, n // 3, n // 2, n - 1})
    rows = [torch.full((n,), value) for value in (2.0, -0.0, -3e38, 1e-45, INF, -INF, NAN, -NAN)]
    for base in (torch.linspace(-2, 2, n).round(decimals=1), torch.full((n,), -INF), torch.full((n,), INF)):
        for value in (INF, -INF, NAN, -NAN, 3e38, -3e38, 0.0):
            rows += [base.index_fill(0, torch.tensor([place]), value) for place in places]
    rows.append(torch.zeros(n).index_fill(0, torch.arange(n // 2), -0.0))  # equal to the zeros behind them
    rows.append(torch.zeros(n).index_fill(0, torch.arange(n // 2, n), -0.0))
    return torch.stack(rows)


def wanted_token(row: list[float]) -> int:
    if any(math.isnan(value) or value == INF for value in row):
        return BROKEN_LOGITS
    best = max(row)
    return NOTHING_POSSIBLE if best == -INF else row.index(best)
