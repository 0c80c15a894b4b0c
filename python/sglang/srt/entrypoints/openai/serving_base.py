"""What the two OpenAI endpoints share: from requests to one JSON object or a stream of chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Generic, TypeVar

from fastapi import Request, Response

from sglang.srt.entrypoints.http_responses import (
    JsonResponse,
    ModelNotFoundError,
    sse,
    stream_response,
    unless_disconnected,
)
from sglang.srt.entrypoints.openai.protocol import (
    DEFAULT_MODEL_NAME,
    ChatCompletionRequest,
    CompletionRequest,
)
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.request_state import Delta, ReqState, RequestGroup
from sglang.srt.managers.tokenizer_manager import TokenizerManager

R = TypeVar("R", ChatCompletionRequest, CompletionRequest)

_MESSAGES_IN_THREAD = 500


class Answer(ABC, Generic[R]):
    """One request while it is answered: knows the shape of the response.

    Attributes:
        object_name, chunk_name: the response's ``object``, whole and streamed.
    """

    object_name: str
    chunk_name: str

    def __init__(
        self, manager: TokenizerManager, request: R, model: str, settings: OpenAISettings, prefix: str
    ) -> None:
        self.manager = manager
        self.request: R = request
        self.settings = settings
        self._head = {
            "id": request.rid or f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @abstractmethod
    def requests(self) -> list[GenerateRequest]:
        """What to generate, in the order of the choices."""

    @abstractmethod
    def choice(self, state: ReqState) -> dict[str, Any]:
        """A finished sequence as a choice."""

    @abstractmethod
    def chunk_choices(self, state: ReqState, delta: Delta) -> Iterable[dict[str, Any]]:
        """What a sequence gained, as the choices of chunks; none if there is nothing to tell."""

    def reasoning_tokens(self, state: ReqState) -> int:
        """How many of a sequence's tokens so far are thoughts."""
        return 0

    def _usage(self, states: Sequence[ReqState], samples: int) -> dict[str, Any]:
        """Token counts of a response whose prompts were sampled ``samples`` times each; a prompt counts once."""
        prompts = states[::samples]
        prompt_tokens = sum(state.prompt_tokens for state in prompts)
        completion_tokens = sum(len(state.output_ids) for state in states)
        reasoning_tokens = sum(map(self.reasoning_tokens, states))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(state.cached_tokens for state in prompts)},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "reasoning_tokens": reasoning_tokens,  # SGLang's place
        }

    async def _submit(self, *, stream: bool) -> RequestGroup:
        # A template takes its time for many messages, and others have their turn meanwhile.
        long = len(getattr(self.request, "messages", ())) > _MESSAGES_IN_THREAD
        requests = await asyncio.to_thread(self.requests) if long else self.requests()
        return await self.manager.submit(requests, stream=stream)

    async def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        group = await self._submit(stream=False)
        try:
            states = await group.wait()
        finally:
            self.manager.release(group)
        return {
            "object": self.object_name,
            **self._head,
            "choices": [self.choice(state) for state in states],
            "usage": self._usage(states, self.request.n),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        request = self.request
        head = {"object": self.chunk_name, **self._head}
        group = await self._submit(stream=True)
        try:
            while (state := await group.next()) is not None:
                state.raise_if_failed()
                # All of them now: while one is being sent the sequence goes on.
                choices = list(self.chunk_choices(state, state.take()))
                so_far: dict[str, Any] = {}
                if request.continuous_usage:
                    so_far = {"usage": self._usage([state], 1)}
                elif request.include_usage:
                    so_far = {"usage": None}
                for choice in choices:
                    yield sse({**head, "choices": [choice], **so_far})
            if request.include_usage:
                yield sse({**head, "choices": [], "usage": self._usage(group.states, request.n)})
        finally:
            self.manager.release(group)


def finish(state: ReqState) -> dict[str, Any]:
    """``finish_reason`` and SGLang's ``matched_stop``."""
    reason = state.finish_reason or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def check_model(name: str, served: Sequence[str]) -> None:
    """A request is for the model that is served, by its name, its path, or by SGLang's word for whatever is served.

    Raises:
        ModelNotFoundError: it is for another one.
    """
    if name not in (DEFAULT_MODEL_NAME, *served):
        raise ModelNotFoundError(name, served[0])


async def respond(answer: Answer[Any], request: Request) -> Response:
    """Run ``answer``; a client that hangs up aborts it."""
    try:
        if answer.request.stream:
            return await stream_response(request, answer.chunks())
        return JsonResponse(await unless_disconnected(request, answer.whole()))
    except RequestError as error:
        error.param = answer.request.field_names.get(error.param or "", error.param)
        raise
