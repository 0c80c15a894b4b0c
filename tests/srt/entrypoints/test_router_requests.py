"""What sglang-router 0.3.2 makes of its clients' requests: it adds every field of SGLang's that has a default."""

from typing import Any

import httpx
import pytest

GENERATE = {
    "model": None,
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 4},
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
OPENAI = {
    "model": "default",
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
CHAT = {
    **OPENAI,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": False,
    "max_completion_tokens": 3,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}
COMPLETION = {**OPENAI, "prompt": "hi", "max_tokens": 3, "logprobs": 1, "echo": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {**GENERATE, "text": "hi"}),
        ("/generate", {**GENERATE, "input_ids": [5, 6], "return_logprob": True, "rid": "abc"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
    ],
    ids=["text", "input_ids", "chat", "completion"],
)
def test_it_is_answered(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text


def test_a_model_is_the_one_that_is_served(http: httpx.Client) -> None:
    """As a router with several models sends it; SGLang does not look at it."""
    name = http.get("/v1/models").json()["data"][0]["id"]
    for model, status in ((name, 200), ("default", 200), ("another", 404), ("", 404), (3, 400)):
        response = http.post("/generate", json={**GENERATE, "text": "hi", "model": model})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(("field", "value"), [("log_metrics", False), ("no_logs", True), ("return_bytes", True)])
def test_asking_for_it_is_refused(http: httpx.Client, field: str, value: bool) -> None:
    response = http.post("/generate", json={**GENERATE, "text": "hi", field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/health", "/server_info", "/model_info", "/get_load", "/v1/loads"])
def test_what_it_reads(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200
