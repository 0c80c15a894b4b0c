"""Keys, metrics, load, /tokenize, and bodies that are no requests."""

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from transformers import AutoTokenizer

from http_server_thread import FIXTURE, serve
from sglang.srt.entrypoints import http_responses
from sglang.srt.entrypoints.http_responses import BodyTooLargeError, read_json
from sglang.srt.entrypoints.unsupported_routes import UNSUPPORTED_ROUTES

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
KEY, ADMIN_KEY = "sésame", "barley"
SHORT: dict[str, Any] = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    """A server with everything on; requests bring the key unless they say otherwise."""
    arguments: dict[str, Any] = {
        "api_key": KEY,
        "admin_api_key": ADMIN_KEY,
        "enable_metrics": True,
        "served_model_name": "tiny",
        "max_queued_requests": 3,
        "fastapi_root_path": "/llm",
        "random_seed": 5,
    }
    with serve(**arguments) as url, httpx.Client(base_url=url, timeout=30, headers=bearer(KEY)) as client:
        yield client


# Keys


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping", "/metrics"])
def test_probes_need_no_key(guarded: httpx.Client, path: str) -> None:
    assert guarded.get(path, headers={"authorization": ""}).status_code == 200


@pytest.mark.parametrize(
    "header", [b"", b"Bearer", b"Bearer wrong", b"Basic s\xc3\xa9same", b"s\xc3\xa9same", b"Bearer s\xe9same", b"\xff"]
)
@pytest.mark.parametrize("path", ["/generate", "/v1/models", "/server_info", "/flush_cache", "/v1/loads"])
def test_wrong_key_is_refused_before_anything_else(guarded: httpx.Client, path: str, header: bytes) -> None:
    method = "POST" if path == "/generate" else "GET"
    response = guarded.request(method, path, headers={"authorization": header}, content=b"no json")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key" and KEY not in error["message"] and ADMIN_KEY not in error["message"]


def test_each_key_opens_its_own(guarded: httpx.Client) -> None:
    assert guarded.post("/generate", json=SHORT).status_code == 200
    assert guarded.post("/generate", json=SHORT, headers=bearer(ADMIN_KEY)).status_code == 401
    assert guarded.post("/flush_cache").status_code == 401
    assert guarded.post("/flush_cache", headers=bearer(ADMIN_KEY)).status_code == 200
    assert guarded.post("/flush_cache", headers={"authorization": f"bearer  {ADMIN_KEY}"}).status_code == 200


def test_one_key_opens_everything() -> None:
    with serve(api_key=KEY) as url:
        assert httpx.post(f"{url}/flush_cache").status_code == 401
        assert httpx.post(f"{url}/flush_cache", headers=bearer(KEY)).status_code == 200


def test_keys_are_not_shown(guarded: httpx.Client) -> None:
    info = guarded.get("/server_info").json()
    assert info["api_key"] == info["admin_api_key"] == "***"
    text = json.dumps(info, ensure_ascii=False)
    assert KEY not in text and ADMIN_KEY not in text


def test_a_page_from_elsewhere_may_ask(guarded: httpx.Client) -> None:
    ask = {"origin": "https://example.org", "access-control-request-method": "POST"}
    headers = {**ask, "access-control-request-headers": "authorization,content-type", "authorization": ""}
    response = guarded.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in ("*", "https://example.org")
    refused = guarded.post("/generate", json=SHORT, headers={"origin": "https://example.org", "authorization": ""})
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_below_a_path_of_a_proxy(guarded: httpx.Client) -> None:
    assert guarded.get("/v1/models").status_code == 200
    assert {"url": "/llm"} in guarded.get("/openapi.json").json()["servers"]


# Queue


def test_full_queue_is_503_with_a_time_to_come_back(guarded: httpx.Client) -> None:
    long = {"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    threads = [threading.Thread(target=lambda: guarded.post("/generate", json=long)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while guarded.get("/get_load").json()[0]["num_reqs"] < 3:
        time.sleep(0.01)
    responses = [
        guarded.post("/generate", json=SHORT),
        guarded.post("/v1/completions", json={"prompt": "hello", "stream": True}),
    ]
    for response in responses:
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == "The request queue is full."
    guarded.post("/abort_request", json={"abort_all": True}, headers=bearer(ADMIN_KEY))
    for thread in threads:
        thread.join()


def test_one_refused_sequence_ends_its_batch_at_once(guarded: httpx.Client) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True}  # together some seconds
    begin = time.monotonic()
    response = guarded.post("/generate", json={"text": ["hello"] * 8, "sampling_params": params})
    assert response.status_code == 503
    while guarded.get("/server_info").json()["internal_states"][0]["#running"]:
        assert time.monotonic() - begin < 4, "the others go on for nobody"


