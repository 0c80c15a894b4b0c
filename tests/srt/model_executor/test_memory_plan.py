"""What is measured of the largest steps, and the arithmetic that follows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.errors import StartupError
from sglang.srt.model_executor import memory_plan
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from sglang.srt.model_executor.memory_plan import GB, MemoryPlan, measure_graphs, measure_largest_steps
from sglang.srt.model_executor.model_runner import ModelRunner
from step_harness import make_runner

FIXTURES = Path(__file__).parents[2] / "fixtures"


# ------------------------------------------------------------------------------------------------------- arithmetic
def plan(total: float = 140, available: float = 130, activations: float = 3, graphs: float = 2) -> MemoryPlan:
    return MemoryPlan(*(int(part * GB) for part in (total, available, activations, graphs)))


def test_without_a_flag_all_but_a_margin() -> None:
    assert plan().room == 125 * GB
    assert plan().budget(None) == 125 * GB - int(140 * GB * 0.02)
    assert plan(total=24, available=18).budget(None) == 12 * GB, "never less than a gigabyte stays free"


def test_a_fraction_is_of_the_whole_device(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's meaning: weights and KV cache together get 0.9 of 140, and 10 are in use."""
    assert plan().budget(0.9) == pytest.approx(116 * GB, abs=1)
    assert plan().budget(0.05) < 0
    assert not caplog.text


def test_a_fraction_never_takes_what_steps_need(caplog: pytest.LogCaptureFixture) -> None:
    assert plan().budget(0.99) == plan().budget(1.0) == 125 * GB
    assert (
        "--mem-fraction-static 0.99 leaves 1.40 GB beside weights and KV cache, but the largest step and CUDA graphs "
        "take 5.00 GB: the KV cache gets 3.60 GB less."
    ) in caplog.text


def test_where_the_memory_goes() -> None:
    assert plan().describe(int(122.2 * GB)) == (
        "weights and libraries 10.00 GB, KV cache 122.20 GB, the largest step 3.00 GB, CUDA graphs 2.00 GB, "
        "free 2.80 GB"
    )


