"""Rows with a seed: what they get depends on their logits, parameters, seed and position, and on nothing else."""

import math
import random

import pytest
import torch
from test_sampler import PARAMS, VOCAB, allowed

from sglang.srt.layers import sampler
from sglang.srt.layers.sampler import sample_tokens, seeded_uniform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The same generator in unbounded integers."""
    stream = mix((seed + GAMMA) & MASK)
    return (mix((stream + (position + 1) * GAMMA) & MASK) >> 11) / 2**53


def check_numbers(device: str) -> None:
    seeds = [0, 1, 2, 42, -1, 2**63 - 1, -(2**63), 123456789012345]
    positions = [0, 1, 2, 7, 4096, 2**31, 2**40]
    pairs = torch.tensor([(seed, position) for seed in seeds for position in positions], device=device)
    got = seeded_uniform(pairs[:, :1], pairs[:, 1:]).flatten().tolist()
    assert got == [uniform(seed, position) for seed, position in pairs.tolist()]
    assert len(set(got)) == len(got)


def test_numbers() -> None:
    check_numbers("cpu")
    # SplitMix64's published first outputs for seed 0: the stream's generator is that one.
    assert [mix(GAMMA * i & MASK) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    n = 1 << 16
    run, fixed = torch.arange(n).unsqueeze(1), torch.full((n, 1), 5)
    numbers = (seeded_uniform(run, fixed) if along == "seeds" else seeded_uniform(fixed, run)).flatten()
    counts = torch.histc(numbers, 64, 0.0, 1.0)
    chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert 25 < chi2 < 120  # 63 degrees of freedom: about one in 10**5 lies outside
    centred = numbers - 0.5
    for lag in (1, 2, 3, 64):
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) * 12 < 5 / math.sqrt(n)


@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_frequencies_over_positions(params: SamplingParams) -> None:
    torch.manual_seed(1)
    draws = 20000
    logits = torch.randn(VOCAB) * 1.5
    expected = allowed(logits.tolist(), params)
    seeded = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, sampling_seed=7
    )
    info = SamplingBatchInfo.from_params([seeded] * draws, VOCAB, "cpu")
    counts = sample_tokens(logits.expand(draws, -1), info, torch.arange(draws)).bincount(minlength=VOCAB)
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    for token, prob in expected.items():
        sigma = math.sqrt(draws * prob * (1 - prob))
        assert abs(int(counts[token]) - draws * prob) <= 5 * sigma + 1, token


def check_independence(device: str) -> None:
    """bfloat16 logits have many equal values; which of them comes first must not depend on the batch either."""
    rng = random.Random(0)
    torch.manual_seed(0)
    vocab = 3000
    rows = [
        (
            SamplingParams(
                temperature=rng.choice([0.6, 1.0, 3.0]),
                top_k=rng.choice([-1, 5, 2000]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.05]),
                sampling_seed=rng.choice([None, 0, 1, -5]),
            ),
            torch.randn(vocab).bfloat16().float().to(device),
            rng.randrange(5000),
        )
        for _ in range(40)
    ]
    alone: dict[int, int] = {}
    for _ in range(12):
        chosen = rng.sample(range(40), rng.choice([1, 7, 40]))
        info = SamplingBatchInfo.from_params([rows[i][0] for i in chosen], vocab, device)
        positions = torch.tensor([rows[i][2] for i in chosen], device=device)
        tokens = sample_tokens(torch.stack([rows[i][1] for i in chosen]), info, positions).tolist()
        for i, token in zip(chosen, tokens, strict=True):
            if rows[i][0].sampling_seed is not None:
                assert alone.setdefault(i, token) == token
    assert len(alone) > 20


@pytest.mark.parametrize("candidates", [16, 1024])
def test_batch_mates_change_nothing(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    check_independence("cpu")


def test_equal_probabilities_are_ordered_by_token() -> None:
    """Of the tokens that share the best logit, the first two."""
    logits = torch.zeros(64, 5000)
    logits[:, 4000:] = 1.0
    params = [SamplingParams(top_k=2, sampling_seed=i) for i in range(64)]
    info = SamplingBatchInfo.from_params(params, 5000, "cpu")
    assert set(sample_tokens(logits, info, torch.zeros(64, dtype=torch.int64)).tolist()) == {4000, 4001}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_gpu() -> None:
    check_numbers("cuda")
    check_independence("cuda")
    torch.manual_seed(2)
    logits = torch.randn(256, 32000)
    params = [SamplingParams(sampling_seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(256)]
    tokens = [
        sample_tokens(
            logits.to(device), SamplingBatchInfo.from_params(params, 32000, device), torch.arange(256, device=device)
        ).tolist()
        for device in ("cpu", "cuda")
    ]
    assert sum(a != b for a, b in zip(*tokens, strict=True)) <= 1  # the softmax differs in its last bits
