"""How long a call takes, and whether it is right, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fp4_fakes import make_weight
from sglang.srt.layers.quantization import fp4_autotune_timing as timing
from sglang.srt.layers.quantization.fp4_autotune_timing import Probe, copies_needed, seconds_per_call
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear, NvFp4Weight

CPU = torch.device("cpu")


class Calls:
    """Calls that take the given seconds, one after the other, the last one for ever; ``made`` says which were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float], count: int = 1) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.made: list[int] = []
        self.calls: list[Callable[[], None]] = [lambda index=index: self.call(index) for index in range(count)]
        monkeypatch.setattr(timing, "clock", lambda: self.now)

    def call(self, index: int) -> None:
        self.now += self.seconds[min(len(self.made), len(self.seconds) - 1)]
        self.made.append(index)


def test_the_median_counts_and_copies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [9e-3, 1e-3, 2e-3, 1e-3, 9e-3, 2e-3, 2e-3], count=3)
    monkeypatch.setattr(timing, "MAX_SAMPLES", 7)
    assert seconds_per_call(calls.calls, CPU) == (pytest.approx(2e-3), "clock")
    assert calls.made == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("seconds", "give_up", "samples"),
    [
        (1e-4, float("inf"), timing.MAX_SAMPLES),
        (0.02, float("inf"), 3),
        (0.1, float("inf"), 3),
        (0.6, float("inf"), 2),
        (3.0, float("inf"), 1),
        (1e-4, 0.9e-4, 1),
        (1e-4, 1.1e-4, timing.MAX_SAMPLES),
    ],
)
def test_how_often(seconds: float, give_up: float, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [seconds])
    assert seconds_per_call(calls.calls, CPU, give_up)[0] == pytest.approx(seconds)
    assert len(calls.made) == samples


def test_copies_exceed_the_cache_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_cache_bytes", lambda device: 50 << 20)
    assert copies_needed(9 << 20, CPU) == 12  # 108 MB for a cache of 50
    assert copies_needed(1 << 30, CPU) == 1
    assert copies_needed(1000, CPU) == copies_needed(0, CPU) == timing.MAX_COPIES
    monkeypatch.setattr(timing, "_cache_bytes", lambda device: 10 << 30)
    assert copies_needed(64 << 20, CPU) == 1 + timing.MAX_COLD_BYTES // (64 << 20)
    monkeypatch.undo()
    assert timing._cache_bytes(CPU) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", list(Activation))
def test_rows_repeat_and_any_number_of_them_has_the_same_scale(activation: Activation, dtype: torch.dtype) -> None:
    pre = torch.rand(2, 64).mul(4).add(0.25)
    weight = replace(make_weight([32, 16], 64, [0.01, 3.0], activation, dtype), pre_quant_scale=pre)
    probe = Probe.make(weight, 200)
    assert probe.x.shape == (200, 64) and probe.x.dtype == dtype and probe.exact.y.isfinite().all()
    linear = NvFp4Linear(weight, backends()["torch"]())
    for rows in (1, 2, 64, 65, 200):
        assert probe.problem(linear(probe.x[:rows])) is None
    assert torch.equal(probe.x[:64], probe.x[64:128])
    quantised = Probe.make(make_weight([48], 64, [0.01], activation, dtype), 4)
    if activation is Activation.STATIC:  # the whole range of the static scale is used, and nothing is clipped
        assert float(quantised.x.abs().max()) == pytest.approx(0.7, rel=0.01)


def test_float16_results_stay_finite() -> None:
    weight = make_weight([48], 64, [1e4], Activation.NONE, torch.float16)
    probe = Probe.make(weight, 8)
    y = NvFp4Linear(weight, backends()["torch"]())(probe.x)
    assert y.isfinite().all() and probe.problem(y) is None


def test_an_all_zero_weight_has_a_right_result() -> None:
    weight = make_weight([32], 64, [0.01])
    weight = replace(weight, packed=torch.zeros_like(weight.packed))
    probe = Probe.make(weight, 8)
    zero = torch.zeros(8, 32, dtype=torch.bfloat16)
    assert probe.problem(zero) is None
    assert probe.problem(zero + 1e-3) is not None


def test_a_part_cannot_hide_behind_a_larger_one() -> None:
    weight = make_weight([64, 16], 64, [1.0, 1e-6])
    probe = Probe.make(weight, 128)
    y = NvFp4Linear(weight, backends()["torch"]())(probe.x)
    assert probe.problem(y) is None
    y[:, 64:] *= 1.1
    assert "for 128 rows is wrong by" in str(probe.problem(y))


def test_wrong_scales_and_wrong_last_rows_are_found() -> None:
    def result(weight: NvFp4Weight) -> torch.Tensor:
        return NvFp4Linear(weight, backends()["torch"]())(probe.x)

    weight = make_weight([96], 128, [0.01])
    probe = Probe.make(weight, 130)
    assert probe.problem(result(weight)) is None
    assert probe.problem(result(replace(weight, scale=weight.scale.roll(1, 0)))) is not None
    assert probe.problem(result(replace(weight, packed=weight.packed.roll(1, 1)))) is not None
    y = result(weight)
    y[129] = 0  # behind the last whole period
    assert probe.problem(y) is not None
