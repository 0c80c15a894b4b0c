"""``--fp4-gemm-autotune`` of a whole model: fake backends on a clock of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4_fakes import World
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.layers.quantization import fp4_autotune_timing, fp4_utils
from sglang.srt.layers.quantization.nvfp4_linear import linears_of
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from thread_ranks import on_every_rank, thread_groups

FIXTURES = Path(__file__).parents[2] / "fixtures"
W4A4, W4A16 = FIXTURES / "tiny-llama-modelopt-nvfp4", FIXTURES / "tiny-llama-modelopt-w4a16"
QUICK = {"1-4": "slow", "5-": "quick"}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    world = World()
    world.time_torch(monkeypatch)
    world.add("slow", priority=9, layout="shared")
    world.add("quick", layout="shared")
    world.seconds |= {"slow": [1e-3] * 3 + [5e-3], "quick": [2e-3]}
    monkeypatch.setattr(fp4_autotune_timing, "clock", world.clock)
    monkeypatch.setattr(fp4_autotune_timing, "MAX_COPIES", 1)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    yield world
    world.remove_all()


def make(mode: str, folder: Path = W4A4, tp: TensorParallelGroup = SINGLE, **arguments: Any) -> ModelRunner:
    given = {"device": "cpu", "dtype": "float32", "max_total_tokens": 64, "chunked_prefill_size": 32, **arguments}
    args = ServerArgs.from_kwargs(model_path=str(folder), random_seed=0, fp4_gemm_autotune=mode, **given)
    return ModelRunner(args, ModelConfig.from_server_args(args), tp)


def choices(runner: ModelRunner) -> set[str]:
    return {str(linear.choices) for linear in linears_of(runner.model)}


def test_a_model_is_tuned_and_starts_tuned_from_then_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    first = make("on")
    assert choices(first) == {str(QUICK)}
    assert {label for label, _ in world.calls} == {"slow", "quick"}
    assert max(rows for _, rows in world.calls) == 32
    assert "4 products measured in" in caplog.text
    assert "layer model.layers.1.mlp.down_proj (N=256 K=512 static float32): " + str(QUICK) in caplog.text
    world.calls.clear()
    assert choices(make("cached")) == choices(make("on")) == {str(QUICK)}
    assert not world.calls, "nothing was measured again"
    assert choices(make("off")) == {str({"1-": "slow"})}


def test_the_state_of_the_server_shows_the_choices(world: World) -> None:
    runner = make("on")
    scheduler: Any = SimpleNamespace(model_runner=runner)
    for name in ("max_total_num_tokens", "max_running_requests", "waiting_queue", "pools"):
        setattr(scheduler, name, [])
    scheduler.metrics = SimpleNamespace(token_usage=lambda: 0, last_gen_throughput=0, num_retracted_reqs=0)
    scheduler.pools = SimpleNamespace(num_active_reqs=lambda: 0)
    state = Scheduler.get_internal_state(scheduler)
    assert state["fp4_gemm_choices"] == {
        f"N={rows} K={columns} static float32": QUICK
        for rows, columns in ((512, 256), (256, 256), (1024, 256), (256, 512))
    }


def test_new_weights_use_the_table_and_measure_nothing(world: World) -> None:
    runner = make("on")
    world.calls.clear()
    assert runner.update_weights_from_disk(str(W4A4), "auto")[0]
    assert choices(runner) == {str(QUICK)}
    assert runner.update_weights_from_disk(str(W4A16), "auto")[0]
    assert choices(runner) == {str({"1-": "slow"})}, "these products have not been measured"
    assert not world.calls
    assert runner.update_weights_from_disk(str(W4A4), "auto")[0]
    assert choices(runner) == {str(QUICK)}


def test_how_many_rows_are_measured(world: World) -> None:
    assert make("off", max_running_requests=2).fp4_autotuner.rows[-1] == 32
    assert make("off", max_running_requests=100).fp4_autotuner.rows[-1] == 128
    assert make("off", chunked_prefill_size=-1).fp4_autotuner.rows[-1] == 8192


def test_a_gpu_is_warmed_up_after_loading(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is nothing to compile."""
    make("off")
    assert not world.calls

    class Gpu:
        """Looks like a GPU to the runner only."""

        type = "cuda"

    cpu = torch.device("cpu")
    warmed: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(
        model_runner, "warm_up_fp4_gemm", lambda linears, rows, **_: warmed.append((len(linears), list(rows)))
    )
    build = ModelRunner._build_model

    def build_on_cpu(self: ModelRunner, *arguments: Any) -> Any:
        self.device = cpu
        model = build(self, *arguments)
        self.device = Gpu()  # type: ignore[assignment]
        return model

    def stop(device: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "_build_model", build_on_cpu)
    monkeypatch.setattr(model_runner, "release_unused_memory", stop)
    with pytest.raises(KeyboardInterrupt):
        make("off")
    assert warmed == [(8, [1, 2, 4, 8, 16, 32])]


def test_ranks_of_a_model_agree(world: World) -> None:
    groups = thread_groups(2)
    previous = torch.get_default_dtype()
    try:
        runners = on_every_rank(2, lambda rank: make("on", tp=groups[rank], tp_size=2))
    finally:
        torch.set_default_dtype(previous)
    first, second = ({linear.product: linear.choices for linear in linears_of(one.model)} for one in runners)
    assert first == second and set(map(str, first.values())) == {str(QUICK)}
    assert "N=256 K=128 static float32" in first
