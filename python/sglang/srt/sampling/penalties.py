"""What the parameters of a batch's requests do to its logits, before anything is drawn from them.

Every class covers the rows that ask for it; ``from_reqs`` returns None where none does. ``apply`` changes logits
[B, vocabulary] float32 in place, ``count`` takes the tokens that were then sampled, [B] int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.platforms import to_device
from sglang.srt.sampling.sampling_params import SamplingParams


class SampledRequest(Protocol):
    """What is needed of a request.

    Attributes:
        output_ids: all tokens that were generated, also before a retraction, as far as the host has read them.
        num_sampled: how many tokens were generated before the step that is prepared: one more than ``output_ids`` has
            while the newest has not been read.
        stop_token_ids: the model's and the request's own.
        token_counts: [vocabulary] int32 on the device, how often each token is in ``output_ids``; None where nobody
            has counted yet. Written by :class:`Penalties` only.
        chosen_ids: ``stop_token_ids`` and ``logit_bias`` as tensors on the CPU, once they were needed. They may name a
            whole vocabulary, which takes Python a tenth of a second, and a batch changes at almost every step.
    """

    sampling_params: SamplingParams
    output_ids: list[int]
    stop_token_ids: frozenset[int]
    token_counts: torch.Tensor | None
    chosen_ids: dict[str, tuple[torch.Tensor, ...]]

    @property
    def num_sampled(self) -> int: ...


@dataclass(frozen=True)
class Penalties:
    """Frequency, presence and repetition penalty of P rows, over the tokens that were generated.

    Attributes:
        rows: [P] int64, indices into the batch.
        counts: [P, vocabulary] int32; row i is also its request's ``token_counts``.
        frequency, presence, repetition: [P, 1] float32, None where it is every row's neutral value.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    frequency: torch.Tensor | None
    presence: torch.Tensor | None
    repetition: torch.Tensor | None

    @classmethod
    def from_reqs(cls, reqs: Sequence[SampledRequest], vocab_size: int, device: torch.device | str) -> Penalties | None:
        rows = [row for row, req in enumerate(reqs) if req.sampling_params.has_penalties]
        if not rows:
            return None
        chosen = [reqs[row] for row in rows]
        counts = torch.stack([_token_counts(req, vocab_size, device) for req in chosen])
        for req, count in zip(chosen, counts, strict=True):
            req.token_counts = count

        def column(name: str, neutral: float) -> torch.Tensor | None:
            values = [getattr(req.sampling_params, name) for req in chosen]
            if set(values) == {neutral}:
                return None
            return to_device(values, torch.float32, device).unsqueeze(1)

        return cls(
            rows=to_device(rows, torch.int64, device),
            counts=counts,
            frequency=column("frequency_penalty", 0.0),
            presence=column("presence_penalty", 0.0),
            repetition=column("repetition_penalty", 1.0),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """SGLang's order: both penalties that are subtracted, then the factor."""
        own = logits[self.rows]
        seen = self.counts > 0
        if self.frequency is not None:
            own -= self.frequency * self.counts
        if self.presence is not None:
            own -= self.presence * seen
        if self.repetition is not None:
            factor = torch.where(seen, self.repetition, 1.0)
            own = torch.where(own < 0, own * factor, own / factor)
        logits[self.rows] = own

    def count(self, token_ids: torch.Tensor) -> None:
        # A row with broken logits has -1; its request ends here.
        sampled = token_ids[self.rows].clamp(min=0).unsqueeze(1)
        self.counts.scatter_add_(1, sampled, torch.ones_like(sampled, dtype=torch.int32))


def _token_counts(req: SampledRequest, vocab_size: int, device: torch.device | str) -> torch.Tensor:
    if req.token_counts is not None:
        return req.token_counts
    # Nobody has counted before the request's first step, also after a retraction: then every token has been read.
    generated = torch.tensor(req.output_ids, dtype=torch.int64)
    return to_device(torch.bincount(generated, minlength=vocab_size), torch.int32, device)


@dataclass
class MinNewTokens:
    """Tokens that would end an output are impossible until it has ``min_new_tokens``.

    Attributes:
        rows, ids: [M] int64, pairs of a row of the batch and a token that would end it.
        left: [M] int64, tokens for which this still holds; ``most_left`` is the largest of them.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    left: torch.Tensor
    most_left: int

    @classmethod
    def from_reqs(cls, reqs: Sequence[SampledRequest], device: torch.device | str) -> MinNewTokens | None:
        asking = [
            (row, left, _stop_ids(req))
            for row, req in enumerate(reqs)
            if (left := req.sampling_params.min_new_tokens - req.num_sampled) > 0 and req.stop_token_ids
        ]
        if not asking:
            return None
        ids = [ids for _, _, ids in asking]
        lefts = [left for _, left, _ in asking]
        rows = _spread([row for row, _, _ in asking], ids)
        rows, all_ids, left = to_device(torch.stack([rows, torch.cat(ids), _spread(lefts, ids)]), torch.int64, device)
        return cls(rows, all_ids, left, max(lefts))

    def apply(self, logits: torch.Tensor) -> None:
        if self.most_left > 0:
            logits[self.rows, self.ids] = logits[self.rows, self.ids].masked_fill(self.left > 0, -math.inf)

    def count(self, token_ids: torch.Tensor) -> None:
        self.most_left -= 1
        self.left -= 1


@dataclass(frozen=True)
class LogitBias:
    """``logit_bias`` of a batch: [L] int64 rows and token ids, each pair once, and [L] float32 values to add."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def from_reqs(cls, reqs: Sequence[SampledRequest], device: torch.device | str) -> LogitBias | None:
        rows = [row for row, req in enumerate(reqs) if req.sampling_params.logit_bias]
        if not rows:
            return None
        biases = [_biases(reqs[row]) for row in rows]
        ids = [ids for ids, _ in biases]
        values = torch.cat([values for _, values in biases])
        return cls(
            to_device(_spread(rows, ids), torch.int64, device),
            to_device(torch.cat(ids), torch.int64, device),
            to_device(values, torch.float32, device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        logits[self.rows, self.ids] += self.values

    def count(self, token_ids: torch.Tensor) -> None:
        """A bias depends on no token."""


def _spread(values: Sequence[int], ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each of ``values`` as often as the tensor beside it is long."""
    return torch.tensor(values).repeat_interleave(torch.tensor([len(one) for one in ids]))


def _stop_ids(req: SampledRequest) -> torch.Tensor:
    if "stop" not in req.chosen_ids:
        req.chosen_ids["stop"] = (torch.tensor(sorted(req.stop_token_ids)),)
    return req.chosen_ids["stop"][0]


def _biases(req: SampledRequest) -> tuple[torch.Tensor, ...]:
    """Token ids, and float32 values."""
    if "bias" not in req.chosen_ids:
        biases = req.sampling_params.logit_bias or {}
        ids = torch.tensor([int(token_id) for token_id in biases])
        req.chosen_ids["bias"] = ids, torch.tensor(list(biases.values()), dtype=torch.float32)
    return req.chosen_ids["bias"]
