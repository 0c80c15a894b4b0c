"""Every quantised fixture over ``/generate``: log-probabilities of its prompts, computed in float64 from its bytes."""

from pathlib import Path

import pytest
import torch
from launched_server import FIXTURES, Server, launched
from safetensors.torch import load_file

EXPECTED = load_file(FIXTURES / "expected.safetensors")
W4A16 = ("--quantization", "w4a16_nvfp4")
# fixture, set of expected logits, arguments, prompts that float32 must reproduce to 1e-3 (1e-4 weight-only). Prompt 2
# of some has a value on a rounding boundary, where two correct implementations differ.
CASES = [
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a4", (), (0, 1, 2)),
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a16", W4A16, (0, 1, 2)),
    ("modelopt-w4a16", "modelopt-nvfp4.w4a16", (), (0, 1, 2)),
    ("modelopt-mixed", "modelopt-mixed.as_configured", (), (0, 1)),
    ("modelopt-nvfp4-kvfp8", "modelopt-nvfp4-kvfp8.w4a16", W4A16, (0, 1)),
    ("ct-nvfp4", "ct-nvfp4.w4a4", (), (0, 1)),
    ("ct-nvfp4", "ct-nvfp4.w4a16", W4A16, (0, 1, 2)),
    ("ct-nvfp4a16", "ct-nvfp4.w4a16", (), (0, 1, 2)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "expected", "arguments", "tight"), CASES, ids=[f"{c[1]}-{c[0]}" for c in CASES])
def test_log_probabilities(
    name: str, expected: str, arguments: tuple[str, ...], tight: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    with launched(FIXTURES / f"tiny-llama-{name}", tmp_path, "--dtype", dtype, *arguments) as server:
        check_log_probabilities(server, expected, dtype, tight)


def check_log_probabilities(server: Server, expected: str, dtype: str, tight: tuple[int, ...]) -> None:
    weight_only = expected.endswith("w4a16")
    for index in range(3):
        ids = EXPECTED[f"prompt{index}"]
        reply = server.generate(
            input_ids=ids.tolist(),
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=5,
        )
        log_probs = torch.log_softmax(EXPECTED[f"{expected}.prompt{index}"].double(), dim=-1)
        wanted = log_probs[:-1].gather(1, ids[1:, None])[:, 0]
        meta = reply["meta_info"]
        pairs = meta["input_token_logprobs"]
        assert pairs[0][0] is None and [pair[1] for pair in pairs] == ids.tolist()
        got = torch.tensor([pair[0] for pair in pairs[1:]], dtype=torch.float64)
        difference = (got - wanted).abs()
        top = torch.tensor([[entry[0] for entry in row] for row in meta["input_top_logprobs"][1:]])
        top_difference = (top - log_probs[:-1].topk(5).values).abs()
        if dtype == "float32" and index in tight:
            bound = 1e-4 if weight_only else 1e-3
            assert difference.max() < bound and top_difference.max() < bound
            token = reply["output_ids"][0]
            assert token == int(log_probs[-1].argmax())
            assert abs(meta["output_token_logprobs"][0][0] - float(log_probs[-1, token])) < bound
        elif weight_only:
            assert difference.max() < 0.4 and difference.square().mean().sqrt() < 0.05
        else:  # says only that nothing is grossly wrong; single linears hold W4A4 tightly
            assert difference.square().mean().sqrt() < 0.4
