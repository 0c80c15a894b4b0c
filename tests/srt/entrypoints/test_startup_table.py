from typing import Any

from http_server_thread import FIXTURE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import SINGLE
from sglang.srt.entrypoints.startup_table import startup_table
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_summary import summarize
from sglang.srt.server_args import ServerArgs


def table(name: str, **more: Any) -> dict[str, str]:
    args = ServerArgs(model_path=str(FIXTURE.parent / name), device="cpu", max_total_tokens=64)
    config = ModelConfig.from_server_args(args)
    info = {**summarize(ModelRunner(args, config, SINGLE)), **more}
    lines = startup_table(args, config, info).splitlines()
    assert len({len(line) - len(line.lstrip()) for line in lines}) <= 2
    return {name.strip(): value for name, _, value in (line.strip().partition("  ") for line in lines)}


def test_layers_by_kind() -> None:
    rows = {name: value.strip() for name, value in table("tiny-llama-modelopt-mixed").items()}
    assert rows["qkv_proj"] == "1 FP8, 1 unquantised"
    kinds = {part.partition(" (")[0] for part in rows["down_proj"].split(", ")}
    assert kinds == {"1 NVFP4 W4A4", "1 NVFP4 W4A16"}
    assert rows["lm_head"] == "1 unquantised"


def test_capacity_and_backend() -> None:
    gb = 1 << 30
    info: dict[str, Any] = {
        "memory_usage": {"weight_bytes": 3 * gb, "kv_cache_bytes": gb // 2},
        "max_total_num_tokens": 64,
        "max_running_requests": 7,
        "fp4_gemm_choices": {"N=1": {"1-": "torch"}},
        "fp4_gemm_backend": {
            "requested": "auto", "source": "default", "resolved": "torch",
            "unsupported": {"a": "needs luck", "b": "needs luck", "c": "is shy"},
        },
    }  # fmt: skip
    args = ServerArgs(model_path=str(FIXTURE), device="cpu", served_model_name="tiny")
    text = startup_table(args, ModelConfig.from_server_args(args), info)
    for words in (
        "tiny (LlamaForCausalLM)", "3.00 GB", "64 tokens, 0.50 GB", "at most 7", "torch (auto takes the best here)",
        "2048 tokens",
    ):  # fmt: skip
        assert words in text, text
    # The line of the choice, earlier in the log, has the others' reasons.
    assert "needs luck" not in text
    info["fp4_gemm_backend"]["requested"] = "torch"
    named = startup_table(args, ModelConfig.from_server_args(args), info)
    assert "(auto takes the best here)" not in named
