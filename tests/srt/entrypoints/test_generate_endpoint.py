"""``/generate`` and the server's own endpoints. The fake scheduler answers with the prompt's tokens, over and over."""

import itertools
import json
import threading
import time
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from fake_scheduler import MAX_REQ_INPUT_LEN, logprob
from http_server_thread import FIXTURE
from sglang import __version__

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
GREEDY = {"temperature": 0, "max_new_tokens": 5}


def generate(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/generate", json={"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def assert_refused(response: httpx.Response, param: str | None, *words: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


def test_text(http: httpx.Client) -> None:
    out = generate(http, text="hello", rid="mine")
    ids = TOKENIZER("hello").input_ids
    expected = (ids * 5)[:5]
    assert out["output_ids"] == expected
    assert out["text"] == TOKENIZER.decode(expected, skip_special_tokens=True)
    meta = out["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": len(ids),
        "completion_tokens": 5,
        "cached_tokens": len(ids) // 2,
    }


def test_input_ids_equal_text(http: httpx.Client) -> None:
    ids = TOKENIZER("hello").input_ids
    assert generate(http, input_ids=ids)["text"] == generate(http, text="hello")["text"]


def test_batches_keep_their_order(http: httpx.Client) -> None:
    texts = ["a", "bb", "some longer text"]
    params = [{**GREEDY, "max_new_tokens": n} for n in (9, 1, 4)]
    outs = generate(http, text=texts, sampling_params=params, rid="batch")
    assert [out["meta_info"]["id"] for out in outs] == ["batch_0", "batch_1", "batch_2"]
    for text, param, out in zip(texts, params, outs, strict=True):
        assert out == {**generate(http, text=text, sampling_params=param), "meta_info": out["meta_info"]}
    assert len(generate(http, input_ids=[[4, 5], [6]])) == 2
    assert len(generate(http, text=["only one"])) == 1


def test_n_samples(http: httpx.Client) -> None:
    outs = generate(http, text=["a", "b"], sampling_params={**GREEDY, "n": 2})
    assert [out["output_ids"] for out in outs[:2]] == [generate(http, text="a")["output_ids"]] * 2
    assert len({out["meta_info"]["id"] for out in outs}) == 4
    assert len(generate(http, text="a", sampling_params={**GREEDY, "n": 3})) == 3


def test_stream_is_cumulative(http: httpx.Client) -> None:
    whole = generate(http, text="héllo wörld", sampling_params={**GREEDY, "max_new_tokens": 30})
    body = {"text": "héllo wörld", "sampling_params": {**GREEDY, "max_new_tokens": 30}, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    assert len(chunks) > 3
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
    assert all("\ufffd" not in chunk["text"] for chunk in chunks)
    last = chunks[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


def test_stream_of_a_batch_has_indexes(http: httpx.Client) -> None:
    with http.stream("POST", "/generate", json={"text": ["a", "b"], "sampling_params": GREEDY, "stream": True}) as r:
        chunks = events(r)
    final = {chunk["index"]: chunk["text"] for chunk in chunks if chunk["meta_info"]["finish_reason"]}
    assert final == {0: generate(http, text="a")["text"], 1: generate(http, text="b")["text"]}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(http: httpx.Client, stream: bool) -> None:
    ids = [0, 70, 80, 90]
    body = {
        "input_ids": ids,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        "stream": stream,
    }
    if stream:
        with http.stream("POST", "/generate", json=body) as response:
            out = events(response)[-1]
    else:
        out = generate(http, **body)
    meta = out["meta_info"]

    def text(token_id: int) -> str:
        return str(TOKENIZER.decode([token_id]))

    assert meta["input_token_logprobs"] == [[None if i == 70 else logprob(i), i, text(i)] for i in ids[1:]]
    assert meta["output_token_logprobs"] == [[logprob(i), i, text(i)] for i in out["output_ids"]]
    assert meta["output_token_logprobs_length"] == 5
    top = [[logprob(i), i, text(i)] for i in range(2)]
    assert meta["input_top_logprobs"] == [None, top, top]
    assert meta["output_top_logprobs"] == [top] * 5


def test_logprobs_of_the_output_only(http: httpx.Client) -> None:
    meta = generate(http, text="hello", return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [None] * 5
    assert "output_top_logprobs" not in meta


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(http: httpx.Client, stream: bool) -> None:
    prompt = "one two three"
    ids = TOKENIZER(prompt, add_special_tokens=False).input_ids
    params = {**GREEDY, "max_new_tokens": 400, "stop": ["o th", "never"]}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": stream}
    before = http.get("/server_info").json()["internal_states"][0]["aborted"]
    if stream:
        with http.stream("POST", "/generate", json=body) as response:
            chunks = events(response)
        assert all("one two".startswith(chunk["text"]) and "o t" not in chunk["text"] for chunk in chunks)
        out = chunks[-1]
    else:
        out = generate(http, **body)
    assert out["text"] == "one tw"
    meta = out["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": "o th"}
    assert meta["completion_tokens"] == len(out["output_ids"]) == len(meta["output_token_logprobs"]) < len(ids)
    assert TOKENIZER.decode(out["output_ids"]).startswith("one two th")
    # The scheduler, which knows nothing of stop strings, was told to stop.
    assert _state_when(http, "aborted", before + 1)["#running"] == 0


def test_stop_tokens(http: httpx.Client) -> None:
    eos = generate(http, input_ids=[70, 80, 1, 90], sampling_params={**GREEDY, "skip_special_tokens": False})
    assert eos["output_ids"] == [70, 80, 1]
    assert eos["text"] == TOKENIZER.decode([70, 80])
    assert eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    ignored = generate(http, input_ids=[70, 80, 1, 90], sampling_params={**GREEDY, "ignore_eos": True})
    assert len(ignored["output_ids"]) == 5
    own = generate(http, input_ids=[70, 80, 90], sampling_params={**GREEDY, "stop_token_ids": [80]})
    assert (own["output_ids"], own["text"]) == ([70, 80], TOKENIZER.decode([70]))


def test_special_tokens(http: httpx.Client) -> None:
    ids = [4, 70, 5]
    shown = generate(http, input_ids=ids, sampling_params={**GREEDY, "skip_special_tokens": False})
    assert shown["text"] == "<|user|>" + TOKENIZER.decode([70]) + "<|assistant|><|user|>" + TOKENIZER.decode([70])
    assert generate(http, input_ids=ids)["text"] == TOKENIZER.decode([70]) * 2


def test_no_new_tokens(http: httpx.Client) -> None:
    out = generate(http, text="hi", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert (out["text"], out["output_ids"]) == ("", [])
    assert len(out["meta_info"]["input_token_logprobs"]) == out["meta_info"]["prompt_tokens"]


BAD_REQUESTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "text", "text"),
    ({"text": "a", "input_ids": [5]}, "text", "Exactly one"),
    ({"text": ""}, "text", "empty"),
    ({"text": []}, "text", "empty"),
    ({"text": ["a", ""]}, "text", "empty"),
    ({"input_ids": []}, "input_ids", "no tokens"),
    ({"input_ids": [[5], []]}, "input_ids", "no tokens"),
    ({"input_ids": [5, [6]]}, "input_ids", "mixes"),
    ({"input_ids": [320]}, "input_ids", "320"),
    ({"input_ids": [-1]}, "input_ids", "-1"),
    ({"input_ids": [2**70]}, "input_ids", ""),
    ({"input_ids": "5"}, "input_ids", "array"),
    ({"input_ids": [1.5]}, "input_ids[0]", "int"),
    ({"text": 5}, "text", "str"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature", "temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "max_new_tokens"),
    ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature", "temprature"),
    ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "custom_params", "not supported"),
    ({"text": "a", "sampling_params": {"stop_regex": "(a"}}, "stop_regex", "RE2"),
    ({"text": "a", "sampling_params": {"logit_bias": {"320": 1}}}, "logit_bias", "320"),
    (
        {"input_ids": [5] * 900, "sampling_params": {"max_new_tokens": None, "min_new_tokens": 2000}},
        "min_new_tokens",
        "1148 tokens",
    ),
    ({"text": ["a", "b"], "sampling_params": {"n": 10000}}, "n", "20000 sequences"),
    ({"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob", "return_logprob"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [320]}, "token_ids_logprob", "320"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [[5], [6]]}, "token_ids_logprob", "2 entries for 1"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [5, [6]]}, "token_ids_logprob", "mixes"),
    ({"text": "a", "sampling_params": [GREEDY, GREEDY]}, "sampling_params", "2 entries for 1"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n", "same"),
    ({"text": "a", "sampling_params": {"n": 0}}, "n", "at least 1"),
    ({"text": "a", "sampling_params": "hot"}, "sampling_params", "sampling_params"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [320]}}, "stop_token_ids", "320"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 2048}}, "max_new_tokens", "maximum context length of 2048"),
    ({"text": "a", "stream": "yes"}, "stream", "bool"),
    ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "return_logprob"),
    ({"text": "a", "logprob_start_len": 0}, "logprob_start_len", "return_logprob"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len", "beyond"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-1"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", "at least 0"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num", "320"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "duplicate"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries for 2"),
    ({"text": "a", "image_data": "cat.png"}, "image_data", "not supported by this server: leave it out or send null."),
    ({"text": "a", "lora_path": "x"}, "lora_path", "leave it out or send null."),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states", "leave it out or send False."),
    ({"text": "a", "no_such_field": None}, "no_such_field", "Unrecognized"),
    (
        {"input_ids": [5] * 2048},
        None,
        "The input (2048 tokens) is longer than the model's context length (2048 tokens).",
    ),
    ({"input_ids": [5] * (MAX_REQ_INPUT_LEN + 1)}, None, "exceeds the maximum allowed length"),
    ({"input_ids": [2]}, None, "The fake scheduler can't run this."),
    ({"text": "\ud800"}, None, ""),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_REQUESTS, ids=[str(i) for i in range(len(BAD_REQUESTS))])
