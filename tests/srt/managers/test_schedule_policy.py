import pytest
from fake_model import Harness

from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import INIT_NEW_TOKEN_RATIO, MIN_NEW_TOKEN_RATIO

pytestmark = pytest.mark.usefixtures("each_loop")


def running(h: Harness) -> list[str]:
    return [req.rid for req in h.scheduler.running_batch.reqs]


def test_admission_counts_what_running_requests_may_still_generate() -> None:
    h = Harness(size=100, radix=False)
    h.add([2] * 10, max_new_tokens=60, ignore_eos=True)
    h.step()
    # 90 are free; the first one is expected to take 0.7 * 59 of them.
    second = h.add([3] * 10, max_new_tokens=45, ignore_eos=True)
    h.step()
    h.step()
    assert running(h) == ["r0"] and h.scheduler.batch_is_full
    third = h.add([4], max_new_tokens=1)  # would fit, but it is not its turn
    h.step()
    assert not h.results[third].messages
    h.run()
    h.check_results()
    assert h.scheduler.metrics.num_retracted_reqs == 0
    assert h.results[second].finish_reason is not None


def test_a_small_enough_request_is_admitted() -> None:
    h = Harness(size=100, radix=False)
    h.add([2] * 10, max_new_tokens=60, ignore_eos=True)
    h.step()
    h.add([3] * 10, max_new_tokens=38, ignore_eos=True)
    h.step()
    h.step()
    assert running(h) == ["r0", "r1"]


def test_cached_prefixes_count_as_free_unless_the_request_itself_uses_them() -> None:
    h = Harness(size=60)
    h.add([2] * 40, max_new_tokens=1)
    h.run()
    assert h.scheduler.tree_cache.evictable_size() == 40
    h.add([3] * 50, max_new_tokens=5)
    h.run()
    h.add([3] * 50 + [4], max_new_tokens=9)
    h.run()
    h.check_results()
    assert h.results["r2"].cached_tokens == 50


def test_no_more_requests_than_rows() -> None:
    h = Harness(rows=3)
    for i in range(7):
        h.add([2, 3 + i], max_new_tokens=5 + i, ignore_eos=True)
    most = 0
    while h.step():
        most = max(most, len(h.scheduler._active_reqs()))
    h.check_results()
    assert most == 3


def test_the_ratio_falls_while_memory_lasts_and_rises_with_a_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    h = Harness(size=101, radix=False)
    for i in range(2):
        h.add([2, 3 + i], max_new_tokens=100, ignore_eos=True)
    h.step()
    assert h.scheduler.new_token_ratio == INIT_NEW_TOKEN_RATIO
    h.step()
    assert MIN_NEW_TOKEN_RATIO < h.scheduler.new_token_ratio < INIT_NEW_TOKEN_RATIO
    while not h.scheduler.waiting_queue:
        h.step()
    h.read()
    (left,) = h.scheduler.running_batch.reqs
    assert h.scheduler.new_token_ratio == pytest.approx((len(left.output_ids) - 1 + 20) / 101)
    h.run()
    h.check_results()
    assert h.scheduler.new_token_ratio == INIT_NEW_TOKEN_RATIO


def test_without_chunks_a_prefill_batch_is_bounded_but_a_long_prompt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_policy, "MAX_PREFILL_TOKENS", 50)
    h = Harness(chunk=-1)
    for length in (30, 30, 120, 10):
        h.add(list(range(2, 12)) * (length // 10), max_new_tokens=2)
    h.run()
    h.check_results()
    extends = [b.extend_seq_lens for b in h.runner.batches if b.forward_mode.is_extend()]
    # The second one comes from the cache, as do 30 of the third one.
    assert extends == [[30], [1], [90], [1]]
