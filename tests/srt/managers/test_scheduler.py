import random
import time

import pytest
from fake_model import EOS, Harness, next_token

from sglang.srt.managers import schedule_policy
from sglang.srt.managers.io_struct import ControlReply, GetInternalStateReq

pytestmark = pytest.mark.usefixtures("each_loop")


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 50) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that expects requests to generate nothing, so that memory runs out."""
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [-1, 16])
@pytest.mark.parametrize("radix", [True, False])
def test_together_as_one_by_one(page_size: int, chunk: int, radix: bool) -> None:
    h = Harness(page_size=page_size, chunk=chunk, radix=radix)
    rids = [h.add(p, max_new_tokens=20) for p in prompts(20)]
    h.run()
    h.check_results()
    assert {h.results[r].finish_reason["type"] for r in rids} == {"stop", "length"}  # type: ignore[index]
    assert max(len(batch.seq_lens_list) for batch in h.runner.batches) == 8  # all rows were used


def test_requests_that_come_later_join_the_running_ones() -> None:
    h = Harness()
    h.add([2, 3], max_new_tokens=30, ignore_eos=True)
    for _ in range(5):
        h.step()
    late = h.add([4, 5], max_new_tokens=5, ignore_eos=True)
    h.step()
    h.read()
    assert len(h.results[late].output_ids) == 1  # prefill goes before decode
    h.step()
    h.read()
    assert len(h.results[late].output_ids) == 2 and len(h.results["r0"].output_ids) == 6
    h.run()
    h.check_results()
    assert [len(b.seq_lens_list) for b in h.runner.batches].count(2) == 4


def test_a_decode_step_keeps_what_does_not_change() -> None:
    h = Harness()
    for i in range(3):
        h.add([2, 3 + i], max_new_tokens=6, ignore_eos=True)
    h.run()
    first, second = h.runner.batches[1:3]
    assert first.forward_mode.is_decode() and second.forward_mode.is_decode()
    assert second.sampling_info is first.sampling_info
    assert second.req_pool_indices is first.req_pool_indices
    assert second.seq_lens_list == [n + 1 for n in first.seq_lens_list]


# Prefix cache


@pytest.mark.parametrize(("page_size", "cached"), [(1, 29), (16, 16)])
def test_a_repeated_prompt_comes_from_the_cache(page_size: int, cached: int) -> None:
    h = Harness(page_size=page_size)
    prompt = list(range(2, 32))
    first = h.add(prompt)
    h.run()
    second = h.add(prompt)
    h.run()
    h.check_results()
    assert h.results[first].cached_tokens == 0
    assert h.results[second].cached_tokens == cached
    extends = [b for b in h.runner.batches if b.forward_mode.is_extend()]
    assert [len(b.input_ids) for b in extends] == [30, 30 - cached]


def test_the_output_is_cached_too() -> None:
    h = Harness()
    h.add([2, 3, 4], max_new_tokens=10, ignore_eos=True)
    h.run()
    follow_up = h.add([2, 3, 4, *h.results["r0"].output_ids, 5])
    h.run()
    h.check_results()
    assert h.results[follow_up].cached_tokens == 3 + 10 - 1  # the last token's keys were never computed


def test_a_running_request_shares_its_prompt() -> None:
    h = Harness()
    h.add(list(range(2, 22)), max_new_tokens=30, ignore_eos=True)
    h.step()
    second = h.add([*range(2, 12), 40], max_new_tokens=3)
    h.run()
    h.check_results()
    assert h.results[second].cached_tokens == 10


def test_without_the_radix_cache_nothing_is_reused() -> None:
    h = Harness(radix=False)
    for _ in range(2):
        rid = h.add(list(range(2, 32)))
        h.run()
    h.check_results()
    assert h.results[rid].cached_tokens == 0


def test_old_prefixes_make_room() -> None:
    h = Harness(size=64)
    for prompt in prompts(30, seed=3):
        h.add(prompt, max_new_tokens=4)
        h.run()
    h.check_results()


# Chunked prefill


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_prompt_is_computed_in_pieces(page_size: int) -> None:
    h = Harness(chunk=16, page_size=page_size)
    rid = h.add(prompts(1, seed=1)[0] * 8, max_new_tokens=3, ignore_eos=True)
    length = len(h.requests[rid].input_ids)
    assert length > 48
    h.run()
    h.check_results()
    sizes = [len(b.input_ids) for b in h.runner.batches if b.forward_mode.is_extend()]
    assert sizes == [16] * (length // 16) + [length % 16] * (length % 16 > 0)
    assert h.results[rid].messages == 3  # nothing is sent for a piece


def test_one_chunked_request_at_a_time_and_others_fill_its_last_piece() -> None:
    h = Harness(chunk=16)
    h.add(list(range(2, 42)), max_new_tokens=3)
    h.add(list(range(3, 43)), max_new_tokens=3)
    h.add([7, 8], max_new_tokens=3)
    h.run()
    h.check_results()
    extends = [b.extend_seq_lens for b in h.runner.batches if b.forward_mode.is_extend()]
    assert extends == [[16], [16], [8, 8], [16], [16], [2]]


# Memory runs out


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
def test_retraction_is_exact(page_size: int, radix: bool) -> None:
    h = Harness(size=80, page_size=page_size, radix=radix)
    for i, prompt in enumerate(prompts(12, longest=20, seed=5)):
        h.add(prompt, max_new_tokens=40, ignore_eos=True, return_logprob=i % 2 == 0, top_logprobs_num=i % 3)
    h.run()
    h.check_results()
    assert h.scheduler.metrics.num_retracted_reqs >= 5


@pytest.mark.usefixtures("hopeful")
def test_the_one_with_the_least_output_is_retracted_and_goes_on_first(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness(size=40, radix=False, rows=2)
    old = h.add([2, 3, 4], max_new_tokens=30, ignore_eos=True)
    for _ in range(4):
        h.step()
    young = h.add([5] * 10, max_new_tokens=25, ignore_eos=True)
    last = h.add([6], max_new_tokens=2, ignore_eos=True)  # waits for a row
    while len(h.scheduler.waiting_queue) != 2 or not h.scheduler.metrics.num_retracted_reqs:
        h.step()
    assert [r.rid for r in h.scheduler.waiting_queue] == [young, last]
    assert "Retract requests. #retracted_reqs: 1" in caplog.text
    assert h.results[old].finish_reason is None
    kept = list(h.results[young].output_ids)
    h.run()
    h.check_results()
    assert kept and h.results[young].output_ids[: len(kept)] == kept


@pytest.mark.usefixtures("hopeful")
def test_nothing_is_computed_between_the_pieces_of_a_prompt() -> None:
    """So that a request that was admitted for all of its prompt finds the slots for it."""
    h = Harness(size=64, chunk=8, radix=False)
    running = h.add([2, 3], max_new_tokens=60, ignore_eos=True)
    for _ in range(26):
        h.step()
    assert h.scheduler.pools.allocator.available_size() == 64 - 27
    long = h.add([4] * 37, max_new_tokens=5, ignore_eos=True, return_logprob=True)
    for _ in range(5):
        h.step()
    h.read()
    assert h.scheduler.pools.allocator.available_size() == 0 and len(h.results[long].output_ids) == 1
    h.run()
    h.check_results()
    assert h.scheduler.metrics.num_retracted_reqs == 1 and len(h.results[running].output_ids) == 60


def test_a_request_alone_may_fill_the_pool_and_ends_with_length(caplog: pytest.LogCaptureFixture) -> None:
    for page_size in (1, 8):
        h = Harness(size=32, page_size=page_size, context_len=200)
        assert "The KV cache holds 32 tokens" in caplog.text
        rid = h.add([2] * 10, max_new_tokens=None, ignore_eos=True)
        other = h.add([3] * 10, max_new_tokens=100, ignore_eos=True)
        h.run()
        h.check_results()
        # 32 slots hold the prompt and all of the output but its last token.
        assert h.results[rid].finish_reason == h.results[other].finish_reason == {"type": "length", "length": 23}


def test_the_context_ends_the_output() -> None:
    h = Harness(context_len=20)
    rid = h.add([2] * 19, max_new_tokens=50, ignore_eos=True)
    other = h.add([2] * 5, max_new_tokens=50, ignore_eos=True)
    h.run()
    h.check_results()
    assert h.results[rid].finish_reason == {"type": "length", "length": 1}
    assert h.results[other].finish_reason == {"type": "length", "length": 15}


@pytest.mark.parametrize("length", [0, 20, 500])
def test_a_prompt_that_can_not_be_served_is_answered(length: int) -> None:
    h = Harness(context_len=20)
    rid, good = h.add([2] * length), h.add([2, 3])
    h.run()
    reason = h.results[rid].finish_reason
    assert reason is not None and reason["type"] == "abort" and reason["status_code"] == 400
    assert f"{length} tokens" in reason["message"] and "1 to 19" in reason["message"]
    assert h.results[good].finish_reason is not None and h.results[good].finish_reason["type"] != "abort"


# The end of an output


def prompt_that_gives(token: int, position: int) -> list[int]:
    """A prompt whose output has ``token`` first at ``position``."""
    for first in range(2, 50):
        for second in range(2, 50):
            tokens = [first, second]
            while len(tokens) < position + 3 and tokens[-1] != token:
                tokens.append(next_token(tokens))
            if len(tokens) == position + 3 and tokens[-1] == token:
                return [first, second]
    raise AssertionError("no such prompt")


def test_eos_ends_and_is_part_of_the_output() -> None:
    h = Harness()
    prompt = prompt_that_gives(EOS, 3)
    stopped, ignored = h.add(prompt, 10), h.add(prompt, 10, ignore_eos=True)
    at_the_limit, scored = h.add(prompt, 4), h.add(prompt, 0)
    h.run()
    h.check_results()
    assert h.results[stopped].finish_reason == {"type": "stop", "matched": EOS}
    assert len(h.results[stopped].output_ids) == 4 and h.results[stopped].output_ids[-1] == EOS
    assert len(h.results[ignored].output_ids) == 10
    assert h.results[at_the_limit].finish_reason == {"type": "length", "length": 4}
    assert h.results[scored].finish_reason == {"type": "length", "length": 0} and not h.results[scored].output_ids


def test_stop_token_ids_end_even_where_eos_is_ignored() -> None:
    h = Harness()
    prompt = prompt_that_gives(9, 2)
    rid = h.add(prompt, 10, ignore_eos=True, stop_token_ids=(9, 11))
    h.run()
    h.check_results()
    assert h.results[rid].finish_reason == {"type": "stop", "matched": 9}


# Aborts


@pytest.mark.parametrize("page_size", [1, 4])
def test_abort_in_every_state(page_size: int) -> None:
    h = Harness(chunk=8, rows=2, page_size=page_size)
    running = h.add([2, 3], max_new_tokens=50, ignore_eos=True)
    h.step()
    h.step()
    chunked, waiting = h.add([4] * 50, max_new_tokens=50), h.add([5, 6], max_new_tokens=50)
    h.step()
    h.step()
    assert h.scheduler.chunked_req is not None and len(h.scheduler.waiting_queue) == 1
    for rid in (waiting, chunked, running):
        used = h.scheduler.metrics.num_used_tokens()
        h.abort(rid)
        h.step()
        assert h.results[rid].finish_reason == {
            "type": "abort", "message": "The request was aborted.", "status_code": 499,
        }  # fmt: skip
        if rid != waiting:
            assert h.scheduler.metrics.num_used_tokens() < used
    assert not h.step()
    h.check_slots()
    h.add([7, 8])
    h.run()
    h.check_results()


def test_abort_between_prefill_and_first_decode_and_before_anything() -> None:
    h = Harness()
    first, second = h.add([2, 3], 50, ignore_eos=True), h.add([2, 4], 50, ignore_eos=True)
    h.step()
    h.read()
    h.abort(first)
    unseen = h.add([9], 50)
    h.abort(unseen)
    h.abort("unknown")
    h.run()
    h.check_results()
    assert len(h.results[first].output_ids) == 1 and not h.results[unseen].output_ids
    assert len(h.results[second].output_ids) == 50
    h.abort(second)  # it has finished
    h.run()
    h.check_results()


def test_an_abort_lets_the_next_one_in() -> None:
    h = Harness(rows=1)
    first, second = h.add([2, 3], 50, ignore_eos=True), h.add([4, 5], 5, ignore_eos=True)
    for _ in range(3):
        h.step()
    assert h.scheduler.batch_is_full
    h.abort(first)
    h.step()
    h.read()
    assert len(h.results[second].output_ids) == 1
    h.run()
    h.check_results()


def test_a_client_with_thousands_of_requests_hangs_up() -> None:
    h = Harness()
    rids = [h.add([2, 3], 5) for _ in range(16000)]
    other = h.add([4, 5], 5, ignore_eos=True)
    h.step()
    assert len(h.scheduler.waiting_queue) > 15900
    for rid in rids:
        h.abort(rid)
    began = time.process_time()
    h.step()
    assert time.process_time() - began < 2, "each abort has looked through the whole queue"
    h.run()
    h.check_results()
    assert all(h.results[rid].finish_reason is not None for rid in rids)
    assert len(h.results[other].output_ids) == 5


def test_aborts_count_for_what_comes_behind_them() -> None:
    h = Harness(rows=1, max_queued=1)
    running = h.add([2, 3], 50, ignore_eos=True)
    h.step()
    first = h.add([4, 5], 5)
    h.step()
    h.abort(first)
    second = h.add([6, 7], 5, ignore_eos=True)  # into the place of the first
    h.abort(running)
    h.abort("unknown")
    h.channel.inbox.append(GetInternalStateReq(call_id="x"))
    h.step()
    (reply,) = (m for m in h.channel.sent if isinstance(m, ControlReply))
    assert (reply.data["#running"], reply.data["#waiting"]) == (0, 1)
    h.run()
    h.check_results()
    assert len(h.results[second].output_ids) == 5
