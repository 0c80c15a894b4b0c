"""Prompts in graphs that are broken at the attention, recorded on a CPU: its recorder keeps memory as a GPU's does, so
what is read after it was given away shows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.kernels import cpu_extension
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.attention.base_attn_backend import Rotary
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.cpu_graph import CpuGraphCapture
from sglang.srt.model_executor.device_graph import Cut, DeviceGraph, borrowed
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.prefill_cuda_graph_runner import (
    PrefillGraphRunner,
    captured_tokens,
    why_no_prefill_graphs,
)
from sglang.srt.server_args import ServerArgs
from step_harness import Stepper, make_runner, random_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
W4A16, NVFP4 = FIXTURES / "tiny-llama-modelopt-w4a16", FIXTURES / "tiny-llama-modelopt-nvfp4"
SIZES = (4, 8, 24)
needs_kernels = pytest.mark.skipif(
    (reason := cpu_extension.unavailable()) is not None, reason=f"our kernels for CPUs: {reason}"
)


def make(folder: Path = W4A16, sizes: tuple[int, ...] = SIZES, **args: Any) -> ModelRunner:
    """A runner on the CPU whose steps without a decode graph are recorded as a GPU's are."""
    runner = make_runner(folder, disable_cuda_graph=True, **args)
    pools = runner.req_to_token_pool, runner.token_to_kv_pool
    runner.prefill_graphs = PrefillGraphRunner(runner.model.model, CpuGraphCapture(), *pools, sizes)
    runner.prefill_graphs.record_all(show_progress=False)
    return runner


def eager(folder: Path = W4A16, **args: Any) -> ModelRunner:
    return make_runner(folder, disable_cuda_graph=True, **args)


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(length, 320, seed=seed)


# ------------------------------------------------------------------------------------------------------------- steps
@needs_kernels
@pytest.mark.parametrize(
    ("folder", "args"),
    [
        (W4A16, {}),
        (W4A16, {"dtype": "bfloat16", "page_size": 4}),
        (NVFP4, {}),
        (FIXTURES / "tiny-llama-modelopt-nvfp4-kvfp8", {"page_size": 16}),
    ],
)
def test_a_replayed_prompt_has_the_bits_of_the_prompt(folder: Path, args: dict[str, Any]) -> None:
    """One and several requests, first and later parts of prompts, every number of tokens up to the largest and more;
    between them decode steps, which take these graphs where there are none of their own."""
    graphs, steps = Stepper(make(folder, **args)), Stepper(eager(folder, **args))
    for buffer in (*buffers_of(graphs.runner), *buffers_of(steps.runner)):
        buffer.view(torch.uint8).zero_()
    turns: list[dict[int, list[int]]] = [
        {0: prompt(24, 1)},
        {1: prompt(3, 2), 2: prompt(7, 3)},
        {0: [5], 1: [6], 2: [7]},
        {1: prompt(4, 4)},
        {2: prompt(1, 5), 3: prompt(8, 6), 0: prompt(2, 7)},
        {4: prompt(25, 8)},
        {4: prompt(23, 9), 5: prompt(1, 10)},
        {4: [1], 0: [2]},
    ]
    for turn, tokens in enumerate(turns):
        (output, batch), (wanted, _) = graphs.step(tokens), steps.step(tokens)
        assert torch.equal(output.next_token_logits, wanted.next_token_logits), turn
        for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(batch, name).fill_(1 << 40)  # nobody looks at it again
    for mine, theirs in zip(buffers_of(graphs.runner), buffers_of(steps.runner), strict=True):
        same = torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert same, "the same keys and values are in the same slots, and in no other"


def buffers_of(runner: ModelRunner) -> list[torch.Tensor]:
    pool = runner.token_to_kv_pool
    return [*pool._k, *pool._v]


@needs_kernels
def test_log_probabilities_of_prompt_tokens() -> None:
    graphs, steps = Stepper(make()), Stepper(eager())
    tokens = {0: prompt(9, 1), 1: prompt(6, 2)}
    wanted_tokens = [[3, 4, 5], [6]]
    found, expected = (
        one.step(tokens, logprob_starts=[2, 4], logprob_targets=wanted_tokens, tops=[2, 0])[0].input_logprobs
        for one in (graphs, steps)
    )
    assert found is not None and expected is not None and found.lists() == expected.lists()


