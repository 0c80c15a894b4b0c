"""``/v1/...`` through the official client. The fake scheduler answers with the prompt's tokens, over and over."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from fake_scheduler import logprob
from http_server_thread import FIXTURE, serve

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
MODEL = str(FIXTURE)
MESSAGES: list[Any] = [{"role": "system", "content": "Grüße!"}, {"role": "user", "content": "Hi"}]
CHAT_IDS = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text(token_id: int) -> str:
    return str(TOKENIZER.decode([token_id]))


def test_models(openai_client: OpenAI) -> None:
    (model,) = openai_client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 2048  # type: ignore[attr-defined]
    assert openai_client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("call", ["chat", "completion", "retrieve"])
def test_unknown_model(openai_client: OpenAI, call: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        if call == "chat":
            openai_client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        elif call == "completion":
            openai_client.completions.create(model="gpt-9", prompt="a")
        else:
            openai_client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert MODEL in caught.value.message


def test_default_model_name(openai_client: OpenAI) -> None:
    assert openai_client.completions.create(model="default", prompt="a").model == MODEL


# Completions


def test_completion(openai_client: OpenAI) -> None:
    result = openai_client.completions.create(model=MODEL, prompt="hello", temperature=0, max_tokens=20)
    ids = (TOKENIZER("hello").input_ids * 20)[:20]
    (choice,) = result.choices
    assert choice.text == decode(ids)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert result.object == "text_completion"
    usage = result.usage
    n = len(TOKENIZER("hello").input_ids)
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (n, 20, n + 20)
    assert usage.prompt_tokens_details.cached_tokens == n // 2
    assert openai_client.completions.create(model=MODEL, prompt="hello").usage.completion_tokens == 16  # type: ignore[union-attr]


def test_completion_prompts(openai_client: OpenAI) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        result = openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, **options)
        assert [choice.index for choice in result.choices] == list(range(len(result.choices)))
        return [choice.text for choice in result.choices]

    a, b = texts("a")[0], texts("b")[0]
    assert a != b
    assert texts(["a", "b"]) == [a, b]
    assert texts(TOKENIZER("a").input_ids) == [a]
    assert texts([TOKENIZER("a").input_ids, TOKENIZER("b").input_ids]) == [a, b]
    assert texts(["a", "b"], n=2) == [a, a, b, b]
    assert texts("a", echo=True) == ["a" + a]
    assert texts(TOKENIZER("a").input_ids, echo=True) == ["a" + a]


def test_usage_counts_a_prompt_once(openai_client: OpenAI) -> None:
    one = openai_client.completions.create(model=MODEL, prompt="hello", max_tokens=4).usage
    three = openai_client.completions.create(model=MODEL, prompt="hello", max_tokens=4, n=3).usage
    assert one is not None and three is not None
    assert (three.prompt_tokens, three.completion_tokens) == (one.prompt_tokens, 12)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs(openai_client: OpenAI, stream: bool, echo: bool) -> None:
    prompt_ids = TOKENIZER("é!").input_ids
    ids = (prompt_ids * 6)[:6]
    options: Any = {"model": MODEL, "prompt": "é!", "max_tokens": 6, "logprobs": 2, "echo": echo}
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    shown = ""
    results = (
        openai_client.completions.create(**options, stream=True)
        if stream
        else [openai_client.completions.create(**options)]
    )
    for result in results:
        (choice,) = result.choices
        shown += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens or []
            logprobs += choice.logprobs.token_logprobs or []
            tops += choice.logprobs.top_logprobs or []
            offsets += choice.logprobs.text_offset or []
    expected = prompt_ids + ids if echo else ids
    assert shown == ("é!" if echo else "") + decode(ids)
    assert tokens == [text(i) for i in expected]
    assert logprobs == [None if echo and j == 0 else logprob(i) for j, i in enumerate(expected)]
    assert tops == [None if echo and j == 0 else {text(i): logprob(i) for i in range(2)} for j in range(len(expected))]
    # A token's offset is the length of the visible text before it, complete characters only.
    before = [decode(expected[:j]) for j in range(len(expected))]
    assert offsets == [len(t[:-1] if t.endswith("\ufffd") else t) for t in before]


def test_completion_stream(openai_client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": ["héllo", "wörld"], "max_tokens": 12, "n": 2}
    whole = openai_client.completions.create(**options)
    texts = dict.fromkeys(range(4), "")
    finish: dict[int, str] = {}
    chunks = list(openai_client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert "\ufffd" not in choice.text
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finish[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert finish == dict.fromkeys(range(4), "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_completion_stop(openai_client: OpenAI, stream: bool) -> None:
    options: Any = {"model": MODEL, "prompt": "one two three", "max_tokens": 300, "stop": ["o th", "x"]}
    if stream:
        chunks = [chunk.choices[0] for chunk in openai_client.completions.create(**options, stream=True)]
        shown, last = "".join(choice.text for choice in chunks), chunks[-1]
    else:
        last = openai_client.completions.create(**options).choices[0]
        shown = last.text
    assert shown == "one tw"
    assert last.finish_reason == "stop"
    assert last.matched_stop == "o th"


# Chat


def test_chat(openai_client: OpenAI) -> None:
    result = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=5)
    (choice,) = result.choices
    # The fake scheduler's answer begins with the prompt, so this shows that the prompt is right, BOS once.
    assert CHAT_IDS.count(0) == 1
    assert choice.message.content == decode(CHAT_IDS[:5])
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert result.object == "chat.completion"
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(CHAT_IDS), 5)


def test_chat_ends_with_eos(openai_client: OpenAI) -> None:
    result = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert result.choices[0].finish_reason == "stop"
    end = CHAT_IDS.index(1)
    assert result.choices[0].message.content == decode(CHAT_IDS[:end])
    assert result.usage is not None and result.usage.completion_tokens == end + 1


def test_chat_prompt_reaches_the_model_unchanged(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": len(CHAT_IDS), "ignore_eos": True, "skip_special_tokens": False}
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert content == TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream(openai_client: OpenAI, n: int) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 20, "n": n}
    whole = openai_client.chat.completions.create(**options)
    chunks = list(openai_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for index in range(n):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in own) == whole.choices[index].message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [whole.choices[index].finish_reason]
        assert own[-1].finish_reason is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_continuous_usage(http: httpx.Client) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(chunk["usage"]["prompt_tokens"] == len(CHAT_IDS) for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(openai_client: OpenAI, stream: bool) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    content: list[Any] = []
    results = (
        openai_client.chat.completions.create(**options, stream=True)
        if stream
        else [openai_client.chat.completions.create(**options)]
    )
    for result in results:
        if result.choices[0].logprobs is not None:
            content += result.choices[0].logprobs.content or []
    ids = CHAT_IDS[: CHAT_IDS.index(1) + 1][:30]
    assert [entry.token for entry in content] == [text(i) for i in ids]
    assert [entry.logprob for entry in content] == [logprob(i) for i in ids]
    assert all([t.token for t in entry.top_logprobs] == [text(0), text(1)] for entry in content)
    # The bytes are exact where the text of one token can't be.
    spelled = b"".join(bytes(entry.bytes) for entry in content)
    assert "Grüße".encode() in spelled
    assert spelled.decode() == TOKENIZER.decode(ids)


def test_chat_without_top_logprobs(openai_client: OpenAI) -> None:
    result = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert result.choices[0].logprobs is not None and result.choices[0].logprobs.content is not None
    assert [entry.top_logprobs for entry in result.choices[0].logprobs.content] == [[], []]


def test_message_forms(http: httpx.Client) -> None:
    def content(messages: list[Any], **options: Any) -> str:
        body = {"messages": messages, "max_tokens": 40, "ignore_eos": True, "skip_special_tokens": False, **options}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    plain = content([{"role": "user", "content": "hi there"}])
    assert plain.startswith("<s><|user|>\nhi there</s>\n<|assistant|>\n")
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    assert content([{"role": "user", "content": parts}]) == plain
    # An assistant's message as the client library writes it back.
    history = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert "<|assistant|>\nhi</s>" in content([{"role": "user", "content": "a"}, history])
    continued = content(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I th"}], continue_final_message=True
    )
    assert continued.startswith("<s><|user|>\na</s>\n<|assistant|>\nI th<s>")


def test_chat_template_kwargs(tmp_path: Path) -> None:
    template = "{% if shout %}LOUD{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = _copy_fixture(tmp_path, template)
    recommended = {"temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps({**recommended, "max_length": 9, "eos_token_id": 1}))
    with serve(model_path=str(folder), served_model_name="tiny") as url, httpx.Client(base_url=url) as http:
        assert http.get("/get_model_info").json()["preferred_sampling_params"] == recommended
        body = {"model": "tiny", "messages": MESSAGES[1:], "max_tokens": 5, "chat_template_kwargs": {"shout": True}}
        loud = http.post("/v1/chat/completions", json=body).json()
        assert loud["choices"][0]["message"]["content"].startswith("LOUD")
        assert loud["model"] == "tiny"
        body["chat_template_kwargs"] = {"chat_template": "x"}
        refused = http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
        # The name that was given is the one that is listed; the path still works.
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert http.post(
            "/v1/chat/completions", json={**body, "chat_template_kwargs": None, "model": str(folder)}
        ).is_success


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate")],
)
def test_chat_template_faults(tmp_path: Path, template: str | None, words: str) -> None:
    with serve(model_path=str(_copy_fixture(tmp_path, template))) as url, httpx.Client(base_url=url) as http:
        response = http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def _copy_fixture(folder: Path, template: str | None) -> Path:
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_bytes((FIXTURE / name).read_bytes())
    config = json.loads((FIXTURE / "tokenizer_config.json").read_text())
    del config["chat_template"]
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
