"""From hidden states to logits and log-probabilities: the head is computed on rows that somebody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang.srt.model_executor.forward_batch_info import LogitsProcessorOutput

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Logits of prompt tokens are computed in chunks of at most this many values (64 MB in fp32).
MAX_CHUNK_ELEMENTS = 1 << 24

TopLogprobs = list[tuple[float, int]]
# Of one position: the target's log-probability, the best ones, those of chosen tokens.
PositionLogprobs = tuple[float, TopLogprobs, TopLogprobs]


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
        ends = torch.tensor(batch.extend_seq_lens).cumsum(0)
        starts = [0, *ends[:-1].tolist()]
        last = hidden_states.index_select(0, (ends - 1).to(hidden_states.device))
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
        flat = _chunked_logprobs(
            hidden_states,
            head,
            rows,
            [target for wanted in targets for target in wanted],
            [top for top, wanted in zip(tops, targets, strict=True) for _ in wanted],
            [ids for ids, wanted in zip(chosen, targets, strict=True) for _ in wanted],
            max(1, MAX_CHUNK_ELEMENTS // output.next_token_logits.shape[1]),
        )
        output.input_token_logprobs, output.input_top_logprobs, output.input_token_ids_logprobs = [], [], []
        for wanted in targets:
            found = [next(flat) for _ in wanted]
            output.input_token_logprobs.append([logprob for logprob, _, _ in found])
            output.input_top_logprobs.append([top for _, top, _ in found])
            output.input_token_ids_logprobs.append([ids for _, _, ids in found])
    return output


def _chunked_logprobs(
    hidden_states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    rows: list[int],
    targets: list[int],
    tops: list[int],
    chosen: list[list[int]],
    chunk: int,
) -> Iterator[PositionLogprobs]:
    for begin in range(0, len(rows), chunk):
        part = slice(begin, begin + chunk)
        index = torch.tensor(rows[part], device=hidden_states.device)
        logits = head(hidden_states.index_select(0, index)).float()
        target_ids = torch.tensor(targets[part], device=logits.device)
        yield from zip(*logprobs_of(logits, target_ids, tops[part], chosen[part]), strict=True)


def logprobs_of(
    logits: torch.Tensor, targets: torch.Tensor, tops: list[int], chosen: list[list[int]]
) -> tuple[list[float], list[TopLogprobs], list[TopLogprobs]]:
    """Log-softmax of ``logits`` [rows, vocabulary] at ``targets`` [rows], the ``tops[i]`` best of row i, and those of
    the tokens ``chosen[i]``. An impossible token has the smallest float32, which JSON can say, instead of -infinity.

    Returns:
        The targets' values, and per row (value, token id): best first, and in the order of ``chosen``.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    values: list[float] = _finite(logits.gather(1, targets.unsqueeze(1)) - normalizer).squeeze(1).tolist()
    best: list[TopLogprobs] = [[] for _ in values]
    if (most := min(max(tops, default=0), logits.shape[1])) > 0:
        top_values, top_ids = logits.topk(most, dim=-1)
        rows = zip(_finite(top_values - normalizer).tolist(), top_ids.tolist(), tops, strict=True)
        best = [list(zip(row[:top], row_ids[:top], strict=True)) for row, row_ids, top in rows]
    own: list[TopLogprobs] = [[] for _ in values]
    if (most := max(map(len, chosen), default=0)) > 0:
        padded = torch.tensor([ids + [0] * (most - len(ids)) for ids in chosen], device=logits.device)
        own_values = _finite(logits.gather(1, padded) - normalizer).tolist()
        own = [list(zip(row, ids, strict=False)) for row, ids in zip(own_values, chosen, strict=True)]
    return values, best, own


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
