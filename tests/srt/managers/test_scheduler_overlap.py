"""Steps that are launched before the tokens of the one before are read."""

import random
from typing import Any

import fake_model
import pytest
import torch
from fake_model import EOS, VOCAB, FakeChannel, FakeModelRunner, Harness, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_device import SlowDevice

from sglang.srt.distributed import SINGLE
from sglang.srt.layers.logits_processor import compute_logits
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.io_struct import ControlReply, FlushCacheReq, GetInternalStateReq, UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunner


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    monkeypatch.setattr(fake_model, "OVERLAP", True)
    device = SlowDevice()
    device.attach(monkeypatch)
    return device


def prompt_that_ends(count: int) -> list[int]:
    """A prompt whose output has ``count`` tokens, of which the last is the first EOS."""
    for first in range(2, VOCAB):
        for second in range(2, VOCAB):
            tokens = [first, second]
            while len(tokens) < count + 2 and EOS not in tokens:
                tokens.append(next_token(tokens))
            if len(tokens) == count + 2 and tokens[-1] == EOS:
                return tokens[:2]
    raise AssertionError("no such prompt")


def computed(h: Harness) -> int:
    """Tokens that steps computed."""
    return sum(len(batch.input_ids) for batch in h.runner.batches)


def test_every_step_is_launched_before_the_one_before_is_read(device: SlowDevice) -> None:
    h = Harness(chunk=16)
    h.add([2] * 40, max_new_tokens=6, ignore_eos=True)
    h.run()
    h.check_results()
    steps = 3 + 5
    events = [("launch", 0)]
    for i in range(1, steps):
        events += [("launch", i), ("read", i - 1)]
    assert device.log == [*events, ("read", steps - 1)]
    assert len(h.runner.batches) == steps, "a step was launched for a request whose last token was in flight"


def test_in_turn_where_it_is_wanted(device: SlowDevice) -> None:
    h = Harness()
    h.scheduler.enable_overlap = False
    h.add([2, 3], max_new_tokens=4, ignore_eos=True)
    h.run()
    h.check_results()
    assert device.log == [(what, i) for i in range(4) for what in ("launch", "read")]


