"""Decode graphs on a fake device: a recording that is run again sees nothing but the static tensors."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from second_checkpoint import NVFP4, make_second_checkpoint
from sglang.srt.errors import StartupError
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor import cuda_graph_runner, model_runner
from sglang.srt.model_executor.cuda_graph_runner import DecodeGraphRunner, captured_sizes
from sglang.srt.model_executor.device_graph import DeviceGraph, GraphUnavailable
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from step_harness import Stepper, make_runner, random_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
BF16 = FIXTURES / "tiny-llama-bf16"
SIZES = (1, 2, 4, 8)
# A batch of another size is another product of matrices, which may add in another order.
TOLERANCE = 1e-5
POISON = 1 << 40


class Recorder:
    """A capture whose replay runs again what was recorded.

    Attributes:
        shapes: sizes of the results that were recorded; ``replays`` counts.
    """

    def __init__(self) -> None:
        self.shapes: list[int] = []
        self.replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        result = run().clone()
        self.shapes.append(len(result))

        def replay() -> None:
            self.replays += 1
            result.copy_(run())

        result.fill_(float("nan"))  # a capture computes nothing
        return SimpleNamespace(replay=replay), result


@pytest.fixture(autouse=True)
def torch_attention_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fake device can: what its metadata holds is prepared anew for every step."""
    monkeypatch.setattr(TorchNativeAttnBackend, "captures_decode", True)
    monkeypatch.setattr(TorchNativeAttnBackend, "init_cuda_graph_state", lambda *_: None)
    monkeypatch.setattr(TorchNativeAttnBackend, "init_graph_metadata", TorchNativeAttnBackend.init_forward_metadata)


def make(folder: Path = BF16, recorder: Recorder | None = None, **args: Any) -> tuple[ModelRunner, Recorder]:
    """A runner on the CPU with padded graphs, recorded by a Recorder as a GPU's are; ``sizes`` are theirs."""
    sizes, repeats_first = args.pop("sizes", SIZES), args.pop("repeats_first", False)
    runner = make_runner(folder, attention_backend="torch_native", disable_cuda_graph=True, **args)
    recorder = recorder or Recorder()

    def logits(batch: ForwardBatch) -> torch.Tensor:
        return runner.model(batch).next_token_logits

    graphs = DecodeGraphRunner(
        logits,
        recorder,
        runner.attn_backend,
        runner.req_to_token_pool,
        runner.token_to_kv_pool,
        sizes,
        pads=True,
        repeats_first=repeats_first,
    )
    graphs.record_all(show_progress=False)
    runner.decode_graphs = graphs
    return runner, recorder


def eager(folder: Path = BF16, **args: Any) -> ModelRunner:
    return make_runner(folder, attention_backend="torch_native", disable_cuda_graph=True, **args)


def poison(batch: ForwardBatch) -> None:
    """What a replay must not look at again."""
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(batch, name).fill_(POISON)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------------------ sizes
def sizes_of(running: int = 1000, pads: bool = True, **args: Any) -> list[int]:
    return list(captured_sizes(ServerArgs(model_path="m", device="cpu", **args), running, pads))


def test_sizes() -> None:
    usual = [1, 2, 4, 8, 12, *range(16, 257, 8)]
    assert sizes_of() == usual
    assert sizes_of(running=48) == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]
    assert sizes_of(running=13) == [1, 2, 4, 8, 12, 13]
    assert sizes_of(running=1) == [1]
    assert sizes_of(cuda_graph_max_bs=3) == [1, 2, 3]
    assert sizes_of(cuda_graph_max_bs=300) == [*usual, 272, 288, 300]
    assert sizes_of(cuda_graph_max_bs=600)[-6:] == [480, 496, 512, 544, 576, 600]
    assert sizes_of(cuda_graph_bs=(7, 3, 2000, 7)) == [3, 7, 1000]
    assert sizes_of(pads=False) == list(range(1, 257))
    assert sizes_of(pads=False, running=3) == sizes_of(pads=False, cuda_graph_max_bs=3) == [1, 2, 3]
    assert sizes_of(pads=False, cuda_graph_bs=(5, 2)) == [2, 5]


