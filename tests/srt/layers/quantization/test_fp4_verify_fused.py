"""What ``verify_fp4`` finds wrong with steps that are computed together with a product, each with one fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4_fakes import make_weight
from sglang.srt.layers.fusion import SUMMED, AddRMSNorm, Rows, SiluAndMul, Step, Then, UnscaledRows
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, backends
from sglang.srt.layers.quantization.fp4_verify import Layer, exact_product, random_layers
from sglang.srt.layers.quantization.fp4_verify_fused import check_fused
from sglang.srt.layers.quantization.fp4_verify_run import Verification
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear

TORCH = backends()["torch"]
COLUMNS = 64


class Fusing:
    """What computes with ``backend`` all that can be fused, with one ``fault``."""

    def __init__(
        self, backend: Fp4GemmBackend, fault: str, steps: tuple[Step, ...] = (UnscaledRows, SiluAndMul, AddRMSNorm)
    ) -> None:
        self.backend, self.fault, self.steps = backend, fault, steps

    def fuses(self, weight: PreparedWeight, step: Step, rows: int) -> bool:
        return step in self.steps

    def apply_fused(self, x: Rows, weight: PreparedWeight, bias: torch.Tensor | None, then: Then) -> Rows:
        fault = self.fault
        if isinstance(x, UnscaledRows):
            y = self.backend.apply(x.values, weight, None).float()
            rms = (x.squares.sum(-1, keepdim=True) / (x.squares.shape[1] * SUMMED) + x.eps).sqrt()
            rms = {"no division": 1, "another row's division": rms.roll(1, 0), "squared": rms**2}.get(fault, rms)
            y = y / rms
            y = (y if bias is None or fault == "no bias behind the division" else y + bias).to(x.values.dtype)
        else:
            y = self.backend.apply(x, weight, bias)
        if isinstance(then, SiluAndMul):
            first, second = y.chunk(2, dim=1)
            if fault == "halves swapped":
                first, second = second, first
            gated = F.silu(first.float()).to(y.dtype) * (first if fault == "one half" else second)
            if fault == "one gate":
                gated[-1, -1] *= 1.1
            if fault == "truncated":
                gated *= 1 - 2**-6
            if fault == "reordered":
                gated[0, :4] *= 1 + 2**-6
            if fault == "wrong gate of what is divided" and isinstance(x, UnscaledRows):
                gated = gated * 2
            if fault == "nan":
                gated[0, 1] = torch.nan
            return gated[:, :-1] if fault == "too few gates" else gated
        if isinstance(then, AddRMSNorm):
            total = y + then.residual
            if fault == "wrong sum of what is divided" and isinstance(x, UnscaledRows):
                total = total * 2
            if fault != "the residual stays":
                then.residual.copy_(y if fault == "no residual" else total)
            values = total if fault == "no weight" else total * then.weight
            squares = (values if fault == "squares behind the weight" else total).float().square()
            sums = squares.unflatten(1, (-1, SUMMED)).sum(-1)
            if fault == "a sum's neighbour":
                sums = sums.roll(1, 1)
            return UnscaledRows(values, sums, then.eps)
        return y


def verdict(fault: str, rows: int = 7, **args: Any) -> str:
    weight = make_weight([COLUMNS // 2] * 2, 64, [0.01, 0.02], activation=Activation.NONE)
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((rows, 64), (COLUMNS,)))
    backend: Any = TORCH()
    fusing = Fusing(backend, fault, **args)
    backend.fuses, backend.apply_fused = fusing.fuses, fusing.apply_fused
    limit = exact_product(Layer("", weight, bias, on_grid=False), x).limit
    return check_fused(NvFp4Linear(weight, backend), x, bias, limit)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_right_steps_pass(rows: int) -> None:
    assert verdict("", rows) == "ok"
    assert verdict("nan", rows, steps=()) == "ok", "nothing to judge"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no division", "a product that is divided by the norm of its input: "),
        ("another row's division", "a product that is divided by the norm of its input: "),
        ("squared", "a product that is divided by the norm of its input: "),
        ("no bias behind the division", "a product that is divided by the norm of its input: "),
        ("halves swapped", "the gate: "),
        ("one half", "the gate: "),
        ("one gate", "the gate: 1 of 224 are wrong; [6, 31] is"),
        ("nan", "the gate: 1 of 224 are wrong; [0, 1] is nan, exactly"),
        ("truncated", "the gate: "),
        ("too few gates", "the gate has 31 columns, not 32"),
        ("the residual stays", "the sum with the residual is not the product's"),
        ("no residual", "the sum with the residual is not the product's"),
        ("no weight", "the sum times the norm's weight is wrong"),
        ("squares behind the weight", "the squares of the sum: "),
        ("a sum's neighbour", "the squares of the sum: "),
    ],
)
def test_faults(fault: str, words: str) -> None:
    assert verdict(fault).startswith(words)


def test_few_gates_may_be_of_a_product_in_another_order() -> None:
    assert verdict("reordered", 16) == "ok"
    assert verdict("reordered", 7) == "the gate: 4 of 224 are not rounded"


def test_a_fault_of_both_together() -> None:
    """Right by itself, wrong where the input is not divided yet."""
    found = verdict("wrong gate of what is divided")
    assert found.startswith("the gate of an input that is not divided: ")
    found = verdict("wrong sum of what is divided")
    assert found == "the sum with the residual of an input that is not divided is not the product's"


def test_the_verdict_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify_fp4`` says it in the row of the product."""
    monkeypatch.setattr(TORCH, "fuses", lambda *_: True)
    monkeypatch.setattr(TORCH, "apply_fused", Fusing(TORCH(), "no weight").apply_fused)
    device = torch.device("cpu")
    verification = Verification(device, ["torch"], 0)
    *_, layer = random_layers(64, 64, torch.bfloat16, torch.Generator().manual_seed(0))
    verification.run(layer, [0, 7], lambda text: None)
    empty, row = verification.rows
    assert empty.ok and row.verdict == "the sum times the norm's weight is wrong" and row.error is not None
    assert row.microseconds is None
