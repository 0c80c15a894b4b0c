"""Every quantised fixture: log-probabilities of its prompts, computed in float64 from its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = load_file(FIXTURES / "expected.safetensors")
W4A16 = {"quantization": "w4a16_nvfp4"}
TOP = 5
# fixture, set of expected logits, arguments, prompts that float32 must reproduce to 1e-3 (1e-4 weight-only). Prompt 2
# of some has a value on a rounding boundary, where two correct implementations differ.
CASES: list[tuple[str, str, dict[str, str], tuple[int, ...]]] = [
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a4", {}, (0, 1, 2)),
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a16", W4A16, (0, 1, 2)),
    ("modelopt-w4a16", "modelopt-nvfp4.w4a16", {}, (0, 1, 2)),
    ("modelopt-mixed", "modelopt-mixed.as_configured", {}, (0, 1)),
    ("modelopt-nvfp4-kvfp8", "modelopt-nvfp4-kvfp8.w4a16", W4A16, (0, 1)),
    ("ct-nvfp4", "ct-nvfp4.w4a4", {}, (0, 1)),
    ("ct-nvfp4", "ct-nvfp4.w4a16", W4A16, (0, 1, 2)),
    ("ct-nvfp4a16", "ct-nvfp4.w4a16", {}, (0, 1, 2)),
]
IDS = [f"{case[1]}-{case[0]}" for case in CASES]


@dataclass(frozen=True)
class Found:
    """Of a prompt of T tokens: log-probabilities of all but the first one [T - 1], the five largest at each [T - 1, 5],
    the greedy next token and its log-probability."""

    values: torch.Tensor
    top: torch.Tensor
    token: int
    logprob: float


def check_log_probabilities(found: Found, expected: str, index: int, dtype: str, tight: tuple[int, ...]) -> None:
    """``found`` is what prompt ``index`` must give with the logits ``expected``, as well as ``dtype`` can."""
    weight_only = expected.endswith("w4a16")
    ids = EXPECTED[f"prompt{index}"]
    log_probs = torch.log_softmax(EXPECTED[f"{expected}.prompt{index}"].double(), dim=-1)
    difference = (found.values - log_probs[:-1].gather(1, ids[1:, None])[:, 0]).abs()
    if dtype == "float32" and index in tight:
        bound = 1e-4 if weight_only else 1e-3
        assert difference.max() < bound
        assert (found.top - log_probs[:-1].topk(TOP).values).abs().max() < bound
        assert found.token == int(log_probs[-1].argmax())
        assert abs(found.logprob - float(log_probs[-1, found.token])) < bound
    elif weight_only:
        assert difference.max() < 0.4 and difference.square().mean().sqrt() < 0.05
    else:  # says only that nothing is grossly wrong; single linears hold W4A4 tightly
        assert difference.square().mean().sqrt() < 0.4
