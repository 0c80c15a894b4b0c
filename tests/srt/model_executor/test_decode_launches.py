"""What a steady greedy decode step gives a GPU beside its graph: at batch 1 each launch costs a thousandth of an 8B
model's step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers import sampler
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.operators import TORCH_OPERATORS
from sglang.srt.managers import batch_result, schedule_batch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.decode_inputs import decode_inputs
from sglang.srt.model_executor.cuda_graph_runner import DecodeGraphRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from step_harness import make_runner

BF16 = Path(__file__).parents[2] / "fixtures" / "tiny-llama-bf16"


class Launches(TorchDispatchMode):
    """Notes torch's operators that compute or copy, and what is one launch of ours on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (operator.is_view or "empty" in operator.name()):
            self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))

    def one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            before = len(self.names)
            result = function(*arguments)
            self.names[before:] = [name]
            return result

        return noted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("requests", [1, 3])
def test_steady_steps(requests: int, page_size: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    greedy = SimpleNamespace(greedy=launches.one("greedy", TORCH_OPERATORS.greedy))
    monkeypatch.setattr(sampler, "operators_for", lambda device: greedy)
    monkeypatch.setattr(schedule_batch, "decode_inputs", launches.one("decode_inputs", decode_inputs))
    monkeypatch.setattr(batch_result, "to_host", launches.one("to_host", torch.clone))
    monkeypatch.setattr(TorchNativeAttnBackend, "init_graph_metadata", lambda *_: None)
    runner = make_runner(BF16, attention_backend="torch_native", disable_cuda_graph=True, page_size=page_size)
    logits = torch.zeros(4, runner.model_config.vocab_size)
    runner.decode_graphs = DecodeGraphRunner(
        lambda batch: logits,
        lambda run: (SimpleNamespace(replay=launches.one("graph", lambda: None)), run()),
        runner.attn_backend,
        runner.req_to_token_pool,
        runner.token_to_kv_pool,
        sizes=(4,),
        pads=True,
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    inbox = [
        TokenizedGenerateReqInput(rid=str(i), input_ids=list(range(2, 9 + i)), sampling_params=params)
        for i in range(requests)
    ]
    sent: list[Any] = []
    channel: Any = SimpleNamespace(recv=lambda block: [inbox.pop()] if inbox else [], send=sent.append)
    scheduler = Scheduler(runner.server_args, runner.model_config, runner, channel)
    scheduler.enable_overlap = overlap
    for _ in range(10):
        scheduler.step()
    for _ in range(20):  # across the beginnings of pages
        launches.names.clear()
        with launches:
            scheduler.step()
        assert launches.names == ["decode_inputs", "aten::_foreach_copy_", "graph", "greedy", "to_host"]
    assert {output.rid for output in sent[-1].outputs} == {str(i) for i in range(requests)}
