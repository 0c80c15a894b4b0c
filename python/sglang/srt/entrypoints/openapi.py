"""``/openapi.json``: the routes, and the request bodies as the structs that they are converted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from sglang import __version__
from sglang.srt.entrypoints.openai.protocol import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    LABELS,
    ChatCompletionRequest,
    CompletionRequest,
)
from sglang.srt.entrypoints.openai.serving_tokenize import DetokenizeRequest, TokenizeRequest
from sglang.srt.managers.generate_request import NEUTRAL_FIELDS, GenerateReqInput
from sglang.srt.managers.weight_update_request import NEUTRAL_VALUES as UPDATE_NEUTRAL
from sglang.srt.managers.weight_update_request import UpdateWeightsRequest
from sglang.srt.sampling.sampling_params import NEUTRAL_VALUES as SAMPLING_NEUTRAL
from sglang.srt.sampling.sampling_params import SamplingParams

_REF = "#/components/schemas/"
Neutral = Mapping[str, tuple[Any, ...]]


class AbortRequest(msgspec.Struct, kw_only=True):
    """``rid`` names a request or all sequences of a batch."""

    rid: str | None = None
    abort_all: bool = False


@dataclass(frozen=True)
class Body:
    """A request body.

    Attributes:
        neutral: fields that are known and not acted on, with the values (beside null) that ask for nothing.
        labels: fields that may have any value.
        nullable: null means the default everywhere.
    """

    struct: type[msgspec.Struct]
    neutral: Neutral
    labels: frozenset[str] = frozenset()
    nullable: bool = False


SAMPLING = Body(SamplingParams, {name: (value,) for name, value in SAMPLING_NEUTRAL.items()}, nullable=True)
BODIES: dict[str, Body] = {
    "/generate": Body(GenerateReqInput, NEUTRAL_FIELDS),
    "/v1/completions": Body(CompletionRequest, COMPLETION_NEUTRAL, LABELS, nullable=True),
    "/v1/chat/completions": Body(ChatCompletionRequest, CHAT_NEUTRAL, LABELS, nullable=True),
    "/tokenize": Body(TokenizeRequest, {}, nullable=True),
    "/detokenize": Body(DetokenizeRequest, {}, nullable=True),
    "/abort_request": Body(AbortRequest, {}),
    "/update_weights_from_disk": Body(UpdateWeightsRequest, UPDATE_NEUTRAL),
}
_GET: dict[str, str] = {
    "/health": "Whether requests are accepted.",
    "/health_generate": "Whether a token can be generated.",
    "/metrics": "Prometheus metrics, with --enable-metrics.",
    "/model_info": "What is served.",
    "/server_info": "The server's arguments and state.",
    "/v1/loads": "What the scheduler is doing.",
    "/get_load": "The same in few numbers.",
    "/v1/models": "The model's name.",
    "/flush_cache": "Empty the prefix cache.",
}


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = [*BODIES.values(), SAMPLING]
    _, schemas = msgspec.json.schema_components([body.struct for body in bodies], ref_template=_REF + "{name}")
    for body in bodies:
        _complete(schemas[body.struct.__name__], body)
    sampling = {"$ref": _REF + SamplingParams.__name__}
    schemas[GenerateReqInput.__name__]["properties"]["sampling_params"] = {
        "anyOf": [sampling, {"type": "array", "items": sampling}, {"type": "null"}]
    }
    text: dict[str, Any] = {"type": "string", "minLength": 1}
    for name in ("stop", "stop_regex"):
        schemas[SamplingParams.__name__]["properties"][name] = {
            "anyOf": [text, {"type": "array", "items": text}, {"type": "null"}]
        }
    schemas["Error"] = _ERROR
    paths: dict[str, Any] = {path: {"get": _operation(path, text)} for path, text in _GET.items()}
    for path, body in BODIES.items():
        content = {"application/json": {"schema": {"$ref": _REF + body.struct.__name__}}}
        operation = _operation(path, (body.struct.__doc__ or "").split("\n")[0])
        paths[path] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "SGLang", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _complete(schema: dict[str, Any], body: Body) -> None:
    """Add to a struct's schema what is true of the request beside the struct."""
    properties: dict[str, Any] = schema["properties"]
    if body.nullable:
        for name in properties.keys() - set(schema.get("required", ())):
            properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    for name, values in body.neutral.items():
        words = "Known and not supported: only what asks for nothing is taken."
        properties[name] = {"enum": [None, *values], "description": words}
    properties |= {name: {"description": "Has no effect."} for name in body.labels}
    schema["additionalProperties"] = False


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(path: str, summary: str) -> dict[str, Any]:
    error = {"description": "An error.", "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}}}
    answers = {"200": {"description": "The answer."}, "default": error}
    return {"operationId": path.strip("/").replace("/", "_"), "summary": summary, "responses": answers}
