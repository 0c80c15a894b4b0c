import logging
import random
from typing import Any

import fake_model
import pytest
import torch
from fake_model import Harness, expected

from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    ShutdownReq,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput

pytestmark = pytest.mark.usefixtures("each_loop")


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 50) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


# Control messages, idleness


def control(h: Harness, message: Any) -> ControlReply:
    h.channel.inbox.append(message)
    h.step()
    (reply,) = (m for m in h.channel.sent if isinstance(m, ControlReply))
    h.channel.sent.clear()
    assert reply.call_id == message.call_id
    return reply


def test_flush_cache_only_while_nothing_runs() -> None:
    h = Harness()
    h.add([2] * 10, max_new_tokens=20, ignore_eos=True)
    h.step()
    assert not control(h, FlushCacheReq(call_id="a")).success
    h.run()
    assert h.scheduler.tree_cache.evictable_size() > 0
    assert control(h, FlushCacheReq(call_id="b")).success
    assert h.scheduler.tree_cache.evictable_size() == 0
    again = h.add([2] * 10)
    h.run()
    h.check_results()
    assert h.results[again].cached_tokens == 0


def test_internal_state() -> None:
    h = Harness(rows=1)
    h.add([2] * 9, max_new_tokens=90, ignore_eos=True)
    h.add([2] * 9)
    for _ in range(41):
        h.step()
    h.read()
    state = control(h, GetInternalStateReq(call_id="x")).data
    assert state["max_total_num_tokens"] == 512 and state["max_running_requests"] == 1
    assert state["#running"] == state["#waiting"] == 1
    assert state["token usage"] == pytest.approx((9 + 40) / 512)
    assert state["last_gen_throughput"] > 0
    assert state["memory_usage"] == {"weight_bytes": (15 + 5) * 4, "kv_cache_bytes": 513 * 2 * 4 * 2}
    assert "fp4_gemm_backend" in state
    h.run()
    h.check_results()


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    h = Harness()
    h.add([2] * 7, max_new_tokens=50, ignore_eos=True)
    h.run()
    h.add([2] * 8, max_new_tokens=1)
    h.run()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0"
    )
    held = 47 + fake_model.OVERLAP  # the next step has its slot before this one is counted
    assert lines[1].startswith(
        f"Decode batch. #running-req: 1, #token: {held}, token usage: 0.09, gen throughput (token/s): "
    )
    assert lines[1].endswith(", #queue-req: 0")
    assert lines[2].startswith("Prefill batch. #new-seq: 1, #new-token: 1, #cached-token: 7,")
    assert len(lines) == 3


def test_a_leak_is_noticed_when_idle() -> None:
    h = Harness()
    h.add([2, 3])
    h.run()
    h.scheduler.pools.allocator.alloc_decode([1])
    with pytest.raises(RuntimeError, match="KV cache leak: 1 slots held by nobody"):
        h.step()
    h = Harness()
    h.scheduler.pools.req_to_token_pool.alloc()
    with pytest.raises(RuntimeError, match="1 of 8 rows taken"):
        h.step()


def test_the_loop_waits_when_idle_and_ends_when_told_and_drained() -> None:
    h = Harness()
    rid = h.add([2, 3], max_new_tokens=5, ignore_eos=True)
    blocks: list[bool] = []
    receive = h.channel.recv

    def recv(block: bool) -> list[Any]:
        blocks.append(block)
        if len(blocks) == 3:
            h.channel.inbox.append(ShutdownReq())  # while the request runs
        return receive(block)

    h.channel.recv = recv  # type: ignore[method-assign]
    h.scheduler.event_loop()
    assert not any(blocks)
    h._collect()
    h.check_results()
    assert len(h.results[rid].output_ids) == 5
    h.scheduler.shutdown_requested = False
    with pytest.raises(AssertionError, match="wait for ever"):
        h.scheduler.event_loop()
    assert blocks[-2:] == [False, True]


def test_one_message_a_step_for_all_requests() -> None:
    h = Harness()
    for i in range(3):
        h.add([2, 3 + i], max_new_tokens=4, ignore_eos=True)
    sent: list[Any] = []
    h.channel.send = sent.append  # type: ignore[method-assign]
    while h.scheduler.step():
        pass
    assert all(isinstance(m, BatchTokenIDOutput) for m in sent)
    if fake_model.OVERLAP:
        assert sent.pop(0).load.num_running_reqs == 3  # only the load has changed
    assert [len(m.outputs) for m in sent] == [3] * 4
    assert expected(h.requests["r0"], 100).output_ids == [m.outputs[0].output_ids[0] for m in sent]


@pytest.mark.parametrize("step", [0, 3])
def test_a_request_without_finite_logits_ends_alone(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    rids = [h.add([2, 3 + i], max_new_tokens=8, ignore_eos=True, return_logprob=True) for i in range(3)]
    sample, calls = h.runner.sample, []

    def broken(output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
        tokens = sample(output, batch)
        if len(calls) == step:
            tokens[1] = -1
        calls.append(1)
        return tokens

    monkeypatch.setattr(h.runner, "sample", broken)
    h.aborted.add(rids[1])
    h.run()
    h.check_results()
    reason = h.results[rids[1]].finish_reason
    assert reason is not None and reason["type"] == "abort" and reason["status_code"] == 500
    assert "NaN or infinite logits" in reason["message"]
    assert [len(h.results[rid].output_ids) for rid in rids] == [8, step, 8]
