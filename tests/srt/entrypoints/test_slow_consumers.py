"""Streams whose consumer is slower than the scheduler: what comes while a chunk is being sent is sent once."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from http_server_thread import FIXTURE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import parse_chat_request, parse_completion_request
from sglang.srt.entrypoints.openai.serving_chat import ChatAnswer
from sglang.srt.entrypoints.openai.serving_completions import CompletionAnswer
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.generate_request import GenerateRequest, parse_generate_request
from sglang.srt.managers.io_struct import ReqOutput
from sglang.srt.managers.request_state import ReqState, RequestGroup
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
ARGS = ServerArgs(model_path=str(FIXTURE), device="cpu", chat_template="{{ messages }}")
SETTINGS = OpenAISettings.create(ARGS, TOKENIZER, ModelConfig.from_server_args(ARGS))
TEXT = "one two three four five six"
IDS = TOKENIZER(TEXT, add_special_tokens=False).input_ids
STOP = {"type": "length", "length": len(IDS)}


class Manager:
    """Starts what it is given and hears of nothing; the test is the scheduler."""

    def __init__(self) -> None:
        self.decoder = TokenDecoder(TOKENIZER)
        self.group: RequestGroup | None = None

    async def submit(self, requests: list[GenerateRequest], *, stream: bool, log_metrics: bool = True) -> RequestGroup:
        states = [ReqState(str(i), request, [1], self.decoder, i) for i, request in enumerate(requests)]
        self.group = RequestGroup(states, stream)
        return self.group

    def release(self, group: RequestGroup) -> None:
        pass

    def step(self, index: int, ids: list[int], *, last: bool = False) -> None:
        assert self.group is not None
        state = self.group.states[index]
        logprobs = [(-float(i), i) for i in ids]
        state.push(ReqOutput(
            rid="", output_ids=ids, finish_reason=STOP if last else None, prompt_tokens=1, completion_tokens=0,
            cached_tokens=0, output_token_logprobs=logprobs, output_top_logprobs=[[] for _ in ids],
        ))  # fmt: skip
        self.group.notify(state)


async def slowly(stream: AsyncIterator[Any], manager: Manager) -> list[Any]:
    """What comes out if, of two sequences, the second one ends while the first one's first piece is being sent, and the
    first one while its second piece is."""
    first = asyncio.ensure_future(stream.__anext__())
    while manager.group is None:
        await asyncio.sleep(0)
    for index in (0, 1):
        manager.step(index, IDS[:2])
    pieces = [await first]
    manager.step(0, IDS[2:4])
    manager.step(1, IDS[2:], last=True)
    pieces.append(await stream.__anext__())
    manager.step(0, IDS[4:], last=True)
    return pieces + [piece async for piece in stream]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_openai(kind: str) -> None:
    manager: Any = Manager()
    common = {"n": 2, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer: Any
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, **common}
        answer = ChatAnswer(manager, parse_chat_request(body), "m", SETTINGS)
    else:
        answer = CompletionAnswer(
            manager, parse_completion_request({"prompt": "hi", "logprobs": 0, **common}), "m", SETTINGS
        )
    chunks = [json.loads(event[6:]) for event in asyncio.run(slowly(answer.chunks(), manager))]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        texts, tokens = "", []
        for choice in choices:
            texts += choice["delta"].get("content", "") if kind == "chat" else choice["text"]
            if choice["logprobs"]:
                content = choice["logprobs"].get("content") or ()
                tokens += [one["token"] for one in content] or choice["logprobs"]["tokens"]
        assert texts == TEXT
        assert tokens == [TOKENIZER.decode([i]) for i in IDS]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert choices[-1]["finish_reason"]


def test_generate() -> None:
    manager: Any = Manager()
    batch = parse_generate_request({"text": ["a", "b"], "stream": True})
    outputs = asyncio.run(slowly(TokenizerManager.generate(manager, batch), manager))
    for index in (0, 1):
        ends = [out["meta_info"]["finish_reason"] for out in outputs if out["index"] == index]
        assert ends[-1] == STOP and ends.count(STOP) == 1


def test_one_that_waits_for_all() -> None:
    async def whole() -> list[ReqState]:
        manager = Manager()
        group = await manager.submit(parse_generate_request({"text": ["a", "b"]}).requests, stream=False)
        waiting = asyncio.ensure_future(group.wait())
        await asyncio.sleep(0)
        manager.step(0, IDS, last=True)
        await asyncio.sleep(0)
        assert not waiting.done()
        manager.step(1, IDS, last=True)
        return await waiting

    assert [state.text for state in asyncio.run(whole())] == [TEXT, TEXT]
