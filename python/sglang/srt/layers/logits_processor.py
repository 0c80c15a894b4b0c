"""From hidden states to logits and log-probabilities: the head is computed on rows that somebody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING

import torch

from sglang.srt.model_executor.forward_batch_info import LogitsProcessorOutput
from sglang.srt.platforms import to_device, to_host

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Logits of prompt tokens are computed in chunks of at most this many values (64 MB in fp32).
MAX_CHUNK_ELEMENTS = 1 << 24

TopLogprobs = list[tuple[float, int]]
# Of one position: the target's log-probability, the best ones, those of chosen tokens.
PositionLogprobs = tuple[float, TopLogprobs, TopLogprobs]


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of R rows, float32. An impossible token has the smallest float32, which JSON can say, instead
    of -infinity.

    Attributes:
        values: [R], of the rows' targets.
        best: [R, k] the k largest and their token ids, best first; None where no row wants any.
        own: [R, c] of the tokens ``chosen``, whatever behind them; None where no row has chosen any.
        tops: how many of the largest each row wants.
        chosen: tokens of each row.
    """

    values: torch.Tensor
    best: tuple[torch.Tensor, torch.Tensor] | None
    own: torch.Tensor | None
    tops: list[int]
    chosen: list[list[int]]

    def to_host(self) -> Logprobs:
        """The same as :func:`~sglang.srt.platforms.to_host` makes it."""
        best = None if self.best is None else (to_host(self.best[0]), to_host(self.best[1]))
        own = None if self.own is None else to_host(self.own)
        return replace(self, values=to_host(self.values), best=best, own=own)

    def lists(self) -> list[PositionLogprobs]:
        """What each row wants, in Python; waits for the device where the tensors are on one."""
        values: list[float] = self.values.tolist()
        best: list[TopLogprobs] = [[] for _ in values]
        if self.best is not None:
            rows = zip(self.best[0].tolist(), self.best[1].tolist(), self.tops, strict=True)
            best = [list(zip(row[:top], ids[:top], strict=True)) for row, ids, top in rows]
        own: list[TopLogprobs] = [[] for _ in values]
        if self.own is not None:
            own = [list(zip(row, ids, strict=False)) for row, ids in zip(self.own.tolist(), self.chosen, strict=True)]
        return list(zip(values, best, own, strict=True))


@dataclass(frozen=True)
class InputLogprobs:
    """Log-probabilities of prompt tokens.

    Attributes:
        parts: of all wanted positions, request after request.
        counts: how many of them are each request's.
    """

    parts: list[Logprobs]
    counts: list[int]

    def to_host(self) -> InputLogprobs:
        return InputLogprobs([part.to_host() for part in self.parts], self.counts)

    def lists(self) -> list[list[PositionLogprobs]]:
        """Of each request; as :meth:`Logprobs.lists`."""
        positions = chain.from_iterable(part.lists() for part in self.parts)
        return [list(islice(positions, count)) for count in self.counts]


def compute_logits(
    hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], batch: ForwardBatch
) -> LogitsProcessorOutput:
    """Logits of each request's last new token, and the prompt log-probabilities that the batch asks for.

    Args:
        hidden_states: [T, hidden size] of the new tokens.
        head: [rows, hidden size] to [rows, vocabulary].
    """
    last = hidden_states
    starts = [0] * batch.batch_size
    if batch.forward_mode.is_extend():
        ends = list(accumulate(batch.extend_seq_lens))
        starts = [0, *ends[:-1]]
        index = to_device([end - 1 for end in ends], torch.int64, hidden_states.device)
        last = hidden_states.index_select(0, index)
    output = LogitsProcessorOutput(next_token_logits=head(last).float())
    targets = batch.input_logprob_targets
    if batch.return_logprob and targets is not None and batch.input_logprob_starts is not None:
        rows = [
            start + first + offset
            for start, first, wanted in zip(starts, batch.input_logprob_starts, targets, strict=True)
            for offset in range(len(wanted))
        ]
        tops = batch.top_logprobs_nums or [0] * batch.batch_size
        chosen = batch.token_ids_logprobs or [[]] * batch.batch_size
        parts = _chunked_logprobs(
            hidden_states,
            head,
            rows,
            [target for wanted in targets for target in wanted],
            [top for top, wanted in zip(tops, targets, strict=True) for _ in wanted],
            [ids for ids, wanted in zip(chosen, targets, strict=True) for _ in wanted],
            max(1, MAX_CHUNK_ELEMENTS // output.next_token_logits.shape[1]),
        )
        output.input_logprobs = InputLogprobs(list(parts), [len(wanted) for wanted in targets])
    return output


def _chunked_logprobs(
    hidden_states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    rows: list[int],
    targets: list[int],
    tops: list[int],
    chosen: list[list[int]],
    chunk: int,
) -> Iterator[Logprobs]:
    for begin in range(0, len(rows), chunk):
        part = slice(begin, begin + chunk)
        index = to_device(rows[part], torch.int64, hidden_states.device)
        logits = head(hidden_states.index_select(0, index)).float()
        target_ids = to_device(targets[part], torch.int64, logits.device)
        yield logprobs_of(logits, target_ids, tops[part], chosen[part])


def logprobs_of(logits: torch.Tensor, targets: torch.Tensor, tops: list[int], chosen: list[list[int]]) -> Logprobs:
    """Log-softmax of ``logits`` [rows, vocabulary] at ``targets`` [rows], the ``tops[i]`` best of row i, and those of
    the tokens ``chosen[i]``; doesn't wait for the device."""
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    values = _finite(logits.gather(1, targets.unsqueeze(1)) - normalizer).squeeze(1)
    best = own = None
    if (most := min(max(tops, default=0), logits.shape[1])) > 0:
        top_values, top_ids = logits.topk(most, dim=-1)
        best = _finite(top_values - normalizer), top_ids
    if (most := max(map(len, chosen), default=0)) > 0:
        padded = to_device([ids + [0] * (most - len(ids)) for ids in chosen], torch.int64, logits.device)
        own = _finite(logits.gather(1, padded) - normalizer)
    return Logprobs(values, best, own, tops, chosen)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
