"""The HTTP application: every route, from request bytes to response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from sglang.srt.entrypoints.http_responses import (
    JsonResponse,
    error_body,
    error_response,
    sse,
    stream_response,
    unless_disconnected,
)
from sglang.srt.entrypoints.openai.protocol import parse_chat_request, parse_completion_request
from sglang.srt.entrypoints.openai.serving_base import check_model, respond
from sglang.srt.entrypoints.openai.serving_chat import ChatAnswer
from sglang.srt.entrypoints.openai.serving_completions import CompletionAnswer
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import parse_generate_request
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager, close, last
from sglang.srt.managers.weight_update_request import parse_update_weights_request
from sglang.srt.request_validation import convert, decode_json_object, select_supported

Handler = Callable[[Request], Awaitable[Response]]

HEALTH_CHECK_TIMEOUT = 20.0


class _AbortRequest(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False


class HttpServer:
    """The application: one handler a route. Handlers raise; :meth:`_guarded` turns that into error bodies.

    Attributes:
        ready: requests are accepted. False while the model loads and from the beginning of the end.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.ready = False
        self._runtime = runtime
        self._created = int(time.time())
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_exception_handler(HTTPException, _http_error)
        for paths, methods, handler in (
            ("/health", "GET", self.health),
            ("/health_generate", "GET", self.health_generate),
            ("/get_model_info /model_info", "GET", self.model_info),
            ("/get_server_info /server_info", "GET", self.server_info),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{model:path}", "GET", self.model),
            ("/flush_cache", "GET POST", self.flush_cache),
            ("/abort_request", "POST", self.abort_request),
            ("/update_weights_from_disk", "POST", self.update_weights_from_disk),
            ("/generate", "POST PUT", self.generate),
            ("/v1/completions", "POST", self.completions),
            ("/v1/chat/completions", "POST", self.chat_completions),
        ):
            for path in paths.split():
                self.app.add_route(path, _guarded(handler), methods=methods.split())

    def _manager(self) -> TokenizerManager:
        if not self.ready:
            raise ServiceError("The server is not ready: it is starting or shutting down.", 503)
        return self._runtime.manager

    @property
    def _served_names(self) -> tuple[str, str]:
        args = self._runtime.server_args
        return args.served_model_name, args.model_path

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.ready else 503)

    async def health_generate(self, request: Request) -> Response:
        """Generates one token. A scheduler too busy to get to it before the timeout is healthy if it sent others."""
        manager = self._manager()
        begin = time.monotonic()
        batch = parse_generate_request({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        try:
            await asyncio.wait_for(last(manager.generate(batch)), HEALTH_CHECK_TIMEOUT)
        except asyncio.TimeoutError:
            if manager.last_receive_time < begin:
                message = f"The scheduler did not answer within {HEALTH_CHECK_TIMEOUT:g} seconds."
                raise ServiceError(message, 503) from None
        return Response(status_code=200)

    async def model_info(self, request: Request) -> Response:
        args, config = self._runtime.server_args, self._runtime.model_config
        return JsonResponse(
            {
                "model_path": args.model_path,
                "tokenizer_path": args.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._runtime.weight_version,
                "model_type": config.hf_config.model_type,
                "architectures": [config.architecture],
            }
        )

    async def server_info(self, request: Request) -> Response:
        self._manager()
        return JsonResponse(await self._runtime.server_info())

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._served_names)
        return JsonResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._served_names[0],
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": self._served_names[1],
            "parent": None,
            "max_model_len": self._runtime.model_config.context_len,
        }

    async def flush_cache(self, request: Request) -> Response:
        done = await self._manager().flush_cache()
        text = (
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )
        return PlainTextResponse(text, 200 if done else 400)

    async def abort_request(self, request: Request) -> Response:
        manager = self._manager()
        body = decode_json_object(await request.body())
        fields = convert(select_supported(body, _AbortRequest.__struct_fields__, {}), _AbortRequest)
        if not fields.rid and not fields.abort_all:
            raise RequestError("Either 'rid' or 'abort_all' must be given.", "rid")
        manager.abort_request(fields.rid, abort_all=fields.abort_all)
        return Response(status_code=200)

    async def update_weights_from_disk(self, request: Request) -> Response:
        self._manager()
        parsed = parse_update_weights_request(decode_json_object(await request.body()))
        success, message = await self._runtime.update_weights_from_disk(parsed)
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return JsonResponse(content, 200 if success else 400)

    async def generate(self, request: Request) -> Response:
        manager = self._manager()
        batch = parse_generate_request(decode_json_object(await request.body()))
        if batch.stream:
            return await stream_response(request, _events(manager.generate(batch)))
        return JsonResponse(await unless_disconnected(request, last(manager.generate(batch))))

    async def completions(self, request: Request) -> Response:
        manager = self._manager()
        parsed = parse_completion_request(decode_json_object(await request.body()))
        check_model(parsed.model, self._served_names)
        return await respond(CompletionAnswer(manager, parsed, self._served_names[0]), request)

    async def chat_completions(self, request: Request) -> Response:
        manager = self._manager()
        parsed = parse_chat_request(decode_json_object(await request.body()))
        check_model(parsed.model, self._served_names)
        return await respond(ChatAnswer(manager, parsed, self._served_names[0]), request)


async def _events(outputs: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    try:
        async for output in outputs:
            yield sse(output)
    finally:
        await close(outputs)


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(error)

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router finds: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    messages = {404: "Invalid URL", 405: "Method not allowed"}
    message = f"{messages.get(error.status_code, error.detail)} ({request.method} {request.url.path})"
    return JsonResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)
