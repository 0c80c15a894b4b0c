"""The HTTP application: every route, from request bytes to response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from sglang.srt.entrypoints.auth import Access, ApiKeys
from sglang.srt.entrypoints.http_responses import (
    JsonResponse,
    NotSupportedError,
    error_body,
    error_response,
    read_json,
    sse,
    stream_response,
    unless_disconnected,
)
from sglang.srt.entrypoints.openai.protocol import parse_chat_request, parse_completion_request
from sglang.srt.entrypoints.openai.serving_base import check_model, respond
from sglang.srt.entrypoints.openai.serving_chat import ChatAnswer
from sglang.srt.entrypoints.openai.serving_completions import CompletionAnswer
from sglang.srt.entrypoints.openai.serving_tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    parse_request,
    tokenize,
    tokens_answer,
)
from sglang.srt.entrypoints.openapi import AbortRequest, openapi_document
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.entrypoints.unsupported_routes import UNSUPPORTED_ROUTES
from sglang.srt.entrypoints.v1_loads import get_load, loads
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import parse_generate_request
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager, close, last
from sglang.srt.managers.weight_update_request import parse_update_weights_request
from sglang.srt.request_validation import convert, select_supported
from sglang.srt.sampling.sampling_params import MAX_PARALLEL_SAMPLES

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

HEALTH_CHECK_TIMEOUT = 20.0

# Paths, methods, the method of HttpServer that answers, and what it asks for.
ROUTES: tuple[tuple[str, str, str, Access], ...] = (
    ("/health /ready /ping", "GET", "health", Access.FREE),
    ("/health_generate", "GET", "health_generate", Access.FREE),
    ("/metrics", "GET", "metrics", Access.FREE),
    ("/get_model_info /model_info", "GET", "model_info", Access.NORMAL),
    ("/get_server_info /server_info", "GET", "server_info", Access.NORMAL),
    ("/get_load", "GET", "get_load", Access.NORMAL),
    ("/v1/loads", "GET", "loads", Access.NORMAL),
    ("/v1/models", "GET", "models", Access.NORMAL),
    ("/v1/models/{model:path}", "GET", "model", Access.NORMAL),
    ("/flush_cache", "GET POST", "flush_cache", Access.ADMIN),
    ("/abort_request", "POST", "abort_request", Access.ADMIN),
    ("/update_weights_from_disk", "POST", "update_weights_from_disk", Access.ADMIN),
    ("/generate", "POST PUT", "generate", Access.NORMAL),
    ("/tokenize /v1/tokenize", "POST", "tokenize", Access.NORMAL),
    ("/detokenize /v1/detokenize", "POST", "detokenize", Access.NORMAL),
    ("/v1/completions", "POST", "completions", Access.NORMAL),
    ("/v1/chat/completions", "POST", "chat_completions", Access.NORMAL),
)


class HttpServer:
    """The application: one handler a route. Handlers raise; :meth:`_route` turns that into error bodies.

    Attributes:
        ready: requests are accepted. False while the model loads and from the beginning of the end.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.ready = False
        self._runtime = runtime
        self._created = int(time.time())
        self._keys = ApiKeys(runtime.server_args)
        self.app = FastAPI(title="SGLang")
        self.app.openapi = openapi_document  # type: ignore[method-assign]
        self.app.add_exception_handler(HTTPException, _http_error)
        # As SGLang: a page from anywhere may use the server, if it has the key.
        self.app.add_middleware(
            CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
        )
        for paths, methods, name, access in ROUTES:
            for path in paths.split():
                self.app.add_route(path, self._route(path, getattr(self, name), access), methods=methods.split())
        for path, words in UNSUPPORTED_ROUTES.items():
            refusal = _unsupported(f"This server does not have SGLang's {path}: {words}.")
            self.app.add_route(path, self._route(path, refusal, Access.FREE), methods=["GET", "POST", "PUT", "DELETE"])

    def _route(self, path: str, handler: Handler, access: Access) -> Handler:
        """``handler`` behind the key, with errors as responses, counted."""

        async def respond_to(request: Request) -> Response:
            if metrics := self._runtime.metrics:
                metrics.http_request(path, request.method)
            try:
                self._keys.check(access, request.headers.get("authorization"))
                response = await handler(request)
            except Exception as error:
                response = error_response(error)
            if metrics:
                metrics.http_response(path, request.method, response.status_code)
            return response

        return respond_to

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
            await asyncio.wait_for(last(manager.generate(batch, log_metrics=False)), HEALTH_CHECK_TIMEOUT)
        except asyncio.TimeoutError:
            if manager.last_receive_time < begin:
                message = f"The scheduler did not answer within {HEALTH_CHECK_TIMEOUT:g} seconds."
                raise ServiceError(message, 503) from None
        return Response(status_code=200)

    async def model_info(self, request: Request) -> Response:
        self._manager()  # clients wait for the model by asking for this
        args, config = self._runtime.server_args, self._runtime.model_config
        return JsonResponse(
            {
                "model_path": args.model_path,
                "served_model_name": args.served_model_name,
                "tokenizer_path": args.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": dict(self._runtime.openai.sampling_defaults) or None,
                "weight_version": self._runtime.weight_version,
                "load_format": args.load_format,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.hf_config.model_type,
                "architectures": [config.architecture],
            }
        )

    async def server_info(self, request: Request) -> Response:
        self._manager()
        return JsonResponse(await self._runtime.server_info())

    async def metrics(self, request: Request) -> Response:
        if not self._runtime.server_args.enable_metrics:
            raise NotSupportedError("There are no metrics: start the server with --enable-metrics.", 404)
        manager = self._manager()
        assert self._runtime.metrics is not None
        return Response(self._runtime.metrics.render(manager.load), media_type=CONTENT_TYPE_LATEST)

    async def get_load(self, request: Request) -> Response:
        return JsonResponse(get_load(self._manager().load))

    async def loads(self, request: Request) -> Response:
        load, info = self._manager().load, self._runtime.scheduler_info
        return JsonResponse(loads(load, info, request.query_params, self._runtime.server_args.tp_size))

    async def models(self, request: Request) -> Response:
        self._manager()  # as model_info
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._manager()
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
        done = await self._manager().flush_cache(_timeout(request.query_params.get("timeout", "0")))
        text = (
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )
        return PlainTextResponse(text, 200 if done else 400)

    async def abort_request(self, request: Request) -> Response:
        manager = self._manager()
        body = await read_json(request)
        fields = convert(select_supported(body, AbortRequest.__struct_fields__, {}), AbortRequest)
        if not fields.rid and not fields.abort_all:
            raise RequestError("Either 'rid' or 'abort_all' must be given.", "rid")
        manager.abort_request(fields.rid, abort_all=fields.abort_all)
        return Response(status_code=200)

    async def update_weights_from_disk(self, request: Request) -> Response:
        self._manager()
        parsed = parse_update_weights_request(await read_json(request))
        success, message = await self._runtime.update_weights_from_disk(parsed)
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return JsonResponse(content, 200 if success else 400)

    async def generate(self, request: Request) -> Response:
        manager = self._manager()
        batch = parse_generate_request(await read_json(request), MAX_PARALLEL_SAMPLES)
        if batch.model is not None:
            check_model(batch.model, self._served_names)
        if batch.stream:
            return await stream_response(request, _events(manager.generate(batch)))
        return JsonResponse(await unless_disconnected(request, last(manager.generate(batch))))

    async def tokenize(self, request: Request) -> Response:
        manager = self._manager()
        body = await read_json(request)
        if body.get("messages") is None:
            parsed = parse_request(body, TokenizeRequest)
            check_model(parsed.model, self._served_names)
            return JsonResponse(await tokenize(manager, parsed))
        chat = parse_chat_request(body)
        check_model(chat.model, self._served_names)
        prompt, *_ = ChatAnswer(manager, chat, self._served_names[0], self._runtime.openai).requests()
        ids = await manager.encode(prompt.text or "", "messages", add_special_tokens=prompt.add_special_tokens)
        return JsonResponse(tokens_answer(manager, ids))

    async def detokenize(self, request: Request) -> Response:
        manager = self._manager()
        parsed = parse_request(await read_json(request), DetokenizeRequest)
        check_model(parsed.model, self._served_names)
        return JsonResponse(await detokenize(manager, parsed))

    async def completions(self, request: Request) -> Response:
        manager = self._manager()
        parsed = parse_completion_request(await read_json(request))
        check_model(parsed.model, self._served_names)
        return await respond(CompletionAnswer(manager, parsed, self._served_names[0], self._runtime.openai), request)

    async def chat_completions(self, request: Request) -> Response:
        manager = self._manager()
        parsed = parse_chat_request(await read_json(request))
        check_model(parsed.model, self._served_names)
        return await respond(ChatAnswer(manager, parsed, self._served_names[0], self._runtime.openai), request)


async def _events(outputs: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    try:
        async for output in outputs:
            yield sse(output)
    finally:
        await close(outputs)


def _unsupported(message: str) -> Handler:
    async def handler(request: Request) -> Response:
        raise NotSupportedError(message)

    return handler


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise RequestError(f"'timeout' must be a number of seconds from 0 to 3600, got {text!r}.", "timeout")
    return seconds


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router finds: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    messages = {404: "Invalid URL", 405: "Method not allowed"}
    message = f"{messages.get(error.status_code, error.detail)} ({request.method} {request.url.path})"
    return JsonResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)
