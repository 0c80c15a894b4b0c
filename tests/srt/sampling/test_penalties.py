"""Penalties, biases and minimum lengths of a batch against transformers' processors and vLLM's formula, row by row."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from sglang.srt.sampling.penalties import Penalties
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 23
EOS = frozenset({1, 2})


@dataclass
class Request:
    sampling_params: SamplingParams
    prompt: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    token_counts: torch.Tensor | None = None
    chosen_ids: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    grammar: None = None

    @property
    def num_sampled(self) -> int:
        return len(self.output_ids)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return EOS | frozenset(self.sampling_params.stop_token_ids)


def reference(req: Request, logits: torch.Tensor) -> torch.Tensor:
    """[1, VOCAB] logits as they have to be sampled."""
    params = req.sampling_params
    ids = torch.tensor([req.prompt + req.output_ids])
    stops = sorted(req.stop_token_ids)
    wanted = logits.clone()
    if params.min_new_tokens:
        processor = MinNewTokensLengthLogitsProcessor(len(req.prompt), params.min_new_tokens, stops, device="cpu")
        wanted = processor(ids, wanted)
    for token, count in Counter(req.output_ids).items():
        wanted[0, token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.repetition_penalty != 1.0:
        scale = RepetitionPenaltyLogitsProcessor(params.repetition_penalty, prompt_ignore_length=len(req.prompt))
        wanted = scale(ids, wanted)
    if params.logit_bias:
        bias = {(int(token),): value for token, value in params.logit_bias.items()}
        wanted = SequenceBiasLogitsProcessor(bias)(ids, wanted)
    return wanted


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -1.5]),
        presence_penalty=rng.choice([0.0, 0.0, 2.0, -0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.5]),
        min_new_tokens=rng.choice([0, 0, 1, 4]),
        stop_token_ids=rng.choice([(), (5,), (5, 1)]),
        logit_bias=rng.choice([None, {"3": 2.5, "0": -1000.0}, {"1": 1.0}]),
    )


def check_batches(device: str) -> None:
    """Requests join, leave, change rows and start again; the state that is carried must be the recomputed one."""
    rng = random.Random(3)
    torch.manual_seed(3)
    running: list[Request] = []
    rebuilt = 0
    info = SamplingBatchInfo(())
    for step in range(120):
        if step == 0 or rng.random() < 0.4:
            running = [req for req in running if rng.random() < 0.8]
            running += [
                Request(params_of(rng), prompt=rng.choices(range(VOCAB), k=rng.randint(1, 9)))
                for _ in range(rng.randint(1, 4))
            ]
            rng.shuffle(running)
            for req in rng.sample(running, len(running) // 3):  # as a retraction
                req.token_counts = None
            info = SamplingBatchInfo.from_reqs(running, VOCAB, device)
            rebuilt += 1
        logits = torch.randn(len(running), VOCAB) * 3
        wanted = torch.cat([reference(req, row.unsqueeze(0)) for req, row in zip(running, logits, strict=True)])
        got = logits.to(device)
        info.apply(got)
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)
        plain = [
            req.sampling_params == SamplingParams(stop_token_ids=req.sampling_params.stop_token_ids) for req in running
        ]
        assert torch.equal(got.cpu()[plain], logits[plain])
        tokens = torch.randint(0, VOCAB, (len(running),))
        info.count(tokens.to(device))
        for req, token in zip(running, tokens.tolist(), strict=True):
            req.output_ids.append(token)
    assert rebuilt > 30


def test_batches() -> None:
    check_batches("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_on_gpu() -> None:
    check_batches("cuda")


def test_nothing_is_done_when_nobody_asks() -> None:
    info = SamplingBatchInfo.from_reqs([Request(SamplingParams(stop_token_ids=(4,)))] * 3, VOCAB, "cpu")
    assert info.rules == ()
    done = Request(SamplingParams(min_new_tokens=2), output_ids=[5, 6])
    assert SamplingBatchInfo.from_reqs([done], VOCAB, "cpu").rules == ()


def test_only_rows_that_ask_are_kept() -> None:
    asking = Request(SamplingParams(presence_penalty=1.0), output_ids=[4, 4])
    penalties = Penalties.from_reqs([Request(SamplingParams()), asking], VOCAB, "cpu")
    assert penalties is not None and penalties.rows.tolist() == [1]
    assert penalties.counts.shape == (1, VOCAB) and int(penalties.counts[0, 4]) == 2
    assert asking.token_counts is not None and asking.token_counts.data_ptr() == penalties.counts.data_ptr()
    penalties.count(torch.tensor([4, -1]))  # broken logits: a number that nobody will look at, but no error
    assert int(penalties.counts.sum()) == 3


def test_logprobs_are_of_the_distribution_that_is_sampled() -> None:
    """SGLang's default: behind penalties, biases and temperature; a greedy row has temperature 1."""
    params = [
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1, temperature=0.3),
        SamplingParams(temperature=2.0, sampling_seed=1),
    ]
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    tempered = SamplingBatchInfo.from_params(params, VOCAB, "cpu").tempered(logits)
    assert torch.equal(logits, before)
    torch.testing.assert_close(tempered, logits / torch.tensor([[0.5], [1.0], [1.0], [2.0]]))
    greedy = SamplingBatchInfo.from_params(params[1:3], VOCAB, "cpu")
    assert greedy.tempered(logits[1:3].clone()).tolist() == logits[1:3].tolist()


def test_a_whole_vocabulary_is_looked_at_once() -> None:
    """A batch changes at almost every step; 50000 biases took 0.1 s each time."""

    class Counted(dict[str, float]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            Counted.looks += 1
            return super().__iter__()

    biases = Counted({str(i): float(i) for i in range(VOCAB)})
    req = Request(SamplingParams(min_new_tokens=3, stop_token_ids=(4, 5), logit_bias=biases))
    for _ in range(3):
        logits = torch.zeros(2, VOCAB)
        SamplingBatchInfo.from_reqs([Request(SamplingParams()), req], VOCAB, "cpu").apply(logits)
        want = torch.arange(float(VOCAB))
        want[[1, 2, 4, 5]] = -torch.inf
        assert torch.equal(logits, torch.stack([torch.zeros(VOCAB), want]))
    assert Counted.looks == 1
