"""The benchmarks of GPU steps and servers, as far as a CPU can run them: the shapes' arithmetic, floors, reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.hf_tokenizer import get_tokenizer
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import weight_bytes
from sglang.srt.server_args import ServerArgs

SCRIPTS = Path(__file__).parents[2] / "benchmark"
sys.path.insert(0, str(SCRIPTS))

import dummy_models  # noqa: E402
import gpu_measures  # noqa: E402
import plot_gpu  # noqa: E402
from dummy_models import Shape  # noqa: E402


def runner(folder: Path, **arguments: object) -> ModelRunner:
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", max_total_tokens=64, max_running_requests=2, **arguments
    )
    return ModelRunner(args, ModelConfig.from_server_args(args))


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-32b", 32.76), ("llama-3.3-70b", 70.55)])
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    shape = Shape.parse(name)
    norms = shape.weight_bytes("bf16") / 2 / 1e9
    assert norms == pytest.approx(billions, abs=0.01)
    half = Shape.parse(f"{name}:{shape.layers // 2}")
    assert half.kv_bytes() * 2 == shape.kv_bytes() and half.attention_flops(10) * 2 == shape.attention_flops(10)
    with pytest.raises(ValueError, match="'gpt' is none of llama-3.1-8b"):
        Shape.parse("gpt")


@pytest.mark.parametrize("quant", dummy_models.QUANTS)
def test_weights_take_what_the_floor_counts(quant: str, tmp_path: Path) -> None:
    shape = Shape.parse("tiny")
    dummy_models.write_config(tmp_path, shape, quant)
    model = runner(tmp_path, load_format="dummy", dtype="bfloat16").model
    # Norms and the columns' global scales are not counted.
    assert weight_bytes(model) == pytest.approx(shape.weight_bytes(quant), rel=0.015)


def test_written_weights_are_complete_and_a_tokenizer_covers_them(tmp_path: Path) -> None:
    shape = Shape.parse("tiny")
    dummy_models.write_weights(tmp_path, shape, "cpu")
    runner(tmp_path, dtype="float32")  # refuses a checkpoint that is not exactly what it needs
    head = load_file(tmp_path / "lm_head.safetensors")["lm_head.weight"].float()
    assert float(head.std()) == pytest.approx(256**-0.5, rel=0.02)
    dummy_models.write_tokenizer(tmp_path, shape)
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 1024 and tokenizer.decode(tokenizer.encode("a wörd")) == "a wörd"
    assert tokenizer.decode([1023]) == "w1023"


def test_busy_time_counts_what_overlaps_once() -> None:
    assert gpu_measures.union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert gpu_measures.union([]) == 0
    assert gpu_measures.busy_ms(torch.device("cpu"), lambda: None) is None


def test_floors() -> None:
    rates = {"copy_gbps": 1000.0, "bf16_tflops": 100.0}
    assert gpu_measures.floor_ms(rates, 2e9, 1e11) == {"ms": 2.0, "bound": "bytes"}
    assert gpu_measures.floor_ms(rates, 2e9, 1e12) == {"ms": 10.0, "bound": "flops"}


def test_steps_of_one_and_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "steps.json"
    command = [
        sys.executable,
        str(SCRIPTS / "bench_gpu_steps.py"),
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--tp",
        "1,2",
    ]
    command += ["--prefill", "32", "--context", "16", "--batches", "1,2", "--steps", "2", "--loop-batches", "3"]
    command += ["--loop-context", "8", "--quants", "w4a16_nvfp4", "--output", str(output)]
    subprocess.run(command, check=True, timeout=280, env={**dummy_models.environment(), "OMP_NUM_THREADS": "1"})
    report = json.loads(output.read_text())
    assert report["failed"] == [] and set(report["rates"]) == {"copy_gbps", "bf16_tflops"}
    found = [(row["tp"], row["phase"], row["batch"], row["context"]) for row in report["rows"]]
    steps = [("decode", 1, 16), ("decode", 2, 16), ("prefill", 1, 32), ("scheduler", 3, 8)]
    assert found == [(tp, *step) for tp in (1, 2) for step in steps]
    for row in report["rows"]:
        assert 0 < row["floor_ms"] < row["ms"] and row["ratio"] == pytest.approx(row["floor_ms"] / row["ms"], rel=0.1)
    tables = plot_gpu.steps_tables(report)
    assert "| tiny | w4a16_nvfp4 | 2 | decode | 2 | 16 |" in tables
    assert "tiny w4a16_nvfp4, decode, batch 2: 2 ranks" in tables


def test_server_tables() -> None:
    rows = [
        {"engine": engine, "concurrency": 16, "requests": 32, "output_throughput": rate, "ttft_ms": 10.5, "itl_ms": 2.0}
        for engine, rate in (("sglang-nvfp4 bf16", 300.0), ("transformers bf16", 100.0))
    ]
    tables = plot_gpu.server_tables({"rows": rows, "input": 512, "output": 256})
    assert "| sglang-nvfp4 bf16 | 16 | 300.0 | 3.00 | 10.5 | 2.0 |" in tables
    assert "| transformers bf16 | 16 | 100.0 | 1.00 | 10.5 | 2.0 |" in tables


def test_a_page_gets_its_tables_again_and_again() -> None:
    page = "a\n<!-- x.json -->\nold\n<!-- /x.json -->\nb\n"
    once = plot_gpu.update(page, "x.json", "| new |")
    assert once == "a\n<!-- x.json -->\n\n| new |\n\n<!-- /x.json -->\nb\n"
    assert plot_gpu.update(once, "x.json", "| new |") == once
    assert plot_gpu.update(page, "y.json", "| new |") == page
    rows = [{"shape": "s", "quant": "bf16", "tp": 2, "one": 0.1, "several": 0.2, "between": 0.3, "same_best": 1.0}]
    assert "| s | bf16 | 2 | 0.1 | 0.2 | 0.3 | 1.0 |" in plot_gpu.logits_tables({"rows": rows})