@needs_kernels
def test_what_is_replayed_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next larger size, pieces in order, and nothing above the largest."""
    runner = make()
    assert runner.prefill_graphs is not None
    replayed: list[tuple[int, int]] = []

    class Watched:
        def __init__(self, graph: DeviceGraph, size: int, index: int) -> None:
            self.graph, self.at = graph, (size, index)

        def replay(self) -> None:
            replayed.append(self.at)
            self.graph.replay()

    for size, step in runner.prefill_graphs._steps.items():
        step.pieces[:] = [Watched(piece, size, index) for index, piece in enumerate(step.pieces)]
    stepper = Stepper(runner)
    for length, size in ((1, 4), (4, 4), (5, 8), (9, 24), (24, 24), (25, None)):
        replayed.clear()
        stepper.step({0: prompt(length, length)}, logprob_starts=[0], logprob_targets=[[]])
        assert replayed == ([] if size is None else [(size, index) for index in range(3)])


@needs_kernels
def test_a_recording_keeps_no_memory_of_its_own() -> None:
    """All sizes lie in what the largest needs, and of that nothing but the result is in use when it is recorded."""
    capture = CpuGraphCapture()
    arena = capture._arena
    runner = eager(max_total_tokens=1024, context_len=1024)
    pools = runner.req_to_token_pool, runner.token_to_kv_pool
    graphs = PrefillGraphRunner(runner.model.model, capture, *pools, [16, 512, 1024])
    graphs.record(1024)
    largest = arena.nbytes
    free = sum(end - begin for _, begin, end in arena._free)
    assert largest - free == graphs._steps[1024].hidden_states.nbytes
    graphs.record(512)
    graphs.record(16)
    assert arena.nbytes == largest


@needs_kernels
def test_attention_gets_the_real_rows_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(NVFP4)
    seen: list[tuple[int, int, int, ForwardBatch]] = []
    forward = type(runner.attn_backend).forward

    def watch(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, rotary: Rotary, out: Any) -> torch.Tensor:
        assert len(q) == len(k) == len(v) == len(rotary[0]) == len(rotary[1]) == len(out)
        seen.append((layer.layer_id, len(q), q.data_ptr(), batch))
        return forward(self, q, k, v, layer, batch, rotary, out)

    monkeypatch.setattr(type(runner.attn_backend), "forward", watch)
    _, batch = Stepper(runner).step({0: prompt(6, 1), 3: prompt(5, 2)})
    assert [(layer, rows) for layer, rows, _, _ in seen] == [(0, 11), (1, 11)]
    assert all(one is batch for *_, one in seen)


# ------------------------------------------------------------------------------------------------------------- pieces
@needs_kernels
def test_pieces_of_a_recording() -> None:
    """Each does its part, as often as it is replayed, and a failed recording leaves the recorder as it was."""
    operators = model_runner.capture_for(torch.device("cpu"))
    from sglang.srt.layers.cpu_operators import CpuOperators

    table = torch.arange(12.0).view(4, 3)
    ids = torch.tensor([0, 1])

    def run(cut: Cut) -> torch.Tensor:
        first = CpuOperators().embedding(ids, table, torch.float32)
        kept.append(borrowed(first))
        cut()
        return CpuOperators().embedding(ids, table, torch.float32)

    kept: list[torch.Tensor] = []
    (one, two), result = operators.in_pieces(run)
    ids.copy_(torch.tensor([3, 2]))
    one.replay()
    assert torch.equal(kept[-1], table[[3, 2]])
    ids.copy_(torch.tensor([1, 1]))
    two.replay()
    assert torch.equal(result, table[[1, 1]]) and torch.equal(kept[-1], table[[3, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_borrowed_tensor_is_the_same_memory(dtype: torch.dtype) -> None:
    whole = torch.arange(60).view(5, 12).to(dtype)
    for part in (whole, whole[1:4, 2:7], whole.t(), whole[2:3].unflatten(1, (3, 4))[:, 1:]):
        loan = borrowed(part)
        assert loan.shape == part.shape and loan.stride() == part.stride() and loan.data_ptr() == part.data_ptr()
        assert torch.equal(loan.float(), part.float())
        assert loan.untyped_storage()._cdata != part.untyped_storage()._cdata
    borrowed(whole[1:2]).copy_(whole[0:1])
    assert torch.equal(whole[1].float(), whole[0].float())


# -------------------------------------------------------------------------------------------------------------- sizes
def sizes_of(most: int = 2048, **args: Any) -> list[int]:
    return captured_tokens(ServerArgs(model_path="m", **args), most)


def test_sizes() -> None:
    usual = sizes_of()
    assert usual[:6] == [16, 32, 48, 64, 96, 128] and usual[-5:] == [512, 640, 768, 896, 1024]
    assert usual == sorted(set(usual)) and all(b - a <= max(16, a / 2) for a, b in pairwise(usual))
    assert all(size % 128 == 0 for size in usual if size > 512), "as many rows as cuBLAS computes anyway"
    assert sizes_of(most=100) == [16, 32, 48, 64, 96, 100]
    assert sizes_of(cuda_graph_max_bs_prefill=40) == [16, 32, 40]
    assert sizes_of(cuda_graph_max_bs_prefill=5) == [5]
    assert sizes_of(cuda_graph_max_bs_prefill=4096)[-5:] == [1024, 1280, 1536, 1792, 2048]
    assert sizes_of(cuda_graph_bs_prefill=(700, 30, 30, 5000)) == [30, 700, 2048]


class Linear:
    def __init__(self, rows_share_a_scale: bool) -> None:
        self.rows_share_a_scale = rows_share_a_scale


@pytest.mark.parametrize(
    ("args", "device", "shared", "reason"),
    [
        ({}, "cuda", False, None),
        ({"cuda_graph_backend_prefill": "breakable"}, "cuda", False, None),
        ({"disable_cuda_graph": True}, "cuda", False, "--disable-cuda-graph"),
        ({"cuda_graph_backend_prefill": "disabled"}, "cuda", False, "--cuda-graph-backend-prefill disabled"),
        ({}, "cuda", True, "a layer scales its input by the largest value of all rows, so padding would change it"),
        ({}, "cpu", False, "not on a CPU"),
    ],
)
def test_why_there_are_none(args: dict[str, Any], device: str, shared: bool, reason: str | None) -> None:
    linears: Any = [Linear(False), Linear(shared)]
    assert why_no_prefill_graphs(ServerArgs(model_path="m", **args), torch.device(device), linears) == reason


def test_a_model_that_takes_the_place_of_another_has_its_own_answer() -> None:
    runner, other = eager(), eager(FIXTURES / "tiny-llama-bf16", quantization="nvfp4", fp4_gemm_runner_backend="torch")
    runner.device = torch.device("cuda")  # of which nothing is asked
    runner.server_args = ServerArgs(model_path="m")
    assert runner.why_no_prefill_graphs is None
    runner.model = other.model
    assert str(runner.why_no_prefill_graphs).startswith("a layer scales its input by the largest value of all rows")


def test_flags_that_say_nothing_on_a_cpu() -> None:
    with pytest.raises(ArgumentError, match="^--cuda-graph-bs-prefill says nothing on a CPU"):
        make_runner(W4A16, cuda_graph_bs_prefill=[64])
    assert make_runner(W4A16, cuda_graph_backend_prefill="disabled").prefill_graphs is None


def test_a_failed_capture_says_what_to_do() -> None:
    class Failing(CpuGraphCapture):
        def in_pieces(self, run: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    runner = eager()
    pools = runner.req_to_token_pool, runner.token_to_kv_pool
    graphs = PrefillGraphRunner(runner.model.model, Failing(), *pools, SIZES)
    words = (
        "the prefill of 24 tokens could not be captured in a CUDA graph: CUDA out of memory. Tried to allocate 3 "
        "GiB\nIf memory is short, reduce --cuda-graph-max-bs-prefill or --mem-fraction-static; "
        "--cuda-graph-backend-prefill disabled"
    )
    with pytest.raises(StartupError, match=words):
        graphs.record_all(show_progress=False)
