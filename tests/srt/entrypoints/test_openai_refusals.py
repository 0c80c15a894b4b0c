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


def _tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _assistant(name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [_tool(name, arguments=arguments)]}


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
            "frequency_penalty": 2.5,
            "presence_penalty": -2.5,
            "repetition_penalty": 0,
            "logit_bias": {"x": 1},
            "seed": 1 << 63,
            "response_format": {"type": "xml"},
            "stream_options": {"include_usage": True},
            "min_tokens": 3,
            "stop_regex": "(",
            "lora_path": "x",
            "custom_params": {"a": 1},
            "return_hidden_states": True,
            "service_tier": "flex",
            "store": True,
            "no_such_field": 1,
        }.items()
    ),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    *(
        (CHAT, {"messages": [*MESSAGES, {"role": role, "content": None}]}, "messages[1].content")
        for role in ("user", "system", "developer", "tool", "function", "critic")
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [_assistant("f", "{")]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [_assistant("f", "[1]")]}, "messages[0].tool_calls[0]"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0]"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    (CHAT, {"tools": [_tool(""), _tool("g")]}, "tools[0]"),
    (CHAT, {"tools": [_tool("f"), _tool("f")]}, "tools"),
    (CHAT, {"tools": [_tool("f", parameters="x")]}, "tools[0]"),
    (CHAT, {"tools": [_tool("f", cache=True)]}, "tools[0]"),
    # This model's template has no place for tools.
    (CHAT, {"tools": [_tool("f")]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [_tool("f")], "tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"tools": [_tool("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
    (CHAT, {"tools": [_tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"tools": [_tool("f")], "tool_choice": "required", "regex": "a"}, "tool_choice"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"regex": "a", "ebnf": "root ::= 'a'"}, "ebnf"),
    (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    (CHAT, {"chat_template_kwargs": {"no_such_name": 1}}, "chat_template_kwargs"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction"),
    (CHAT, {"reasoning_effort": "enormous"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": True}, "reasoning_effort"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"input_ids": [5]}, "input_ids"),
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
    labels = {"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "store": False}
    chat = {**CHAT, **labels, "verbosity": "medium", "reasoning_effort": "none", "prompt_cache_retention": "in_memory"}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert http.post("/v1/completions", json={**COMPLETION, **labels, "service_tier": "auto"}).status_code == 200


def test_an_assistant_need_not_say_anything(http: httpx.Client) -> None:
    for silent in ({"role": "assistant"}, {"role": "assistant", "content": None}, _assistant("f", "{}")):
        response = http.post("/v1/chat/completions", json={**CHAT, "messages": [*MESSAGES, silent, *MESSAGES]})
        assert response.status_code == 200, response.text


def test_a_refusal_proposes_what_the_field_may_be(http: httpx.Client) -> None:
    for field, value, proposed in (
        ("lora_path", "x", "null"),
        ("functions", [{}], "null"),
        ("cache_salt", "x", "null"),
        ("return_hidden_states", True, "False"),
        ("routed_experts_start_len", 1, "0"),
    ):
        message = http.post("/v1/chat/completions", json={**CHAT, field: value}).json()["error"]["message"]
        assert message == f"'{field}' is not supported by this server: leave it out or send {proposed}."


def test_error_reaches_the_client_library(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
        openai_client.completions.create(model=MODEL, prompt=[5] * 3000)
    with pytest.raises(openai.BadRequestError, match="can't run this"):
        list(openai_client.completions.create(model=MODEL, prompt=[2], stream=True))
