"""The sampler's distributions against a plain restatement of SGLang's rule."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers import sampler
from sglang.srt.layers.logits_processor import logprobs_of
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.sampling.sampling_batch_info import BROKEN_LOGITS, NOTHING_POSSIBLE, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 40


def allowed(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Token to probability: sorted, then top-k, top-p on the running sum, min-p relative to the best."""
    weights = [math.exp((value - max(logits)) / params.temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept: dict[int, float] = {}
    before = 0.0
    for rank, token in enumerate(order):
        limit = params.top_k if params.top_k > 0 else len(probs)
        if (
            rank < limit
            and (params.top_p == 1 or before <= params.top_p)
            and probs[token] >= params.min_p * probs[order[0]]
        ):
            kept[token] = probs[token]
        before += probs[token]
    total = sum(kept.values())
    return {token: prob / total for token, prob in kept.items()}


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.01),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=12, top_p=0.8, min_p=0.1),
    SamplingParams(temperature=3.0, top_k=30, top_p=0.95),
]


@pytest.mark.parametrize("candidates", [2, 1024])
@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_frequencies(params: SamplingParams, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    check_frequencies(params, "cpu")


def check_frequencies(params: SamplingParams, device: str) -> None:
    torch.manual_seed(1)
    draws = 20000
    logits = torch.randn(VOCAB) * 1.5
    expected = allowed(logits.tolist(), params)
    info = SamplingBatchInfo.from_params([params] * draws, VOCAB, device)
    positions = torch.zeros(draws, dtype=torch.int64, device=device)
    counts = sample_tokens(logits.expand(draws, -1).to(device), info, positions).bincount(minlength=VOCAB).cpu()
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    for token, prob in expected.items():
        sigma = math.sqrt(draws * prob * (1 - prob))
        assert abs(int(counts[token]) - draws * prob) <= 5 * sigma + 1, token


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_frequencies_on_gpu(params: SamplingParams) -> None:
    check_frequencies(params, "cuda")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-30, 0.5, 1.0, 2.0]),
            top_k=st.sampled_from([-1, 1, 3, VOCAB, VOCAB + 5]),
            top_p=st.sampled_from([1e-6, 0.5, 0.9, 1.0]),
            min_p=st.sampled_from([0.0, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_mixed_batches_draw_what_is_allowed(params: list[SamplingParams], seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(params), VOCAB) * 3
    logits[:, 7] = logits.max(dim=1).values  # a tie for the best
    before = logits.clone()
    info = SamplingBatchInfo.from_params(params, VOCAB, "cpu")
    tokens = sample_tokens(logits, info, torch.zeros(len(params), dtype=torch.int64)).tolist()
    assert torch.equal(logits, before)
    assert info.is_all_greedy == all(one.is_greedy for one in params)
    for row, (token, one) in enumerate(zip(tokens, params, strict=True)):
        if one.is_greedy:
            assert token == int(logits[row].argmax())
        else:
            # Which of two equal logits comes first is open, and so is a probability beside a limit.
            nudged = SamplingParams(
                temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p * (1 - 1e-5)
            )
            assert float(logits[row, token]) in {
                float(logits[row, other]) for other in allowed(logits[row].tolist(), nudged)
            }


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (1 - 2**-53, 4), (1.0, 4)])
def test_impossible_tokens_are_not_drawn_at_the_ends(
    uniform: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(*shape, uniform, **options))
    logits = torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf, 0.5, -math.inf]])
    info = SamplingBatchInfo.from_params([SamplingParams()], 6, "cpu")
    assert sample_tokens(logits, info, torch.zeros(1, dtype=torch.int64)).tolist() == [expected]


def test_seed_reproduces() -> None:
    info = SamplingBatchInfo.from_params([SamplingParams(), SamplingParams(top_p=0.9)], VOCAB, "cpu")
    logits = torch.randn(2, VOCAB)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append([sample_tokens(logits, info, torch.zeros(2, dtype=torch.int64)).tolist() for _ in range(10)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_marked_and_harm_no_other_row(bad: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = bad
    info = SamplingBatchInfo.from_params([SamplingParams(temperature=temperature)] * 3, VOCAB, "cpu")
    tokens = sample_tokens(logits, info, torch.zeros(3, dtype=torch.int64)).tolist()
    assert tokens[1] == (NOTHING_POSSIBLE if bad == -math.inf else BROKEN_LOGITS)
    assert all(0 <= token < VOCAB for token in (tokens[0], tokens[2]))
    if temperature == 0.0:
        assert tokens[0] == int(logits[0].argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_logit_marks_its_row_in_every_group(bad: float) -> None:
    """Rows come in pairs with the same parameters, of which the second is broken."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8, min_p=0.1),
        SamplingParams(sampling_seed=7),
        SamplingParams(top_k=3, sampling_seed=7),
    ]
    logits = torch.randn(len(kinds), VOCAB).repeat_interleave(2, dim=0)
    logits[1::2, 5] = bad
    logits[::2, 6] = -math.inf  # which is no fault
    info = SamplingBatchInfo.from_params([one for one in kinds for _ in range(2)], VOCAB, "cpu")
    tokens = sample_tokens(logits, info, torch.zeros(2 * len(kinds), dtype=torch.int64))
    assert tokens[1::2].tolist() == [BROKEN_LOGITS] * len(kinds)
    assert all(0 <= token < VOCAB and token != 6 for token in tokens[::2].tolist())


def test_logprobs_are_of_the_unscaled_distribution() -> None:
    logits = torch.randn(3, VOCAB)
    targets = torch.tensor([4, 0, 39])
    values, tops, _ = zip(*logprobs_of(logits, targets, [2, 0, 50], [[]] * 3).lists(), strict=True)
    expected = logits.log_softmax(-1)
    assert values == pytest.approx([float(expected[i, t]) for i, t in enumerate(targets.tolist())], abs=1e-6)
    best, ids = expected.sort(dim=-1, descending=True)
    assert [token for _, token in tops[0]] == ids[0, :2].tolist()
    assert [value for value, _ in tops[0]] == pytest.approx(best[0, :2].tolist(), abs=1e-6)
    assert tops[1] == []
    assert [token for _, token in tops[2]] == ids[2].tolist()
