"""New weights in a running scheduler: only while nothing runs, and nothing computed before is used after."""

import time
from typing import Any

import pytest
from fake_model import Harness

from sglang.srt.managers.io_struct import ControlReply, UpdateWeightFromDiskReqInput

pytestmark = pytest.mark.usefixtures("each_loop")


def update(h: Harness, success: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> ControlReply:
    def replace_weights(model_path: str, load_format: str) -> tuple[bool, str]:
        calls.append((model_path, load_format))
        time.sleep(0.05)
        return success, "said so"

    monkeypatch.setattr(h.runner, "update_weights_from_disk", replace_weights, raising=False)
    h.channel.inbox.append(UpdateWeightFromDiskReqInput(call_id="x", model_path="folder", load_format="auto"))
    h.step()
    (reply,) = (m for m in h.channel.sent if isinstance(m, ControlReply))
    h.channel.sent.clear()
    return reply


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("success", [True, False])
def test_the_prefix_cache_is_emptied_if_and_only_if_it_was_done(
    success: bool, radix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, calls = Harness(radix=radix), []
    h.add([2] * 10)
    h.run()
    cached = h.scheduler.tree_cache.evictable_size()
    assert (cached > 0) == radix
    began = h.scheduler.metrics._last_stats_time
    reply = update(h, success, calls, monkeypatch)
    assert reply == ControlReply(call_id="x", success=success, data={"message": "said so"})
    assert calls == [("folder", "auto")]
    assert h.scheduler.tree_cache.evictable_size() == (0 if success else cached)
    assert h.scheduler.metrics._last_stats_time - began >= 0.05, "counted as generation time"
    again = h.add([2] * 10)
    h.run()
    h.check_results()
    assert (h.results[again].cached_tokens > 0) == (radix and not success)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_refused_while_a_request_waits_or_runs(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    h, calls = Harness(rows=1), []
    h.add([2] * 10, max_new_tokens=20, ignore_eos=True)
    for _ in range(steps):
        h.step()
    reply = update(h, True, calls, monkeypatch)
    assert not reply.success and "1 requests are not finished" in reply.data["message"] and not calls
    h.run()
    h.check_results()
    assert update(h, True, calls, monkeypatch).success and len(calls) == 1
