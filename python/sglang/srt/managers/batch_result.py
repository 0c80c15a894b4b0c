"""What a step gives, which the device may still be computing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import LogitsProcessorOutput
from sglang.srt.platforms import record_event, to_host

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import PositionLogprobs


class GenerationBatchResult:
    """One step of a batch that was given to the device, with the requests that the batch had then.

    Making one starts the copy of everything that the host will read, and waits for nothing.

    Attributes:
        reqs: who gets a token, in the order of the rows.
        chunked_req: the one of them whose prompt the step doesn't finish; its token means nothing.
        is_extend: whether the step computed prompts.
        has_grammar: whether some request needs its token before its next step can be sampled.
    """

    def __init__(self, batch: ScheduleBatch, output: LogitsProcessorOutput, next_token_ids: torch.Tensor) -> None:
        self.reqs: list[Req] = batch.reqs
        self.chunked_req = batch.chunked_req
        self.is_extend = batch.forward_mode.is_extend()
        self.has_grammar = batch.has_grammar
        self._token_ids = to_host(next_token_ids)
        inputs, outputs = output.input_logprobs, output.next_logprobs
        self._input_logprobs = None if inputs is None else inputs.to_host()
        self._logprobs = None if outputs is None else outputs.to_host()
        self._copied = record_event(next_token_ids.device)

    def read(self) -> Iterator[tuple[Req, int, list[PositionLogprobs], PositionLogprobs | None]]:
        """Wait for the step. Of each request: its token (negative: there is none, see ``why_no_token``), and the
        log-probabilities of prompt tokens and of that token, as far as the batch wants any."""
        self._copied.synchronize()
        token_ids: list[int] = self._token_ids.tolist()
        inputs: list[list[PositionLogprobs]] = [[]] * len(token_ids)
        if self._input_logprobs is not None:
            inputs = self._input_logprobs.lists()
        logprobs: list[PositionLogprobs] | list[None] = [None] * len(token_ids)
        if self._logprobs is not None:
            logprobs = self._logprobs.lists()
        return zip(self.reqs, token_ids, inputs, logprobs, strict=True)