# ------------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("page_size", [1, 4])
def test_padded_steps_are_the_eager_ones(page_size: int) -> None:
    runner, recorder = make(page_size=page_size, max_running_requests=9)
    other = eager(page_size=page_size, max_running_requests=9)
    graphs, steps = Stepper(runner), Stepper(other)
    prompts = {row: random_tokens(3 + 2 * row, 320, seed=row) for row in range(9)}
    close(graphs.step(prompts)[0].next_token_logits, steps.step(prompts)[0].next_token_logits)
    assert recorder.shapes == [8, 4, 2, 1], "the largest is recorded first, and nothing twice"
    # Sizes go up and down, so that what padding finds in the static tensors is another batch's.
    for turn, rows in enumerate(
        ([0], [3, 1], [2, 5, 8], [7, 6, 5, 4, 3, 2, 1, 0], [4], [8, 0, 1, 2, 3], [6, 7, 1, 0, 2, 5], [5, 2, 3, 4, 1])
    ):
        tokens = {row: random_tokens(1, 320, seed=100 + turn + row) for row in rows}
        output, batch = graphs.step(tokens)
        close(output.next_token_logits, steps.step(tokens)[0].next_token_logits)
        assert recorder.replays == turn + 1
        poison(batch)
    # A slot that was ever written holds the same; the others were never touched by padding.
    used = torch.tensor([slot for row in range(9) for slot in row_slots(graphs, row)])
    for layer in range(2):
        for name in ("get_key_buffer", "get_value_buffer"):
            close(
                getattr(runner.token_to_kv_pool, name)(layer)[used], getattr(other.token_to_kv_pool, name)(layer)[used]
            )
    assert (used >= page_size).all() and not runner.req_to_token_pool.req_to_token[-1].any()


def row_slots(stepper: Stepper, row: int) -> list[int]:
    return stepper.runner.req_to_token_pool.req_to_token[row, : stepper.lengths[row]].tolist()


