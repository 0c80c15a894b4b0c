"""Measuring and warming up on a GPU: CUDA graphs hold what is multiplied, and time it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4_fakes import World, make_weight
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_autotune import Autotuner
from sglang.srt.layers.quantization.fp4_autotune_timing import Probe, seconds_per_call
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.layers.quantization.nvfp4 import install
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear, NvFp4Weight, warm_up_fp4_gemm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

GPU = torch.device("cuda", 0)
SIZES = [1, 5, 64, 130]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    world = World()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    yield world
    world.remove_all()


def on_gpu(weight: NvFp4Weight) -> NvFp4Weight:
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(
        weight, **{name: value.to(GPU) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    )


def install_on_gpu(weight: NvFp4Weight) -> NvFp4Linear:
    layer = nn.Module()
    layer.prefix = "a"
    install(layer, on_gpu(weight))
    return layer.nvfp4


def slow(y: torch.Tensor) -> torch.Tensor:
    for _ in range(500):
        y = y.clone()
    return y


def check_captured(linear: NvFp4Linear) -> None:
    """After a warm-up every size can be captured, and a replay with new input gives the bits of an eager call."""
    assert warm_up_fp4_gemm([linear], SIZES) == 1
    for rows in SIZES:
        x, bias = (torch.randn(*shape, device=GPU).to(linear.dtype) for shape in ((rows, 256), (96,)))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = linear(x, bias)
        for _ in range(2):
            x.normal_()
            graph.replay()
            assert torch.equal(y, linear(x, bias))


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_product_is_the_eager_one(activation: Activation, dtype: torch.dtype) -> None:
    weight = make_weight([64, 32], 256, [0.01, 0.02], activation, dtype)
    check_captured(NvFp4Linear(on_gpu(weight), backends()["torch"]()))


def test_a_product_with_several_choices_is_captured(world: World) -> None:
    first, second = world.add("first", layout="shared"), world.add("second", layout="shared")
    linear = NvFp4Linear(on_gpu(make_weight([96], 256)), first(), first(), second())
    assert linear.choices == {"1-2": "first", "3-": "second"}
    check_captured(linear)
    assert {rows for label, rows in world.calls if label == "second"} == {5, 64, 130}


def test_times_are_of_graphs_where_one_can_be_captured() -> None:
    x, weight = (torch.randn(2048, 2048, device=GPU) for _ in range(2))
    stream = torch.cuda.current_stream()

    def product() -> torch.Tensor:
        return x @ weight

    def waits() -> float:
        return float((x @ weight)[0, 0])

    product()
    seconds, how = seconds_per_call([product], GPU)
    assert how == "graph" and seconds > 0
    seconds, how = seconds_per_call([waits], GPU)
    assert how == "events" and seconds > 0
    # No capture was begun.
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    assert torch.randn(8, device=GPU).isfinite().all()
    assert seconds_per_call([product], GPU)[1] == "graph"


def test_the_probe_is_right_on_a_gpu() -> None:
    for activation in Activation:
        weight = on_gpu(make_weight([64, 32], 256, [0.01, 2.0], activation))
        probe = Probe.make(weight, 100)
        y = NvFp4Linear(weight, backends()["torch"]())(probe.x)
        assert probe.problem(y) is None
        assert probe.problem(y * 1.02) is not None


def test_measuring(world: World, tmp_path: Path) -> None:
    world.add("slow", priority=99)
    world.add("broken", priority=50)
    world.add("waits", priority=40)
    world.faults |= {"slow": slow, "broken": torch.zeros_like, "waits": lambda y: slow(y) + float(y[0, 0]) * 0}
    tuner = Autotuner("on", GPU, 64)
    before = torch.cuda.memory_allocated()
    with tuner.active(measure=True):
        linear = install_on_gpu(make_weight([2048], 4096))
    assert linear.choices == {"1-": "torch"}
    (measurement,) = tuner.products.values()
    assert measurement is not None
    assert measurement.timing == {"slow": "graph", "waits": "events", "torch": "graph"}
    assert measurement.dropped.keys() == {"broken"}
    assert all(value > 0 for values in measurement.microseconds.values() for value in values)
    # One bfloat16 copy of 16 MiB and cuBLAS's workspaces; measured were several.
    assert torch.cuda.memory_allocated() - before < 96 << 20, "nothing of what was measured is kept"
    (file,) = (tmp_path / "fp4_autotune").glob("*.json")
    stamp = json.loads(file.read_text())["stamp"]
    assert stamp["device"].startswith(torch.cuda.get_device_name(GPU)) and stamp["NVIDIA driver"]
    assert stamp["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(GPU))
    world.calls.clear()
    with Autotuner("cached", GPU, 64).active(measure=False):
        assert install_on_gpu(make_weight([2048], 4096, seed=1)).choices == {"1-": "torch"}
    assert not world.calls
