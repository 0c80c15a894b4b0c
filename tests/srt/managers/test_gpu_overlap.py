"""The scheduler's overlap on a GPU: what it gives, and that no launch waits."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_model
import pytest
import torch
from fake_model import FakeModelRunner, Harness
from test_scheduler_overlap import KINDS, ShapesOnly
from test_scheduler_stress import live

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-llama-bf16"


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU, as far as torch knows of it, is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Watched:
    """Chooses and launches steps without waiting, once the first ones have loaded and allocated everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warm_up: int) -> None:
        self.watched: list[ScheduleBatch] = []
        choose, run, seen = Scheduler._choose_batch, Scheduler.run_batch, []

        def choose_batch(scheduler: Scheduler) -> ScheduleBatch | None:
            if len(seen) < warm_up:
                return choose(scheduler)
            with no_waiting():
                return choose(scheduler)

        def run_batch(scheduler: Scheduler, batch: ScheduleBatch) -> Any:
            seen.append(batch)
            # How a backend of the attention plans a prompt is its own affair.
            if len(seen) <= warm_up or not (
                batch.forward_mode.is_decode() or isinstance(scheduler.model_runner, ShapesOnly)
            ):
                return run(scheduler, batch)
            self.watched.append(batch)
            with no_waiting():
                return run(scheduler, batch)

        monkeypatch.setattr(Scheduler, "_choose_batch", choose_batch)
        monkeypatch.setattr(Scheduler, "run_batch", run_batch)


class RunnerOnGpu(FakeModelRunner):
    on = "cuda"


@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_what_it_gets_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_model, "FakeModelRunner", RunnerOnGpu)
    monkeypatch.setattr(fake_model, "OVERLAP", True)
    live(seed, monkeypatch).check_results()


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_step_waits(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, pieces of them, joins, leaves, retractions and everything that sampling can do."""
    rng = random.Random(4)
    monkeypatch.setattr(ShapesOnly, "on", "cuda")
    monkeypatch.setattr(fake_model, "FakeModelRunner", ShapesOnly)
    monkeypatch.setattr(fake_model, "OVERLAP", True)
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 0)
    watch = Watched(monkeypatch, warm_up=20)
    h = Harness(size=112, page_size=page_size, chunk=16, rows=6)
    for i in range(56):
        h.add([2 + i % 3] * rng.randint(1, 40), max_new_tokens=rng.randint(1, 30), **KINDS[i % len(KINDS)])
        h.step()
    while h.step():
        pass
    assert len(watch.watched) > 100 and h.scheduler.metrics.num_retracted_reqs > 3


@pytest.mark.parametrize("graphs", [True, False])
def test_no_decode_step_of_a_model_waits(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(
        model_path=str(MODEL), device="cuda", dtype="float16", max_total_tokens=2048, max_running_requests=8,
        random_seed=1, disable_cuda_graph=not graphs,
    )  # fmt: skip
    config = ModelConfig.from_server_args(args)
    runner = ModelRunner(args, config)
    if runner.attn_backend.name == "torch_native":
        pytest.skip("torch_native asks the GPU for the rows of its requests: FlashInfer can't be had here")
    watch = Watched(monkeypatch, warm_up=12)
    outputs = []
    for overlap in (True, False):
        channel = fake_model.FakeChannel()
        scheduler = Scheduler(args, config, runner, channel)
        assert scheduler.enable_overlap
        scheduler.enable_overlap = overlap
        for i in range(6):
            params = SamplingParams(max_new_tokens=40, ignore_eos=True, **{"temperature": 0.0, **KINDS[i]})
            channel.inbox.append(
                TokenizedGenerateReqInput(rid=str(i), input_ids=list(range(3 + i, 30)), sampling_params=params)
            )
        while scheduler.step():
            pass
        ids: dict[str, list[int]] = {}
        for message in channel.sent:
            for out in getattr(message, "outputs", ()):
                ids.setdefault(out.rid, []).extend(out.output_ids)
        assert [len(ids[str(i)]) for i in range(6)] == [40] * 6
        outputs.append([ids[str(i)] for i in (0, 3, 5)])  # those that need no noise of the device
    assert outputs[0] == outputs[1]
    assert len(watch.watched) > 50
