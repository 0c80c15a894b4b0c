"""Quantised fixtures over ``/generate``: log-probabilities of their prompts, computed in float64 from their bytes. One
of each kind; ``srt/models/test_fixture_logits.py`` has all, without a server."""

from pathlib import Path

import pytest
import torch
from launched_server import Server, launched

from fixture_logprobs import CASES, EXPECTED, FIXTURES, IDS, TOP, Found, check_log_probabilities

SERVED = [
    ("modelopt-nvfp4.w4a4-modelopt-nvfp4", "float32"),
    ("modelopt-nvfp4-kvfp8.w4a16-modelopt-nvfp4-kvfp8", "bfloat16"),
    ("ct-nvfp4.w4a16-ct-nvfp4a16", "float32"),
]


def flags(arguments: dict[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(("case", "dtype"), SERVED)
def test_log_probabilities(case: str, dtype: str, tmp_path: Path) -> None:
    name, expected, arguments, tight = CASES[IDS.index(case)]
    with launched(FIXTURES / f"tiny-llama-{name}", tmp_path, "--dtype", dtype, *flags(arguments)) as server:
        check_prompts(server, expected, dtype, tight)


def check_prompts(server: Server, expected: str, dtype: str, tight: tuple[int, ...]) -> None:
    """All three of them."""
    for index in range(3):
        ids = EXPECTED[f"prompt{index}"]
        reply = server.generate(
            input_ids=ids.tolist(),
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=TOP,
        )
        meta = reply["meta_info"]
        pairs = meta["input_token_logprobs"]
        assert pairs[0][0] is None and [pair[1] for pair in pairs] == ids.tolist()
        found = Found(
            values=torch.tensor([pair[0] for pair in pairs[1:]], dtype=torch.float64),
            top=torch.tensor([[entry[0] for entry in row] for row in meta["input_top_logprobs"][1:]]),
            token=reply["output_ids"][0],
            logprob=meta["output_token_logprobs"][0][0],
        )
        check_log_probabilities(found, expected, index, dtype, tight)
