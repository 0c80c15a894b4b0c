"""The sampling parameters of a batch, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingGroup:
    """Rows that are sampled in the same way.

    Attributes:
        rows: [n] int64, indices into the batch.
        temperatures: [n, 1] float32, positive.
        top_ks: [n, 1] int64; the vocabulary's size where there is no limit.
        top_ps: [n, 1] float32; infinite where there is no limit (a running sum of probabilities may exceed 1).
        min_ps: [n, 1] float32; 0 where there is no limit.
        filtered: some of top-k, top-p, min-p limits the rows; else the three are not looked at.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    filtered: bool


@dataclass(frozen=True)
class SamplingBatchInfo:
    """Rows in no group are greedy."""

    groups: tuple[SamplingGroup, ...]

    @property
    def is_all_greedy(self) -> bool:
        return not self.groups

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str
    ) -> SamplingBatchInfo:
        """Sort the requests of a batch, in its order, into greedy, unlimited and filtered ones."""
        members: dict[bool, list[int]] = {False: [], True: []}
        for row, one in enumerate(params):
            if not one.is_greedy:
                members[_is_filtered(one, vocab_size)].append(row)
        return cls(tuple(_group(params, rows, kind, vocab_size, device) for kind, rows in members.items() if rows))


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _group(
    params: Sequence[SamplingParams], rows: list[int], filtered: bool, vocab_size: int, device: torch.device | str
) -> SamplingGroup:
    chosen = [params[row] for row in rows]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    top_ks = [one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in chosen]
    return SamplingGroup(
        rows=torch.tensor(rows, device=device),
        temperatures=column([one.temperature for one in chosen]),
        top_ks=torch.tensor(top_ks, device=device).unsqueeze(1),
        top_ps=column([one.top_p if one.top_p < 1 else math.inf for one in chosen]),
        min_ps=column([one.min_p for one in chosen]),
        filtered=filtered,
    )
