"""Sampling parameters through the scheduler: joins, leaves, chunks and retractions change nobody's tokens."""

import random

import fake_model
import pytest
import torch
from fake_model import EOS, VOCAB, FakeModelRunner, Harness
from transformers import RepetitionPenaltyLogitsProcessor

from sglang.srt.distributed import SINGLE
from sglang.srt.managers import schedule_policy
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from thread_ranks import on_every_rank, thread_groups

pytestmark = pytest.mark.usefixtures("each_loop")


def logits_of(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fake_model._hash(tokens))
    return torch.randn(VOCAB, generator=generator) * 2


class SamplingRunner(FakeModelRunner):
    """Logits are a hash of the whole sequence; the sampling is the real runner's."""

    tp = SINGLE
    sample = ModelRunner.sample  # type: ignore[assignment]

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        output = super().forward(batch)
        output.next_token_logits = torch.stack([logits_of(tokens) for tokens in self._sequences])
        return output


@pytest.fixture(autouse=True)
def sampling_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_model, "FakeModelRunner", SamplingRunner)
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)  # admits more than fits, so that some are retracted


def greedy_reference(prompt: list[int], params: SamplingParams, limit: int) -> list[int]:
    """The tokens of one request, alone, by the formulae."""
    output: list[int] = []
    stops = {EOS, *params.stop_token_ids}
    scale = RepetitionPenaltyLogitsProcessor(params.repetition_penalty, prompt_ignore_length=len(prompt))
    while len(output) < limit:
        logits = logits_of(prompt + output)
        if len(output) < params.min_new_tokens:
            logits[sorted(stops)] = -torch.inf
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        logits = scale(torch.tensor([prompt + output]), logits.unsqueeze(0))[0]
        for token_id, bias in (params.logit_bias or {}).items():
            logits[int(token_id)] += bias
        output.append(int(logits.argmax()))
        if output[-1] in stops and not (params.ignore_eos and output[-1] == EOS):
            break
    return output


def options_of(rng: random.Random) -> dict[str, object]:
    return {
        "frequency_penalty": rng.choice([0.0, 1.5, -0.5]),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.9]),
        "min_new_tokens": rng.choice([0, 0, 9]),
        "logit_bias": rng.choice([None, None, {"7": 3.0, "1": 2.0}]),
        "ignore_eos": rng.random() < 0.5,
    }


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_requests_get_what_the_formulae_give_alone(page_size: int) -> None:
    rng = random.Random(5)
    h = Harness(size=160, page_size=page_size, chunk=16, rows=6)
    wanted = {}
    for i in range(24):
        prompt = [2 + rng.randrange(45) for _ in range(rng.randint(3, 40))]
        options = options_of(rng)
        rid = h.add(prompt, max_new_tokens=40, **options)
        wanted[rid] = greedy_reference(prompt, h.requests[rid].sampling_params, 40)
        if i % 5 == 0:
            for _ in range(rng.randint(1, 12)):
                h.step()
    h.run()
    for rid, tokens in wanted.items():
        assert h.results[rid].output_ids == tokens, rid
    assert h.scheduler.metrics.num_retracted_reqs >= 3
    assert any(len(set(tokens)) < len(tokens) for tokens in wanted.values())


def test_seeded_requests_get_the_same_tokens_in_any_company() -> None:
    def run(together: bool, chunk: int, size: int) -> list[list[int]]:
        rng = random.Random(8)
        torch.manual_seed(rng.randrange(1 << 30) + together)  # the others' noise
        results = []
        h = Harness(size=size, chunk=chunk, rows=5)
        for i in range(16):
            prompt = [2 + rng.randrange(45) for _ in range(rng.randint(3, 40))]
            options = {**options_of(rng), "temperature": 1.3, "top_p": rng.choice([1.0, 0.9])}
            if together:
                h.add(prompt[:5], temperature=1.0, max_new_tokens=rng.randint(1, 30))
            rid = h.add(prompt, max_new_tokens=30, sampling_seed=i % 3, **options)
            if not together:
                rng.randint(1, 30)
                h.run()
            results.append((h, rid))
        h.run()
        assert together == (h.scheduler.metrics.num_retracted_reqs > 0)
        return [h.results[rid].output_ids for h, rid in results]

    alone = run(together=False, chunk=-1, size=512)
    assert run(together=True, chunk=8, size=130) == alone
    assert len({tuple(tokens) for tokens in alone}) > 12


def test_same_prompt_with_other_seeds_differs() -> None:
    h = Harness()
    rids = [h.add([5, 6, 7], temperature=1.0, sampling_seed=seed, ignore_eos=True) for seed in (1, 2, 1, None)]
    h.run()
    first, second, again, _ = (h.results[rid].output_ids for rid in rids)
    assert first == again != second


def test_logprobs_are_of_the_changed_logits() -> None:
    """Penalised, biased and tempered; a token that can't come has a finite value."""
    h = Harness()
    rid = h.add(
        [5, 6, 7], 6, temperature=0.5, sampling_seed=3, min_new_tokens=6, presence_penalty=1.5, logit_bias={"9": 4.0},
        return_logprob=True, logprob_start_len=3, top_logprobs_num=2, token_ids_logprob=[EOS, 9],
    )  # fmt: skip
    h.run()
    got = h.results[rid]
    for position, (value, token) in enumerate(got.output_token_logprobs):
        before = got.output_ids[:position]
        logits = logits_of([5, 6, 7, *before])
        logits[EOS] = -torch.inf
        logits[list(set(before))] -= 1.5
        logits[9] += 4.0
        logprobs = (logits / 0.5).log_softmax(-1)
        assert token == got.output_ids[position]
        assert value == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert got.output_top_logprobs[position][0][0] == pytest.approx(float(logprobs.max()), abs=1e-4)
        (impossible, _), (biased, _) = got.output_token_ids_logprobs[position]
        assert impossible == torch.finfo(torch.float32).min
        assert biased == pytest.approx(float(logprobs[9]), abs=1e-4)
    assert len(got.output_ids) == 6


def test_ranks_penalise_the_same_tokens() -> None:
    """Only rank 0 draws; the log-probabilities, which every rank computes, show what each has counted."""
    groups = thread_groups(2)

    def run(rank: int) -> list[object]:
        h = Harness(chunk=8)
        h.runner.tp = groups[rank]  # type: ignore[attr-defined]
        options = {"temperature": 1.0, "ignore_eos": True, "return_logprob": True, "logprob_start_len": 20}
        rids = [h.add(list(range(2, 22)), 12, presence_penalty=2.0, **options), h.add([9] * 20, 9, **options)]
        h.run()
        return [h.results[rid].output_token_logprobs for rid in rids]

    first, second = on_every_rank(2, run)
    assert first == second


def test_no_token_is_left_before_min_new_tokens() -> None:
    h = Harness()
    every = h.add([5, 6, 7], stop_token_ids=tuple(range(VOCAB)), min_new_tokens=2)
    mate = h.add([5, 6, 7], 4, ignore_eos=True)
    h.run()
    reason = h.results[every].finish_reason
    assert reason is not None and (reason["type"], reason["status_code"]) == ("abort", 400)
    assert (
        "After 0 tokens every one that could come next is a stop token, which min_new_tokens (2)" in reason["message"]
    )
    assert h.results[mate].finish_reason == {"type": "length", "length": 4}
