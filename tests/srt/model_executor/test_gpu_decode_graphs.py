"""Captured decode steps and the KV cache's size on a GPU, through a ModelRunner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_runner import FIXTURES, GPU, MB, NEEDS_FLASHINFER, assert_close, make_gpu_runner

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import StartupError
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.model_executor.device_graph import CudaGraphCapture
from sglang.srt.model_executor.memory_plan import LEAST_MARGIN, MARGIN_FRACTION, measure_largest_steps
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import available_memory, release_unused_memory
from sglang.srt.server_args import ServerArgs
from step_harness import Stepper, random_tokens

pytestmark = NEEDS_FLASHINFER


def make(folder: str, **args: Any) -> ModelRunner:
    largest = None if args.get("disable_cuda_graph") else 16
    return make_gpu_runner(folder, **{"max_total_tokens": 2048, "cuda_graph_max_bs": largest, **args})


def slots_of(stepper: Stepper, row: int) -> list[int]:
    return stepper.runner.req_to_token_pool.req_to_token[row, : stepper.lengths[row]].tolist()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("folder", ["tiny-llama-bf16", "tiny-llama-modelopt-w4a16", "tiny-llama-modelopt-nvfp4-kvfp8"])
def test_replayed_steps_are_the_eager_ones(folder: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferAttnBackend, "own_decode_pairs", 8)  # four requests with two KV heads, and no more
    runner, other = make(folder, page_size=page_size), make(folder, page_size=page_size, disable_cuda_graph=True)
    assert runner.decode_graphs is not None and list(runner.decode_graphs.sizes) == [1, 2, 4, 8, 12, 16]
    graphs, steps = Stepper(runner), Stepper(other)
    prompts = {row: random_tokens(3 + 2 * row, 320, seed=row) for row in range(17)}
    assert_close(graphs.step(prompts)[0].next_token_logits, steps.step(prompts)[0].next_token_logits)
    for turn, count in enumerate([*range(1, 18), 3, 1]):
        rows = [(turn + 5 * i) % 17 for i in range(count)]
        tokens = {row: random_tokens(1, 320, seed=100 + turn + row) for row in rows}
        output, batch = graphs.step(tokens)
        assert_close(output.next_token_logits, steps.step(tokens)[0].next_token_logits)
        for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(batch, name).zero_()  # a replay does not look at them again
    used = torch.tensor([slot for row in range(17) for slot in slots_of(graphs, row)], device=GPU)
    assert int(used.min()) >= page_size
    for layer in range(2):
        for name in ("get_key_buffer", "get_value_buffer"):
            mine, theirs = (getattr(one.token_to_kv_pool, name)(layer).float()[used] for one in (runner, other))
            if runner.kv_cache_dtype == torch.float8_e4m3fn:  # the nearest of them may be another one
                assert ((mine - theirs).abs() <= theirs.abs() / 7 + 1e-2).all()
                assert (mine == theirs).float().mean() > 0.95
            else:
                assert_close(mine, theirs)
    assert not runner.req_to_token_pool.req_to_token[-1].any()


def test_padding_writes_to_the_padding_page_only() -> None:
    runner = make("tiny-llama-modelopt-w4a16")
    stepper = Stepper(runner)
    stepper.step({row: random_tokens(5, 320, seed=row) for row in range(5)})
    pool = runner.token_to_kv_pool
    before = [buffer.clone() for buffer in (*pool._k, *pool._v)]
    _, batch = stepper.step({row: [9] for row in range(5)})
    allowed = {0, *batch.out_cache_loc.tolist()}
    for old, new in zip(before, (*pool._k, *pool._v), strict=True):
        changed = (old.view(torch.int16) != new.view(torch.int16)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= allowed and set(changed) >= allowed - {0}


def test_a_replay_gives_the_same_bits_and_waits_for_nothing() -> None:
    runner = make("tiny-llama-modelopt-w4a16")
    stepper = Stepper(runner)
    stepper.step({row: random_tokens(9, 320, seed=row) for row in range(3)})
    output, batch = stepper.step({row: [7] for row in range(3)})
    first = output.next_token_logits.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = runner.forward(batch).next_token_logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.data_ptr() == output.next_token_logits.data_ptr()
    assert torch.equal(again, first)


def test_new_weights_are_captured_anew() -> None:
    """The fixture's W4A16 weights, then its bfloat16 ones."""
    runner, wanted = make("tiny-llama-modelopt-w4a16", context_length=128), make("tiny-llama-bf16", context_length=128)
    used = []
    for _ in range(3):
        assert runner.update_weights_from_disk(str(FIXTURES / "tiny-llama-modelopt-w4a16"), "auto")[0]
        assert runner.update_weights_from_disk(str(FIXTURES / "tiny-llama-bf16"), "auto")[0]
        used.append(available_memory(GPU))
    graphs, steps = Stepper(runner), Stepper(wanted)
    for tokens in ({0: [5, 6, 7], 1: [8, 9]}, {0: [8], 1: [3]}, {0: [9], 1: [1]}):
        assert_close(graphs.step(tokens)[0].next_token_logits, steps.step(tokens)[0].next_token_logits)
    assert used[0] - used[-1] < 64 * MB, "graphs that are not needed any more are freed"


