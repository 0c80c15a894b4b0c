"""Requests that nobody sends by accident: each with what the answer may be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

MB = 1 << 20


@dataclass(frozen=True)
class Odd:
    """A body, raw, and the statuses that are right for it."""

    name: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = (400,)
    headers: dict[str, str] = field(default_factory=dict)


def _generate(name: str, *statuses: int, **fields: object) -> Odd:
    return Odd(name, "/generate", json.dumps({"text": "hello", **fields}).encode(), statuses or (400,))


def _params(name: str, *statuses: int, **params: object) -> Odd:
    return _generate(name, *statuses, sampling_params={"max_new_tokens": 4, **params})


def _nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def odd_requests(vocab_size: int) -> Iterator[Odd]:
    # Bodies
    yield Odd("no body", "/generate", b"")
    yield Odd("trailing garbage", "/generate", b'{"text":"hello"} x')
    yield Odd("half an object", "/generate", b'{"text":"hello"')
    yield Odd(
        "duplicate keys", "/generate", b'{"text":"a","text":"hello","sampling_params":{"max_new_tokens":1}}', (200,)
    )
    yield Odd("invalid UTF-8", "/generate", b'{"text":"\xff\xfe"}')
    yield Odd("lone surrogate", "/generate", b'{"text":"\\ud800"}')
    yield Odd("lone surrogate in rid", "/generate", b'{"text":"a","rid":"\\udfff"}')
    yield Odd("NaN", "/generate", b'{"text":"a","sampling_params":{"temperature":NaN}}')
    yield Odd("a huge number", "/generate", b'{"text":"a","sampling_params":{"temperature":1e999}}')
    yield Odd("a long integer", "/generate", b'{"text":"a","sampling_params":{"max_new_tokens":' + b"9" * 5000 + b"}}")
    yield Odd("an array", "/generate", b"[]")
    for depth in (300, 900, 1100, 100_000):
        body = b'{"text":"a","sampling_params":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        yield Odd(f"nested {depth} deep", "/generate", body)
    yield Odd("10 MB prompt", "/generate", json.dumps({"text": "hello world " * (10 * MB // 12)}).encode())
    yield Odd("10 MB prompt without spaces", "/generate", json.dumps({"text": "a" * (10 * MB)}).encode())
    yield Odd("10 MB of token ids", "/generate", b'{"input_ids":[' + b"1," * (5 * MB) + b"1]}", (413,))
    yield Odd("8 MB of token ids", "/generate", b'{"input_ids":[' + b"1," * (4 * MB - 100) + b"1]}")
    yield Odd("64 MB of lists", "/generate", b'{"text":[' + b"[]," * (21 * MB) + b"[]]}", (413,))
    yield Odd("250000 names", "/generate", b'{"a":{' + b",".join(b'"%d":1' % i for i in range(250_000)) + b"}}")
    yield Odd("10 MB of a field's name", "/generate", b'{"text":"a","' + b"x" * (10 * MB) + b'":1}')
    yield Odd("70 MB", "/generate", b'{"text":"' + b"a" * (70 * MB) + b'"}', (413, 0))
    yield Odd("gzip", "/generate", b'{"text":"a"}', (200, 400, 415), {"content-encoding": "gzip"})
    yield Odd("no JSON by its type", "/generate", b'{"text":"a","sampling_params":{"max_new_tokens":1}}', (200, 415),
              {"content-type": "text/plain"})  # fmt: skip
    # Batches
    yield _generate("empty batch", text=[])
    yield _generate("no token", text=None, input_ids=[])
    yield _generate("no tokens in a batch", text=None, input_ids=[[1], []])
    yield _generate("one bad of a batch", text=None, input_ids=[[1], [vocab_size]])
    yield _generate("ids mixed with lists", text=None, input_ids=[1, [1]])
    yield _generate("a million prompts", 413, text=["a"] * 1_000_000)
    yield _generate("250000 prompts", text=["a"] * 250_000)
    yield _generate("250000 sequences", text=None, input_ids=[[1]] * 250_000)
    yield _generate("rids of a batch twice", text=["a", "b"], rid=["x", "x"])
    yield _generate("rids for no batch", rid=["x", "y"])
    yield _generate("1 MB of rid for 10000 samples", rid="x" * MB, sampling_params={"n": 10000, "max_new_tokens": 1})
    yield _params("n 10**9", n=10**9)
    yield _params("n 0", n=0)
    yield _generate(
        "a long prompt 16384 times", text="hello " * 4000, sampling_params={"n": 16384, "max_new_tokens": 1}
    )
    # Parameters
    yield _params("empty stop", stop=[""])
    yield _params("250000 stop strings", stop=[f"s{i}" for i in range(250_000)])
    yield _params("10 MB of stop string", stop="ab" * (5 * MB))
    yield _params("100000 biases", 200, 400, logit_bias={str(i % vocab_size): 1.0 for i in range(100_000)})
    yield _params("biases twice", 400, logit_bias={"1": 1.0, "01": 2.0})
    yield _params("a bias behind the vocabulary", logit_bias={str(vocab_size): 1.0})
    yield _params("every token stops", 200, stop_token_ids=list(range(vocab_size)))
    yield _params("every token stops, later", stop_token_ids=list(range(vocab_size)), min_new_tokens=2)
    yield _params("a million stop tokens", 200, stop_token_ids=[i % vocab_size for i in range(1_000_000)])
    yield _params("many patterns", stop_regex=["a"] * 1000)
    yield _params("a pattern that blows up", 200, 400, stop_regex="(a{1,1000}){1,1000}")
    yield _params("a temperature near zero", 200, temperature=1e-45)
    yield _params("a large temperature", 200, temperature=1e38)
    yield _params("top_p near zero", 200, top_p=1e-45)
    yield _params("all biases at their limit", 200, 400, logit_bias={str(i): -1e30 for i in range(vocab_size)})
    yield _generate("log-probabilities of all", 200, 400, return_logprob=True, logprob_start_len=0,
                    top_logprobs_num=vocab_size, sampling_params={"max_new_tokens": 4})  # fmt: skip
    yield _generate("log-probabilities of all for a long prompt", 200, 400, text="hello world " * 150,
                    return_logprob=True, logprob_start_len=0, token_ids_logprob=list(range(vocab_size)) * 100,
                    sampling_params={"max_new_tokens": 4})  # fmt: skip
    yield _generate("log-probabilities from behind", return_logprob=True, logprob_start_len=10**9)
    # OpenAI
    for name, fields in (
        ("no messages", {"messages": []}),
        ("a role that is none", {"messages": [{"role": "\x00", "content": "a"}]}),
        ("no content", {"messages": [{"role": "user"}]}),
        ("content of all kinds", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("a tool that is none", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),
        ("a format that is none", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "x"}}),
        (
            "template arguments",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}},
        ),
    ):
        body = json.dumps({"max_tokens": 2, **fields}).encode()
        yield Odd(f"chat: {name}", "/v1/chat/completions", body, (200, 400))
    for count, status in ((50_000, 400), (100_000, 413)):
        many = [{"role": "user", "content": "a"}] * count
        body = json.dumps({"messages": many}).encode()
        yield Odd(f"chat: {count} messages", "/v1/chat/completions", body, (status,))
    for depth in (100, 400, 5000):
        schema = _nested(depth)
        yield _params(f"schema {depth} deep", 200, 400, json_schema=schema)
        body = '{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"response_format":{"type":"json_schema",'
        body += '"json_schema":{"name":"x","schema":' + schema + "}}}"
        yield Odd(f"chat: schema {depth} deep", "/v1/chat/completions", body.encode(), (200, 400))
    yield Odd("completions: ids mixed", "/v1/completions", b'{"prompt":[1,"a",[2]]}')
    yield Odd("completions: 250000 prompts", "/v1/completions", json.dumps({"prompt": ["a"] * 250_000}).encode())
    yield Odd("completions: no prompt", "/v1/completions", b'{"prompt":[]}')
    yield Odd("tokenize: 10 MB", "/tokenize", json.dumps({"prompt": "hello " * 1_700_000}).encode(), (200, 400))
    yield Odd("detokenize: wrong ids", "/detokenize", json.dumps({"tokens": [vocab_size, -1, 2**70]}).encode())
    yield Odd("detokenize: a million", "/detokenize", json.dumps({"tokens": [5] * 1_000_000}).encode(), (200, 400))
    yield Odd("abort of nothing", "/abort_request", b'{"rid":"never heard of"}', (200,))
