"""The official client against a real server on a tiny NVFP4 checkpoint."""

import concurrent.futures
from typing import Annotated, Literal

import openai
import pytest
from fp4_checks import check_resolution
from launched_server import Server
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "ab cd"}]


@pytest.fixture
def server(tiny_server: Server) -> Server:
    return tiny_server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens <= 12 and whole.usage.prompt_tokens > 0
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=10, temperature=0)
    stream = client.completions.create(model="tiny", prompt="hello", max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason in ("length", "stop")
    both = client.completions.create(model="tiny", prompt=["hello", "hello"], max_tokens=10, temperature=0)
    assert [choice.text for choice in both.choices] == [whole.choices[0].text] * 2


def test_stop(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=30, temperature=0).choices[0].text
    assert len(whole) > 6
    stop = whole[3:5]
    stopped = client.completions.create(model="tiny", prompt="hello", max_tokens=30, temperature=0, stop=[stop])
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


class Point(BaseModel):
    x: Annotated[int, Field(ge=0, le=99)]
    colour: Literal["red", "green"]


def test_parse(client: openai.OpenAI) -> None:
    """An answer as a pydantic model, and a call with arguments as one, whatever the model would rather write."""
    result = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Point, n=4, seed=1, max_tokens=100
    )
    for choice in result.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Point)
    tool = openai.pydantic_function_tool(Point, name="draw")
    result = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=1
    )
    (call,) = result.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Point)
    assert result.choices[0].finish_reason == "tool_calls"


def test_errors_have_openai_shape_and_harm_nobody(server: Server, client: openai.OpenAI) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        good = pool.submit(
            client.completions.create,
            model="tiny",
            prompt="hello",
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="hello", temperature=-1)
        with pytest.raises(openai.BadRequestError, match="longer"):
            client.completions.create(model="tiny", prompt=[5] * 3000, max_tokens=1)
        assert good.result().usage.completion_tokens == 60
    for path, body in (
        ("/generate", b"{"),
        ("/generate", b'{"text": 5}'),
        ("/generate", b'{"text": ""}'),
        ("/generate", b'{"text": "a", "sampling_params": {"heat": 1}}'),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": "x"}'),
        ("/v1/completions", b"[]"),
    ):
        import httpx

        response = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, (path, body, response.text)
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
    assert "heat" in httpx.post(server.url + "/generate", json={"text": "a", "sampling_params": {"heat": 1}}).text


def test_server_info_and_logs(server: Server) -> None:
    info = server.get("/get_server_info").json()
    assert info["fp4_gemm_runner_backend"] == "auto"
    check_resolution(server, "auto")
    assert server.get("/server_info").json().keys() == info.keys()
    assert server.get("/get_model_info").json() == server.get("/model_info").json()
    assert server.get("/health_generate").status_code == 200
    for line in (
        "The server is fired up and ready to roll!",
        "Prefill batch. #new-seq: ",
    ):
        assert line in server.log, line


def test_cached_tokens(server: Server) -> None:
    prompt = list(range(10, 210))
    parameters = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    first = server.generate(input_ids=prompt, sampling_params=parameters)
    again = server.generate(input_ids=prompt, sampling_params=parameters)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert again["output_ids"] == first["output_ids"]