def test_the_pools_get_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers, 2 KV heads of 64, keys and values in bfloat16: 1024 bytes a token; a row for each request and one for
    padding; a page for padding."""
    given = MemoryPlan(8 * GB, 2 * GB, GB // 2, GB // 4)
    monkeypatch.setattr(ModelRunner, "_plan_memory", lambda *_: given)
    args: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": None, "max_running_requests": 4096}
    runner = make_runner(FIXTURES / "tiny-llama-bf16", mem_fraction_static=0.8, disable_cuda_graph=True, **args)
    budget = 2 * GB - int(8 * GB * (1 - 0.8))
    assert runner.max_total_num_tokens == (budget - 4097 * 128 * 4) // 1024 - 1
    used = runner.token_to_kv_pool.get_kv_size_bytes() + runner.req_to_token_pool.req_to_token.nbytes
    assert budget - 1024 < used <= budget


@pytest.mark.parametrize("tokens", [700_000, 800_000])
def test_what_steps_need_is_not_for_the_kv_cache(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-total-tokens may use the margin, but nothing that was measured."""
    monkeypatch.setattr(ModelRunner, "_plan_memory", lambda *_: MemoryPlan(8 * GB, GB, GB // 8, GB // 8))
    args: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": tokens}
    if tokens * 1024 < 0.75 * GB:
        assert make_runner(FIXTURES / "tiny-llama-bf16", **args).max_total_num_tokens == tokens
        return
    words = (
        r"a token takes 1024 bytes, 0.75 GB are available and 0.75 GB may be used, after the weights were loaded and "
        r"0.12 GB kept for the largest step \(--chunked-prefill-size makes it smaller\) and 0.12 GB for CUDA graphs "
        r"\(--cuda-graph-max-bs, --cuda-graph-max-bs-prefill\). Reduce --max-total-tokens"
    )
    with pytest.raises(StartupError, match=words):
        make_runner(FIXTURES / "tiny-llama-bf16", **args)


# -------------------------------------------------------------------------------------------------------- measuring
class Memory:
    """A device on which whatever a test says is in use, until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = GB
        self.cached = 0
        monkeypatch.setattr(memory_plan, "available_memory", lambda device: self.free - self.cached)
        monkeypatch.setattr(memory_plan, "release_unused_memory", lambda device: setattr(self, "cached", 0))


class Watched:
    """A real runner, and the steps that it was asked for."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[ForwardBatch] = []
        self.sampled = 0
        forward, sample = runner.forward, runner.sample

        def watched_forward(batch: ForwardBatch) -> LogitsProcessorOutput:
            self.batches.append(batch)
            return forward(batch)

        def watched_sample(output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
            self.sampled += 1
            return sample(output, batch)

        monkeypatch.setattr(runner, "forward", watched_forward)
        monkeypatch.setattr(runner, "sample", watched_sample)

    @property
    def sizes(self) -> list[tuple[bool, list[int], list[int]]]:
        return [(one.forward_mode.is_decode(), one.seq_lens_list, one.extend_seq_lens) for one in self.batches]


@pytest.mark.parametrize("attention", ["auto", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_largest_steps(attention: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache of 64 tokens, chunks of 32, at most 5 requests: real steps, on pools that hold nothing."""
    runner = make_runner(
        FIXTURES / "tiny-llama-bf16", attention_backend=attention, page_size=page_size, chunked_prefill_size=32,
        max_total_tokens=64, disable_cuda_graph=True,
    )  # fmt: skip
    before = [buffer.clone() for buffer in (*runner.token_to_kv_pool._k, *runner.token_to_kv_pool._v)]
    watched, memory = Watched(runner, monkeypatch), Memory(monkeypatch)
    memory.cached = 300
    assert measure_largest_steps(runner, 5) == 300 and watched.sampled == 3
    assert watched.sizes == [
        (False, [7, 7, 6, 6, 6], [7, 7, 6, 6, 6]),
        (False, [64], [32]),
        (True, [1] * 5, [1] * 5),
    ]
    for batch in watched.batches:
        assert batch.positions.tolist() == [
            position
            for end, new in zip(batch.seq_lens_list, batch.extend_seq_lens, strict=True)
            for position in range(end - new, end)
        ]
        assert not batch.req_pool_indices.any() and not batch.out_cache_loc.any()
        assert batch.sampling_info.groups[0].rows.tolist() == list(range(batch.batch_size))
    after = (*runner.token_to_kv_pool._k, *runner.token_to_kv_pool._v)
    assert all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in zip(before, after, strict=True))


def test_more_requests_than_tokens_and_prompts_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FIXTURES / "tiny-llama-bf16", chunked_prefill_size=4)
    watched = Watched(runner, monkeypatch)
    measure_largest_steps(runner, 6)
    assert watched.sizes == [(False, [1] * 4, [1] * 4), (False, [128], [4]), (True, [1] * 6, [1] * 6)]
    runner = make_runner(FIXTURES / "tiny-llama-bf16", chunked_prefill_size=-1)
    watched = Watched(runner, monkeypatch)
    monkeypatch.setattr(memory_plan, "MAX_PREFILL_TOKENS", 200)
    measure_largest_steps(runner, 1)
    assert watched.sizes[:2] == [(False, [128], [128]), (False, [128], [128])]
    measure_largest_steps(runner, 3)
    assert watched.sizes[3] == (False, [67, 67, 66], [67, 67, 66])


def test_a_context_that_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FIXTURES / "tiny-llama-bf16", chunked_prefill_size=32)
    watched = Watched(runner, monkeypatch)
    monkeypatch.setattr(memory_plan, "available_memory", lambda device: 50 * runner.token_bytes)
    measure_largest_steps(runner, 5)
    assert watched.sizes[1] == (False, [50], [32])
    # Ranks meet in these steps: what counts is the room of the one with the least.
    monkeypatch.setattr(type(runner.tp), "minimum", lambda self, value: min(value, 40 * runner.token_bytes))
    measure_largest_steps(runner, 5)
    assert watched.sizes[4] == (False, [40], [32])


def test_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FIXTURES / "tiny-llama-bf16", chunked_prefill_size=32)
    calls: list[Any] = []

    def forward(batch: ForwardBatch) -> LogitsProcessorOutput:
        calls.append(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB")
        return LogitsProcessorOutput(torch.zeros(batch.batch_size, 320))

    monkeypatch.setattr(runner, "forward", forward)
    words = (
        "not enough memory for a prefill of 32 tokens at the end of a context of 128, with the weights loaded: CUDA "
        "out of memory. Tried to allocate 5 GiB\nReduce --chunked-prefill-size"
    )
    with pytest.raises(StartupError, match=words):
        measure_largest_steps(runner, 5)


def test_graphs_are_estimated_from_the_two_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, recorded = Memory(monkeypatch), []

    def record_all(sizes: list[int], show_progress: bool) -> None:
        recorded.append(sizes)
        memory.cached += 50  # what eager runs leave in the allocator
        memory.free -= {8: 100, 4: 7}[sizes[0]]

    graphs: Any = SimpleNamespace(sizes=[1, 2, 4, 8], record_all=record_all)
    assert measure_graphs(torch.device("cpu"), [graphs]) == 100 + 3 * 7
    assert recorded == [[8], [4]]
    graphs.sizes = [8]
    assert measure_graphs(torch.device("cpu"), [graphs]) == 100
    assert measure_graphs(torch.device("cpu"), [None, None]) == 0
    other: Any = SimpleNamespace(sizes=[4, 8], record_all=record_all)
    assert measure_graphs(torch.device("cpu"), [graphs, None, other]) == 100 + 100 + 7
