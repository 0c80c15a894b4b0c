"""Every quantised fixture through the loader, its layers, the cache and the logits processor."""

from pathlib import Path

import pytest
import torch

from fixture_logprobs import CASES, EXPECTED, FIXTURES, IDS, TOP, Found, check_log_probabilities
from step_harness import Stepper, make_runner


def found_by(folder: Path, **arguments: str) -> list[Found]:
    """Of the three prompts, together in one batch."""
    prompts: list[list[int]] = [EXPECTED[f"prompt{index}"].tolist() for index in range(3)]
    runner = make_runner(folder, context_len=512, max_total_tokens=1024, **arguments)
    output, _ = Stepper(runner).step(
        dict(enumerate(prompts)),
        logprob_starts=[0] * 3,
        logprob_targets=[ids[1:] for ids in prompts],
        tops=[TOP] * 3,
    )
    assert output.input_logprobs is not None
    found = []
    for rows, logits in zip(output.input_logprobs.lists(), output.next_token_logits, strict=True):
        values = torch.tensor([value for value, _, _ in rows], dtype=torch.float64)
        top = torch.tensor([[value for value, _ in best] for _, best, _ in rows], dtype=torch.float64)
        log_probs = logits.log_softmax(-1)
        token = int(log_probs.argmax())
        found.append(Found(values, top, token, float(log_probs[token])))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "expected", "arguments", "tight"), CASES, ids=IDS)
def test_log_probabilities(
    name: str, expected: str, arguments: dict[str, str], tight: tuple[int, ...], dtype: str
) -> None:
    for index, found in enumerate(found_by(FIXTURES / f"tiny-llama-{name}", dtype=dtype, **arguments)):
        check_log_probabilities(found, expected, index, dtype, tight)
