"""Replacing the weights of a ModelRunner: exactly those of a new one, or nothing changes."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from second_checkpoint import BROKEN, FIXTURES, NVFP4, copy_with, make_second_checkpoint
from sglang.srt.errors import CheckpointError, StartupError
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from step_harness import Stepper, make_runner, random_tokens
from thread_ranks import on_every_rank, thread_groups

TOKENS = random_tokens(40, 320)
DONE = (True, "Succeeded to update model weights.")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_second_checkpoint(tmp_path_factory.mktemp("second"))


def make(folder: Path, **args: object) -> ModelRunner:
    return make_runner(folder, context_length=128, **args)


def logits(runner: ModelRunner) -> torch.Tensor:
    output, _ = Stepper(runner).step({0: TOKENS})
    return output.next_token_logits


def update(runner: ModelRunner, folder: Path, load_format: str = "auto") -> tuple[bool, str]:
    return runner.update_weights_from_disk(str(folder), load_format)


def test_back_and_forth_and_twice_the_same(second: Path) -> None:
    first, other = logits(make(NVFP4)), logits(make(second))
    assert (first - other).abs().max() > 0.1
    runner = make(NVFP4)
    for folder, wanted in ((second, other), (second, other), (NVFP4, first), (second, other), (NVFP4, first)):
        assert update(runner, folder) == DONE
        assert torch.equal(logits(runner), wanted)
        assert runner.model_config.model_path == runner.server_args.model_path == str(folder)


def test_a_folder_whose_files_are_overwritten(second: Path, tmp_path: Path) -> None:
    """What a trainer does: new values in the same files. Nothing of the old ones is still mapped."""
    folder = copy_with(NVFP4, tmp_path / "folder")
    runner = make(folder)
    before = logits(runner)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((second / "model.safetensors").read_bytes())
        file.truncate()
    assert torch.equal(logits(runner), before)
    assert update(runner, folder) == DONE
    assert torch.equal(logits(runner), logits(make(second)))


@pytest.fixture(scope="module")
def survivor() -> ModelRunner:
    """One that sees every broken checkpoint."""
    return make(NVFP4)


@pytest.mark.parametrize("reason", list(BROKEN))
def test_a_broken_checkpoint_changes_nothing(second: Path, survivor: ModelRunner, reason: str, tmp_path: Path) -> None:
    how, words = BROKEN[reason]
    runner = survivor
    before, model = logits(runner), runner.model
    success, message = update(runner, copy_with(second, tmp_path / "broken", **how))
    assert not success and message.startswith("Failed to update weights: ") and words in message
    assert message.endswith("The weights from before are still served.")
    assert torch.equal(logits(runner), before)
    assert runner.model is model and runner.server_args.model_path == str(NVFP4)


def test_a_failure_is_no_obstacle(second: Path, survivor: ModelRunner) -> None:
    assert update(survivor, second) == DONE
    assert torch.equal(logits(survivor), logits(make(second)))


def test_other_failures(second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(NVFP4)
    before = logits(runner)
    assert "there is no such folder" in update(runner, tmp_path / "nowhere")[1]
    assert "load_format" in update(runner, second, "gguf")[1].replace("-", "_")
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "available_memory", lambda device: 1000)
        assert "must fit into memory together" in update(runner, second)[1]

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_build_model", no_memory)
        assert update(runner, second)[1].startswith("Failed to update weights: CUDA out of memory.")
    assert torch.equal(logits(runner), before)


def test_what_may_differ_is_taken_from_the_new_folder(second: Path, tmp_path: Path) -> None:
    w4a16 = FIXTURES / "tiny-llama-modelopt-w4a16"
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    other_rope = copy_with(NVFP4, tmp_path / "rope", rope_parameters=rope, rms_norm_eps=1e-3)
    runner = make(NVFP4)
    for folder in (w4a16, FIXTURES / "tiny-llama-bf16", other_rope):
        assert update(runner, folder) == DONE
        assert torch.equal(logits(runner), logits(make(folder)))


def test_the_cache_and_activation_dtypes_stay(tmp_path: Path) -> None:
    kvfp8 = FIXTURES / "tiny-llama-modelopt-nvfp4-kvfp8"
    words = "has a KV cache in torch.float8_e4m3fn instead of torch.float32"
    assert words in update(make(NVFP4), kvfp8)[1]
    fixed = make(NVFP4, kv_cache_dtype="fp8_e4m3")
    assert update(fixed, kvfp8) == DONE
    assert torch.equal(logits(fixed), logits(make(kvfp8)))
    half = copy_with(FIXTURES / "tiny-llama-bf16", tmp_path / "half", torch_dtype="float16")
    runner = make(FIXTURES / "tiny-llama-bf16", dtype="auto")
    assert "dtype torch.float16 instead of torch.bfloat16" in update(runner, half)[1]


def test_the_model_that_is_not_needed_is_gone(second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[nn.Module]] = []
    load_model = model_runner.load_model

    def spy(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        built.append(weakref.ref(model))
        load_model(model, *args, **kwargs)

    monkeypatch.setattr(model_runner, "load_model", spy)
    runner = make(NVFP4)
    gc.disable()  # what is collected is collected by the update itself
    try:
        assert update(runner, second) == DONE
        assert built[0]() is None
        assert not update(runner, copy_with(second, tmp_path / "broken", **BROKEN["missing"][0]))[0]
        assert built[2]() is None
        assert built[1]() is runner.model
    finally:
        gc.enable()


def test_all_ranks_or_none(second: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner = make(NVFP4)
    before = logits(runner)
    answers: list[int] = []

    class Other:
        """The rank beside this one has failed."""

        rank, size, local_size = 0, 1, 1

        def minimum(self, value: int) -> int:
            answers.append(value)
            return 0

    monkeypatch.setattr(runner, "tp", Other())
    with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_build_model", lambda *_: nn.Linear(1, 1))
        success, message = update(runner, second)
    assert not success and "another tensor-parallel rank could not load them" in message and message in caplog.text
    patch.undo()
    monkeypatch.undo()
    assert answers == [1] and torch.equal(logits(runner), before)


def test_a_failing_rank_still_meets_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(NVFP4)
    answers: list[int] = []
    monkeypatch.setattr(type(runner.tp), "minimum", lambda self, value: answers.append(value) or value)

    def broken(*_: Any) -> None:
        raise CheckpointError("tensor x is broken")

    monkeypatch.setattr(ModelRunner, "_build_model", broken)
    assert "tensor x is broken" in update(runner, NVFP4)[1]
    assert answers == [0]


@pytest.mark.parametrize("when", ["before it loads", "while it loads", "behind all tensors"])
def test_a_rank_that_fails_while_ranks_share_scales(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising at load, ranks meet for every layer: the others learn there that one has given up."""
    folder, groups = FIXTURES / "tiny-llama-bf16", thread_groups(2)
    arguments = {"quantization": "w4a16_nvfp4", "context_length": 128}
    runners = on_every_rank(2, lambda rank: make_runner(folder, groups[rank], **arguments))
    before = on_every_rank(2, lambda rank: logits(runners[rank]))
    load_model = model_runner.load_model

    def give_up(*_: object) -> None:
        raise OSError("the file is gone")

    def fail_on_rank_1(model: nn.Module, *args: Any, progress: bool) -> None:
        if not progress and when == "before it loads":
            give_up()
        if not progress and when == "while it loads":
            layer: Any = model.get_submodule("model.layers.1.self_attn.qkv_proj")
            layer.quant_method.process_weights_after_loading = give_up
        load_model(model, *args, progress=progress)
        if not progress:
            give_up()

    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "load_model", fail_on_rank_1)
        messages = on_every_rank(2, lambda rank: update(runners[rank], folder))
    assert not any(success for success, _ in messages)
    assert "another tensor-parallel rank could not load them" in messages[0][1] and "is gone" in messages[1][1]
    assert all(map(torch.equal, on_every_rank(2, lambda rank: logits(runners[rank])), before))
    assert on_every_rank(2, lambda rank: update(runners[rank], folder)) == [DONE, DONE]


def test_ranks_with_different_backends_do_not_start() -> None:
    class Other:
        rank, size, local_rank = 1, 2, 1

        def broadcast_bytes(self, data: bytes) -> bytes:
            return data.replace(b'"torch_native"', b'"flashinfer"')

    words = "--attention-backend: rank 1 has torch_native and rank 0 has flashinfer, but all need the same one"
    with pytest.raises(StartupError, match=words):
        make_runner(NVFP4, Other(), attention_backend="torch_native")  # type: ignore[arg-type]
