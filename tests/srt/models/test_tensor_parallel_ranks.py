"""Whole models on real ranks (processes with gloo between them): the logits of one rank within float32 noise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from gloo_ranks import GlooRanks, collectives
from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax, quantize_nvfp4_weight
from step_harness import Stepper, make_model, make_runner, random_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPECTED = load_file(FIXTURES / "expected.safetensors")
PROMPTS: list[list[int]] = [EXPECTED[f"prompt{index}"][:120].tolist() for index in range(3)]
DECODED = 3  # tokens that are fed one at a time


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooRanks]:
    ranks = GlooRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def logits(tp: TensorParallelGroup, folder: Path, prompts: list[list[int]], arguments: dict[str, Any]) -> list[Any]:
    """float32 logits [length, vocabulary] at every position of each prompt, as numpy arrays."""
    # Replayed steps would not call the hook.
    runner = make_runner(folder, tp, disable_cuda_graph=True, **arguments)
    hidden: list[torch.Tensor] = []
    runner.model.model.register_forward_hook(lambda *call: hidden.append(call[2]))
    stepper = Stepper(runner)
    model = runner.model
    head = model.model.embed_tokens.logits if model.lm_head is None else model.lm_head
    results = []
    for row, prompt in enumerate(prompts):
        hidden.clear()
        stepper.step({row: prompt[:-DECODED]})
        for token in prompt[-DECODED:]:
            stepper.step({row: [token]})
        with torch.inference_mode():
            results.append(head(torch.cat(hidden)).float().numpy())
    return results


def on(ranks: GlooRanks, size: int, folder: Path, prompts: list[list[int]], **arguments: Any) -> list[torch.Tensor]:
    """What all of ``size`` ranks agree about, to the bit."""
    first, *others = ranks.run(size, logits, folder, prompts, arguments)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert (ours == theirs).all()
    return [torch.from_numpy(values) for values in first]


def test_collectives(ranks: GlooRanks) -> None:
    size = 3
    results = ranks.run(size, collectives)
    first = results[0]
    assert all(result == first for result in results)
    base = torch.arange(6).reshape(2, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        assert first[f"sum {dtype}"] == (3 * base + 30).tolist()
        assert first[f"max {dtype}"] == (base + 20).tolist()
        assert first[f"gather {dtype}"] == torch.cat([base[:, :2] + 10 * r for r in range(size)], dim=1).tolist()
        assert first[f"broadcast {dtype}"] == base.tolist()
    assert first["bytes"] == [b"abc", b"", b"x" * 100_000]
    assert first["minimum"] == 8
    assert first["largest"] == torch.tensor([0.0, 1e-45, 0.1 * size, 3e38, torch.inf]).tolist()
    assert first["given up"] is True


W4A16 = {"quantization": "w4a16_nvfp4"}
# fixture, set of expected logits, arguments, bound, prompts in which no value is on a rounding boundary.
FIXTURE_CASES = [
    ("bf16", "bf16.plain", {}, 1e-4, (0, 1, 2)),
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a16", W4A16, 1e-4, (0, 1, 2)),
    ("modelopt-nvfp4", "modelopt-nvfp4.w4a4", {}, 1e-3, (0, 1)),
    ("modelopt-mixed", "modelopt-mixed.as_configured", {}, 1e-3, (0, 1)),
    ("modelopt-nvfp4-kvfp8", "modelopt-nvfp4-kvfp8.w4a16", W4A16, 1e-3, (0, 1)),
    ("ct-nvfp4", "ct-nvfp4.w4a4", {}, 1e-3, (0, 1)),
    ("ct-nvfp4a16", "ct-nvfp4.w4a16", {}, 1e-4, (0, 1, 2)),
]


@pytest.mark.parametrize("size", [2, 4])  # the fixtures have 2 KV heads: with 4 ranks each is held twice
@pytest.mark.parametrize(
    ("name", "expected", "arguments", "bound", "prompts"), FIXTURE_CASES, ids=[case[1] for case in FIXTURE_CASES]
)
def test_fixtures(
    ranks: GlooRanks,
    name: str,
    expected: str,
    arguments: dict[str, Any],
    bound: float,
    prompts: tuple[int, ...],
    size: int,
) -> None:
    results = on(ranks, size, FIXTURES / f"tiny-llama-{name}", [PROMPTS[i] for i in prompts], **arguments)
    for index, values in zip(prompts, results, strict=True):
        reference = EXPECTED[f"{expected}.prompt{index}"][: len(values)]
        torch.testing.assert_close(values, reference, rtol=0, atol=bound)


def quantized(folder: Path, pattern: str, target: Path) -> Path:
    """The checkpoint with the linear layers whose names match stored as ModelOpt NVFP4 and all others as they are."""
    tensors = load_file(folder / "model.safetensors")
    plain = []
    for name in [name.removesuffix(".weight") for name in tensors if re.search(r"(_proj|lm_head)\.weight$", name)]:
        if not re.search(pattern, name):
            plain.append(name)
            continue
        weight = tensors[f"{name}.weight"]
        scale = global_scale_from_amax(float(weight.abs().amax()))
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantize_nvfp4_weight(weight, scale)
        tensors[f"{name}.weight_scale_2"] = scale
        tensors[f"{name}.input_scale"] = torch.tensor(0.002)
    target.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": plain}
    (target / "config.json").write_text(json.dumps(config))
    return target


# architecture, tied head, pattern of quantised layers (None: the bf16 checkpoint), arguments
GENERATED_CASES = {
    "biases and a quantised head": ("qwen2", False, "", {}),
    "biases, weight-only": ("qwen2", False, "", W4A16),
    "a head left alone": ("qwen3", False, "_proj", W4A16),
    "a tied head, parts quantised differently": ("qwen3", True, "(q|gate|o)_proj", W4A16),
    "quantised while loading": ("qwen2", True, None, W4A16),
    "quantised while loading, activations too": ("qwen3", False, None, {"quantization": "nvfp4"}),
}


@pytest.mark.parametrize(
    ("architecture", "tied", "pattern", "arguments"), GENERATED_CASES.values(), ids=list(GENERATED_CASES)
)
def test_generated(
    ranks: GlooRanks, architecture: str, tied: bool, pattern: str | None, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """A vocabulary that 64 does not divide, biases everywhere, norms of heads, one KV head for several ranks."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=321,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path / "plain"
    make_model(config, folder)
    if pattern is not None:
        folder = quantized(folder, pattern, tmp_path / "quantized")
    # Where activations are quantised, a value on a rounding boundary spoils everything behind it: short prompts.
    short = arguments is not W4A16
    prompts = [random_tokens(length, 321, seed=length) for length in ((6, 9) if short else (20, 40))]
    alone = on(ranks, 1, folder, prompts, **arguments)
    assert all(values.std() > 0.5 for values in alone)
    for size in (2, 4):
        for ours, expected in zip(on(ranks, size, folder, prompts, **arguments), alone, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