def test_a_device_that_is_no_cpu_overlaps_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeModelRunner(64, 1, 32, 2)
    runner.device = torch.device("meta")
    config: Any = type("C", (), {"context_len": 32, "vocab_size": VOCAB, "eos_token_ids": frozenset()})
    for disabled in (False, True):
        args: Any = type("A", (), {
            "chunked_prefill_size": -1, "disable_radix_cache": False, "max_queued_requests": None,
            "disable_overlap_schedule": disabled,
        })  # fmt: skip
        scheduler = Scheduler(args, config, runner, FakeChannel())  # type: ignore[arg-type]
        assert scheduler.enable_overlap is not disabled


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_an_end_that_nobody_could_foresee_costs_one_token(count: int, page_size: int, radix: bool) -> None:
    h = Harness(page_size=page_size, radix=radix)
    prompt = prompt_that_ends(count)
    rid, mate = h.add(prompt, max_new_tokens=30), h.add([9, 9, 9], max_new_tokens=20, ignore_eos=True)
    h.run()
    h.check_results()
    assert len(h.results[rid].output_ids) == count and len(h.results[mate].output_ids) == 20
    assert computed(h) == (2 + count - 1 + 1) + (3 + 20 - 1)
    # The EOS was computed in that step, so it can be reused.
    again = h.add([*prompt, *h.results[rid].output_ids, 7], max_new_tokens=2)
    h.run()
    h.check_results()
    assert h.results[again].cached_tokens == ((2 + count) // page_size * page_size if radix else 0)


@pytest.mark.parametrize("limit", ["max_new_tokens", "context", "pool"])
def test_the_last_possible_token_needs_no_slot(limit: str) -> None:
    h = Harness(size=24 if limit == "pool" else 512, context_len=20 if limit == "context" else 200)
    rid = h.add([2] * 10, max_new_tokens=9 if limit == "max_new_tokens" else None, ignore_eos=True)
    h.run()
    h.check_results()
    count = {"max_new_tokens": 9, "context": 10, "pool": 15}[limit]
    assert h.results[rid].finish_reason == {"type": "length", "length": count}
    assert computed(h) == 10 + count - 1


def test_a_row_is_free_only_when_the_last_token_has_been_read() -> None:
    h = Harness(rows=1)
    first, second = h.add([2, 3], max_new_tokens=1), h.add([4, 5], max_new_tokens=1)
    h.step()
    assert h.scheduler.running_batch.is_empty() and not h.results[first].output_ids
    h.step()  # nothing else can be launched, so the first one's token is read, and the second one can
    assert len(h.results[first].output_ids) == 1 and len(h.runner.batches) == 2
    h.run()
    h.check_results()
    assert h.results[second].finish_reason is not None


@pytest.mark.parametrize("limit", [6, 30])
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_abort_drops_the_token_that_is_in_flight(page_size: int, limit: int) -> None:
    """Also the last one, which leaves its request in no batch."""
    h = Harness(page_size=page_size)
    rid, mate = h.add([2, 3], limit, ignore_eos=True), h.add([2, 4], 30, ignore_eos=True)
    for _ in range(6):
        h.step()
    assert len(h.results[rid].output_ids) == 5
    h.abort(rid)
    h.step()
    got = h.results[rid]
    assert got.finish_reason is not None and got.finish_reason["type"] == "abort" and len(got.output_ids) == 5
    h.run()
    h.check_results()
    assert len(h.results[mate].output_ids) == 30


def test_who_is_aborted_with_all_others_leaves_nothing_behind() -> None:
    h = Harness(chunk=8)
    rids = [h.add([2, 3], 30, ignore_eos=True), h.add([4] * 30, 30, ignore_eos=True)]
    for _ in range(3):
        h.step()
    assert h.scheduler.chunked_req is not None and h.scheduler.pending_result is not None
    for rid in rids:
        h.abort(rid)
    assert not h.step() and h.scheduler.pending_result is None
    h.check_slots()


def test_a_request_without_a_token_is_given_to_one_more_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token that a model can look up."""
    h = Harness(page_size=4)
    rids = [h.add([2, 3 + i], max_new_tokens=9, ignore_eos=True) for i in range(3)]
    sample = h.runner.sample

    def broken(output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
        tokens = sample(output, batch)
        if len(h.runner.batches) == 4:
            tokens[1] = -1
        return tokens

    monkeypatch.setattr(h.runner, "sample", broken)
    h.aborted.add(rids[1])
    h.run()
    h.check_results()
    assert [len(h.results[rid].output_ids) for rid in rids] == [9, 3, 9]
    (after,) = (batch for batch in h.runner.batches[4:5])
    assert after.batch_size == 3 and int(after.input_ids.min()) >= 0


@pytest.mark.parametrize("steps", [1, 3])
def test_what_empties_the_cache_waits_for_the_last_token(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for message in (
        FlushCacheReq(call_id="a"),
        UpdateWeightFromDiskReqInput(call_id="a", model_path="m", load_format="auto"),
    ):
        h = Harness()
        monkeypatch.setattr(h.runner, "update_weights_from_disk", lambda *args: (True, ""), raising=False)
        h.add([2, 3], max_new_tokens=steps, ignore_eos=True)
        for _ in range(steps):
            h.step()
        assert h.scheduler.pending_result is not None
        h.channel.inbox.append(message)
        assert not h.step()
        (reply,) = (m for m in h.channel.sent if isinstance(m, ControlReply))
        assert reply.success and h.scheduler.tree_cache.evictable_size() == 0
        h.check_results()


def test_a_retraction_knows_every_token(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    h = Harness(size=40, radix=False)
    retract, seen = h.scheduler.metrics.log_retraction, []

    def log_retraction(*args: Any) -> None:
        seen.append(device.log[-1][0])
        assert h.scheduler.pending_result is None
        retract(*args)

    monkeypatch.setattr(h.scheduler.metrics, "log_retraction", log_retraction)
    for i in range(3):
        h.add([2, 3 + i], max_new_tokens=30, ignore_eos=True)
    h.run()
    h.check_results()
    assert seen and set(seen) == {"read"}


def test_outputs_leave_behind_the_launch_of_the_next_step(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    h.add([2, 3], max_new_tokens=4, ignore_eos=True)
    send = h.channel.send

    def logged(message: Any) -> None:
        device.log.append(("send", len(message.outputs)))
        send(message)

    monkeypatch.setattr(h.channel, "send", logged)
    h.run()
    assert device.log[:7] == [
        ("launch", 0), ("send", 0), ("launch", 1), ("read", 0), ("send", 1), ("launch", 2), ("read", 1),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 4]), st.booleans(), st.integers(1, 6), st.sampled_from([-1, 4, 8]))
def test_any_life_gives_what_it_gives_in_turn(
    data: st.DataObject, page_size: int, radix: bool, rows: int, chunk: int
) -> None:
    """Ends, aborts, requests without a token, retractions, pieces and control messages in any order."""
    size = page_size * data.draw(st.integers(40 // page_size, 120 // page_size))
    h = Harness(size=size, page_size=page_size, chunk=chunk, rows=rows, radix=radix, context_len=60)
    sample, broken = h.runner.sample, data.draw(st.sets(st.integers(0, 60), max_size=3))

    def sometimes_none(output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
        tokens = sample(output, batch)
        if len(h.runner.batches) in broken:
            tokens[0] = -1
        return tokens

    h.runner.sample = sometimes_none  # type: ignore[method-assign]
    clip, schedule_policy.CLIP_MAX_NEW_TOKENS = schedule_policy.CLIP_MAX_NEW_TOKENS, data.draw(st.sampled_from([0, 4]))
    try:
        for _ in range(data.draw(st.integers(5, 60))):
            action = data.draw(st.sampled_from(["add", "add", "abort", "state", "flush", "step", "step", "step"]))
            if action == "add":
                prompt = [data.draw(st.integers(2, 3))] * data.draw(st.integers(1, 30)) + [data.draw(st.integers(2, 9))]
                h.add(
                    prompt, max_new_tokens=data.draw(st.sampled_from([None, 0, 1, 2, 5, 30])),
                    ignore_eos=data.draw(st.booleans()), stop_token_ids=data.draw(st.sampled_from([(), (4, 5, 6, 7)])),
                    return_logprob=data.draw(st.booleans()), top_logprobs_num=2,
                )  # fmt: skip
            elif action == "abort" and h.requests:
                h.abort(data.draw(st.sampled_from(list(h.requests))))
            elif action == "state":
                h.channel.inbox.append(GetInternalStateReq(call_id="x"))
            elif action == "flush":
                h.channel.inbox.append(FlushCacheReq(call_id="x"))
            h.step()
        h.run()
    finally:
        schedule_policy.CLIP_MAX_NEW_TOKENS = clip
    h.aborted.update(h.requests)  # a prefix of what they get is right for those that got no token
    h.check_results()
    lost = [rid for rid, got in h.results.items() if got.finish_reason is None]
    assert not lost


# Without data


# Everything that a request may ask of sampling, but for a grammar.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "sampling_seed": 3},
    {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_new_tokens": 4, "logit_bias": {"3": 1.0}},
    {"temperature": 1.0, "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]},
]


class ShapesOnly(FakeModelRunner):
    """A runner on torch's device without data, where whoever looks at a value fails; its sampling is the real one."""

    on = "meta"
    tp = SINGLE
    sample = ModelRunner.sample  # type: ignore[assignment]

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        self.batches.append(batch)
        hidden = torch.zeros(len(batch.input_ids), 3, device=self.device)
        return compute_logits(hidden, lambda rows: rows.new_zeros(len(rows), VOCAB), batch)


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_host_decides_without_looking_at_the_device(
    page_size: int, device: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)

    def to_host(x: torch.Tensor) -> torch.Tensor:
        values = torch.tensor([rng.randrange(2, VOCAB) for _ in range(x.numel())]).view(x.shape).to(x.dtype)
        return SlowDevice.to_host(device, values)

    monkeypatch.setattr(device, "to_host", to_host)
    device.attach(monkeypatch)
    monkeypatch.setattr(fake_model, "FakeModelRunner", ShapesOnly)
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    h = Harness(size=160, page_size=page_size, chunk=16, rows=6)
    for i in range(28):
        h.add([2 + i % 3] * rng.randint(1, 40), max_new_tokens=rng.randint(1, 30), **KINDS[i % len(KINDS)])
        h.step()
    while h.step():
        pass
    assert all(got.finish_reason is not None for got in h.results.values())
    assert h.scheduler.metrics.num_retracted_reqs > 3
    assert device.log.count(("read", 5)) == 1
