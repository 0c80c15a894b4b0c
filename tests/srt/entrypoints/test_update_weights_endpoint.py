"""``/update_weights_from_disk`` in front of a fake scheduler, which reads prompts backwards after an update."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fake_channel import FakeChannel
from fake_scheduler import run_fake_scheduler
from http_server_thread import FIXTURE, serve
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.errors import RequestError
from sglang.srt.managers.io_struct import ControlReply, UpdateWeightFromDiskReqInput
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.weight_update_request import UpdateWeightsRequest
from sglang.srt.server_args import ServerArgs


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with serve(random_seed=10) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


ARGUMENTS: dict[str, Any] = {"model_path": str(FIXTURE), "device": "cpu", "random_seed": 1}


def make_engine() -> Engine:
    return Engine(_run_scheduler=run_fake_scheduler, **ARGUMENTS)


def update(client: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return client.post("/update_weights_from_disk", json={"model_path": path, **fields})


def generate(client: httpx.Client, tokens: int = 3) -> Any:
    params = {"temperature": 0, "max_new_tokens": tokens}
    return client.post("/generate", json={"input_ids": [70, 80, 90], "sampling_params": params}).json()


def model_info(client: httpx.Client) -> tuple[str, str]:
    info = client.get("/get_model_info").json()
    assert info["tokenizer_path"] == str(FIXTURE)
    return info["model_path"], info["weight_version"]


def wait_for_running(client: httpx.Client) -> None:
    deadline = time.monotonic() + 10
    while client.get("/get_server_info").json()["internal_states"][0]["#running"] == 0:
        assert time.monotonic() < deadline


def test_reply_and_what_the_server_says_of_itself(client: httpx.Client) -> None:
    assert model_info(client) == (str(FIXTURE), "default")
    failed = update(client, "bad", weight_version="7")
    assert failed.status_code == 400
    assert failed.json() == {"success": False, "message": "bad as auto with 0 running", "num_paused_requests": 0}
    assert model_info(client) == (str(FIXTURE), "default")
    assert generate(client)["output_ids"] == [70, 80, 90]

    done = update(client, "good", load_format="safetensors", weight_version="8")
    assert done.status_code == 200
    message = "good as safetensors with 0 running Weight version updated to 8."
    assert done.json() == {"success": True, "message": message, "num_paused_requests": 0}
    assert model_info(client) == ("good", "8")
    assert client.get("/get_server_info").json()["load_format"] == "safetensors"
    assert generate(client)["output_ids"] == [90, 80, 70]

    # The name under which the model is served stays, and its new path is one too.
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"]) == (str(FIXTURE), "good")
    for name in (str(FIXTURE), "good"):
        body = {"model": name, "prompt": [70], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert update(client, "good2").json()["message"] == "good2 as safetensors with 0 running"
    assert model_info(client) == ("good2", "8")


def test_running_requests_end_first_and_new_ones_wait(client: httpx.Client) -> None:
    with ThreadPoolExecutor(4) as threads:
        before = threads.submit(generate, client, 60)
        wait_for_running(client)
        done = threads.submit(update, client, "good")
        time.sleep(0.1)
        after = threads.submit(generate, client)
        assert before.result()["output_ids"] == [70, 80, 90] * 20
        assert done.result().json()["message"] == "good as auto with 0 running"
        assert after.result()["output_ids"] == [90, 80, 70]


def test_updates_come_one_after_the_other(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        running = threads.submit(generate, client, 60)
        wait_for_running(client)
        updates = [threads.submit(update, client, f"good{i}") for i in range(3)]
        others = [threads.submit(generate, client) for _ in range(4)]
        assert running.result()["output_ids"] == [70, 80, 90] * 20
        for i, done in enumerate(updates):
            assert done.result().json()["message"] == f"good{i} as auto with 0 running"
        for other in others:
            assert other.result()["output_ids"] in ([70, 80, 90], [90, 80, 70])
    assert generate(client)["output_ids"] == [90, 80, 70]


def test_a_request_during_an_update_gets_the_new_weights(client: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as threads:
        done = threads.submit(update, client, "good")
        time.sleep(0.1)
        assert generate(client)["output_ids"] == [90, 80, 70]
        assert done.result().status_code == 200


def test_abort_all_requests(client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(generate, client, 1000)
        wait_for_running(client)
        assert update(client, "good", abort_all_requests=True).status_code == 200
        reply = running.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) < 1000
    assert generate(client)["output_ids"] == [90, 80, 70]


def test_fields(client: httpx.Client) -> None:
    neutral = {
        "load_format": None,
        "abort_all_requests": False,
        "weight_version": None,
        "is_async": False,
        "torch_empty_cache": True,
        "keep_pause": False,
        "recapture_cuda_graph": True,
        "token_step": 0,
        "flush_cache": True,
        "manifest": None,
    }
    assert update(client, "good", **neutral).status_code == 200
    for field, value in (
        ("is_async", True),
        ("keep_pause", True),
        ("recapture_cuda_graph", "no"),
        ("token_step", 3),
        ("flush_cache", False),
        ("manifest", {}),
        ("no_such_field", None),
        ("abort_all_requests", "yes"),
        ("weight_version", 3),
    ):
        refused = update(client, "good", **{**neutral, field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
    missing = client.post("/update_weights_from_disk", json={})
    assert missing.status_code == 400 and "model_path" in missing.json()["error"]["message"]
    assert generate(client)["output_ids"] == [90, 80, 70], "a refused update was made"


def test_scheduler_dies_during_an_update() -> None:
    with make_engine() as engine:
        pid = engine._run(engine._runtime.server_info())["internal_states"][0]["pid"]
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(ServiceError, match="killed by signal 9"):
            engine.update_weights_from_disk("good")
        with pytest.raises(ServiceError, match="killed by signal 9"):
            engine.generate(input_ids=[70], sampling_params={"max_new_tokens": 1})


class AnsweringChannel(FakeChannel):
    def answer(self, success: bool) -> None:
        self.receive(ControlReply(call_id=self.sent[-1].call_id, success=success, data={"message": "said"}))


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_calls_whose_caller_goes_away() -> None:
    runtime = Runtime(ServerArgs(**ARGUMENTS), run_fake_scheduler)
    request = UpdateWeightsRequest(model_path="good", weight_version="9")

    async def main() -> None:
        channel = AnsweringChannel()
        runtime._manager = manager = TokenizerManager(runtime.tokenizer, 320, 256, channel)  # type: ignore[arg-type]
        manager.start()
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

        for call in (manager.internal_state, manager.flush_cache):
            task: asyncio.Task[Any] = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            await cancel(task)
            assert not manager._calls
            channel.answer(True)
            task = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            task.cancel()
            channel.answer(True)  # before the caller notices
            with pytest.raises(asyncio.CancelledError):
                await task

        for success, known in ((False, (str(FIXTURE), "default")), (True, ("good", "9"))):
            task = asyncio.ensure_future(runtime.update_weights_from_disk(request))
            await asyncio.sleep(0)
            assert isinstance(channel.sent[-1], UpdateWeightFromDiskReqInput)
            await cancel(task)
            channel.answer(success)
            await asyncio.sleep(0)
            assert (runtime.server_args.model_path, runtime.weight_version) == known
        assert not manager._calls

        # One that has not begun doesn't, and the next one can.
        manager._idle.clear()
        task = asyncio.ensure_future(runtime.update_weights_from_disk(request))
        await asyncio.sleep(0)
        sent = len(channel.sent)
        await cancel(task)
        manager._idle.set()
        await asyncio.sleep(0)
        assert len(channel.sent) == sent
        task = asyncio.ensure_future(runtime.update_weights_from_disk(request))
        await asyncio.sleep(0)
        channel.answer(True)
        assert await task == (True, "said Weight version updated to 9.")
        task = asyncio.ensure_future(runtime.update_weights_from_disk(request))
        await asyncio.sleep(0)
        await cancel(task)
        manager.scheduler_died("dead")
        await asyncio.sleep(0)
        assert problems == []

    asyncio.run(main())


def test_an_interrupted_engine_knows_its_weights() -> None:
    with make_engine() as engine:
        request = UpdateWeightsRequest(model_path="good")
        future = asyncio.run_coroutine_threadsafe(engine._runtime.update_weights_from_disk(request), engine._loop)
        time.sleep(0.1)
        assert future.cancel()  # as an interrupt does
        out = engine.generate(input_ids=[70, 80], sampling_params={"max_new_tokens": 2})
        assert out["output_ids"] == [80, 70]
        assert engine.get_server_info()["model_path"] == "good"


def test_engine() -> None:
    with make_engine() as engine:
        assert engine.update_weights_from_disk("bad", "dummy") == (False, "bad as dummy with 0 running", 0)
        assert engine.update_weights_from_disk("good", weight_version="9") == (
            True,
            "good as auto with 0 running Weight version updated to 9.",
            0,
        )
        with pytest.raises(RequestError, match="keep_pause"):
            engine.update_weights_from_disk("good", keep_pause=True)
        out = engine.generate(input_ids=[70, 80], sampling_params={"max_new_tokens": 2})
        assert out["output_ids"] == [80, 70]
