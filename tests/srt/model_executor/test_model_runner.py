"""How much memory the KV cache gets, and what is said when there is too little."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import StartupError
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

FIXTURES = Path(__file__).parents[2] / "fixtures"
# 2 layers, 2 KV heads of 64, keys and values.
TOKEN_ELEMENTS = 2 * 2 * 2 * 64


def make(checkpoint: str = "tiny-llama-bf16", context_len: int | None = None, **args: object) -> ModelRunner:
    server_args = ServerArgs.from_kwargs(
        model_path=str(FIXTURES / checkpoint), device="cpu", load_format="dummy", random_seed=0, **args
    )
    config = ModelConfig.from_server_args(server_args)
    return ModelRunner(server_args, replace(config, context_len=context_len or config.context_len))


def memory(monkeypatch: pytest.MonkeyPatch, available: int, total: int) -> None:
    monkeypatch.setattr(model_runner, "available_memory", lambda device: available)
    monkeypatch.setattr(model_runner, "total_memory", lambda device: total)


def test_max_total_tokens_is_rounded_down_to_pages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = make(max_total_tokens=103, page_size=8)
    assert runner.max_total_num_tokens == 96
    assert runner.token_to_kv_pool.get_key_buffer(1).shape == (104, 2, 64)
    assert runner.max_running_requests == runner.req_to_token_pool.size == 12
    assert runner.req_to_token_pool.padding_row == 12
    assert runner.dtype == runner.kv_cache_dtype == torch.bfloat16
    text = "\n".join(record.getMessage() for record in caplog.records)
    for words in (
        "Load weight begin. avail mem=",
        "Load weight end. elapsed=",
        "KV Cache is allocated. #tokens: 96, K size: 0.00 GB, V size: 0.00 GB",
        "max_total_num_tokens=96, chunked_prefill_size=2048, max_running_requests=12, context_len=",
    ):
        assert words in text


@pytest.mark.parametrize(("dtype", "amx"), [("auto", True), ("auto", False), ("float32", True)])
def test_who_could_be_faster_hears_of_it(
    dtype: str, amx: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_runner, "has_amx", lambda: amx)
    caplog.set_level(logging.INFO)
    assert make("tiny-llama-modelopt-w4a16", dtype=dtype, max_total_tokens=8).dtype == torch.float32
    assert caplog.text.count("--dtype bfloat16 computes prompts") == (dtype == "auto" and amx)


def test_cpu_default_is_a_part_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, available=40 << 20, total=400 << 20)
    runner = make(context_len=1000)
    table = (32 + 1) * 1000 * 4
    assert runner.max_total_num_tokens == ((10 << 20) - table) // (TOKEN_ELEMENTS * 2) - 1


def test_cpu_default_is_at_most_what_requests_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, available=400 << 30, total=400 << 30)
    assert make(context_len=50).max_total_num_tokens == 32 * 50
    assert make(context_len=50, max_running_requests=3).max_total_num_tokens == 150


def test_mem_fraction_static_leaves_the_rest_of_the_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, available=300 << 20, total=400 << 20)
    runner = make(context_len=1000, max_running_requests=60, mem_fraction_static=0.3)  # 280 MB stay free
    assert runner.max_total_num_tokens == ((20 << 20) - 61 * 4000) // (TOKEN_ELEMENTS * 2) - 1


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        ({"mem_fraction_static": 0.2}, "Increase --mem-fraction-static, set --max-total-tokens"),
        ({"max_total_tokens": 10**9}, r"Reduce --max-total-tokens \(1000000000\)"),
    ],
)
def test_too_little_memory(args: dict[str, object], advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, available=300 << 20, total=400 << 20)
    with pytest.raises(StartupError, match=f"a token takes 1024 bytes, 0.29 GB are available .*{advice}"):
        make(**args)


@pytest.mark.parametrize(
    ("checkpoint", "flag", "expected"),
    [
        ("tiny-llama-bf16", "auto", torch.bfloat16),
        ("tiny-llama-bf16", "fp8_e4m3", torch.float8_e4m3fn),
        ("tiny-llama-modelopt-nvfp4-kvfp8", "auto", torch.float8_e4m3fn),
        ("tiny-llama-modelopt-nvfp4-kvfp8", "bf16", torch.bfloat16),
    ],
)
def test_kv_cache_dtype(checkpoint: str, flag: str, expected: torch.dtype) -> None:
    runner = make(checkpoint, max_total_tokens=8, kv_cache_dtype=flag)
    assert runner.kv_cache_dtype == expected
    assert runner.token_to_kv_pool.get_value_buffer(0).dtype == expected


def test_default_dtype_is_restored_and_weights_need_no_gradient() -> None:
    runner = make(max_total_tokens=8)
    assert torch.get_default_dtype() == torch.float32
    assert {param.dtype for param in runner.model.parameters()} == {torch.bfloat16}
    assert not any(param.requires_grad for param in runner.model.parameters())
