"""Modes of the autotuner, later starts, ranks and warm-up: fake backends on a clock of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4_fakes import CPU, MAX_ROWS, World, layer_of, make_weight, name_backend, tuned
from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization import fp4_autotune_measure
from sglang.srt.layers.quantization.fp4_autotune import Autotuner
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear, linears_of, warm_up_fp4_gemm
from thread_ranks import on_every_rank, thread_groups


def test_a_product_is_measured_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    with Autotuner("on", CPU, MAX_ROWS).active(measure=True):
        first = layer_of(make_weight()).nvfp4
        calls = len(world.calls)
        second = layer_of(make_weight(seed=1)).nvfp4
        assert len(world.calls) == calls
        layer_of(make_weight(columns=128))
        assert len(world.calls) > calls
    assert first.choices == second.choices == {"1-": "quick"}
    assert "2 products measured in" in caplog.text


@pytest.mark.parametrize("mode", ["on", "cached"])
def test_a_later_start_uses_what_was_measured(world: World, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [1e-3, 2e-3], "quick": [2e-3, 1e-3]}
    assert tuned(make_weight()).choices == {"1-": "slow"}
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    assert tuned(make_weight(columns=128)).choices == {"1-": "quick"}
    world.calls.clear()
    caplog.clear()
    world.seconds |= {"slow": [1e-3], "quick": [2e-3]}  # it would come out otherwise
    tuner = Autotuner(mode, CPU, MAX_ROWS)
    with tuner.active(measure=True):
        assert layer_of(make_weight(columns=128)).nvfp4.choices == {"1-": "quick"}
    assert not world.calls
    assert "1 products as measured before (" in caplog.text and ".json" in caplog.text


def test_cached_never_measures_and_off_does_not_even_read(world: World, tmp_path: Path) -> None:
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    for mode in ("cached", "off"):
        assert tuned(make_weight(), mode).choices == {"1-": "slow"}
    assert not world.calls and not (tmp_path / "fp4_autotune").exists()
    assert tuned(make_weight()).choices == {"1-": "quick"}
    assert tuned(make_weight(), "cached").choices == {"1-": "quick"}
    assert tuned(make_weight(), "off").choices == {"1-": "slow"}
    assert tuned(make_weight(columns=128), "cached").choices == {"1-": "slow"}


def test_a_file_that_covers_fewer_rows_is_not_enough(world: World) -> None:
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3] * 3 + [3e-3] * 3}

    def start(mode: str, rows: int) -> dict[str, str]:
        with Autotuner(mode, CPU, rows).active(measure=True):
            return layer_of(make_weight()).nvfp4.choices

    assert start("on", 4) == start("cached", 4) == {"1-": "quick"}
    assert start("cached", 32) == {"1-": "slow"}, "nobody knows what is faster for 32 rows"
    assert start("on", 32) == start("cached", 32) == {"1-4": "quick", "5-": "slow"}
    assert start("cached", 8) == {"1-4": "quick", "5-": "slow"}
    assert start("cached", 3) == {"1-": "quick"}


def test_what_raised_is_tried_again_by_a_later_start(world: World) -> None:
    world.add("default", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"default": [1e-3], "quick": [1e-4]}

    def no_network(y: torch.Tensor) -> torch.Tensor:
        raise OSError("download failed")

    def start(mode: str) -> list[dict[str, str]]:
        with Autotuner(mode, CPU, MAX_ROWS).active(measure=True):
            return [layer_of(make_weight(columns=columns)).nvfp4.choices for columns in (64, 128)]

    world.faults["quick"] = no_network
    assert start("on") == start("on") == [{"1-": "default"}] * 2
    del world.faults["quick"]
    assert start("cached") == [{"1-": "default"}] * 2
    assert start("on") == start("cached") == [{"1-": "quick"}] * 2
    world.faults["quick"] = no_network
    assert start("on") == [{"1-": "quick"}] * 2, "known, and not measured again"


def test_more_rows_than_any_measured(world: World) -> None:
    assert Autotuner("on", CPU, 1).rows == [1]
    assert Autotuner("on", CPU, 5).rows == [1, 2, 4, 8]
    assert Autotuner("on", CPU, 10**6).rows[-1] == 8192


def test_weights_that_replace_others_are_not_measured(world: World) -> None:
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    tuner = Autotuner("on", CPU, MAX_ROWS)
    with tuner.active(measure=True):
        layer_of(make_weight())
    world.calls.clear()
    with tuner.active(measure=False):
        assert layer_of(make_weight(seed=1)).nvfp4.choices == {"1-": "quick"}
        assert layer_of(make_weight(columns=128)).nvfp4.choices == {"1-": "slow"}
    assert not world.calls


def test_outside_of_a_tuner_nothing_changes(world: World) -> None:
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    tuner = Autotuner("on", CPU, MAX_ROWS)
    with pytest.raises(KeyError), tuner.active(measure=True):
        layer_of(make_weight())
        raise KeyError
    assert layer_of(make_weight()).nvfp4.choices == {"1-": "slow"}


def test_libraries_below_tune_while_a_candidate_is_checked(world: World, tmp_path: Path) -> None:
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    tuned(make_weight())
    (file,) = (tmp_path / "fp4_autotune").glob("*.json")
    assert world.tuned == [("slow", file, True), ("quick", file, True), ("quick", file, False)]
    world.tuned.clear()
    tuned(make_weight(), "cached")
    assert world.tuned == [("quick", file, False)]


def test_a_folder_that_cannot_be_written(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "fp4_autotune").write_text("in the way")
    world.add("slow", priority=9)
    world.add("quick")
    world.seconds |= {"slow": [2e-3], "quick": [1e-3]}
    with Autotuner("on", CPU, MAX_ROWS).active(measure=True):
        for columns in (64, 128):
            assert layer_of(make_weight(columns=columns)).nvfp4.choices == {"1-": "quick"}
    assert caplog.text.count("measurements can't be kept in") == 1
    assert all(cache is None for _, cache, measure in world.tuned if measure)
    assert tuned(make_weight(), "cached").choices == {"1-": "slow"}


# -------------------------------------------------------------------------------------------------------------- ranks
def test_ranks_take_what_rank_0_has_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"slow": [1e-3, 2e-3], "quick": [2e-3, 1e-3]}
    groups = thread_groups(3)
    calls: list[int] = []

    def load(rank: int) -> list[dict[str, str]]:
        with Autotuner("on", CPU, MAX_ROWS, groups[rank]).active(measure=True):
            layers = [layer_of(make_weight(), groups[rank])]
            # An input that the ranks share, and a head of which the last rank has fewer rows.
            layers += [layer_of(make_weight(activation=Activation.DYNAMIC), groups[rank], sharded=True)]
            layers += [layer_of(make_weight([16 if rank == 2 else 32]), groups[rank])]
            layers += [layer_of(make_weight(columns=128), groups[rank])]
        calls.append(len(world.calls))
        return [layer.nvfp4.choices for layer in layers]

    first, *others = on_every_rank(3, load)
    assert first == others[0] == others[1] == [{"1-1": "slow", "2-": "quick"}] * 4
    assert calls == [calls[0]] * 3  # all that was multiplied, rank 0 did
    world.calls.clear()

    def later(rank: int) -> dict[str, str]:
        with Autotuner("cached", CPU, MAX_ROWS, groups[rank]).active(measure=True):
            return layer_of(make_weight(), groups[rank]).nvfp4.choices

    assert on_every_rank(3, later) == [{"1-1": "slow", "2-": "quick"}] * 3
    assert not world.calls


def test_a_failure_on_rank_0_reaches_every_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("mine")
    world.faults["mine"] = torch.zeros_like
    name_backend(monkeypatch, "mine")
    groups = thread_groups(2)

    def load(rank: int) -> str:
        with pytest.raises(StartupError) as caught, Autotuner("on", CPU, MAX_ROWS, groups[rank]).active(measure=True):
            layer_of(make_weight(), groups[rank])
        return str(caught.value)

    first, second = on_every_rank(2, load)
    assert first == second and "mine can't be used" in first

    def explode(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(fp4_autotune_measure.Probe, "make", explode)
    world.faults.clear()

    def crash(rank: int) -> str:
        with pytest.raises(Exception) as caught, Autotuner("on", CPU, MAX_ROWS, groups[rank]).active(measure=True):
            layer_of(make_weight(), groups[rank])
        return type(caught.value).__name__

    assert on_every_rank(2, crash) == ["ZeroDivisionError", "StartupError"]


def test_ranks_agree_about_what_is_dropped(world: World) -> None:
    world.add("default", priority=9)
    world.add("second", priority=5)
    world.seconds |= {"default": [1e-5], "second": [1e-4]}
    world.faults["default"] = torch.zeros_like
    groups = thread_groups(2)

    def load(rank: int) -> list[dict[str, str]]:
        tuner = Autotuner("on", CPU, MAX_ROWS, groups[rank])
        with tuner.active(measure=True):
            layer_of(make_weight(), groups[rank])
        with tuner.active(measure=False):
            return [layer_of(make_weight(columns=128), groups[rank]).nvfp4.choices]

    assert on_every_rank(2, load) == [[{"1-": "second"}]] * 2


# ------------------------------------------------------------------------------------------------------------ warm-up
def test_warm_up_runs_every_distinct_product_for_every_size(world: World) -> None:
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"slow": [1e-3] * 4 + [2e-3], "quick": [2e-3] * 4 + [1e-3]}
    model = nn.Sequential()
    with Autotuner("on", CPU, MAX_ROWS).active(measure=True):
        for index, columns in enumerate((64, 128, 64)):
            model.append(layer_of(make_weight(columns=columns, seed=index)))
    assert [linear.product for linear in linears_of(model)][::2] == [make_weight().product] * 2
    world.calls.clear()
    assert warm_up_fp4_gemm(linears_of(model), [1, 7, 24, 7]) == 2
    assert world.calls == [("quick", 24), ("slow", 7), ("slow", 1)] * 2


def test_the_choice_depends_on_the_shape_only(world: World) -> None:
    """So a compiled or captured call holds one choice."""
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"slow": [1e-3, 2e-3], "quick": [2e-3, 1e-3]}
    linear = tuned(make_weight())
    for x in (torch.zeros(3, 64), torch.full((3, 64), float("nan")), torch.randn(1, 3, 64)):
        world.calls.clear()
        linear(x.bfloat16())
        assert world.calls == [("quick", 3)]


def test_layouts_that_differ_cannot_share(world: World) -> None:
    world.add("row")
    world.add("column", layout="other")
    world.add("padded", layout="row", multiples=(32, 1))
    world.add("joined", layout="row", per_column=True)
    row = backends()["row"]()
    for other in ("column", "padded", "joined", "torch"):
        with pytest.raises(ValueError, match=f"row and {other} have different layouts"):
            NvFp4Linear(make_weight(), row, backends()[other]())
