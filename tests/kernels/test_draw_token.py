"""``draw_token.cu`` against the sampler's operators of torch: on a GPU, and compiled for the CPU."""

import math

import pytest
import torch

from sglang.srt.layers import cuda_sampling, sampler
from sglang.srt.sampling.sampling_batch_info import SamplingGroup


@pytest.fixture
def device(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if device == "cpu":
        monkeypatch.setattr(cuda_sampling, "THREADS", 64)
    return device


def draw(device: str, probs: torch.Tensor, limits: list[tuple[int, float, float]], noise: list[float]) -> list[int]:
    """The kernel's tokens, once they are those of the sampler's other path. ``limits``: top-k, top-p, min-p by row."""
    top_ks, top_ps, min_ps = (torch.tensor(column).unsqueeze(1) for column in zip(*limits, strict=True))
    rows, size = probs.shape
    assert len(limits) == len(noise) == rows
    uniform = torch.tensor(noise, dtype=torch.float64).unsqueeze(1)

    def group(where: str) -> SamplingGroup:
        columns = (torch.ones(rows, 1), top_ks, top_ps.float(), min_ps.float())
        # Where there are seeds equal probabilities stand in the order of their ids, as they do in the kernel.
        seeds = torch.zeros(rows, 1, dtype=torch.int64)
        return SamplingGroup(torch.arange(rows), *(column.to(where) for column in columns), size, seeds)

    wanted = sampler._sample_filtered(probs, group("cpu"), uniform).tolist()
    got = cuda_sampling.draw(probs.to(device), group(device), uniform.to(device)).tolist()
    assert got == wanted
    return got


NONE = math.inf


@pytest.mark.parametrize("size", [3, 1001, 9000])
def test_what_the_limits_leave(device: str, size: int) -> None:
    """Sharp and flat rows, with the many equal values of bfloat16 logits and without, and impossible tokens."""
    generator = torch.Generator().manual_seed(size)
    cuts = [
        (size, 0.9, 0.0),
        (3, NONE, 0.0),
        (size, NONE, 0.1),
        (size, 0.3, 0.02),
        (max(size // 2, 1), 0.99, 1e-4),
        (1, 0.5, 1.0),
    ]
    logits = torch.randn(2 * len(cuts), size, generator=generator) * torch.tensor([0.3, 6.0]).repeat(
        len(cuts)
    ).unsqueeze(1)
    logits[::3] = logits[::3].bfloat16().float()
    logits[1::4, :: 2 if size > 3 else 5] = -math.inf
    limits = [cut for cut in cuts for _ in range(2)]
    seen = set()
    for low in (0.0, 0.7):
        noise = (torch.rand(len(limits), generator=generator, dtype=torch.float64) * 0.3 + low).tolist()
        seen |= set(enumerate(draw(device, logits.softmax(-1), limits, noise)))
    assert len(seen) > len(limits) or size == 3


def test_among_equal_ones_the_first_are_kept(device: str) -> None:
    """More of them than the kernel lists, and of rows that don't begin at multiples of 16 bytes."""
    for size in (5000, 5001):
        logits = torch.zeros(4, size)
        logits[:, 4000:] = 1.0
        logits[3] = 0.0
        limits = [(2, NONE, 0.0), (700, NONE, 0.0), (size, 0.2, 0.0), (4000, NONE, 0.0)]
        probs = logits.softmax(-1)
        assert draw(device, probs, limits, [0.0, 0.0, 0.0, 0.0]) == [4000, 4000, 4000, 0]
        last = draw(device, probs, limits, [1.0, 1.0, 1.0, 1.0])
        assert last[0] == 4001 and last[1] == 4699 and 4000 < last[2] < size and last[3] == 3999


def test_a_flat_row_without_much_of_a_limit(device: str) -> None:
    """Everything that is kept is more than the kernel lists."""
    probs = torch.rand(3, 9000, generator=torch.Generator().manual_seed(1))
    probs /= probs.sum(-1, keepdim=True)
    limits = [(8999, NONE, 0.0), (9000, 0.97, 0.0), (9000, NONE, 1e-3)]
    for noise in (0.0, 0.37, 0.99, 1.0):
        draw(device, probs, limits, [noise] * 3)


def test_a_row_of_nan_gives_some_token(device: str) -> None:
    probs = torch.full((2, 3000), math.nan)
    probs[1] = 0.0
    probs[1, 77] = 1.0
    columns = (torch.ones(2, 1), torch.full((2, 1), 40), torch.full((2, 1), 0.9), torch.full((2, 1), 0.1))
    group = SamplingGroup(torch.arange(2), *(column.to(device) for column in columns), 3000, None)
    first, second = cuda_sampling.draw(
        probs.to(device), group, torch.full((2, 1), 0.3, dtype=torch.float64, device=device)
    )
    assert 0 <= int(first) < 3000 and int(second) == 77


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_whole_vocabulary_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(3)
    size, rows = 151936, 48
    logits = torch.randn(rows, size, generator=generator) * torch.linspace(0.1, 5, rows).unsqueeze(1)
    logits[::2] = logits[::2].bfloat16().float()
    cuts = [(size, 0.95, 0.0), (20, 0.8, 0.0), (size, NONE, 0.05), (5000, 0.999, 0.0)]
    noise = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    draw("cuda", logits.softmax(-1), cuts * (rows // len(cuts)), noise)
