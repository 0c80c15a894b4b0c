"""A model whose linear layers take the steps around them, by a method that computes them with torch, equals the model
that takes one step after the other."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from sglang.srt.layers.fusion import SUMMED, Rows, SiluAndMul, Step, Then, UnscaledRows, count_of
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from step_harness import Stepper, make_model, make_runner

LAYERS, MOST_ROWS = 3, 2
TAKEN = ("gate_up_proj unscaled", "gate_up_proj silu", "qkv_proj unscaled", "o_proj add", "down_proj add")


class Method:
    """In the place of :class:`UnquantizedLinearMethod`'s: for few rows, and for layers without ``refused`` in the
    name."""

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.taken: Counter[str] = Counter()

    def fuses(self, layer: nn.Module, step: Step, rows: int) -> bool:
        return rows <= MOST_ROWS and self.refused not in str(layer.prefix)

    def apply_fused(self, layer: nn.Module, x: Rows, bias: torch.Tensor | None = None, then: Then = None) -> Rows:
        assert count_of(x) <= MOST_ROWS and self.refused not in str(layer.prefix)
        name = str(layer.prefix).rpartition(".")[2]
        if isinstance(x, UnscaledRows):
            self.taken[f"{name} unscaled"] += 1
            rms = (x.squares.sum(-1, keepdim=True) / x.values.shape[1] + x.eps).sqrt()
            y = layer.linear(x.values, None) / rms  # type: ignore[operator]
            y = y if bias is None else y + bias
        else:
            y = layer.linear(x, bias)  # type: ignore[operator]
        if isinstance(then, SiluAndMul):
            self.taken[f"{name} silu"] += 1
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate) * up
        if then is None:
            return y
        self.taken[f"{name} add"] += 1
        total = then.residual.add_(y)
        squares = total.square().view(len(total), -1, SUMMED).sum(-1)
        return UnscaledRows(total * then.weight, squares, then.eps)


@pytest.mark.parametrize(
    ("refused", "taken"),
    [
        ("nothing", (3, 3, 2, 3, 2)),
        ("qkv_proj", (3, 3, 0, 3, 0)),
        ("layers.1.mlp.gate_up_proj", (2, 2, 2, 2, 2)),
        ("layers.0.self_attn.o_proj", (2, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_steps_around_products(
    refused: str, taken: tuple[int, ...], bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias, mlp_bias=bias, rms_norm_eps=1e-3, tie_word_embeddings=False,
    )  # fmt: skip
    make_model(config, tmp_path)
    prompt = {0: [5, 17, 3], 1: [9, 4]}
    steps: list[dict[int, list[int]]] = [{0: [8], 1: [2]}, {1: [30]}]

    def logits() -> list[torch.Tensor]:
        stepper = Stepper(make_runner(tmp_path, disable_cuda_graph=True))
        stepper.step(prompt)
        return [stepper.step(tokens)[0].next_token_logits for tokens in steps]

    plain = logits()
    method = Method(refused)
    monkeypatch.setattr(UnquantizedLinearMethod, "fuses", staticmethod(method.fuses))
    monkeypatch.setattr(UnquantizedLinearMethod, "apply_fused", staticmethod(method.apply_fused))
    fused = logits()
    assert tuple(method.taken[name] for name in TAKEN) == tuple(len(steps) * count for count in taken)
    for ours, wanted in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
