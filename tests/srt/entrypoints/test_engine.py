import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fake_scheduler import Fault, run_fake_scheduler
from http_server_thread import FIXTURE
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.errors import ArgumentError, CheckpointError, RequestError, StartupError
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.server_args import ServerArgs

PARAMS = {"temperature": 0, "max_new_tokens": 6}
ARGUMENTS = {"model_path": str(FIXTURE), "device": "cpu", "random_seed": 1}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(_run_scheduler=run_fake_scheduler, **ARGUMENTS) as engine:
        yield engine


def test_generate(engine: Engine) -> None:
    one = engine.generate("hello", PARAMS)
    assert one["meta_info"]["completion_tokens"] == 6
    many = engine.generate(["hello", "world"], PARAMS)
    assert [m["text"] for m in many] == [one["text"], engine.generate("world", PARAMS)["text"]]
    ids = engine.generate(input_ids=[70, 80], sampling_params=PARAMS, return_logprob=True, top_logprobs_num=1)
    assert ids["output_ids"] == [70, 80] * 3
    assert len(ids["meta_info"]["output_top_logprobs"]) == 6


def test_generate_stream(engine: Engine) -> None:
    chunks = list(engine.generate("hello", PARAMS, stream=True))
    assert len(chunks) > 1
    assert chunks[-1]["text"] == engine.generate("hello", PARAMS)["text"]


def test_async_generate_and_a_running_loop(engine: Engine) -> None:
    async def main() -> None:
        expected = engine.generate("hello", PARAMS)["text"]  # blocks this loop, not the engine's
        outs = await asyncio.gather(*(engine.async_generate("hello", PARAMS) for _ in range(8)))
        assert [out["text"] for out in outs] == [expected] * 8
        chunks = [chunk async for chunk in await engine.async_generate("hello", PARAMS, stream=True)]
        assert chunks[-1]["text"] == expected

    asyncio.run(main())


def test_closing_a_stream_aborts(engine: Engine) -> None:
    stream = engine.generate("hello", {"max_new_tokens": 2000}, stream=True)
    next(stream)
    stream.close()

    async def main() -> None:
        chunks = await engine.async_generate("hello", {"max_new_tokens": 2000}, stream=True)
        async for _ in chunks:
            break
        await chunks.aclose()

    asyncio.run(main())
    state = engine.get_server_info()["internal_states"][0]
    assert (state["#running"], state["aborted"]) == (0, 2)


def test_cancelling_a_stream_aborts(engine: Engine) -> None:
    before = engine.get_server_info()["internal_states"][0]["aborted"]

    async def consume() -> None:
        async for _ in await engine.async_generate("hello", {"max_new_tokens": 2000}, stream=True):
            pass

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consume(), 0.1)
        for wait in (0, 0.1):
            task = asyncio.ensure_future(consume())
            await asyncio.sleep(wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    state = engine.get_server_info()["internal_states"][0]
    assert state["#running"] == 0
    assert before + 2 <= state["aborted"] <= before + 3  # one may not have got as far as the scheduler


def test_abort_flush_and_information(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["model_path"] == str(FIXTURE) and info["internal_states"][0]["#running"] == 0
    assert engine.flush_cache()
    for abort in ({"rid": "mine"}, {"abort_all": True}):
        stream = engine.generate("hello", {"max_new_tokens": 2000}, stream=True, rid="mine")
        next(stream)
        assert not engine.flush_cache() and not engine.flush_cache(timeout=0.01)
        engine.abort_request("somebody else")
        engine.abort_request(**abort)  # type: ignore[arg-type]
        assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.flush_cache(timeout=10)


def test_bad_requests(engine: Engine) -> None:
    with pytest.raises(RequestError, match="image_data"):
        engine.generate("a", PARAMS, image_data="cat.png")
    with pytest.raises(RequestError, match="no_such"):
        engine.generate("a", PARAMS, no_such=None)
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("a", {"temperature": -1})
    with pytest.raises(RequestError, match="vocabulary"):
        next(engine.generate(input_ids=[999], stream=True))
    assert engine.generate("a", PARAMS)["text"]


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="no_such"):
        Engine(**ARGUMENTS, no_such=1)
    with pytest.raises(CheckpointError):
        Engine(model_path="/nonexistent/folder")
    with pytest.raises(TypeError, match="device"):
        Engine(server_args=ServerArgs(model_path=str(FIXTURE)), device="cpu")


def test_scheduler_that_does_not_start() -> None:
    with pytest.raises(StartupError, match="refuses to start") as caught:
        Engine(_run_scheduler=run_fake_scheduler, **{**ARGUMENTS, "random_seed": Fault.REPORTS_AN_ERROR})
    assert caught.value.exit_code == 2
    with pytest.raises(StartupError, match="exit status 7"):
        Engine(_run_scheduler=run_fake_scheduler, **{**ARGUMENTS, "random_seed": Fault.DIES_EARLY})


def test_death_of_the_scheduler_and_shutdown() -> None:
    engine = Engine(_run_scheduler=run_fake_scheduler, server_args=ServerArgs(**ARGUMENTS))  # type: ignore[arg-type]
    pid = engine.get_server_info()["internal_states"][0]["pid"]
    stream = engine.generate("hello", {"max_new_tokens": 2000}, stream=True)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match="killed by signal 9"):
        list(stream)
    with pytest.raises(ServiceError, match="killed by signal 9"):
        engine.generate("hello", PARAMS)
    engine.shutdown()
    engine.shutdown()
    assert not engine._thread.is_alive()


