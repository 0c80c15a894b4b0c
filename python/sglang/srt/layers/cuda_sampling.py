"""``draw_token.cu``: top-k, top-p, min-p and the draw on a GPU, in one kernel that sorts nothing."""

from __future__ import annotations

import torch

from sglang.kernels import layers
from sglang.srt.sampling.sampling_batch_info import SamplingGroup

THREADS = 1024
LARGEST_VOCABULARY = 1 << 30


def takes(probs: torch.Tensor) -> bool:
    """Whether :func:`draw` can be had for ``probs`` [n, vocabulary]."""
    if probs.device.type != "cuda" or probs.shape[1] >= LARGEST_VOCABULARY:
        return False
    return layers.unavailable(probs.get_device()) is None


def draw(probs: torch.Tensor, group: SamplingGroup, noise: torch.Tensor) -> torch.Tensor:
    """[n] int64 token ids from ``probs`` [n, vocabulary] float32 under the group's limits, at ``noise`` [n, 1] float64.

    Equal probabilities stand in the order of their ids. Sums are exact in multiples of 2**-60, to which probabilities
    are rounded down, so a row's token depends on nothing but the row.
    """
    probs = probs.contiguous()
    rows, size = probs.shape
    ids = torch.empty(rows, dtype=torch.int64, device=probs.device)
    limits = group.top_ks, group.top_ps, group.min_ps, noise
    assert all(column.shape == (rows, 1) and column.is_contiguous() for column in limits)
    params = layers.DRAW.pack(
        probs.data_ptr(), *(column.data_ptr() for column in limits), ids.data_ptr(), size,
        size % 4 == 0 and probs.data_ptr() % 16 == 0,
    )  # fmt: skip
    if rows:
        layers.launch("draw_token", probs.dtype, probs.get_device(), (rows, 1), THREADS, params)
    return ids
