"""Choosing the next tokens."""

from __future__ import annotations

import torch

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingGroup

# Most filters keep fewer tokens than this; sorting the whole vocabulary costs far more.
CANDIDATES = 1024


def sample_tokens(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """One token id per row of ``logits`` [B, vocabulary] float32: [B] int64.

    Greedy rows take the first of the largest logits. The others are drawn from softmax(logits / temperature)
    after top-k, top-p (on the running sum before top-k's cut) and min-p, in this order.
    A row with a NaN, or without a finite largest logit, gets -1 and harms no other row.
    """
    best, token_ids = logits.max(dim=-1)
    bad = ~best.isfinite()
    any_bad = bool(bad.any())
    if any_bad:
        logits = logits.masked_fill(bad.unsqueeze(1), 0.0)
        best = best.masked_fill(bad, 0.0)
    for group in info.groups:
        # Relative to the largest, so that a tiny temperature can't overflow.
        shifted = logits[group.rows] - best[group.rows].unsqueeze(1)
        probs = shifted.div_(group.temperatures).softmax(dim=-1)
        token_ids[group.rows] = (_sample_filtered(probs, group) if group.filtered else _draw(probs)).squeeze(1)
    return token_ids.masked_fill_(bad, -1) if any_bad else token_ids


def _sample_filtered(probs: torch.Tensor, group: SamplingGroup) -> torch.Tensor:
    """[n, 1] token ids from ``probs`` [n, vocabulary] under the group's limits."""
    vocab_size = probs.shape[1]
    for count in (min(CANDIDATES, vocab_size), vocab_size):
        values, ids = probs.topk(count, dim=-1)
        before = values.cumsum(dim=-1, dtype=torch.float64)
        total = before[:, -1:].clone()
        before -= values
        floor = values[:, :1] * group.min_ps
        # What is not among the candidates is cut off by one of the limits.
        complete = (group.top_ks <= count) | (total > group.top_ps) | (values[:, -1:] < floor)
        if count == vocab_size or bool(complete.all()):
            break
    rank = torch.arange(count, device=probs.device)
    kept = (rank < group.top_ks) & (before <= group.top_ps) & (values >= floor)
    return ids.gather(1, _draw(values * kept))


def _draw(weights: torch.Tensor) -> torch.Tensor:
    """Index [n, 1] drawn in proportion to ``weights`` [n, count] by inverting the cumulative sum.

    An index with weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniform = torch.rand(total.shape, dtype=torch.float64, device=weights.device) * total
    uniform = torch.minimum(uniform, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, uniform, right=True)