LONG = {"max_new_tokens": 1000, "ignore_eos": True}


def _whole(engine: Engine) -> Any:
    return engine.generate("hello", LONG)


def _streamed(engine: Engine) -> Any:
    return list(engine.generate("hello", LONG, stream=True))


def _awaited(engine: Engine) -> Any:
    async def main() -> Any:
        return await engine.async_generate("hello", LONG)

    return asyncio.run(main())


def _awaited_stream(engine: Engine) -> Any:
    async def main() -> Any:
        return [chunk async for chunk in await engine.async_generate("hello", LONG, stream=True)]

    return asyncio.run(main())


def _flush(engine: Engine) -> Any:
    return engine.flush_cache(timeout=1000)


@pytest.mark.filterwarnings("error")
def test_what_runs_when_the_engine_is_shut_down_gets_an_error(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Callable[[Engine], Any]] = [_whole, _streamed, _awaited, _awaited_stream, _flush]
    engine = Engine(_run_scheduler=run_fake_scheduler, **{**ARGUMENTS, "random_seed": 10})
    idle, abandoned = (engine.generate("hello", LONG, stream=True) for _ in range(2))
    next(idle), next(abandoned)
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(call, engine) for call in calls]
        while engine.get_server_info()["internal_states"][0]["#running"] < len(calls) + 1:
            time.sleep(0.01)
        engine.shutdown()
        for each in running:
            with pytest.raises(ServiceError, match="The engine was shut down"):
                each.result(timeout=10)
        for call in calls:  # and who comes later
            with pytest.raises(ServiceError, match="The engine was shut down"):
                call(engine)
    with pytest.raises(ServiceError, match="The engine was shut down"):
        next(idle)
    abandoned.close()
    assert not caplog.records
    assert not engine._thread.is_alive()


def test_shutdown_while_a_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow(*args: Any, **others: Any) -> list[int]:
        begun.set()
        go_on.wait(30)
        return [70]

    engine = Engine(_run_scheduler=run_fake_scheduler, **ARGUMENTS)
    monkeypatch.setattr("sglang.srt.managers.tokenizer_manager._TOKENIZE_IN_THREAD", 0)
    monkeypatch.setattr("sglang.srt.managers.tokenizer_manager.encode", slow)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(call, engine) for call in (_whole, _awaited, _awaited_stream)]
        begun.wait(30)
        time.sleep(0.1)
        engine.shutdown()
        for each in running:
            with pytest.raises(ServiceError, match="The engine was shut down"):
                each.result(timeout=10)
        go_on.set()
