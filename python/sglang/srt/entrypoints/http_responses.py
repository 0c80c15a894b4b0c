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

from sglang.srt.entrypoints.auth import AuthenticationError
from sglang.srt.entrypoints.json_size import MAX_TEXTS, MAX_VALUES, JsonSize
from sglang.srt.errors import RequestError
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.tokenizer_manager import close
from sglang.srt.request_validation import decode_json_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"

MAX_BODY_BYTES = 64 << 20
# A longer body is read on, and dropped, up to this many times as much: who still sends doesn't see an answer.
_READ_TIMES = 16
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 100


class JsonResponse(Response):
    """``content`` as JSON; infinite and NaN numbers become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ModelNotFoundError(RequestError):
    """A request names a model that is not served (HTTP 404)."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"The model `{name}` does not exist; this server serves `{served}`.", "model")


class BodyTooLargeError(RequestError):
    """A request's body is longer than MAX_BODY_BYTES, or has too many values (HTTP 413)."""


class NotSupportedError(Exception):
    """SGLang has this, this server has not."""

    def __init__(self, message: str, status: int = 501) -> None:
        super().__init__(message)
        self.status = status


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object. It may quote the client, who may have sent megabytes."""
    message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
    param = param if param is None or len(param) <= MAX_PARAM_CHARS else f"{param[:MAX_PARAM_CHARS]}..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an exception."""
    if isinstance(error, ModelNotFoundError):
        return 404, error_body(str(error), "invalid_request_error", error.param, "model_not_found")
    if isinstance(error, BodyTooLargeError):
        return 413, error_body(str(error), "invalid_request_error")
    if isinstance(error, AuthenticationError):
        return 401, error_body(str(error), "invalid_request_error", code="invalid_api_key")
    if isinstance(error, NotSupportedError):
        return error.status, error_body(str(error), "not_supported_error")
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
    return JsonResponse(body, status, _HEADERS.get(status))


# What else a client should know of an error. In a second a queue may have room, or a starting server may be ready.
_HEADERS = {401: {"www-authenticate": "Bearer"}, 413: {"connection": "close"}, 503: {"retry-after": "1"}}


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object that is the request's body.

    Raises:
        RequestError: it is none, or it is too large.
        ClientDisconnect: the client hung up before it had sent everything.
    """
    body, length, size = bytearray(), 0, JsonSize()
    async for chunk in request.stream():
        length += len(chunk)
        if length <= MAX_BODY_BYTES and not size.too_large:
            body += chunk
            size.feed(chunk)
        elif length > _READ_TIMES * MAX_BODY_BYTES:
            break
    if length > MAX_BODY_BYTES:
        raise BodyTooLargeError(
            f"The request body is longer than {MAX_BODY_BYTES >> 20} MiB; send the prompts in several requests."
        )
    if size.too_large:
        raise BodyTooLargeError(
            f"The request body has more than {MAX_VALUES} values, or more than {MAX_TEXTS} strings, lists and objects; "
            "send the prompts in several requests."
        )
    decoded = decode_json_object(bytes(body))
    await asyncio.sleep(0)  # others have their turn before it is looked through
    return decoded


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
