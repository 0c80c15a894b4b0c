"""Tool calls and thoughts through the official client, every way it has of reading them.

The fake scheduler answers with the prompt's tokens, and the template below puts the last message first and EOS behind
it: the answer is that message's text, a token at a time.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from transformers import AutoTokenizer

from http_server_thread import FIXTURE, serve

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
TEMPLATE = (
    "{{ messages[-1]['content'] }}{{ eos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    '{% if tools %}{{ tools | tojson }}<tool_call>{"name", "arguments"}{% endif %}'
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
)
CITY = '{"city": "Pa\\u00ris, <tool_call>"}'.replace("\\u00r", "r")
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
TWO = f"Let me see.\n{CALL}\n{CALL}"


class GetWeather(BaseModel):
    city: str


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(chat_template=TEMPLATE, reasoning_parser="qwen3", served_model_name="m") as base:
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "tools": [WEATHER], **options}


def test_whole(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ask(TWO)).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [("function", "get_weather", CITY)] * 2
    assert len({call.id for call in calls}) == 2
    one = client.chat.completions.create(**ask(TWO, parallel_tool_calls=False)).choices[0]
    assert len(one.message.tool_calls or []) == 1


def test_stream(client: OpenAI) -> None:
    chunks = [c.choices[0] for c in client.chat.completions.create(**ask(TWO, stream=True))]
    arguments, names, ids = ["", ""], ["", ""], ["", ""]
    for chunk in chunks:
        for call in chunk.delta.tool_calls or ():
            arguments[call.index] += call.function.arguments or ""
            names[call.index] += call.function.name or ""
            ids[call.index] += call.id or ""
    assert arguments == [CITY] * 2 and names == ["get_weather"] * 2 and all(ids) and ids[0] != ids[1]
    assert sum(bool(chunk.delta.tool_calls) for chunk in chunks) > 10  # not in one piece
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_stream_helper(client: OpenAI) -> None:
    done = []
    with client.chat.completions.stream(**ask(TWO)) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, event.arguments))
        message = stream.get_final_completion().choices[0].message
    assert done == [(0, "get_weather", CITY), (1, "get_weather", CITY)]
    assert message.content == "Let me see." and len(message.tool_calls or []) == 2


def test_async_stream(url: str) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(text: str) -> str:
                stream = await client.chat.completions.create(**ask(text, stream=True))
                deltas = [chunk.choices[0].delta async for chunk in stream]
                return "".join(call.function.arguments for delta in deltas for call in delta.tool_calls or ())

            return await asyncio.gather(one(CALL), one("no call"), one(TWO))

    assert asyncio.run(run()) == [CITY, "", CITY * 2]


def test_parse(client: OpenAI) -> None:
    """Strict tools and a schema for the answer, both as pydantic models."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    options = {**ask(CALL), "tools": [tool]}
    (call,) = client.chat.completions.parse(**options).choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris, <tool_call>")
    del options["tools"]
    options["messages"] = [{"role": "user", "content": '{"city": "Rome"}'}]
    parsed = client.chat.completions.parse(**options, response_format=GetWeather).choices[0].message.parsed
    assert parsed == GetWeather(city="Rome")


def test_required(client: OpenAI) -> None:
    """The calls come as the grammar makes them, whatever the model's own format."""
    text = f'[{{"name": "get_weather", "parameters": {CITY}}}]'
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        options = ask(text, tool_choice=choice)
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        assert [c.function.arguments for c in whole.message.tool_calls or ()] == [CITY]
        deltas = [c.choices[0].delta for c in client.chat.completions.create(**options, stream=True)]
        assert "".join(call.function.arguments or "" for d in deltas for call in d.tool_calls or ()) == CITY
        assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_none_leaves_text(client: OpenAI, stream: bool) -> None:
    options = ask(TWO, tool_choice="none")
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(**options, stream=True)]
        assert "".join(c.delta.content or "" for c in chunks) == TWO and chunks[-1].finish_reason == "stop"
    else:
        (choice,) = client.chat.completions.create(**options).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO, None, "stop")


def test_cut_off_call(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ask(CALL, max_tokens=50)).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or []
    assert call.function.arguments and CITY.startswith(call.function.arguments)