# Load and metrics


def test_load(guarded: httpx.Client) -> None:
    guarded.post("/generate", json=SHORT)
    body = guarded.get("/v1/loads").json()
    (load,) = body["loads"]
    assert load["dp_rank"] == load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] == 4096
    assert load["cache_hit_rate"] == 0.5
    assert "memory" not in guarded.get("/v1/loads?include=core").json()["loads"][0]
    assert guarded.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]


@pytest.mark.parametrize("query", ["include=spec", "dp_rank=1", "format=prometheus", "what=ever"])
def test_load_refusals(guarded: httpx.Client, query: str) -> None:
    response = guarded.get(f"/v1/loads?{query}")
    assert response.status_code == 400 and response.json()["error"]["param"] == query.partition("=")[0]


def scrape(http: httpx.Client) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(found: dict[str, Any], name: str, **labels: str) -> float:
    rows = found.get(name, {}).items()
    return sum(value for key, value in rows if set(labels.items()) <= set(key))


def test_metrics_count_what_happens(guarded: httpx.Client) -> None:
    before = scrape(guarded)
    guarded.post("/generate", json=SHORT)
    with guarded.stream("POST", "/generate", json={**SHORT, "stream": True}) as response:
        response.read()
    guarded.post("/generate", json={**SHORT, "text": ""})  # refused, so it never was one
    guarded.get("/health_generate")
    after = scrape(guarded)

    def gained(name: str, **labels: str) -> float:
        return total(after, f"sglang:{name}", **labels) - total(before, f"sglang:{name}", **labels)

    prompt = len(TOKENIZER("hello").input_ids)
    for stream in ("true", "false"):
        assert gained("num_requests_total", is_streaming=stream, model_name="tiny") == 1
        assert gained("prompt_tokens_total", is_streaming=stream) == prompt
        assert gained("generation_tokens_total", is_streaming=stream) == 4
        assert gained("time_to_first_token_seconds_count", is_streaming=stream) == 1
        assert gained("e2e_request_latency_seconds_count", is_streaming=stream) == 1
    assert gained("inter_token_latency_seconds_count") == 6
    assert gained("time_per_output_token_seconds_count") == gained("request_time_per_output_token_seconds_count") == 2
    assert gained("cached_tokens_total") == 2 * (prompt // 2)
    assert gained("num_aborted_requests_total") == 0
    assert gained("http_requests_total", endpoint="/generate", method="POST") == 3
    assert gained("http_responses_total", endpoint="/generate", status_code="400") == 1
    # Each of two requests takes four steps of 5 ms; their outputs may be read together.
    assert 0.04 <= gained("e2e_request_latency_seconds_sum") < 30
    parts = gained("time_to_first_token_seconds_sum") + gained("inter_token_latency_seconds_sum")
    assert parts == pytest.approx(gained("e2e_request_latency_seconds_sum"), abs=0.05)


def test_metrics_show_the_load_and_what_is_aborted(guarded: httpx.Client) -> None:
    before = scrape(guarded)
    assert total(before, "sglang:max_total_num_tokens") == 4096
    long = {"text": "hello", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
    with guarded.stream("POST", "/generate", json=long) as response:
        lines = response.iter_lines()  # whose end closes the response
        next(lines)
        found = scrape(guarded)
        assert total(found, "sglang:num_running_reqs", model_name="tiny", engine_type="unified") == 1
        assert total(found, "sglang:num_used_tokens") == 10
        assert total(found, "sglang:kv_available_tokens") == 4086
        assert total(found, "sglang:cache_hit_rate") == 0.5
    deadline = time.monotonic() + 10
    name = "sglang:num_aborted_requests_total"
    while total(scrape(guarded), name) == total(before, name):  # the client hung up
        assert time.monotonic() < deadline


DASHBOARD = """
sglang:e2e_request_latency_seconds_bucket sglang:e2e_request_latency_seconds_sum
sglang:time_to_first_token_seconds_bucket sglang:time_to_first_token_seconds_count sglang:num_running_reqs
sglang:gen_throughput sglang:cache_hit_rate sglang:num_queue_reqs sglang:inter_token_latency_seconds_bucket
sglang:num_requests_total sglang:prompt_tokens_total sglang:generation_tokens_total sglang:token_usage
sglang:num_used_tokens sglang:time_per_output_token_seconds_bucket
"""


def test_metrics_have_the_names_of_dashboards(guarded: httpx.Client) -> None:
    found = scrape(guarded)
    assert set(DASHBOARD.split()) <= set(found)
    assert all("model_name" in dict(key) for name in DASHBOARD.split() for key in found[name])


def test_no_metrics_unless_asked_for(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.status_code == 404 and "--enable-metrics" in response.json()["error"]["message"]


# /tokenize, /detokenize


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize(http: httpx.Client, prefix: str) -> None:
    ids = TOKENIZER("hello world").input_ids
    response = http.post(f"{prefix}/tokenize", json={"model": "default", "prompt": "hello world"}).json()
    assert response == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    several = http.post(f"{prefix}/tokenize", json={"prompt": ["hello world", ""]}).json()
    empty = TOKENIZER("").input_ids
    assert (several["tokens"], several["count"]) == ([ids, empty], [len(ids), len(empty)])
    bare = http.post(f"{prefix}/tokenize", json={"prompt": "hello", "add_special_tokens": False}).json()["tokens"]
    assert bare == TOKENIZER("hello", add_special_tokens=False).input_ids
    back = http.post(f"{prefix}/detokenize", json={"tokens": ids}).json()
    assert back == {"text": TOKENIZER.decode(ids, skip_special_tokens=True)}
    both = http.post(f"{prefix}/detokenize", json={"tokens": [ids, []], "skip_special_tokens": False}).json()
    assert both == {"text": [TOKENIZER.decode(ids), ""]}
    assert http.post(f"{prefix}/detokenize", json={"tokens": []}).json() == {"text": ""}


def test_tokenize_a_conversation_as_a_chat_completion_would(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    chat = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["count"] == len(answer["tokens"]) == chat["usage"]["prompt_tokens"]
    assert "hello" in TOKENIZER.decode(answer["tokens"])
    refused = http.post("/tokenize", json={"messages": messages, "prompt": "hello"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {"prompt": 3}, "prompt", 400),
        ("/tokenize", {}, None, 400),
        ("/tokenize", {"prompt": "a", "what": 1}, "what", 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", 404),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens", 400),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens", 400),
        ("/detokenize", {"tokens": [[-1]]}, "tokens", 400),
        ("/detokenize", {"tokens": "a"}, "tokens", 400),
    ],
)
def test_tokenize_refusals(http: httpx.Client, path: str, body: Any, param: str | None, status: int) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status and response.json()["error"]["param"] == param


# Routes that there are not


def test_routes_of_sglang_that_are_absent_say_so(http: httpx.Client) -> None:
    for path, words in UNSUPPORTED_ROUTES.items():
        for method in ("GET", "POST"):
            response = http.request(method, path.replace("{response_id}", "x"), json={})
            assert response.status_code == 501, path
            assert words in response.json()["error"]["message"] and path in response.json()["error"]["message"]


def test_flush_cache_waits_if_it_may(guarded: httpx.Client) -> None:
    def flush(query: str) -> httpx.Response:
        return guarded.post(f"/flush_cache{query}", headers=bearer(ADMIN_KEY))

    long = {"text": "hello", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}, "stream": True}
    with guarded.stream("POST", "/generate", json=long) as response:
        lines = response.iter_lines()  # whose end closes the response
        next(lines)
        assert flush("").status_code == 400
        assert flush("?timeout=0.001").status_code == 400
        assert flush("?timeout=20").status_code == 200
    for timeout in ("-1", "nan", "x", "1e9"):
        assert flush(f"?timeout={timeout}").json()["error"]["param"] == "timeout"


# Bodies that are no requests


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"[]", b"3", b'"a"', b"[" * 200_000, b'{"a":' * 100_000, b'{"text":"\xff"}', b"\x00",
        b'{"text":"a","sampling_params":{"temperature":NaN}}', b'{"text":"a","sampling_params":{"temperature":1e999}}',
        b'{"text":"a","sampling_params":{"max_new_tokens":' + b"9" * 4000 + b"}}", b'{"text":"\\ud800"}',
        b'{"input_ids":[99999999999999999999999]}', b'{"input_ids":[-1]}', b'{"text":"a","rid":1}',
        '{"text":"a"}'.encode("utf-16"), b'{"text":"a","sampling_params":{"stop":[""]}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_junk_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_long_body_is_a_413(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_responses, "MAX_BODY_BYTES", 1 << 20)
    padded = json.dumps(SHORT).encode() + b" " * ((1 << 20) - 200)
    assert http.post("/generate", content=padded).status_code == 200
    response = http.post("/generate", content=iter([b" " * (1 << 20)] * 3))  # in chunks: no length is announced
    assert response.status_code == 413 and "1 MiB" in response.json()["error"]["message"]


def test_long_body_is_not_kept_and_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_responses, "MAX_BODY_BYTES", 4 << 20)
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b" " * (1 << 20), "more_body": True}

    tracemalloc.start()
    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_json(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    assert sent == 4 * 16 + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
