"""Choosing the next tokens."""

from __future__ import annotations

import torch

from sglang.srt.layers import cuda_sampling
from sglang.srt.layers.operators import operators_for
from sglang.srt.sampling.sampling_batch_info import CANDIDATES, SamplingBatchInfo, SamplingGroup

_TOKEN_BITS = 32
# Weyl increment and multipliers of SplitMix64 (Steele, Lea, Flood 2014), as signed integers.
_GAMMA, _MULTIPLIERS = 0x9E3779B97F4A7C15 - (1 << 64), (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def sample_tokens(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """One token id per row of ``logits`` [B, vocabulary] float32: [B] int64. ``positions`` [B] int64: the tokens'
    places in their sequences.

    Greedy rows take the first of the largest logits. The others are drawn from softmax(logits / temperature)
    after top-k, top-p (on the running sum before top-k's cut) and min-p, in this order.
    A row with a NaN or an infinite logit gets ``BROKEN_LOGITS``, one of -infinity only ``NOTHING_POSSIBLE``, and harms
    no other row. What a row with a seed gets depends on its logits, parameters, seed and position only.
    On a GPU nothing here waits for it.
    """
    best, token_ids = operators_for(logits.device.type).greedy(logits)
    for group in info.groups:
        # Relative to the largest, so that a tiny temperature can't overflow.
        shifted = logits[group.rows] - best[group.rows].unsqueeze(1)
        probs = shifted.div_(group.temperatures).softmax(dim=-1)
        noise = _noise(group, positions)
        drawn = _sample_filtered(probs, group, noise) if group.most_kept else _draw(probs, noise)
        greedy = token_ids[group.rows]  # negative where there is nothing to draw from
        token_ids[group.rows] = torch.where(greedy < 0, greedy, drawn)
    return token_ids


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
    if cuda_sampling.takes(probs):
        return cuda_sampling.draw(probs, group, noise)
    counts = _candidate_counts(group, probs)
    for count in counts:
        values, ids = probs.topk(count, dim=-1) if group.seeds is None else _ordered(probs, count)
        if count == counts[-1] or _suffice(values, group):
            break
    return draw_candidates(values, ids, group, noise)


def draw_candidates(values: torch.Tensor, ids: torch.Tensor, group: SamplingGroup, noise: torch.Tensor) -> torch.Tensor:
    """[n] token ids: of ``values`` [n, count], probabilities of ``ids``, the largest first, those that the limits leave
    are drawn from."""
    before = values.cumsum(dim=-1, dtype=torch.float64) - values
    rank = torch.arange(values.shape[1], device=values.device)
    kept = (rank < group.top_ks) & (before <= group.top_ps) & (values >= values[:, :1] * group.min_ps)
    return ids.gather(1, _draw(values * kept, noise).unsqueeze(1)).squeeze(1)


def _suffice(values: torch.Tensor, group: SamplingGroup) -> bool:
    """Whether, in every row, what is smaller than its largest ``values`` [n, count] is cut off by one of the limits."""
    total = values.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    smallest_cut = values[:, -1:] < values[:, :1] * group.min_ps
    return bool(((group.top_ks <= values.shape[1]) | (total > group.top_ps) | smallest_cut).all())


def _candidate_counts(group: SamplingGroup, probs: torch.Tensor) -> tuple[int, ...]:
    """How many of the largest probabilities to look at, in turn until the limits cut off all others.

    To see that they do would mean to wait for a GPU, which sorts all that could be needed at once.
    """
    if probs.device.type == "cpu" and group.most_kept > CANDIDATES:
        return CANDIDATES, group.most_kept
    return (group.most_kept,)


def _ordered(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk`` with equal probabilities in the order of their token ids: which of them comes first, and which is cut
    off, must not depend on the batch. Floats that are not negative order as their bits do."""
    ids = torch.arange(probs.shape[1], device=probs.device)
    keys = (probs.view(torch.int32).long() << _TOKEN_BITS) - ids
    ids = -keys.topk(count, dim=-1).values & ((1 << _TOKEN_BITS) - 1)
    return probs.gather(1, ids), ids


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index [n] drawn in proportion to ``weights`` [n, count] by inverting the cumulative sum at ``noise`` [n, 1].

    An index with weight 0 is never drawn; of weights with a NaN, any index is.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniform = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, uniform, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
