import pytest
from fake_model import Harness, top_logprobs

from sglang.srt.managers import schedule_policy

pytestmark = pytest.mark.usefixtures("each_loop")

PROMPT = [2 + (i * 7) % 45 for i in range(40)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [-1, 16])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 38, 39, 40])
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_and_output_logprobs(page_size: int, chunk: int, start: int, top: int) -> None:
    """With an empty and with a full prefix cache, beside requests that want none."""
    h = Harness(page_size=page_size, chunk=chunk)
    for _ in range(2):
        h.add(PROMPT[:25])
        ids = [9, 3] if top else []
        rid = h.add(PROMPT, return_logprob=True, logprob_start_len=start, top_logprobs_num=top, token_ids_logprob=ids)
        h.add(PROMPT[3:])
        h.run()
    h.check_results()
    got = h.results[rid]
    assert got.input_token_logprobs is not None and len(got.input_token_logprobs) == 40 - start
    if start < 40:
        assert got.input_token_logprobs[0] == (None, PROMPT[start])
    assert len(got.output_token_logprobs) == len(got.output_ids)
    # As much as possible came from the cache: what is before the first hidden state that is needed.
    assert got.cached_tokens == min(start, 39) // page_size * page_size


def test_no_logprobs_unless_wanted() -> None:
    h = Harness()
    plain = h.add(PROMPT, top_logprobs_num=5, token_ids_logprob=[4])
    h.run()
    h.check_results()
    assert h.results[plain].input_token_logprobs is None and not h.results[plain].output_token_logprobs
    assert not any(batch.return_logprob for batch in h.runner.batches)


def test_only_the_needed_positions_are_asked_for() -> None:
    h = Harness(chunk=16)
    h.add(PROMPT, max_new_tokens=1, return_logprob=True, logprob_start_len=20)
    h.run()
    wanted = [(b.input_logprob_starts, b.input_logprob_targets) for b in h.runner.batches]
    assert wanted == [([0], [[]]), ([4], [PROMPT[21:33]]), ([0], [PROMPT[33:]])]


def test_a_request_for_scores_only() -> None:
    h = Harness()
    rid = h.add(PROMPT, max_new_tokens=0, return_logprob=True, top_logprobs_num=2)
    h.run()
    h.check_results()
    got = h.results[rid]
    assert got.messages == 1 and got.output_ids == got.output_token_logprobs == []
    assert got.input_top_logprobs is not None
    assert got.input_top_logprobs[:2] == [None, top_logprobs(PROMPT[:1], 2)]


def test_logprobs_survive_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's are computed once; the second time, the whole prompt may come from the cache."""
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    h = Harness(size=120, chunk=8)
    for i in range(4):
        h.add(
            PROMPT[i * 3 : i * 3 + 20], 60, ignore_eos=True, return_logprob=True, top_logprobs_num=2,
            token_ids_logprob=[i, 30],
        )  # fmt: skip
    h.run()
    h.check_results()
    assert h.scheduler.metrics.num_retracted_reqs >= 2
    asked = [targets for b in h.runner.batches for targets in b.input_logprob_targets or []]
    assert sum(map(len, asked)) == 4 * 19
    assert sum(len(b.input_ids) for b in h.runner.batches if b.forward_mode.is_extend()) > 4 * 20
