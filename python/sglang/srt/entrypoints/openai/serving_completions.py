"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import Answer, finish
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import GenerateRequest, split_token_prompts
from sglang.srt.managers.request_state import Delta, ReqState
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import MAX_PARALLEL_SAMPLES


class CompletionAnswer(Answer[CompletionRequest]):
    """A text completion. Choice i * n + j is sample j of prompt i."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, manager: TokenizerManager, request: CompletionRequest, model: str, settings: OpenAISettings
    ) -> None:
        super().__init__(manager, request, model, settings, "cmpl")
        self._prompts = _prompts(request.prompt)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def requests(self) -> list[GenerateRequest]:
        request = self.request
        params = request.sampling_params(request.output_limit, self.settings.sampling_defaults, request.grammar())
        want_logprobs = request.logprobs is not None
        if (count := len(self._prompts) * request.n) > MAX_PARALLEL_SAMPLES:
            raise RequestError(f"One request may ask for {MAX_PARALLEL_SAMPLES} completions, not {count}.", "prompt")
        return [
            GenerateRequest(
                rid=f"{self.id}_{i * request.n + sample}",
                text=prompt if isinstance(prompt, str) else None,
                input_ids=prompt if isinstance(prompt, list) else None,
                sampling_params=params.sample(sample),
                max_new_tokens_given=request.max_tokens is not None,
                return_logprob=want_logprobs,
                logprob_start_len=0 if want_logprobs and request.echo else -1,
                top_logprobs_num=request.logprobs or 0,
            )
            for i, prompt in enumerate(self._prompts)
            for sample in range(request.n)
        ]

    def choice(self, state: ReqState) -> dict[str, Any]:
        return {
            "index": state.index,
            "text": self._echo(state) + state.text,
            "logprobs": self._format_logprobs(state, 0),
            **finish(state),
        }

    def chunk_choices(self, state: ReqState, delta: Delta) -> Iterable[dict[str, Any]]:
        text, logprobs = delta.text, None
        first = state.index not in self._begun
        if first:
            self._begun.add(state.index)
            text = self._echo(state) + text
        if self.request.logprobs is not None and (first or delta.start < len(state.output_ids)):
            logprobs = self._format_logprobs(state, delta.start)
        if text or logprobs or state.finished:
            yield {"index": state.index, "text": text, "logprobs": logprobs, **finish(state)}

    def _echo(self, state: ReqState) -> str:
        if not self.request.echo:
            return ""
        prompt = self._prompts[state.index // self.request.n]
        return prompt if isinstance(prompt, str) else self.manager.decoder.decode(prompt)

    def _format_logprobs(self, state: ReqState, start: int) -> dict[str, Any] | None:
        """Log-probabilities of the output from token ``start`` on, and of an echoed prompt in front of it."""
        if self.request.logprobs is None:
            return None
        formatter = self._logprobs.get(state.index)
        tokens, tops = state.output_token_logprobs[start:], state.output_top_logprobs[start:]
        if formatter is None:
            formatter = self._logprobs[state.index] = CompletionLogprobs(
                self.manager.decoder, skip_special_tokens=self.request.skip_special_tokens
            )
            tokens, tops = state.input_token_logprobs + tokens, state.input_top_logprobs + tops
        return formatter.format(tokens, tops)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("The prompt is empty.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return list(texts)
    if texts:
        raise RequestError("'prompt' mixes strings and token ids.", "prompt")
    return split_token_prompts([item for item in prompt if not isinstance(item, str)], "prompt")[0]
