"""Which backend is chosen by measurement, and what multiplies then: fake backends on a clock of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4_fakes import CPU, MAX_ROWS, World, layer_of, make_weight, name_backend, tuned
from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization import fp4_autotune_measure, fp4_autotune_timing, fp4_utils
from sglang.srt.layers.quantization.fp4_autotune import Autotuner, candidates_for
from sglang.srt.layers.quantization.fp4_autotune_measure import NOISE, choose
from sglang.srt.layers.quantization.fp4_utils import (
    Fp4GemmBackend,
    PreparedWeight,
    Target,
    backends,
)
from sglang.srt.layers.quantization.nvfp4_linear import (
    Activation,
    NvFp4Linear,
)


def labels_by_rows(world: World, linear: NvFp4Linear, rows: Sequence[int]) -> dict[int, str]:
    """What multiplies that many rows."""
    result = {}
    for count in rows:
        world.calls.clear()
        y = linear(torch.randn(count, linear.in_features).to(linear.dtype))
        assert y.shape == (count, linear.out_features)
        result[count] = "+".join(label for label, _ in world.calls)
    return result


# ------------------------------------------------------------------------------------------------------- the choice
ROW, COLUMN = ("row", 16, 1, False), ("column", 16, 1, False)
LAYOUTS = {"d": ROW, "e": ROW, "f": COLUMN, "g": COLUMN}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"d": [1, 1, 1]}, ["d", "d", "d"]),
        ({"d": [1, 1, 1], "e": [2, 0.5, 1]}, ["d", "e", "d"]),
        ({"d": [1, 1], "e": [0.98, 0.96]}, ["d", "e"]),  # what differs by less than the noise is a tie
        ({"d": [1, 1], "f": [0.5, 0.5]}, ["f", "f"]),
        ({"d": [1, 1], "f": [0.1, 1.1]}, ["d", "d"]),  # slower somewhere: not for any gain elsewhere
        ({"d": [1, 1], "f": [0.1, 1.1], "g": [3, 1]}, ["f", "g"]),  # ... unless another of its layout is not
        ({"d": [1, 1], "f": [0.98, 0.98]}, ["d", "d"]),  # as fast: not worth another layout
        ({"d": [1, 1], "e": [0.5, 1], "f": [0.9, 0.9]}, ["e", "d"]),  # sums 1.5 and 1.8
        ({"d": [1, 1], "e": [0.9, 1], "f": [0.9, 0.4], "g": [0.5, 0.8]}, ["g", "f"]),
        ({"d": [100, 1], "e": [99, 0.5], "f": [50, 1]}, ["d", "e"]),  # relative to the default, not in seconds
    ],
)
def test_choice(times: dict[str, list[float]], chosen: list[str]) -> None:
    assert choose(times, LAYOUTS, "d") == chosen


TIMES = st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4)


@given(st.dictionaries(st.sampled_from(["e", "f", "g"]), TIMES), TIMES)
def test_the_choice_is_never_slower_and_of_one_layout(others: dict[str, list[float]], default: list[float]) -> None:
    times = {"d": default, **others}
    chosen = choose(times, LAYOUTS, "d")
    assert len({LAYOUTS[label] for label in chosen}) == 1
    assert all(times[label][index] <= default[index] * (1 + NOISE) for index, label in enumerate(chosen))
    in_own_layout = [min(times[label][i] for label in times if LAYOUTS[label] == ROW) for i in range(4)]
    cost = sum(times[label][i] / default[i] for i, label in enumerate(chosen))
    assert cost <= sum(best / of_default for best, of_default in zip(in_own_layout, default, strict=True)) * (1 + NOISE)


# ----------------------------------------------------------------------------------------------- measuring a product
def test_every_number_of_rows_gets_the_fastest(world: World) -> None:
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared", variants=("", "wide"))
    world.add("apart")
    world.seconds |= {"slow": [4e-3] * 5, "quick": [1e-3, 1e-3, 5e-3, 5e-3, 5e-3], "quick/wide": [2e-3] * 4 + [9e-3]}
    world.seconds["apart"] = [1e-4] * 4 + [8e-3]  # best on the whole, but not for 16 rows
    linear = tuned(make_weight())
    assert linear.choices == {"1-2": "quick", "3-8": "quick/wide", "9-": "slow"}
    assert labels_by_rows(world, linear, [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 100]) == {
        0: "",
        **dict.fromkeys([1, 2], "quick"),
        **dict.fromkeys([3, 4, 5, 8], "quick/wide"),
        **dict.fromkeys([9, 16, 17, 100], "slow"),
    }
    assert len(linear.segments) == 1 and len(world.alive()) == 1, "one copy of the weight serves all three"


def test_choices_multiply_exactly(world: World) -> None:
    world.add("slow", priority=9, layout="shared", multiples=(32, 64))
    world.add("quick", layout="shared", multiples=(32, 64))
    world.seconds |= {"slow": [1e-3, 4e-3], "quick": [2e-3]}
    weight = make_weight([40, 24], 48, [0.01, 0.3])
    linear, reference = tuned(weight), NvFp4Linear(weight, backends()["torch"]())
    assert linear.choices == {"1-1": "slow", "2-": "quick"}
    for rows in (1, 3, 20):
        x, bias = torch.randn(rows, 48).bfloat16(), torch.randn(64).bfloat16()
        torch.testing.assert_close(linear(x, bias), reference(x, bias), rtol=0.01, atol=1e-3)
    assert {segment.prepared.backend for segment in linear.segments} == {"slow"}


def test_all_rows_alike_is_one_choice(world: World) -> None:
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    linear = tuned(make_weight())
    assert linear.choices == {"1-": "quick"} and len(linear._by_rows) == 1


def test_the_default_is_timed_again_before_something_replaces_it(world: World) -> None:
    """It goes first, when clocks may still be low or something else may still be running."""
    world.add("default", priority=9)
    world.add("other")
    times = iter([5e-3] * (5 + 25) + [1e-3] * 1000)  # while it is checked and timed first

    class Warming(list):
        def __getitem__(self, index: int) -> float:
            return next(times)

    world.seconds |= {"default": Warming([0.0]), "other": [2e-3]}
    assert tuned(make_weight()).choices == {"1-": "default"}


def test_a_named_backend_competes_with_its_own_variants_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("mine", variants=("", "b"))
    world.add("better")
    world.seconds |= {"mine": [2e-3, 1e-3], "mine/b": [1e-3, 2e-3], "better": [1e-5]}
    name_backend(monkeypatch, "mine")
    assert tuned(make_weight()).choices == {"1-1": "mine/b", "2-": "mine"}
    assert "better" not in world.labels()


def test_auto_asks_every_backend_about_the_layer(world: World) -> None:
    world.add("first", priority=9)
    world.add("unasked", priority=-1)  # never chosen unmeasured
    world.add("small", reason=lambda target: "too wide" if target.in_features > 64 else None)
    target = Target("cpu").for_layer(64, 32, False, torch.bfloat16)
    default = fp4_utils.backend_for_layer(target, "a")
    assert [one.label for one in candidates_for(target, default)] == ["first", "small", "torch", "unasked"]
    wide = replace(target, in_features=128)
    assert "small" not in {one.label for one in candidates_for(wide, default)}


def test_the_arithmetic_of_a_w4a4_layer_is_the_defaults(world: World) -> None:
    world.add("keeper", priority=9, keeps=True)
    world.add("quantiser", priority=5)
    world.add("keeper2", keeps=True)
    w4a4 = Target("cpu").for_layer(64, 32, False, torch.bfloat16)
    keeper, quantiser = backends()["keeper"](), backends()["quantiser"]()

    def labels(target: Target, default: Fp4GemmBackend) -> list[str]:
        return [one.label for one in candidates_for(target, default)]

    assert labels(w4a4, keeper) == ["keeper", "keeper2"]
    assert labels(w4a4, quantiser) == ["quantiser", "torch"]
    weight_only = replace(w4a4, weight_only=True)
    assert labels(weight_only, keeper) == ["keeper", "quantiser", "keeper2", "torch"]


def test_what_keeps_activations_is_held_against_the_weight_only_product(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.add("keeper", priority=9, keeps=True)
    world.add("keeper2", keeps=True)
    world.add("quantises_after_all", keeps=True)
    world.seconds |= {"keeper": [2e-3], "keeper2": [1e-3], "quantises_after_all": [0.1e-3]}
    backends()["quantises_after_all"].prepare = backends()["torch"].prepare  # type: ignore[method-assign]
    backends()["quantises_after_all"].apply = quantised  # type: ignore[assignment, method-assign]
    for activation in (Activation.STATIC, Activation.DYNAMIC):
        assert tuned(make_weight(activation=activation)).choices == {"1-": "keeper2"}
        assert "quantises_after_all is not used: with N=32" in caplog.text
        assert "keeper2 is not used" not in caplog.text


def quantised(
    backend: Fp4GemmBackend, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """W4A4 as ``torch`` computes it, by a backend that says it does not."""
    torch_backend = backends()["torch"]()
    return torch_backend.apply(x, replace(weight, backend="torch"), bias)


def test_one_candidate_is_checked_and_not_timed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("only")
    name_backend(monkeypatch, "only")
    assert tuned(make_weight()).choices == {"1-": "only"}
    assert world.calls == [("only", rows) for rows in (16, 8, 4, 2, 1)]


def test_a_hopeless_candidate_is_timed_once(world: World) -> None:
    world.add("default", priority=9)
    world.add("hopeless")
    world.add("close")
    world.seconds |= {"default": [1e-3], "hopeless": [2.5e-3], "close": [1.5e-3]}
    tuned(make_weight())
    count = {label: sum(called == (label, 4) for called in world.calls) for label in world.labels()}
    assert count["hopeless"] == 1 + 1  # checked, timed
    assert count["close"] > 3 and count["default"] > 3


def test_one_layout_at_a_time_is_in_memory(world: World) -> None:
    for priority, name in enumerate(("c", "b", "a")):
        world.add(name, priority=priority + 1, variants=("", "x"))
    world.seconds |= {"a": [4e-3], "a/x": [5e-3], "b": [3e-3], "b/x": [3e-3], "c": [2e-3], "c/x": [1e-3]}
    seen: set[frozenset[str]] = set()

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.add(frozenset(prepared.backend for prepared in world.alive()))
        assert len(world.alive()) <= 2
        return y

    world.faults = dict.fromkeys(["a", "b", "c", "a/x", "b/x", "c/x"], look)
    linear = tuned(make_weight())
    assert linear.choices == {"1-": "c/x"}
    assert seen == {frozenset("a"), frozenset("b"), frozenset("c")}
    assert len(world.alive()) == 1


def test_fused_parts(world: World) -> None:
    """A backend that takes a scale per column competes with one that needs two products for it."""
    world.add("joined", priority=9, per_column=True)
    world.add("apart")
    world.seconds |= {"joined": [3e-3], "apart": [2e-3]}
    unequal, equal = make_weight([32, 16], 64, [0.01, 0.02]), make_weight([32, 16], 64, [0.01, 0.01])
    assert unequal.product == "N=48 K=64 static bfloat16 joined=48 apart=32+16"
    assert equal.product == "N=48 K=64 static bfloat16"
    assert tuned(unequal).choices == {"1-": "joined"}
    assert tuned(equal).choices == {"1-": "apart"}
    pre = torch.ones(2, 64)
    pre[1] = 2
    assert replace(equal, pre_quant_scale=pre).product.endswith("joined=32+16 apart=32+16")
    assert replace(equal, pre_quant_scale=torch.ones(2, 64)).product == equal.product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("pre", [False, True])
def test_right_backends_are_found_right(
    world: World, activation: Activation, dtype: torch.dtype, pre: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.add("default", priority=9)
    world.add("other")
    world.seconds |= {"default": [1e-3], "other": [0.5e-3]}
    weight = make_weight([40, 8], 80, [1e-4, 2.0], activation, dtype)
    if pre:
        weight = replace(weight, pre_quant_scale=torch.rand(2, 80).mul(4).add(0.25))
    assert tuned(weight).choices == {"1-": "other"}
    assert "not used" not in caplog.text


# --------------------------------------------------------------------------------------------------- wrong backends
def no_file(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image")


def last_column(y: torch.Tensor) -> torch.Tensor:
    y[:, -4:] = 0
    return y


def one_row(y: torch.Tensor) -> torch.Tensor:
    y[-1:] = float("nan")
    return y


FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "zeros": (torch.zeros_like, "wrong by 100.0%"),
    "NaN": (lambda y: y * float("nan"), "holds NaN or infinity"),
    "one row NaN": (one_row, "holds NaN or infinity"),
    "factor": (lambda y: y * 1.02, "wrong by 2.0%"),
    "shape": (lambda y: y[:, :-1], "raised RuntimeError: shape"),
    "dtype": (lambda y: y.float(), "is torch.float32"),
    "some columns": (last_column, "is wrong by"),
    "raises": (no_file, "raised RuntimeError: no kernel image"),
    "only many rows": (lambda y: y * 0 if len(y) == 16 else y, "for 16 rows"),
    "only one row": (lambda y: y * 0 if len(y) == 1 else y, "for 1 rows"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_wrong_candidate_is_dropped_and_named(world: World, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    world.add("default", priority=9, layout="shared")
    world.add("broken", layout="shared")
    world.add("third", layout="shared")
    world.seconds |= {"default": [1e-3], "broken": [1e-5], "third": [0.5e-3]}
    world.faults["broken"], words = FAULTS[fault]
    tuner = Autotuner("on", CPU, MAX_ROWS)
    with tuner.active(measure=True):
        assert layer_of(make_weight()).nvfp4.choices == {"1-": "third"}
        calls = [label for label, _ in world.calls].count("broken")
        assert layer_of(make_weight(columns=128)).nvfp4.choices == {"1-": "third"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "once, not for every product"
    assert "broken is not used" in warnings[0] and words in warnings[0] and "verify_fp4" in warnings[0]
    assert [label for label, _ in world.calls].count("broken") == calls, "it is not tried again"


def test_auto_falls_back_where_its_default_is_wrong(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.add("default", priority=9)
    world.add("second", priority=5)
    world.seconds |= {"default": [1e-5], "second": [1e-3], "torch": [1e-3]}
    world.faults["default"] = torch.zeros_like
    with Autotuner("on", CPU, MAX_ROWS).active(measure=True):
        chosen = layer_of(make_weight()).nvfp4.choices["1-"]
    assert chosen in ("second", "torch")
    assert "default is not used" in caplog.text
    # A later start knows it too, for products that were not measured as well.
    assert "default" not in tuned(make_weight(columns=256), "cached").choices.values()


def test_a_named_backend_that_is_wrong_ends_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("mine", variants=("", "b"))
    world.faults["mine"] = torch.zeros_like
    name_backend(monkeypatch, "mine")
    words = r"layer a \(N=32 K=64 static .*\): --fp4-gemm-backend mine can't be used: .*wrong by 100.*verify_fp4.*auto"
    with pytest.raises(StartupError, match=words):
        tuned(make_weight())
    world.faults = {"mine/b": torch.zeros_like}
    world.seconds |= {"mine/b": [1e-5]}
    assert tuned(make_weight()).choices == {"1-": "mine"}


def test_no_right_backend_at_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("default", priority=9)
    world.faults["default"] = no_file
    monkeypatch.setattr(backends()["torch"], "apply", lambda self, x, weight, bias: x.new_zeros(len(x), 32))
    with pytest.raises(
        StartupError, match="every FP4 GEMM backend fails here: default: it raised .*; torch: .*wrong by"
    ):
        tuned(make_weight())


def test_a_failed_capture_ends_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves torch's random numbers and allocator unusable: such a process must not serve."""

    def fails(calls: object, *arguments: object) -> tuple[float, str]:
        raise fp4_autotune_timing.CaptureError("it can't be captured in a CUDA graph: operation not permitted")

    world.add("default", priority=9)
    monkeypatch.setattr(fp4_autotune_measure, "seconds_per_call", fails)
    with pytest.raises(StartupError, match="backend default: .*captured.*can't go on. .*--fp4-gemm-autotune off"):
        tuned(make_weight())


def test_too_little_memory_to_measure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def no_memory(y: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    world.add("default", priority=9)
    world.add("large")
    world.faults["large"] = no_memory
    with Autotuner("on", CPU, MAX_ROWS).active(measure=True):
        layers = [layer_of(make_weight()) for _ in range(3)]
    assert [layer.nvfp4.choices for layer in layers] == [{"1-": "default"}] * 3
    assert caplog.text.count("not enough memory to measure N=32 K=64 static bfloat16") == 1
    assert [label for label, _ in world.calls].count("large") == 1