# --------------------------------------------------------------------------------------------------------- capture
def test_results_of_all_sizes_share_memory() -> None:
    """64 MB for the largest; 32 results would be more than a gigabyte."""
    capture = CudaGraphCapture(GPU)
    x = torch.ones(256, 1, device=GPU)
    column = torch.arange(1 << 16, device=GPU, dtype=torch.float32)
    release_unused_memory(GPU)
    before, results = available_memory(GPU), {}
    for size in range(256, 0, -8):
        results[size] = capture(lambda size=size: x[:size] * column)
    release_unused_memory(GPU)
    assert before - available_memory(GPU) < 400 * MB
    for size, value in ((256, 2.0), (8, 3.0), (128, 5.0), (256, 7.0)):
        x.fill_(value)
        graph, result = results[size]
        graph.replay()
        assert torch.equal(result, value * column.expand(size, -1))
        result.zero_()  # as penalties do, in place


def test_a_result_that_is_a_part_of_a_tensor() -> None:
    """The gathered logits of several ranks are cut to the vocabulary."""
    x = torch.ones(3, 8, device=GPU)
    graph, result = CudaGraphCapture(GPU)(lambda: (x * 2)[:, :5])
    x.copy_(torch.arange(24.0).view(3, 8))
    graph.replay()
    assert result.shape == (3, 5) and torch.equal(result.cpu(), torch.arange(24.0).view(3, 8)[:, :5] * 2)


def test_what_broke_a_capture_is_what_is_said() -> None:
    """In a process of its own: a broken capture leaves CUDA in no state for other tests."""
    script = """
import torch
from sglang.srt.model_executor.device_graph import CudaGraphCapture
x = torch.ones(3, device="cuda")
def run():
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this came first")
    return x * 2
def wait():
    return x * float(x.sum())
for what in (run, wait):
    try:
        CudaGraphCapture(torch.device("cuda", 0))(what)
    except RuntimeError as error:
        print("said:", str(error).splitlines()[0])
        break
"""
    for order, words in (("run, wait", "this came first"), ("wait, run", "captur")):
        command = [sys.executable, "-c", script.replace("(run, wait)", f"({order})")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
        assert said and words in said[0], done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_kv_cache_leaves_what_steps_need(kv_cache_dtype: str) -> None:
    """A context long enough that the KV cache takes all that it gets; then the largest steps are run once more."""
    release_unused_memory(GPU)
    args = ServerArgs(
        model_path=str(FIXTURES / "tiny-llama-modelopt-w4a16"),
        device="cuda",
        dtype="float16",
        kv_cache_dtype=kv_cache_dtype,
        random_seed=0,
    )
    config = replace(ModelConfig.from_server_args(args), context_len=1 << 20)
    runner = ModelRunner(args, config)
    plan = runner.memory_plan
    margin = max(int(plan.total * MARGIN_FRACTION), LEAST_MARGIN)
    assert runner.decode_graphs is not None and runner.max_running_requests == 256
    assert runner.token_to_kv_pool.get_kv_size_bytes() > (plan.room - margin) * 0.95
    after_start = available_memory(GPU)
    assert after_start > plan.activations + margin - 256 * MB, "graphs took more than was kept for them"
    taken = measure_largest_steps(runner, 256)
    assert taken < plan.activations + 256 * MB and after_start - taken > margin - 256 * MB
    del runner
    release_unused_memory(GPU)  # for other tests


def test_too_little_memory_says_what_was_measured() -> None:
    with pytest.raises(StartupError, match=r"kept for the largest step \(--chunked-prefill-size makes it smaller\)"):
        make("tiny-llama-bf16", max_total_tokens=10**9)
