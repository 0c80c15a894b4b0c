"""The sampling parameters of a batch, as tensors, and what has to be known of its requests for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Protocol

import torch

from sglang.srt.constrained.vocab_mask import ConstrainedRequest, VocabMask
from sglang.srt.platforms import to_device
from sglang.srt.sampling.penalties import LogitBias, MinNewTokens, Penalties, SampledRequest
from sglang.srt.sampling.sampling_params import SamplingParams

# Most limits keep fewer tokens than this; sorting the whole vocabulary costs far more.
CANDIDATES = 1024

# Instead of a token, where there is none to choose: the logits are not finite, or every token is impossible.
BROKEN_LOGITS, NOTHING_POSSIBLE = -1, -2


class BatchRequest(SampledRequest, ConstrainedRequest, Protocol):
    """What has to be known of a request."""


@dataclass(frozen=True)
class SamplingGroup:
    """Rows that are sampled in the same way.

    Attributes:
        rows: [n] int64, indices into the batch.
        temperatures: [n, 1] float32, positive.
        top_ks: [n, 1] int64; the vocabulary's size where there is no limit.
        top_ps: [n, 1] float32; infinite where there is no limit (a running sum of probabilities may exceed 1).
        min_ps: [n, 1] float32; 0 where there is no limit.
        most_kept: of the largest probabilities of a row no more than this many are kept: at most ``CANDIDATES`` where
            top-k says so, else the vocabulary's size. 0 where nothing limits the rows and the three are not looked at.
        seeds: [n, 1] int64, or None for rows that draw from the device's generator.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    most_kept: int
    seeds: torch.Tensor | None


@dataclass(frozen=True)
class SamplingBatchInfo:
    """Rows in no group are greedy.

    Attributes:
        rules: what changes logits before they are sampled, in this order.
    """

    groups: tuple[SamplingGroup, ...]
    rules: tuple[MinNewTokens | Penalties | LogitBias | VocabMask, ...] = ()

    @property
    def is_all_greedy(self) -> bool:
        return not self.groups

    @classmethod
    def from_reqs(cls, reqs: Sequence[BatchRequest], vocab_size: int, device: torch.device | str) -> SamplingBatchInfo:
        """What the requests of a batch, in its order, ask for. Good for as long as each of them gets one token a step;
        a batch that others join or leave needs a new one."""
        rules = (
            MinNewTokens.from_reqs(reqs, device),
            Penalties.from_reqs(reqs, vocab_size, device),
            LogitBias.from_reqs(reqs, device),
            VocabMask.from_reqs(reqs),
        )
        info = cls.from_params([req.sampling_params for req in reqs], vocab_size, device)
        return cls(info.groups, tuple(rule for rule in rules if rule is not None))

    def apply(self, logits: torch.Tensor) -> None:
        """Turn the model's ``logits`` [B, vocabulary] float32 into those that are sampled, in place."""
        for rule in self.rules:
            rule.apply(logits)

    def count(self, token_ids: torch.Tensor) -> None:
        """Take the tokens that were sampled, [B] int64, negative where there was none to choose."""
        for rule in self.rules:
            rule.count(token_ids)

    def tempered(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [B, vocabulary] divided by their row's temperature; a greedy row's is 1."""
        if self.groups:
            logits = logits.clone()
        for group in self.groups:
            logits[group.rows] /= group.temperatures
        return logits

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str
    ) -> SamplingBatchInfo:
        """Sort the requests of a batch, in its order, into greedy ones, and others by limits and by seeds."""
        members: dict[tuple[_Limits, bool], list[int]] = {kind: [] for kind in product(_Limits, (False, True))}
        for row, one in enumerate(params):
            if not one.is_greedy:
                members[_limits(one, vocab_size), one.sampling_seed is not None].append(row)
        return cls(
            tuple(_group(params, rows, limits, vocab_size, device) for (limits, _), rows in members.items() if rows)
        )


class _Limits(Enum):
    """NONE: every token is kept. FEW: at most CANDIDATES. SOME: nobody knows how many before the logits."""

    NONE = auto()
    FEW = auto()
    SOME = auto()


def _limits(params: SamplingParams, vocab_size: int) -> _Limits:
    if not (0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0):
        return _Limits.NONE
    return _Limits.FEW if _top_k(params, vocab_size) <= CANDIDATES else _Limits.SOME


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _group(
    params: Sequence[SamplingParams], rows: list[int], limits: _Limits, vocab_size: int, device: torch.device | str
) -> SamplingGroup:
    chosen = [params[row] for row in rows]

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float32, device).unsqueeze(1)

    seeds = [one.sampling_seed for one in chosen if one.sampling_seed is not None]
    top_ks = [_top_k(one, vocab_size) for one in chosen]
    return SamplingGroup(
        rows=to_device(rows, torch.int64, device),
        temperatures=column([one.temperature for one in chosen]),
        top_ks=to_device(top_ks, torch.int64, device).unsqueeze(1),
        top_ps=column([one.top_p if one.top_p < 1 else math.inf for one in chosen]),
        min_ps=column([one.min_p for one in chosen]),
        most_kept=0 if limits is _Limits.NONE else max(top_ks),
        seeds=to_device(seeds, torch.int64, device).unsqueeze(1) if seeds else None,
    )


def why_no_token(req: BatchRequest, token_id: int) -> tuple[str, int]:
    """Message and HTTP status for a request that got ``BROKEN_LOGITS`` or ``NOTHING_POSSIBLE`` for a token."""
    least = req.sampling_params.min_new_tokens
    if req.grammar is not None and req.grammar.failure is not None:
        return f"The grammar can't be followed: {req.grammar.failure}.", 400
    if len(req.output_ids) < least and token_id == NOTHING_POSSIBLE:
        return (
            f"After {len(req.output_ids)} tokens every one that could come next is a stop token, which min_new_tokens "
            f"({least}) forbids; lower it, or give fewer stop_token_ids.",
            400,
        )
    return (
        "The model computed NaN or infinite logits: its weights are damaged or its dtype's range is too small; try "
        "--dtype bfloat16 or float32.",
        500,
    )
