"""What the HTTP process knows of a running request, and the hand-over to whoever waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.errors import RequestError
from sglang.srt.managers.detokenizer import IncrementalDetokenizer, TokenDecoder
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.io_struct import ReqOutput, TokenLogprob, TopLogprobs

# SGLang's triple: log-probability, token id, text (None unless return_text_in_logprobs).
LogprobTriple = tuple[float | None, int, str | None]


class ServiceError(Exception):
    """A request failed and the client is not to blame; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Delta:
    """What a request gained since its consumer last looked. Tokens are ``state.output_ids[start:]``, and likewise
    the log-probabilities."""

    text: str
    start: int


class ReqState:
    """One sequence. Everything is cumulative; the consumer's position is kept by :meth:`take`."""

    def __init__(
        self, rid: str, request: GenerateRequest, input_ids: list[int], decoder: TokenDecoder, index: int
    ) -> None:
        self.rid = rid
        self.request = request
        self.index = index
        self.prompt_tokens = len(input_ids)
        self.cached_tokens = 0
        self.output_ids: list[int] = []
        self.finish_reason: dict[str, Any] | None = None
        self.input_token_logprobs: list[LogprobTriple] = []
        self.input_top_logprobs: list[list[LogprobTriple] | None] = []
        self.output_token_logprobs: list[LogprobTriple] = []
        self.output_top_logprobs: list[list[LogprobTriple] | None] = []
        self.input_token_ids_logprobs: list[list[LogprobTriple] | None] = []
        self.output_token_ids_logprobs: list[list[LogprobTriple] | None] = []
        self._decoder = decoder
        params = request.sampling_params
        self._detokenizer = IncrementalDetokenizer(
            decoder, input_ids, params.stop, params.skip_special_tokens, params.stop_regex, params.no_stop_trim
        )
        self._texts: list[str] = []
        self._taken_texts = 0
        self._taken_tokens = 0
        self._created = time.perf_counter()
        self._latency: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def failed(self) -> bool:
        """It ended with an error, which :meth:`raise_if_failed` raises."""
        return self.finish_reason is not None and "status_code" in self.finish_reason

    @property
    def text(self) -> str:
        """All text so far."""
        text = "".join(self._texts)
        if text and self._taken_texts in (0, len(self._texts)):  # of one piece there can't be taken a part
            self._texts = [text]
            self._taken_texts = min(self._taken_texts, 1)
        return text

    def push(self, out: ReqOutput) -> bool:
        """Take what a scheduler step produced. True: a stop string ended the request, and the scheduler must know."""
        ids = out.output_ids
        reason = out.finish_reason
        self.cached_tokens = out.cached_tokens
        # A matched stop token belongs to the output, but its text does not.
        trimmed = (
            not self.request.sampling_params.no_stop_trim
            and reason is not None
            and reason["type"] == "stop"
            and isinstance(reason.get("matched"), int)
        )
        text, used = self._detokenizer.feed(ids[:-1] if trimmed else ids)
        if self._detokenizer.matched is None:
            used = len(ids)
            if reason is not None:
                text += self._detokenizer.finish()
        self.output_ids += ids[:used]
        if text:
            self._texts.append(text)
        if self.request.return_logprob:
            self._push_logprobs(out, used)
        stopped_here = self._detokenizer.matched is not None
        if stopped_here:
            self.end({"type": "stop", "matched": self._detokenizer.matched})
        elif reason is not None:
            self.end(reason)
        return stopped_here and reason is None

    def end(self, reason: dict[str, Any]) -> None:
        """Finish with ``reason``."""
        self.finish_reason = reason
        self._latency = time.perf_counter() - self._created

    def _push_logprobs(self, out: ReqOutput, used: int) -> None:
        if out.input_token_logprobs:
            self.input_token_logprobs += self._triples(out.input_token_logprobs)
        if out.output_token_logprobs:
            self.output_token_logprobs += self._triples(out.output_token_logprobs[:used])
        if self.request.top_logprobs_num:
            self.input_top_logprobs += map(self._top_triples, out.input_top_logprobs or ())
            self.output_top_logprobs += map(self._top_triples, (out.output_top_logprobs or [])[:used])
        if self.request.token_ids_logprob:
            self.input_token_ids_logprobs += map(self._top_triples, out.input_token_ids_logprobs or ())
            self.output_token_ids_logprobs += map(self._top_triples, (out.output_token_ids_logprobs or [])[:used])

    def _triples(self, pairs: Sequence[TokenLogprob]) -> list[LogprobTriple]:
        if self.request.return_text_in_logprobs:
            return [(logprob, token_id, self._decoder.text(token_id)) for logprob, token_id in pairs]
        return [(logprob, token_id, None) for logprob, token_id in pairs]

    def _top_triples(self, pairs: TopLogprobs) -> list[LogprobTriple] | None:
        return None if pairs is None else self._triples(pairs)

    def take(self) -> Delta:
        """What is new since the last call."""
        delta = Delta("".join(self._texts[self._taken_texts :]), self._taken_tokens)
        self._taken_texts = len(self._texts)
        self._taken_tokens = len(self.output_ids)
        return delta

    def raise_if_failed(self) -> None:
        """An end that is an error (an abort with a status) as an exception.

        Raises:
            RequestError: the scheduler found the request impossible (status 400).
            ServiceError: anything else.
        """
        reason = self.finish_reason
        status = reason.get("status_code") if reason is not None and reason["type"] == "abort" else None
        if reason is None or status is None:
            return
        message = str(reason.get("message", "The request was aborted."))
        raise RequestError(message) if status == 400 else ServiceError(message, status)

    def to_dict(self) -> dict[str, Any]:
        """SGLang's response object, cumulative."""
        meta_info: dict[str, Any] = {
            "id": self.request.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
        }
        if self.request.return_logprob:
            meta_info["input_token_logprobs"] = self.input_token_logprobs
            meta_info["output_token_logprobs"] = self.output_token_logprobs
            meta_info["output_token_logprobs_length"] = len(self.output_token_logprobs)
            if self.request.top_logprobs_num:
                meta_info["input_top_logprobs"] = self.input_top_logprobs
                meta_info["output_top_logprobs"] = self.output_top_logprobs
            if self.request.token_ids_logprob:
                meta_info["input_token_ids_logprobs"] = self.input_token_ids_logprobs
                meta_info["output_token_ids_logprobs"] = self.output_token_ids_logprobs
        meta_info["completion_tokens"] = len(self.output_ids)
        meta_info["cached_tokens"] = self.cached_tokens
        if self._latency is not None:
            meta_info["e2e_latency"] = self._latency
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": meta_info}


class RequestGroup:
    """The sequences of one call and its single waiter, woken at most once per scheduler step: for every piece of news
    if ``stream``, else at the end or when one has failed. Observers are told of it if ``log_metrics``."""

    def __init__(self, states: list[ReqState], stream: bool, log_metrics: bool = True) -> None:
        self.states = states
        self.stream = stream
        self.log_metrics = log_metrics
        self._running = len(states)
        self._news: dict[int, ReqState] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    def notify(self, state: ReqState) -> None:
        """``state`` changed."""
        self._running -= state.finished
        if self.stream or not self._running or state.failed:
            self._news[state.index] = state
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """The waiter gets ``error`` instead of an answer."""
        self._error = error
        self._wake.set()

    async def next(self) -> ReqState | None:
        """A sequence that changed since it was last handed out, as it is now; None when all have finished and were.
        What is done with it before anything else is awaited sees one state of it.

        Raises:
            Exception: what :meth:`fail` was given.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._running:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._news.pop(next(iter(self._news)))

    async def wait(self) -> list[ReqState]:
        """All sequences, finished.

        Raises:
            RequestError, ServiceError: one of them failed; the others may still run.
        """
        while (state := await self.next()) is not None:
            state.raise_if_failed()
        return self.states
