"""--max-queued-requests, the two timeouts, and the load that a scheduler reports."""

from typing import Any

import pytest
from fake_model import Harness

from sglang.srt.errors import ArgumentError
from sglang.srt.managers import request_timeouts
from sglang.srt.managers.io_struct import BatchTokenIDOutput

pytestmark = pytest.mark.usefixtures("each_loop")

LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(monkeypatch: pytest.MonkeyPatch, **limits: str) -> tuple[Harness, Clock]:
    """A scheduler that runs one request at a time, with these timeouts, and its clock."""
    for what, seconds in limits.items():
        monkeypatch.setenv(f"SGLANG_REQ_{what.upper()}_TIMEOUT", seconds)
    h, clock = Harness(rows=1), Clock()
    h.scheduler.timeouts._clock = clock
    return h, clock


def reason(h: Harness, rid: str) -> dict[str, Any] | None:
    return h.results[rid].finish_reason


def test_full_queue_refuses_what_comes_then_and_nothing_else() -> None:
    h = Harness(rows=1, max_queued=2)
    running = h.add([2] * 9, **LONG)
    h.step()
    waiting = [h.add([3 + i] * 9) for i in range(2)]
    refused = [h.add([5] * 9) for _ in range(3)]
    h.step()
    for rid in refused:
        assert reason(h, rid) == {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    h.aborted.update(refused)
    h.run()
    h.check_results()
    assert all(reason(h, rid)["type"] != "abort" for rid in (running, *waiting))
    later = h.add([5] * 9)
    h.run()
    assert reason(h, later)["type"] != "abort"


def test_waiting_timeout_counts_only_until_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    h, clock = timed(monkeypatch, waiting="10")
    running, waiting = h.add([2] * 9, **LONG), h.add([3] * 9)
    h.step()
    clock.now = 9.0
    late = h.add([4] * 9)
    h.step()
    clock.now = 11.0
    h.step()
    h.step()
    expected = {"type": "abort", "message": "Request waiting timeout reached.", "status_code": 503}
    assert reason(h, waiting) == expected
    assert reason(h, running) is reason(h, late) is None
    h.aborted.add(waiting)
    h.run()
    h.check_results()


def test_running_timeout_ends_what_runs_and_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    h, clock = timed(monkeypatch, running="10")
    slow, next_one = h.add([2] * 9, **LONG), h.add([3] * 9)
    h.step()
    clock.now = 100.0  # the other waits, which is not limited
    for _ in range(3):
        h.step()
    assert reason(h, slow) == {"type": "abort", "message": "Request running timeout reached.", "status_code": 503}
    h.aborted.add(slow)
    h.run()
    h.check_results()
    assert reason(h, next_one)["type"] != "abort"


def test_retracted_request_keeps_its_running_time() -> None:
    watch, clock = request_timeouts.RequestTimeouts(1.0, 10.0, Clock()), Clock()
    watch._clock = clock
    req: Any = type("R", (), {"rid": "a"})()
    assert watch.overdue([], [req]) == []
    clock.now = 5.0
    assert watch.overdue([req], []) == []  # in the queue again, and longer than may be waited
    clock.now = 7.0
    assert watch.overdue([req], []) == []
    clock.now = 10.5
    (abort,) = watch.overdue([req], [])
    assert (abort.rid, abort.message, abort.status_code) == ("a", "Request running timeout reached.", 503)
    assert watch.overdue([], []) == [] and watch._started == {}


def test_bad_timeout_is_an_argument_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="SGLANG_REQ_RUNNING_TIMEOUT"):
        Harness()


def test_load_follows_every_step() -> None:
    h, loads = Harness(rows=1), []
    send = h.channel.send

    def keep(message: Any) -> None:
        if isinstance(message, BatchTokenIDOutput):
            loads.append(message.load)
        send(message)

    h.channel.send = keep  # type: ignore[method-assign]
    h.add([2] * 9, max_new_tokens=45, ignore_eos=True)
    h.add([2] * 9, max_new_tokens=2, ignore_eos=True)
    h.run()
    first = loads[0]
    assert (first.num_running_reqs, first.num_waiting_reqs) == (1, 1)
    assert first.num_used_tokens == 9 and first.token_usage == pytest.approx(9 / 512) and first.cache_hit_rate == 0
    assert max(load.gen_throughput for load in loads) > 0
    last = loads[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.num_used_tokens, last.gen_throughput) == (0, 0, 0, 0)
    assert last.num_evictable_tokens == h.scheduler.tree_cache.evictable_size() > 0
    assert last.cache_hit_rate == pytest.approx(8 / 9)
    # Nothing changes, nothing is sent.
    count = len(loads)
    h.step()
    assert len(loads) == count


def test_load_is_sent_where_only_the_load_changes() -> None:
    h = Harness(chunk=16)
    h.add([2] * 40, max_new_tokens=1)
    h.scheduler.step()
    (message,) = h.channel.sent
    assert message.outputs == [] and message.load.num_running_reqs == 1 and message.load.num_used_tokens == 16
