"""bench_one_batch: the tokens are the model's own (transformers says so), results by SGLang's names, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from http_server_thread import FIXTURE
from sglang.benchmark.one_batch import OneBatch, latency_test, main, parse_args
from sglang.srt.errors import ArgumentError, StartupError

MODEL = ["--model-path", str(FIXTURE), "--device", "cpu", "--dtype", "float32", "--random-seed", "1"]
PROMPTS = [[5, 9, 100, 7], [300, 20, 4, 11, 90, 33, 8], [17, 17, 2]]


@pytest.fixture(scope="module", params=["1", "4"])
def model(request: pytest.FixtureRequest) -> Iterator[OneBatch]:
    page = ["--page-size", request.param, "--max-total-tokens", "64", "--max-running-requests", "4"]
    yield OneBatch(parse_args([*MODEL, *page, "--chunked-prefill-size", "-1"])[0])


def test_tokens_are_those_of_transformers(model: OneBatch) -> None:
    reference = AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32)
    for _ in range(2):  # the second time with slots and rows that were used before
        prefill, decode, tokens = model.run(PROMPTS, 6)
        assert prefill > 0 and len(decode) == 5 and all(seconds > 0 for seconds in decode)
        for prompt, got in zip(PROMPTS, tokens, strict=True):
            ids = list(prompt)
            with torch.inference_mode():
                for token in got:
                    assert token == int(reference(torch.tensor([ids])).logits[0, -1].argmax())
                    ids.append(token)


def test_limits(model: OneBatch) -> None:
    assert "--max-running-requests 4" in model.why_not([[1]] * 5, 1)
    assert "context length limit: 2049 tokens" in model.why_not([[1] * 2000], 49)
    assert "the KV cache holds 64" in model.why_not([[1] * 30] * 2, 3)
    assert model.why_not([[1] * 30] * 2, 2) == ""


def test_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one prompt\n\nanother prompt\n")
    path = tmp_path / "result.jsonl"
    argv = f"--batch-size 2 9 --input-len 8 --output-len 1 3 --max-running-requests 4 --result-filename {path}"
    argv += " --run-name r"
    results = latency_test(*parse_args([*MODEL, *argv.split(), "--prompt-filename", str(prompts)]))
    assert [json.loads(line) for line in path.read_text().splitlines()] == results
    first, second = results
    keys = {"run_name", "batch_size", "input_len", "output_len", "prefill_latency", "prefill_throughput",
            "total_latency", "overall_throughput"}  # fmt: skip
    assert set(first) == keys
    assert set(second) == keys | {"median_decode_latency", "median_decode_throughput"}
    assert (second["run_name"], second["batch_size"], second["output_len"]) == ("r", 2, 3)
    out = capsys.readouterr().out
    assert "skipping (9, 8, 3) due to max batch size limit" in out
    assert out.index("Warmup ...") < out.index("Prefill. latency:") < out.index("Benchmark ...")
    assert "Decode 1. Batch size: 2, latency:" in out and "Decode 2." not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--profile", "--profile is known from SGLang"),
        ("--batch-size 0", "--batch-size must be 1 or more"),
        ("--tp-size 2 --nnodes 2 --dist-init-addr 127.0.0.1:4000", "--nnodes: this command runs on one machine"),
        ("--bach-size 3", "unknown argument --bach-size"),
    ],
)
def test_refusals(argv: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_args([*MODEL, *argv.split()])


def test_several_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.jsonl"
    argv = f"--tp-size 2 --batch-size 2 3 --input-len 8 --output-len 4 --max-total-tokens 64 --result-filename {path}"
    monkeypatch.setattr("sys.argv", ["bench_one_batch", *MODEL, *argv.split()])
    main()
    assert [json.loads(line)["batch_size"] for line in path.read_text().splitlines()] == [2, 3]
    assert capfd.readouterr().out.count("Benchmark ...") == 1
    monkeypatch.setattr("sys.argv", ["bench_one_batch", *MODEL, *argv.split(), "--max-running-requests", "1"])
    with pytest.raises(StartupError, match="no batch could be run"):
        main()


def test_nothing_runs(tmp_path: Path) -> None:
    argv = f"--batch-size 5 --max-running-requests 2 --max-total-tokens 64 --result-filename {tmp_path / 'x'}"
    with pytest.raises(StartupError, match="no batch could be run"):
        latency_test(*parse_args([*MODEL, *argv.split()]))
    assert not (tmp_path / "x").exists()
