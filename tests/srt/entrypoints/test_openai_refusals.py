"""What the OpenAI endpoints refuse, by name, and what they accept because it asks for nothing."""

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from http_server_thread import FIXTURE

MODEL = str(FIXTURE)
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
COMPLETION = {"prompt": "a", "max_tokens": 2}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        (body, {field: value}, field)
        for body in (CHAT, COMPLETION)
        for field, value in {
            "temperature": -1,
            "top_p": 0,
            "top_k": 0,
            "max_tokens": -1,
            "n": 0,
            "stop": [""],
            "frequency_penalty": 0.5,
            "presence_penalty": 1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1},
            "seed": 7,
            "response_format": {"type": "json_object"},
            "stream_options": {"include_usage": True},
            "min_tokens": 1,
            "lora_path": "x",
            "service_tier": "flex",
            "store": True,
            "no_such_field": 1,
        }.items()
    ),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 4000}, "max_completion_tokens"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETION, {"prompt": [5, [6]]}, "prompt"),
    (COMPLETION, {"prompt": [320]}, "prompt"),
    (COMPLETION, {"max_tokens": 4000}, "max_tokens"),
    (COMPLETION, {"suffix": "b"}, "suffix"),
    (COMPLETION, {"best_of": 2}, "best_of"),
    (COMPLETION, {"logprobs": -1}, "logprobs"),
    (COMPLETION, {"logprobs": True}, "logprobs"),
    (COMPLETION, {"logprobs": 1000}, "logprobs"),
]


@pytest.mark.parametrize(("body", "change", "param"), REFUSED, ids=[f"{i}-{r[2]}" for i, r in enumerate(REFUSED)])
def test_refused_by_name(http: httpx.Client, body: dict[str, Any], change: dict[str, Any], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    for stream in (False, True):
        stream_fields = {} if "stream_options" in change else {"stream": stream}
        response = http.post(path, json={**body, **change, **stream_fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


def test_missing_fields(http: httpx.Client) -> None:
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        response = http.post(path, json={})
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]


def test_what_common_clients_send_is_accepted(http: httpx.Client) -> None:
    common = {
        "model": "default",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "n": 1,
        "seed": None,
        "stop": None,
        "stream": None,
        "user": "someone",
        "temperature": None,
        "top_p": None,
        "response_format": {"type": "text"},
        "ignore_eos": None,
    }
    chat = {**CHAT, **common, "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": None}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert http.post("/v1/completions", json={**COMPLETION, **common, "best_of": 1, "suffix": None}).status_code == 200
    # A seed changes nothing of a greedy answer.
    assert http.post("/v1/completions", json={**COMPLETION, "temperature": 0, "seed": 1234}).status_code == 200


def test_error_reaches_the_client_library(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
        openai_client.completions.create(model=MODEL, prompt=[5] * 3000)
    with pytest.raises(openai.BadRequestError, match="can't run this"):
        list(openai_client.completions.create(model=MODEL, prompt=[2], stream=True))