def test_bad_requests(http: httpx.Client, body: dict[str, Any], param: str | None, words: str) -> None:
    assert_refused(http.post("/generate", content=json.dumps(body)), param, words)
    if "stream" not in body:
        # An error before the first token has its HTTP status in a stream, too.
        assert_refused(http.post("/generate", content=json.dumps({**body, "stream": True})), param, words)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b'{"text": "\xff"}', b'{"a": NaN}'])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_bad_json(http: httpx.Client, path: str, data: bytes) -> None:
    assert_refused(http.post(path, content=data), None, "JSON")


def test_default_length_fits_the_context(http: httpx.Client) -> None:
    """Only a length that the client chose can be too long."""
    out = generate(http, input_ids=[70] * 900, sampling_params={"temperature": 0, "max_new_tokens": None})
    assert out["meta_info"]["completion_tokens"] == 2048 - 900


def test_bad_request_in_a_batch_starts_nothing(http: httpx.Client) -> None:
    before = http.get("/server_info").json()["internal_states"][0]
    assert_refused(http.post("/generate", json={"input_ids": [[70], [999]], "sampling_params": GREEDY}), "input_ids")
    after = http.get("/server_info").json()["internal_states"][0]
    assert before == after


def test_others_are_unharmed(http: httpx.Client) -> None:
    results: list[Any] = []
    long = {**GREEDY, "max_new_tokens": 200}
    thread = threading.Thread(target=lambda: results.append(generate(http, text="long", sampling_params=long)))
    thread.start()
    for body, _, _ in BAD_REQUESTS:
        http.post("/generate", content=json.dumps(body))
    thread.join()
    assert results[0]["meta_info"]["completion_tokens"] == 200


