"""What an abort does in the HTTP process; the test plays the scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fake_channel import FakeChannel
from http_server_thread import FIXTURE
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.generate_request import parse_generate_request
from sglang.srt.managers.hf_tokenizer import encode, get_tokenizer
from sglang.srt.managers.io_struct import BatchTokenIDOutput, ReqOutput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager, last

TOKENIZER = get_tokenizer(str(FIXTURE))


class AnsweringChannel(FakeChannel):
    def answer(self, ids: list[int], reason: dict[str, Any] | None = None) -> None:
        """The newest request gets ``ids``."""
        request = next(m for m in reversed(self.sent) if isinstance(m, TokenizedGenerateReqInput))
        out = ReqOutput(
            rid=request.rid,
            output_ids=ids,
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            completion_tokens=len(ids),
            cached_tokens=0,
        )
        self.receive(BatchTokenIDOutput(outputs=[out]))


def run(test: Callable[[TokenizerManager, AnsweringChannel], Awaitable[None]]) -> None:
    async def main() -> None:
        channel = AnsweringChannel()
        manager = TokenizerManager(TOKENIZER, 320, 256, channel)  # type: ignore[arg-type]
        manager.start()
        await asyncio.wait_for(test(manager, channel), 30)

    asyncio.run(main())


def start(manager: TokenizerManager, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(last(manager.generate(parse_generate_request(fields))))


@pytest.mark.parametrize("abort", [{"rid": "victim"}, {"abort_all": True}])
def test_an_abort_while_tokenising(abort: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*args: Any, **others: Any) -> list[int]:
        go_on.wait(30)
        return encode(*args, **others)

    monkeypatch.setattr(tokenizer_manager, "_TOKENIZE_IN_THREAD", 0)
    monkeypatch.setattr(tokenizer_manager, "encode", slow)

    async def test(manager: TokenizerManager, channel: AnsweringChannel) -> None:
        single, batch = start(manager, text="a", rid="victim"), start(manager, text=["a", "b"], rid="victim")
        await asyncio.sleep(0.01)
        manager.abort_request("somebody else")
        manager.abort_request(**abort)
        go_on.set()
        outputs = [await single, *await batch]
        assert [output["meta_info"]["id"] for output in outputs] == ["victim", "victim_0", "victim_1"]
        for output in outputs:
            assert output["meta_info"]["finish_reason"] == {
                "type": "abort", "message": "Aborted by an abort request.",
            }  # fmt: skip
            assert (output["text"], output["output_ids"]) == ("", [])
        assert not channel.sent and manager._idle.is_set()
        # The names are free again, and what comes later is not concerned.
        later = start(manager, text="c", rid="victim")
        while not channel.sent:
            await asyncio.sleep(0.01)
        channel.answer([70], {"type": "length", "length": 1})
        assert (await later)["output_ids"] == [70]

    run(test)


def test_an_abort_of_one_sequence_while_its_grammar_is_compiled() -> None:
    class Grammars:
        def __init__(self) -> None:
            self.go_on = asyncio.Event()

        async def prepare(self, params: Any) -> None:
            await self.go_on.wait()

    async def test(manager: TokenizerManager, channel: AnsweringChannel) -> None:
        manager.grammars = grammars = Grammars()  # type: ignore[assignment]
        call = start(manager, text=["a", "b"], rid=["first", "second"], sampling_params={"regex": "x"})
        await asyncio.sleep(0.01)
        manager.abort_request("first")
        grammars.go_on.set()
        while not channel.sent:
            await asyncio.sleep(0.01)
        assert len(channel.sent) == 1
        channel.answer([70], {"type": "length", "length": 1})
        first, second = await call
        assert (first["meta_info"]["finish_reason"]["type"], first["output_ids"]) == ("abort", [])
        assert (second["meta_info"]["finish_reason"]["type"], second["output_ids"]) == ("length", [70])

    run(test)


def test_a_preparation_that_fails_is_forgotten() -> None:
    async def test(manager: TokenizerManager, channel: AnsweringChannel) -> None:
        call = start(manager, text="", rid="x")
        with pytest.raises(Exception, match="empty"):
            await call
        assert not manager._preparations._under_way

    run(test)


def test_an_update_of_the_weights_aborts_what_runs_and_not_what_waits_for_it() -> None:
    async def test(manager: TokenizerManager, channel: AnsweringChannel) -> None:
        running = start(manager, text="a")
        await asyncio.sleep(0.01)
        manager._no_update.clear()  # as another update does
        waiting = start(manager, text="b")
        await asyncio.sleep(0.01)
        update = asyncio.ensure_future(
            manager.update_weights_from_disk("x", "auto", lambda: None, abort_all_requests=True)
        )
        await asyncio.sleep(0.01)
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        update.cancel()
        await asyncio.sleep(0.01)
        channel.answer([70], {"type": "length", "length": 1})
        assert (await waiting)["output_ids"] == [70]

    run(test)


# The stop string may still come when the abort does; the second token is the first of two bytes of a character.
@pytest.mark.parametrize(("stop", "text", "cut"), [("lo!", "hello", 0), ("", "h\u00e9", 1)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_keeps_all_its_text(stop: str, text: str, cut: int, stream: bool) -> None:
    params = {"stop": [stop]} if stop else {}
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - cut]

    async def test(manager: TokenizerManager, channel: AnsweringChannel) -> None:
        call = start(manager, text="a", sampling_params=params, stream=stream, rid="victim")
        await asyncio.sleep(0.01)
        channel.answer(ids)
        await asyncio.sleep(0.01)
        manager.abort_request("victim")
        output = await call
        assert output["text"] == (text[:-cut] + "\ufffd" if cut else text)
        assert output["meta_info"]["finish_reason"]["type"] == "abort"
        assert output["output_ids"] == ids and output["meta_info"]["completion_tokens"] == len(ids)

    run(test)
