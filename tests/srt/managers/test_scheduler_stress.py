"""Random lives of schedulers: whatever happens, every request gets what it gets alone, and no slot is lost."""

import random
from typing import Any

import pytest
from fake_model import Harness

from sglang.srt.managers import schedule_policy

pytestmark = pytest.mark.usefixtures("each_loop")


def random_request(rng: random.Random, shared: list[list[int]], longest: int) -> dict[str, Any]:
    length = rng.randrange(1, 1 + (longest if rng.random() < 0.3 else min(longest, 30)))
    prompt = rng.choice(shared)[:length]
    if rng.random() < 0.5:
        prompt[rng.randrange(length)] = 7
    options: dict[str, Any] = {
        "prompt": prompt,
        "max_new_tokens": rng.choice([None, 0, 1, 5, 20, 60]),
        "ignore_eos": rng.random() < 0.6,
        "stop_token_ids": (5,) if rng.random() < 0.1 else (),
    }
    if rng.random() < 0.4:
        options |= {
            "return_logprob": True,
            "logprob_start_len": rng.randrange(length + 1),
            "top_logprobs_num": rng.choice([0, 2]),
        }
    return options


def live(seed: int, monkeypatch: pytest.MonkeyPatch) -> Harness:
    rng = random.Random(seed)
    if seed % 2:  # admission expects nothing to be generated: memory runs out all the time
        monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    page_size = (1, 1, 2, 4, 16)[seed % 5]
    h = Harness(
        size=page_size * rng.randrange(max(2, 40 // page_size), 300 // page_size + 3),
        page_size=page_size,
        chunk=rng.choice([-1, page_size, page_size * 2, page_size * 3]),
        rows=rng.randrange(1, 9),
        radix=rng.random() < 0.75,
        context_len=rng.choice([60, 200]),
    )
    longest = h.scheduler.max_req_input_len
    shared = [[rng.randrange(2, 4) for _ in range(longest)] for _ in range(2)]
    for _ in range(120):
        if rng.random() < 0.25:
            h.add(**random_request(rng, shared, longest))
        if h.requests and rng.random() < 0.05:
            h.abort(rng.choice(list(h.requests)))
        h.step()
    h.run()
    return h


@pytest.mark.parametrize("seed", range(24))
def test_random_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    live(seed, monkeypatch).check_results()


@pytest.mark.parametrize("seed", [1, 3, 8])
def test_ranks_with_the_same_messages_do_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever differs between two processes: here the addresses of objects and the time."""
    steps = [
        [
            (batch.forward_mode, *(getattr(batch, name).tolist() for name in ("req_pool_indices", "out_cache_loc")))
            for batch in live(seed, monkeypatch).runner.batches
        ]
        for _ in range(2)
    ]
    assert steps[0] == steps[1] and len(steps[0]) > 100
