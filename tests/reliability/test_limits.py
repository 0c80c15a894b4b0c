"""What one request may ask for: a small body must not become gigabytes or minutes."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from http_server_thread import serve
from sglang.srt.managers import request_limits, tokenizer_manager
from sglang.srt.sampling.sampling_params import MAX_PARALLEL_SAMPLES, MAX_STOP_CHARS, MAX_STOPS

SHORT = {"max_new_tokens": 1}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/generate",
            {"text": "a" * ((1 << 20) + 1)},
            "1048577 characters, 1048576 are accepted: the context has 2048",
        ),
        ("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}, "1048577 characters, 1048576 are accepted"),
        ("/generate", {"text": ["a"] * (MAX_PARALLEL_SAMPLES + 1)}, f"{MAX_PARALLEL_SAMPLES} prompts"),
        ("/generate", {"input_ids": [[5]] * (MAX_PARALLEL_SAMPLES + 1)}, f"{MAX_PARALLEL_SAMPLES} prompts"),
        ("/generate", {"text": "a", "rid": "x" * 1025}, "'rid' may have 1024 characters, not 1025"),
        ("/generate", {"text": ["a", "b"], "rid": ["x", "x" * 1025]}, "'rid' may have 1024 characters, not 1025"),
        ("/v1/completions", {"prompt": "a", "rid": "x" * 1025}, "'rid' may have 1024 characters, not 1025"),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 8000}, f"{MAX_PARALLEL_SAMPLES} completions, not 24000"),
        ("/generate", {"text": "a", "sampling_params": {"stop": ["x"] * (MAX_STOPS + 1)}}, f"at most {MAX_STOPS} non-"),
        ("/generate", {"text": "a", "sampling_params": {"stop": "x" * (MAX_STOP_CHARS + 1)}}, "characters, got ('xxx"),
    ],
)
def test_refused(http: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_what_is_just_allowed(http: httpx.Client) -> None:
    params = {**SHORT, "stop": ["x" * (MAX_STOP_CHARS // MAX_STOPS)] * MAX_STOPS}
    answer = http.post("/generate", json={"text": ["hello"] * 300, "sampling_params": params, "rid": "x" * 1024})
    assert answer.status_code == 200 and len(answer.json()) == 300


def test_an_error_quotes_little(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"text": "a", "y" * 100_000: 1})
    assert answer.status_code == 400 and 1000 < len(answer.content) < 1500
    assert answer.json()["error"]["message"].startswith("Unrecognized request argument supplied: yyy")


def test_number_of_log_probabilities(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "_MAX_LOGPROBS", 100)
    body: dict[str, Any] = {"input_ids": [5] * 10, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"max_new_tokens": 10}
    assert http.post("/generate", json={**body, "top_logprobs_num": 5}).status_code == 200
    for fields, name in (({"top_logprobs_num": 6}, "top_logprobs_num"), ({"token_ids_logprob": [1] * 6}, "token_ids_")):
        answer = http.post("/generate", json={**body, **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(name)
        assert "120 log-probabilities are asked for (20 tokens), 100 may be" in answer.json()["error"]["message"]


def test_size_of_all_sequences_together(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of n samples is a message with prompt and biases."""
    monkeypatch.setattr(tokenizer_manager, "_MAX_CALL_SIZE", 100)
    params = {**SHORT, "logit_bias": {"5": 1, "6": 1}, "stop_token_ids": [7, 8, 9], "ignore_eos": True}
    body = {"input_ids": [5] * 15, "sampling_params": {**params, "n": 5}}
    assert http.post("/generate", json=body).status_code == 200
    answer = http.post("/generate", json={**body, "sampling_params": {**params, "n": 6}})
    assert answer.status_code == 400 and "may have 100 tokens, biases" in answer.json()["error"]["message"]


def test_a_prompt_is_tokenised_once_for_all_samples(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    encode = tokenizer_manager.encode

    def counted(tokenizer: Any, text: str, **options: Any) -> list[int]:
        texts.append(text)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer_manager, "encode", counted)
    answer = http.post("/generate", json={"text": ["hello", "world"], "sampling_params": {**SHORT, "n": 3}})
    assert len(answer.json()) == 6 and texts == ["hello", "world"]
