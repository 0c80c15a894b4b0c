"""Requests and responses of every endpoint: JSON, server-sent events, OpenAI-shaped errors, clients that hang up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sglang.srt.errors import RequestError
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.tokenizer_manager import close

logger = logging.getLogger(__name__)

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class JsonResponse(Response):
    """``content`` as JSON; infinite and NaN numbers become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ModelNotFoundError(RequestError):
    """A request names a model that is not served (HTTP 404)."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"The model `{name}` does not exist; this server serves `{served}`.", "model")


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an exception."""
    if isinstance(error, ModelNotFoundError):
        return 404, error_body(str(error), "invalid_request_error", error.param, "model_not_found")
    if isinstance(error, RequestError):
        return 400, error_body(str(error), "invalid_request_error", error.param)
    if isinstance(error, ServiceError):
        kind = "service_unavailable_error" if error.status == 503 else "server_error"
        return error.status, error_body(str(error), kind)
    logger.error("Unexpected error while serving a request", exc_info=error)
    return 500, error_body(f"Internal server error: {type(error).__name__}", "server_error")


def error_response(error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    status, body = describe_error(error)
    return JsonResponse(body, status)


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(data) + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up. The request's body must have been read.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(gone)
        await _cancel(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


class EventStream(StreamingResponse):
    """``first``, then ``events``, as they come; a client that hangs up closes ``events``. An exception from ``events``
    is sent as an event of its own, and every stream ends with ``[DONE]``."""

    def __init__(self, first: bytes, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(gone)
            await _cancel(sender)
            await close(self._events)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:  # the status line is gone; an event is the only way to tell
            await send({"type": "http.response.body", "body": sse(describe_error(error)[1]), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def stream_response(request: Request, events: AsyncIterator[bytes]) -> Response:
    """``events`` as a response. Waits for the first one, so that a request that fails early gets its HTTP status."""
    try:
        first = await unless_disconnected(request, _first(events))
    except BaseException:
        await close(events)
        raise
    return EventStream(first, events)


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await events.__anext__()
