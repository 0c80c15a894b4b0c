"""Choosing the next tokens."""

from __future__ import annotations

import torch

from sglang.srt.layers.operators import operators_for
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingGroup

# Most filters keep fewer tokens than this; sorting the whole vocabulary costs far more.
CANDIDATES = 1024

_TOKEN_BITS = 32
# Weyl increment and multipliers of SplitMix64 (Steele, Lea, Flood 2014), as signed integers.
_GAMMA, _MULTIPLIERS = 0x9E3779B97F4A7C15 - (1 << 64), (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def sample_tokens(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """One token id per row of ``logits`` [B, vocabulary] float32: [B] int64. ``positions`` [B] int64: the tokens'
    places in their sequences.

    Greedy rows take the first of the largest logits. The others are drawn from softmax(logits / temperature)
    after top-k, top-p (on the running sum before top-k's cut) and min-p, in this order.
    A row with a NaN, or without a finite largest logit, gets -1 and harms no other row.
    What a row with a seed gets depends on its logits, parameters, seed and position only.
    """
    best, token_ids = operators_for(logits.device.type).max(logits)
    bad = ~best.isfinite()
    any_bad = bool(bad.any())
    if any_bad:
        logits = logits.masked_fill(bad.unsqueeze(1), 0.0)
        best = best.masked_fill(bad, 0.0)
    for group in info.groups:
        # Relative to the largest, so that a tiny temperature can't overflow.
        shifted = logits[group.rows] - best[group.rows].unsqueeze(1)
        probs = shifted.div_(group.temperatures).softmax(dim=-1)
        noise = _noise(group, positions)
        token_ids[group.rows] = _sample_filtered(probs, group, noise) if group.filtered else _draw(probs, noise)
    return token_ids.masked_fill_(bad, -1) if any_bad else token_ids


def _noise(group: SamplingGroup, positions: torch.Tensor) -> torch.Tensor:
    """[n, 1] float64, uniform in [0, 1)."""
    if group.seeds is None:
        return torch.rand(group.temperatures.shape, dtype=torch.float64, device=positions.device)
    return seeded_uniform(group.seeds, positions[group.rows].unsqueeze(1))


def seeded_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), multiples of 2**-53, float64: SplitMix64 of each position in the stream that its seed, itself
    mixed, begins. Integer arithmetic on int64 tensors, so the same on every device."""
    bits = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    return _shifted(bits, 11).double() * 2.0**-53


def _mix(z: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _shifted(z, shift)) * multiplier
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _sample_filtered(probs: torch.Tensor, group: SamplingGroup, noise: torch.Tensor) -> torch.Tensor:
    """[n] token ids from ``probs`` [n, vocabulary] under the group's limits."""
    vocab_size = probs.shape[1]
    for count in (min(CANDIDATES, vocab_size), vocab_size):
        values, ids = probs.topk(count, dim=-1) if group.seeds is None else _ordered(probs, count)
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
    return ids.gather(1, _draw(values * kept, noise).unsqueeze(1)).squeeze(1)


def _ordered(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk`` with equal probabilities in the order of their token ids: which of them comes first, and which is cut
    off, must not depend on the batch. Floats that are not negative order as their bits do."""
    ids = torch.arange(probs.shape[1], device=probs.device)
    keys = (probs.view(torch.int32).long() << _TOKEN_BITS) - ids
    ids = -keys.topk(count, dim=-1).values & ((1 << _TOKEN_BITS) - 1)
    return probs.gather(1, ids), ids


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index [n] drawn in proportion to ``weights`` [n, count] by inverting the cumulative sum at ``noise`` [n, 1].

    An index with weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniform = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, uniform, right=True).squeeze(1)