def test_unknown_urls(http: httpx.Client) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/generate", 405), ("POST", "/v1/models", 405)):
        response = http.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_information(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200
    for path in ("/get_model_info", "/model_info"):
        info = http.get(path).json()
        assert info["model_path"] == str(FIXTURE)
        assert info["is_generation"] is True
    for path in ("/get_server_info", "/server_info"):
        info = http.get(path).json()
        assert info["model_path"] == str(FIXTURE)
        assert info["page_size"] == 1
        assert info["version"] == __version__
        assert info["max_total_num_tokens"] == 4096
        assert info["internal_states"][0]["fp4_gemm_backend"] == "fake"


def test_flush_cache(http: httpx.Client) -> None:
    for method in ("GET", "POST"):
        response = http.request(method, "/flush_cache")
        assert response.status_code == 200
        assert response.text.startswith("Cache flushed.")
    body = {"text": "hello", "sampling_params": {**GREEDY, "max_new_tokens": 2000}, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # whose end closes the response
        next(lines)
        assert http.post("/flush_cache").status_code == 400


def _state_when(http: httpx.Client, name: str, value: int) -> dict[str, Any]:
    """The scheduler's state as soon as ``name`` has ``value``."""
    deadline = time.monotonic() + 5
    while True:
        state: dict[str, Any] = http.get("/server_info").json()["internal_states"][0]
        if state[name] == value:
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts(http: httpx.Client, path: str, stream: bool) -> None:
    before = _state_when(http, "#running", 0)["aborted"]
    body: dict[str, Any] = {"stream": stream}
    if path == "/generate":
        body |= {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    else:
        body |= {"prompt": ["a", "b"], "max_tokens": 2000, "ignore_eos": True}
    with httpx.Client(base_url=http.base_url) as client:
        if stream:
            with client.stream("POST", path, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.2)
    assert _state_when(http, "#running", 0)["aborted"] == before + 2


@pytest.mark.parametrize("abort", [{"rid": "victim"}, {"abort_all": True}])
def test_abort_request(http: httpx.Client, abort: dict[str, Any]) -> None:
    body = {"text": ["a", "b"], "rid": "victim", "sampling_params": {"max_new_tokens": 2000}, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"rid": "somebody else"}).status_code == 200
        clash = http.post("/generate", json={"text": "c", "rid": "victim_0"})
        assert_refused(clash, "rid", "running already")
        assert http.post("/abort_request", json=abort).status_code == 200
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    reasons = {c["index"]: c["meta_info"]["finish_reason"] for c in chunks if c["meta_info"]["finish_reason"]}
    assert {i: reason["type"] for i, reason in reasons.items()} == {0: "abort", 1: "abort"}
    _state_when(http, "#running", 0)
    # The name is free again.
    assert generate(http, text="c", rid="victim_0")["meta_info"]["id"] == "victim_0"


def test_abort_request_needs_a_name(http: httpx.Client) -> None:
    assert_refused(http.post("/abort_request", json={}), "rid")
    assert_refused(http.post("/abort_request", json={"rid": 5}), "rid")
    assert_refused(http.post("/abort_request", json={"id": "x"}), "id")
