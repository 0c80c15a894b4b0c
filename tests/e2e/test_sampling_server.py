"""Sampling parameters of a served real model: the texts of transformers' ``generate`` with its own processors, for
requests that run together and ask for different things."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_server import Server, launched
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

NEW = 14
PROMPTS = [
    "1, 1, 1, 1, 1, 1,",
    "A rose is a rose is a rose is",
    "Yes.",
    "The capital of France is",
    "Once upon a time",
]
PARAMS: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.1, "repetition_penalty": 1.3},
    {"min_new_tokens": 12},
    {"repetition_penalty": 0.9, "frequency_penalty": -0.2, "logit_bias": {"28": 4.0, "253": -100.0}},
    {},
]


class CountPenalties(LogitsProcessor):
    """OpenAI's and vLLM's: minus frequency times count, minus presence, of the generated tokens."""

    def __init__(self, frequency: float, presence: float, prompt_len: int) -> None:
        self.frequency, self.presence, self.prompt_len = frequency, presence, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token] -= self.frequency * count + self.presence
        return scores


@pytest.fixture(scope="module")
def server(demo_bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sampling")
    arguments = ("--dtype", "float32", "--max-total-tokens", "4000", "--chunked-prefill-size", "8")
    with launched(demo_bf16_dir, folder, *arguments) as running:
        yield running


def reference(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        length, processors = ids.shape[1], LogitsProcessorList()
        if minimum := params.get("min_new_tokens"):
            stop = model.generation_config.eos_token_id
            processors.append(MinNewTokensLengthLogitsProcessor(length, minimum, stop, device="cpu"))
        processors.append(
            CountPenalties(params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0), length)
        )
        if scale := params.get("repetition_penalty"):
            processors.append(RepetitionPenaltyLogitsProcessor(scale, prompt_ignore_length=length))
        if bias := params.get("logit_bias"):
            processors.append(SequenceBiasLogitsProcessor({(int(token),): value for token, value in bias.items()}))
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW, logits_processor=processors)
        texts.append(out[0, length:].tolist())
    return texts


def test_greedy_texts_are_those_of_transformers(server: Server, demo_bf16_dir: Path) -> None:
    params = [{"temperature": 0, "max_new_tokens": NEW, **one} for one in PARAMS]
    together = server.generate(text=PROMPTS, sampling_params=params)
    assert [out["output_ids"] for out in together] == reference(demo_bf16_dir)
    plain = server.generate(text=PROMPTS, sampling_params={"temperature": 0, "max_new_tokens": NEW})
    differing = [a["output_ids"] != b["output_ids"] for a, b in zip(together, plain, strict=True)]
    assert differing == [params != {} for params in PARAMS]


def test_seed(server: Server) -> None:
    """Alone, in a batch, and as the samples of one request."""
    params = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True}
    *others, prompt = PROMPTS
    alone = server.generate(text=prompt, sampling_params=params)["output_ids"]
    mates = [{"temperature": 1.0, "max_new_tokens": 7 + i} for i in range(len(others))]
    among = server.generate(text=[*others, prompt], sampling_params=[*mates, params])[-1]["output_ids"]
    samples = server.generate(text=prompt, sampling_params={**params, "n": 3})
    assert alone == among == samples[0]["output_ids"]
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3
    sixth = server.generate(text=prompt, sampling_params={**params, "sampling_seed": 6})["output_ids"]
    assert sixth == samples[1]["output_ids"]
