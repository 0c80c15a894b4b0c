"""Decode steps recorded on a CPU: the bits of the steps themselves, and a refusal of what can't be recorded."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from sglang.kernels import cpu_extension
from sglang.srt.layers.cpu_operators import CpuOperators
from sglang.srt.model_executor.cpu_graph import Arena, CpuGraphCapture
from sglang.srt.model_executor.device_graph import GraphUnavailable
from step_harness import Stepper, make_model, make_runner, random_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCAB = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied-one-kv-head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 2.0}}),
}

pytestmark = pytest.mark.skipif(
    (reason := cpu_extension.unavailable()) is not None, reason=f"our kernels for CPUs: {reason}"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_steps(folder: Path, **args: Any) -> None:
    """Batches of 1 to 8 requests whose sizes go up and down."""
    replaying = make_runner(folder, **args)
    graphs, steps = Stepper(replaying), Stepper(make_runner(folder, disable_cuda_graph=True, **args))
    vocab = replaying.model_config.vocab_size
    prompts = {row: random_tokens(3 + row, vocab, seed=row) for row in range(8)}
    assert torch.equal(graphs.step(prompts)[0].next_token_logits, steps.step(prompts)[0].next_token_logits)
    for turn, count in enumerate((1, 2, 1, 3, 8, 8, 4, 5, 6, 7, 2, 8)):
        tokens = {(turn + row) % 8: random_tokens(1, vocab, seed=turn + row) for row in range(count)}
        output, batch = graphs.step(tokens)
        wanted, _ = steps.step(tokens)
        assert torch.equal(output.next_token_logits, wanted.next_token_logits), (turn, count)
        for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(batch, name).fill_(1 << 40)  # nobody looks at it again
    assert replaying.decode_graphs is not None and set(replaying.decode_graphs._steps) == set(range(1, 9))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "dynamic-rope"])
def test_a_replayed_step_has_the_bits_of_the_step(name: str, dtype: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    make_model(AutoConfig.for_model(model_type, **{**SMALL, **changes}), tmp_path)
    # float32 weights that are no bfloat16 values would be multiplied by torch.
    args = {"quantization": "w4a16_nvfp4", "page_size": 1 if dtype == "float32" else 4}
    assert_same_steps(round_to_bf16(tmp_path), dtype=dtype, **args)


def round_to_bf16(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("fixture", "args"),
    [
        ("tiny-llama-modelopt-nvfp4", {"dtype": "float32"}),
        ("tiny-llama-modelopt-nvfp4", {"dtype": "bfloat16", "page_size": 4}),
        ("tiny-llama-modelopt-nvfp4-kvfp8", {"dtype": "float32", "page_size": 16}),
    ],
)
def test_quantised_activations(fixture: str, args: dict[str, Any]) -> None:
    assert_same_steps(FIXTURES / fixture, **args)


def test_a_model_that_torch_computes_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_type, changes = MODELS["dynamic-rope"]
    make_model(AutoConfig.for_model(model_type, **{**SMALL, **changes}), tmp_path)
    runner = make_runner(round_to_bf16(tmp_path), quantization="w4a16_nvfp4")
    other = make_runner(tmp_path, quantization="w4a16_nvfp4", disable_cuda_graph=True)
    graphs, steps = Stepper(runner), Stepper(other)
    with caplog.at_level("INFO", logger="sglang"):
        for tokens in ({0: [3, 4, 5]}, {0: [6]}, {0: [7]}):
            assert torch.equal(graphs.step(tokens)[0].next_token_logits, steps.step(tokens)[0].next_token_logits)
    (line,) = (record.getMessage() for record in caplog.records if "not recorded: it" in record.getMessage())
    assert "it computes with torch's aten." in line


# ------------------------------------------------------------------------------------------------------ one recording
def test_what_a_recording_refuses() -> None:
    capture, x = CpuGraphCapture(), torch.randn(4, 6)
    views = [
        lambda: x.view(24)[3:].unflatten(0, (3, 7)).t(),
        lambda: x.split_with_sizes((2, 4), dim=1)[1],
        lambda: x.float().contiguous().reshape(6, 4),
    ]
    for view in views:
        _, result = capture(view)
        assert torch.equal(result, view()) and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for what, name in {
        lambda: x + 1: "aten.add",
        lambda: x.bfloat16(): "aten.",
        lambda: x.t().contiguous(): "aten.",
        lambda: torch.zeros(3): "aten.zeros",
        lambda: x.add_(1): "aten.add_",
        lambda: F.linear(x, x): "aten.",
        lambda: x.max().item(): "aten.max",
        lambda: torch.tensor([1.0]): "aten.",
    }.items():
        with torch.inference_mode(), pytest.raises(GraphUnavailable, match=f"torch's {name}"):
            capture(what)
    assert cpu_extension.recording.get() is None


def test_a_replay_reads_and_writes_where_the_recording_did() -> None:
    operators, capture = CpuOperators(), CpuGraphCapture()
    x, weight = torch.randn(3, 64), torch.randn(32)

    def run() -> torch.Tensor:
        return operators.rms_norm(operators.silu_and_mul(x), weight, 1e-5)

    graph, result = capture(run)
    assert torch.equal(result, run())
    x.normal_()
    assert not torch.equal(result, run())
    graph.replay()
    assert torch.equal(result, run())
    other, other_result = capture(lambda: operators.silu_and_mul(x))  # in the memory of the first
    graph.replay(), other.replay()
    assert torch.equal(other_result, operators.silu_and_mul(x))
    kept = [capture(lambda: torch.empty(1 << 20, dtype=torch.uint8)) for _ in range(3)]
    assert capture._arena.nbytes <= 2 << 20 and len({result.data_ptr() for _, result in kept}) == 1
    torch.set_num_threads(torch.get_num_threads() + 1)
    with pytest.raises(RuntimeError, match="record it again"):
        graph.replay()


def test_a_token_outside_the_vocabulary() -> None:
    operators, ids, weight = CpuOperators(), torch.tensor([1, 2]), torch.randn(5, 8)
    graph, rows = CpuGraphCapture()(lambda: operators.embedding(ids, weight, torch.float32))
    ids.copy_(torch.tensor([4, 0]))
    graph.replay()
    assert torch.equal(rows, weight[[4, 0]])
    ids[1] = 5
    with pytest.raises(IndexError, match="vocabulary"):
        graph.replay()


# ------------------------------------------------------------------------------------------------------------- memory
def test_arena() -> None:
    arena = Arena()
    tensors = {size: arena.empty([size], torch.float32).fill_(size) for size in (5, 100, 0, 1, 70000)}
    assert all(bool((tensor == size).all()) and len(tensor) == size for size, tensor in tensors.items())
    assert all(tensor.data_ptr() % 64 == 0 for size, tensor in tensors.items() if size)
    place = tensors[100].data_ptr()
    view = tensors.pop(100)[50:]
    gc.collect()
    assert arena.empty([100], torch.float32).data_ptr() != place  # a view holds it
    del view
    gc.collect()
    again = arena.empty([10, 5], torch.bfloat16)
    assert again.data_ptr() == place and again.shape == (10, 5) and again.dtype == torch.bfloat16
    nbytes = arena.nbytes
    old = arena.empty([1 << 19], torch.uint8)
    arena.reuse()
    first, second = arena.empty([1 << 18], torch.uint8), arena.empty([1 << 18], torch.uint8)
    del old, tensors, again  # of an earlier recording: what lies there now stays
    gc.collect()
    third = arena.empty([1 << 18], torch.uint8)
    ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in (first, second, third))
    assert all(left[1] <= right[0] for left, right in pairwise(ranges))
    del first, second, third
    gc.collect()
    assert arena.empty([1 << 20], torch.uint8).data_ptr() and arena.nbytes == nbytes  # neighbours have become one


def test_torchs_compiler_is_not_imported() -> None:
    """It would be, in the first decode step of a server, by a mode that torch's compiler has to be told of."""
    code = (
        "import sys, torch; from sglang.srt.model_executor.cpu_graph import CpuGraphCapture; "
        "CpuGraphCapture()(lambda: torch.empty(4)); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