def test_conversation_goes_back_to_the_model(client: OpenAI) -> None:
    """The client's own message object, and the tool's answer."""
    question: Any = {"role": "user", "content": CALL}
    message = client.chat.completions.create(**ask(CALL)).choices[0].message
    (call,) = message.tool_calls or []
    answer = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    options = ask("", messages=[question, message, answer], max_tokens=500, extra_body={"ignore_eos": True})
    prompt = client.chat.completions.create(**options).choices[0].message.content or ""
    assert prompt.startswith("Sunny.{")
    objects, decoder, position = [], json.JSONDecoder(), prompt.index("{")
    while len(objects) < 3:
        value, position = decoder.raw_decode(prompt, position)
        objects.append(value)
    assert objects[1]["tool_calls"][0]["function"]["arguments"] == json.loads(CITY)
    assert objects[1]["tool_calls"][0]["id"] == objects[2]["tool_call_id"] == call.id
    assert prompt[position:].startswith('[{"type": "function", "function": {"name": "get_weather"')


THOUGHTS = f"<think>\nI could call.\n</think>\n\nI call.\n{CALL}"


def test_reasoning(client: OpenAI) -> None:
    message = client.chat.completions.create(**ask(THOUGHTS)).choices[0].message
    assert (message.reasoning_content, message.content) == ("I could call.", "I call.")  # type: ignore[attr-defined]
    assert len(message.tool_calls or []) == 1
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**ask(THOUGHTS, stream=True))]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]  # type: ignore[attr-defined]
    assert "".join(thoughts) == "I could call." and len(thoughts) > 3
    kept = client.chat.completions.create(**ask(THOUGHTS, stream=True, extra_body={"stream_reasoning": False}))
    pieces = [getattr(c.choices[0].delta, "reasoning_content", None) for c in kept]
    assert [piece for piece in pieces if piece] == ["I could call."]
    body = {"separate_reasoning": False}
    message = client.chat.completions.create(**ask(THOUGHTS, extra_body=body)).choices[0].message
    assert message.content == "<think>\nI could call.\n</think>\n\nI call." and len(message.tool_calls or []) == 1


def test_tokens_of_thoughts_are_in_the_usage(client: OpenAI) -> None:
    thoughts, open_ones = (
        len(TOKENIZER(text, add_special_tokens=False).input_ids)
        for text in (THOUGHTS.partition("\n\n")[0], "<think>so")
    )
    for text, separate, expected in (
        (THOUGHTS, True, thoughts), (THOUGHTS, False, thoughts), ("<think>so", True, open_ones + 1), (TWO, True, 0)
    ):  # fmt: skip
        options = ask(text, extra_body={"separate_reasoning": separate}, n=2)
        usage = client.chat.completions.create(**options).usage
        chunks = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == usage.reasoning_tokens == 2 * expected  # type: ignore[attr-defined]
        assert [chunk.usage for chunk in chunks][-1] == usage
    closed = client.chat.completions.create(
        **ask(THOUGHTS, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    )
    assert closed.usage is not None and closed.usage.reasoning_tokens == 0  # type: ignore[attr-defined]


def test_tokens_of_thoughts_so_far(client: OpenAI) -> None:
    options: Any = ask(THOUGHTS, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = []
    for chunk in client.chat.completions.create(**options):
        assert chunk.usage is not None
        counts.append((chunk.usage.reasoning_tokens, chunk.usage.completion_tokens))  # type: ignore[attr-defined]
    thoughts = counts[-1][0]
    assert counts == sorted(counts)
    assert 0 < thoughts < counts[-1][1]
    # Half an opening mark may be text.
    assert len(counts) > 5 and all(so_far in (0, min(thoughts, tokens)) for so_far, tokens in counts)


def test_logprobs_of_a_stream_with_calls_are_complete(client: OpenAI) -> None:
    options = ask(TWO, logprobs=True)
    whole = client.chat.completions.create(**options).choices[0].logprobs
    tokens = []
    for chunk in client.chat.completions.create(**options, stream=True):
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.content or [] if logprobs else []
    assert whole is not None and [t.token for t in tokens] == [t.token for t in whole.content or []]