def test_padding_writes_to_the_padding_page_only() -> None:
    runner, _ = make(page_size=4)
    stepper = Stepper(runner)
    stepper.step({row: random_tokens(5, 320, seed=row) for row in range(3)})
    pool = runner.token_to_kv_pool
    for buffer in (*pool._k, *pool._v):
        written = [slot for row in range(3) for slot in row_slots(stepper, row)]
        rest = torch.ones(len(buffer), dtype=torch.bool)
        rest[written] = False
        buffer[rest] = 7.0
    before = [buffer.clone() for buffer in (*pool._k, *pool._v)]
    _, batch = stepper.step({row: [9] for row in range(3)})
    for old, new in zip(before, (*pool._k, *pool._v), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == sorted([0, *batch.out_cache_loc.tolist()])


@pytest.mark.parametrize("repeats_first", [False, True])
def test_what_the_attention_is_prepared_for(repeats_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding: a token at the beginning of the padding row, or all of the first request but its slot."""
    runner, _ = make(repeats_first=repeats_first)
    stepper = Stepper(runner)
    stepper.step({row: random_tokens(3 + row, 320, seed=row) for row in range(3)})
    seen: list[ForwardBatch] = []
    prepare = TorchNativeAttnBackend.init_graph_metadata
    monkeypatch.setattr(
        TorchNativeAttnBackend, "init_graph_metadata", lambda self, batch: seen.append(batch) or prepare(self, batch)
    )
    _, batch = stepper.step({2: [7], 0: [8], 1: [9]})
    (padded,) = seen
    row, position, token = (2, 5, 7) if repeats_first else (runner.req_to_token_pool.padding_row, 0, 0)
    assert padded.input_ids.tolist() == [7, 8, 9, token]
    assert padded.positions.tolist() == [5, 3, 4, position]
    assert padded.req_pool_indices.tolist() == [2, 0, 1, row]
    assert padded.seq_lens.tolist() == padded.seq_lens_list == [6, 4, 5, position + 1]
    assert padded.out_cache_loc.tolist() == [*batch.out_cache_loc.tolist(), 0]
    assert padded.extend_seq_lens == [1] * 4 and padded.batch_size == 4
    assert padded.req_to_token_pool is runner.req_to_token_pool and padded.attn_backend is runner.attn_backend


def test_larger_batches_and_prompts_are_computed_as_before() -> None:
    runner, recorder = make(sizes=(1, 2))
    graphs, steps = Stepper(runner), Stepper(eager())
    prompts = {row: random_tokens(4, 320, seed=row) for row in range(3)}
    for tokens in ({0: prompts.pop(0)}, prompts, {row: [row + 5] for row in range(3)}):
        assert torch.equal(graphs.step(tokens)[0].next_token_logits, steps.step(tokens)[0].next_token_logits)
    assert recorder.replays == 0
    graphs.step({0: [1], 2: [3]})
    assert recorder.replays == 1


def test_log_probabilities_and_penalties_of_a_replayed_step() -> None:
    """``sample`` changes the logits in place; the next replay writes all of them again."""
    runner, _ = make()
    other = eager()
    graphs, steps = Stepper(runner), Stepper(other)
    prompts = {row: random_tokens(4, 320, seed=row) for row in range(3)}
    graphs.step(prompts), steps.step(prompts)
    params = [SamplingParams(temperature=0.5, sampling_seed=row) for row in range(3)]
    for turn in range(3):
        tokens = {row: [turn + row] for row in range(3)}
        results = []
        for stepper in (graphs, steps):
            output, batch = stepper.step(tokens, params, tops=[2, 0, 5])
            batch.return_logprob = True
            chosen = stepper.runner.sample(output, batch)
            with torch.inference_mode():
                output.next_token_logits[:, 3] = -1000.0
            assert output.next_logprobs is not None
            results.append((chosen, output.next_logprobs.values, output.next_logprobs.best))
        (chosen, values, best), (other_chosen, other_values, other_best) = results
        assert torch.equal(chosen, other_chosen) and torch.equal(best[1], other_best[1])
        close(values, other_values)
        close(best[0], other_best[0])


def test_a_scale_of_the_whole_input_is_that_of_the_batch() -> None:
    """Quantised while loading: the scale of a product's input is computed from all rows, so padding may not change
    it."""
    args = {"quantization": "nvfp4", "fp4_gemm_runner_backend": "torch"}
    runner, _ = make(repeats_first=True, **args)
    graphs, steps = Stepper(runner), Stepper(eager(**args))
    prompts = {row: random_tokens(4 + row, 320, seed=row) for row in range(5)}
    graphs.step(prompts), steps.step(prompts)
    tokens = {row: [row + 9] for row in range(5)}
    (output, batch), (wanted, _) = graphs.step(tokens), steps.step(tokens)
    close(output.next_token_logits, wanted.next_token_logits)
    poison(batch)
    tokens = {row: [row + 7] for row in range(3)}
    close(graphs.step(tokens)[0].next_token_logits, steps.step(tokens)[0].next_token_logits)


def test_which_models_scale_the_whole_input(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    monkeypatch.setattr(model_runner, "capture_for", lambda device: Recorder())
    monkeypatch.setattr(
        model_runner, "DecodeGraphRunner", lambda *_, repeats_first: made.append(repeats_first) or SimpleNamespace()
    )
    for folder, args in ((BF16, {}), (NVFP4, {}), (BF16, {"quantization": "nvfp4"})):
        make_runner(folder, attention_backend="torch_native", **args)
    assert made == [False, False, True]


# ---------------------------------------------------------------------------------------------- sizes as they come
def test_exact_sizes_are_recorded_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(model_runner, "capture_for", lambda device: recorder)
    monkeypatch.setattr(cuda_graph_runner, "KEPT_GRAPHS", 2)
    runner = make_runner(BF16, attention_backend="torch_native", cuda_graph_max_bs=4)
    graphs, steps = Stepper(runner), Stepper(eager())
    prompts = {row: random_tokens(4, 320, seed=row) for row in range(5)}
    graphs.step(prompts), steps.step(prompts)
    assert recorder.shapes == []
    for turn, count in enumerate([3, 1, 3, 5, 2, 3, 1, 4]):
        tokens = {row: [turn + row] for row in range(count)}
        output, batch = graphs.step(tokens)
        assert torch.equal(output.next_token_logits, steps.step(tokens)[0].next_token_logits)
        poison(batch)
    # 3 and 1; 5 is too large; 2 takes the place of 1, which then takes that of 2.
    assert recorder.shapes == [3, 1, 2, 1, 4] and recorder.replays == 7


def test_what_cannot_be_recorded_is_computed_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def refuse(run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        calls.append(run())
        raise GraphUnavailable("aten::sort is not ours")

    monkeypatch.setattr(model_runner, "capture_for", lambda device: refuse)
    runner = make_runner(BF16, attention_backend="torch_native")
    graphs, steps = Stepper(runner), Stepper(eager())
    caplog.set_level("INFO")
    for tokens in ({0: [5, 6, 7]}, {0: [8]}, {0: [9]}):
        assert torch.equal(graphs.step(tokens)[0].next_token_logits, steps.step(tokens)[0].next_token_logits)
    assert len(calls) == 1 and caplog.text.count("Decode steps are not recorded: aten::sort is not ours") == 1


# -------------------------------------------------------------------------------------------------- when there are none
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"disable_cuda_graph": True}, "--disable-cuda-graph"),
        ({"attention_backend": "torch_native"}, "attention backend torch_native can't be captured"),
    ],
)
def test_the_reason_is_said_once(
    args: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TorchNativeAttnBackend, "captures_decode", False)
    caplog.set_level(logging.INFO)
    runner = make_runner(BF16, **args)
    assert runner.decode_graphs is None and runner.why_no_graphs == reason
    Stepper(runner).step({0: [1]})
    assert caplog.text.count(f"Decode steps are not recorded in graphs: {reason}") == 1


def test_a_failed_capture_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
            graph, result = super().__call__(run)
            if len(result) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
            return graph, result

    words = (
        "the decode step of 2 requests could not be captured in a CUDA graph: CUDA out of memory. Tried to allocate 3 "
        "GiB\nIf memory is short, reduce --cuda-graph-max-bs or --mem-fraction-static; --disable-cuda-graph"
    )
    with pytest.raises(StartupError, match=words):
        make(recorder=Failing())


# ------------------------------------------------------------------------------------------------------ new weights
def test_new_weights_are_recorded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has the addresses of the weights that it was recorded with."""
    second = make_second_checkpoint(tmp_path)
    recorder = Recorder()
    monkeypatch.setattr(model_runner, "capture_for", lambda device: recorder)
    alive: list[bool] = []
    args = {"attention_backend": "torch_native", "context_length": 128}
    runner = make_runner(NVFP4, **args)
    graphs = Stepper(runner)
    graphs.step({0: [5, 6, 7]}), graphs.step({0: [8]})
    old_model, old_graphs = weakref.ref(runner.model), weakref.ref(runner.decode_graphs)
    record = ModelRunner._record_graphs

    def recording(self: ModelRunner) -> Any:
        gc.collect()
        alive.append(old_model() is not None or old_graphs() is not None)
        return record(self)

    monkeypatch.setattr(ModelRunner, "_record_graphs", recording)
    assert not runner.update_weights_from_disk(str(tmp_path / "nowhere"), "auto")[0]
    assert runner.decode_graphs is old_graphs() and not alive, "the old ones serve on"
    assert runner.update_weights_from_disk(str(second), "auto")[0]
    assert alive == [False], "the old ones were freed before"
    new, wanted = Stepper(runner), Stepper(make_runner(second, **args))
    for tokens in ({0: [5, 6, 7]}, {0: [8]}, {0: [9]}):
        assert torch.equal(new.step(tokens)[0].next_token_logits, wanted.step(tokens)[0].next_token_logits)
    assert recorder.shapes == [1, 1, 1], "before, after, and that of the other runner"


def test_the_state_is_made_once_for_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(model_runner, "capture_for", lambda device: Recorder())
    monkeypatch.setattr(TorchNativeAttnBackend, "init_cuda_graph_state", lambda self, *sizes: made.append(sizes))
    runner = make_runner(NVFP4, attention_backend="torch_native", cuda_graph_bs=[2, 5], context_length=128)
    assert runner.update_weights_from_disk(str(NVFP4), "auto")[0]
    assert made == [(5, 128)]


def test_a_step_copies_into_the_static_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is one launch."""
    runner, _ = make()
    stepper = Stepper(runner)
    stepper.step({row: [1, 2] for row in range(3)})
    copies = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, values: copies.append(len(to)) or copy(to, values))
    output, batch = stepper.step({row: [3] for row in range(3)})
    assert copies == [10] and batch.forward_mode is ForwardMode.DECODE
    assert isinstance(output, LogitsProcessorOutput) and output.next_token_logits.shape == (3, 320)
