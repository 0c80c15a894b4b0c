"""The log-probabilities that one request wants, and those that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import ReqOutput, TokenizedGenerateReqInput, TopLogprobs

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import PositionLogprobs


class ReqLogprobs:
    """Those of the prompt come once, also where the prompt is computed again after a retraction.

    Attributes:
        start: first prompt position that is wanted; its own value is None.
        top_num: how many of the best are wanted at every position.
        token_ids: tokens that are wanted at every position.
    """

    def __init__(self, recv: TokenizedGenerateReqInput) -> None:
        self.start = recv.logprob_start_len
        self.top_num = recv.top_logprobs_num
        self.token_ids = recv.token_ids_logprob
        self._prompt = recv.input_ids
        self._inputs: list[PositionLogprobs] = []
        self._outputs: list[tuple[PositionLogprobs, int]] = []
        self._sent_inputs = False

    def inputs_complete(self) -> bool:
        return len(self._inputs) >= len(self._prompt) - self.start - 1

    def input_range(self, begin: int, end: int) -> tuple[int, list[int]]:
        """Which log-probabilities the step over tokens ``begin .. end - 1`` has to give.

        Returns:
            number of the first hidden state in the step, and the target token of it and of each one behind it.
        """
        if self.inputs_complete():
            return 0, []
        first = max(begin, self.start)
        targets = self._prompt[first + 1 : end + 1] if first < end else []
        return first - begin if targets else 0, targets

    def add_inputs(self, positions: list[PositionLogprobs]) -> None:
        """Take those of one extend step."""
        self._inputs += positions

    def add_output(self, position: PositionLogprobs, token_id: int) -> None:
        """Take that of the newest output token."""
        self._outputs.append((position, token_id))

    def write(self, output: ReqOutput, sent: int) -> None:
        """Put what is new into ``output``; those of ``sent`` output tokens have been sent."""
        new = self._outputs[sent:]
        output.output_token_logprobs = [(value, token_id) for (value, _, _), token_id in new]
        output.output_top_logprobs = [list(top) for (_, top, _), _ in new] if self.top_num else None
        output.output_token_ids_logprobs = [list(own) for (_, _, own), _ in new] if self.token_ids else None
        if self._sent_inputs or not self.inputs_complete():
            return
        self._sent_inputs = True
        values = [None, *(value for value, _, _ in self._inputs)]
        output.input_token_logprobs = list(zip(values, self._prompt[self.start :], strict=False))
        first: list[TopLogprobs] = [None] * (len(output.input_token_logprobs) > 0)
        if self.top_num:
            output.input_top_logprobs = first + [list(top) for _, top, _ in self._inputs]
        if self.token_ids:
            output.input_token_ids_logprobs = first + [list(own) for _, _, own in self._inputs]
