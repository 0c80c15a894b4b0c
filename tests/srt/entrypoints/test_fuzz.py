"""Requests from schemathesis, by our own OpenAPI document: the server never fails, and nothing stays behind."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode

from http_server_thread import serve
from sglang.srt.entrypoints.openapi import BODIES

SECONDS = 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(enable_metrics=True) as address:
        yield address


@pytest.fixture(scope="module", autouse=True)
def nothing_stays(url: str) -> Iterator[None]:
    yield
    state = httpx.get(f"{url}/server_info").json()["internal_states"][0]
    assert state["#running"] == 0
    assert httpx.post(f"{url}/flush_cache?timeout=20").status_code == 200
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{url}/generate", json=body).json()["meta_info"]["completion_tokens"] == 2


def answered(method: str, address: str, **options: Any) -> int:
    """The status, after the whole answer; an answer that does not come in time is a request that is stuck."""
    response = httpx.request(method, address, timeout=SECONDS, **options)
    assert response.status_code < 500 or response.status_code == 501, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code


FUZZED = [path for path in BODIES if path != "/update_weights_from_disk"]  # which "loads" whatever path it is given


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", FUZZED)
def test_requests_by_the_document(url: str, path: str, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    statuses = set()

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(document[path]["POST"].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        raw = isinstance(case.body, bytes)
        body = {"content": case.body} if raw else {"json": limited(case.body)}
        statuses.add(answered("POST", url + path, **({} if isinstance(case.body, NotSet) else body)))

    run()
    assert statuses <= {200, 400, 404}
    assert mode is GenerationMode.POSITIVE or 400 in statuses


def test_the_document_describes_what_is_taken(url: str) -> None:
    """By the schema it is a request, by the server too; and the other way round."""
    document = httpx.get(f"{url}/openapi.json").json()
    schemas = document["components"]["schemas"]

    def valid(path: str, body: Any) -> bool:
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return bool(Draft202012Validator({**reference, "components": {"schemas": schemas}}).is_valid(body))

    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    for path, body, good in (
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 1, "stop": "x"}}, True),
        (
            "/generate",
            {"text": "hello", "sampling_params": {"max_new_tokens": 1, "stop": ["x"]}, "lora_path": None},
            True,
        ),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": "1"}}, False),
        ("/generate", {"text": "hello", "what": 1}, False),
        ("/generate", {"text": "hello", "lora_path": "x"}, False),
        ("/v1/chat/completions", {**chat, "temperature": None, "user": "me", "service_tier": "auto"}, True),
        ("/v1/chat/completions", {**chat, "service_tier": "flex"}, False),
        ("/v1/chat/completions", {"max_tokens": 1}, False),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "suffix": ""}, True),
        ("/tokenize", {"prompt": "hello"}, True),
        ("/tokenize", {"prompt": 3}, False),
        ("/detokenize", {"tokens": [[1], [2]]}, True),
    ):
        assert valid(path, body) is good, (path, body)
        assert (answered("POST", url + path, json=body) == 200) is good, (path, body)


def limited(body: Any) -> Any:
    """The same, without a wish for more tokens than the fake scheduler makes in a second."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 50)
        body.setdefault("max_tokens", 50) if "messages" in body or "prompt" in body else None
        if isinstance(body.get("sampling_params"), dict):
            limited(body["sampling_params"])
    return body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(0, 9)},
    optional={
        **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"), st.floats(0, 2)),
        "top_k": st.integers(-1, 9), "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
        "n": st.integers(-1, 3), "stop_token_ids": st.lists(st.integers(-1, 600), max_size=3), "ignore_eos": JSON,
        "logit_bias": st.dictionaries(st.integers(-1, 600).map(str), st.floats(-200, 200), max_size=3),
    },
)  # fmt: skip
BODY = st.fixed_dictionaries(
    {"sampling_params": PARAMS | st.lists(PARAMS, max_size=2) | JSON},
    optional={
        "text": st.text(max_size=20) | st.lists(st.text(max_size=9), max_size=3) | JSON,
        "input_ids": st.lists(st.integers(-1, 600), max_size=9) | JSON,
        "return_logprob": st.booleans(), "logprob_start_len": st.integers(-2, 9),
        "top_logprobs_num": st.integers(-1, 5), "token_ids_logprob": JSON, "stream": st.booleans() | JSON,
        "rid": st.text(max_size=3), "return_text_in_logprobs": st.booleans(),
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODY)
def test_generate(url: str, body: dict[str, Any]) -> None:
    if not isinstance(body["sampling_params"], (dict, list)) or body["sampling_params"] in ({}, []):
        body = {**body, "sampling_params": {"max_new_tokens": 3}}
    answered("POST", f"{url}/generate", json=body)
