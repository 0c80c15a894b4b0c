"""bench_serving: times from known token events, SGLang's names, refusals, a run against a server."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_server_thread import FIXTURE, serve
from sglang.benchmark.backends import BACKENDS, RequestFailedError, RequestFuncOutput, read_events
from sglang.benchmark.datasets import get_dataset
from sglang.benchmark.metrics import calculate_metrics
from sglang.benchmark.serving import parse_args, run_benchmark
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.managers.hf_tokenizer import get_tokenizer


class Script:
    """The lines of a response and the clock that they set: (seconds, object or line) in order."""

    def __init__(self, *events: tuple[float, Any]) -> None:
        self._events = events
        self.now = 0.0

    async def lines(self) -> AsyncIterator[bytes]:
        for now, body in self._events:
            self.now = now
            yield body if isinstance(body, bytes) else b"data: " + json.dumps(body).encode() + b"\n"
            yield b"\n"

    def play(self, backend: str, begin: float = 10.0) -> RequestFuncOutput:
        output = RequestFuncOutput(prompt_len=5, output_len=99, start_time=begin)
        asyncio.run(read_events(self.lines(), BACKENDS[backend].parse, output, lambda: self.now))
        return output


def generated(text: str, tokens: int) -> dict[str, Any]:
    return {"text": text, "meta_info": {"prompt_tokens": 7, "completion_tokens": tokens, "cached_tokens": 3}}


def test_generate_spreads_a_gap_over_its_tokens() -> None:
    script = Script(
        (11, generated("", 1)),  # half a character: no text yet
        (12, generated("a", 2)),
        (13, generated("ab", 3)),
        (13.5, generated("ab", 4)),
        (15, generated("abc", 6)),
        (16, b"data: [DONE]\n"),
    )
    output = script.play("sglang")
    assert (output.ttft, output.latency) == (2, 6)
    assert output.itl == [1, 0.5, 0.75, 0.75]
    assert (output.generated_text, output.output_len, output.prompt_len, output.cached_tokens) == ("abc", 6, 7, 3)


def test_openai_counts_a_gap_per_event() -> None:
    usage = {"prompt_tokens": 8, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    script = Script(
        (10.5, {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}),
        (11, {"choices": [{"delta": {"content": "a"}}]}),
        (13, {"choices": [{"delta": {"reasoning_content": "b"}}]}),
        (13.25, {"choices": [{"delta": {"content": "c"}}]}),
        (14, {"choices": [], "usage": usage}),
        (14.5, b"data: [DONE]\n"),
    )
    output = script.play("sglang-oai-chat")
    assert (output.ttft, output.latency, output.itl) == (1, 4.5, [2, 0.25])
    assert (output.generated_text, output.output_len, output.prompt_len, output.cached_tokens) == ("abc", 4, 8, 2)


@pytest.mark.parametrize(
    ("backend", "body"),
    [
        ("sglang", generated("ab", 2)),
        ("sglang-oai", {"choices": [{"text": "ab"}], "usage": {"completion_tokens": 2}}),
        ("sglang-oai-chat", {"choices": [{"message": {"content": "ab"}}], "usage": {"completion_tokens": 2}}),
    ],
)
def test_response_in_one_piece(backend: str, body: dict[str, Any]) -> None:
    output = Script((13, json.dumps(body).encode())).play(backend)
    assert (output.ttft, output.latency, output.itl, output.output_len) == (3, 3, [], 2)
    assert output.generated_text == "ab"


def test_error_in_a_stream_is_no_success() -> None:
    with pytest.raises(RequestFailedError, match="out of slots"):
        Script((11, generated("a", 1)), (12, {"error": {"message": "out of slots"}})).play("sglang")


def test_metrics() -> None:
    def done(start: float, ttft: float, itl: list[float]) -> RequestFuncOutput:
        latency = ttft + sum(itl)
        return RequestFuncOutput(
            prompt_len=0, output_len=1 + len(itl), success=True, latency=latency, ttft=ttft, itl=itl, start_time=start
        )

    outputs = [
        done(100.0, 0.5, [0.1, 0.3]),  # tokens in second 0
        done(100.2, 1.0, []),  # second 1; one token: no TPOT
        RequestFuncOutput(prompt_len=0, output_len=50, error="x"),
        done(101.5, 0.2, [0.2, 0.2, 0.2]),  # 101.7 to 102.3: seconds 1 and 2
    ]
    found = calculate_metrics([10, 20, 1000, 30], outputs, [3, 1, 0, 5], duration=4.0)
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (3, 60, 8)
    assert found["total_output_tokens_retokenized"] == 9
    assert (found["request_throughput"], found["input_throughput"], found["output_throughput"]) == (0.75, 15, 2)
    assert found["total_throughput"] == 17
    # Over 0.2, 0.5, 1.0: numpy's linear interpolation, as SGLang.
    assert [found[f"{k}_ttft_ms"] for k in ("median", "p90", "p95", "p99")] == pytest.approx([500, 900, 950, 990])
    assert found["mean_ttft_ms"] == pytest.approx(1700 / 3)
    assert found["mean_tpot_ms"] == pytest.approx(200)  # 0.2 each; the whole-batch mean would differ
    assert (found["mean_itl_ms"], found["median_itl_ms"]) == (pytest.approx(200), pytest.approx(200))
    assert found["max_itl_ms"] == pytest.approx(300)
    assert found["std_itl_ms"] == pytest.approx(1000 * np.std([0.1, 0.3, 0.2, 0.2, 0.2]))
    assert found["mean_e2e_latency_ms"] == pytest.approx(1000 * (0.9 + 1.0 + 0.8) / 3)
    assert found["concurrency"] == pytest.approx(2.7 / 4)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3, 2)


def dataset(*argv: str) -> list[Any]:
    args = parse_args(["--num-prompts", "5", *argv])
    return get_dataset(args, get_tokenizer(str(FIXTURE)), np.random.RandomState(args.seed))


def test_random_prompts_have_their_lengths_and_repeat() -> None:
    argv = ["--dataset-name", "random", "--random-input", "40", "--random-output", "9", "--tokenize-prompt"]
    rows = dataset(*argv, "--random-range-ratio", "0.5")
    assert all(len(row.prompt) == row.prompt_len and 20 <= row.prompt_len <= 40 for row in rows)
    assert all(4 <= row.output_len <= 9 for row in rows)
    assert len({tuple(row.prompt) for row in rows}) == 5
    assert rows == dataset(*argv, "--random-range-ratio", "0.5")
    assert rows != dataset(*argv, "--random-range-ratio", "0.5", "--seed", "1")


def test_shared_prefix_prompts() -> None:
    argv = "--dataset-name generated-shared-prefix --tokenize-prompt --gsp-ordered --gsp-num-groups 2"
    argv += " --gsp-prompts-per-group 3 --gsp-system-prompt-len 8 --gsp-question-len 4 --gsp-output-len 5"
    args = parse_args(argv.split())
    rows = get_dataset(args, get_tokenizer(str(FIXTURE)), np.random.RandomState(0))
    heads, tails = [tuple(r.prompt[:8]) for r in rows], {tuple(r.prompt[8:]) for r in rows}
    assert len(rows) == 6 and heads[0] == heads[1] == heads[2] != heads[3] == heads[5] and len(tails) == 6
    assert {row.prompt_len for row in rows} == {12} and {row.output_len for row in rows} == {5}


def test_sharegpt_file(tmp_path: Path) -> None:
    turns = [{"value": "one two three"}, {"value": "an answer"}]
    data = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversation": turns}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(data))
    rows = dataset("--dataset-name", "sharegpt", "--dataset-path", str(path), "--sharegpt-output-len", "7")
    assert [(row.prompt, row.output_len) for row in rows] == [("one two three", 7)] * 2
    path.write_text('{"a": 1}')
    with pytest.raises(ArgumentError, match="no ShareGPT file"):
        dataset("--dataset-name", "sharegpt", "--dataset-path", str(path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--profile", "--profile is known from SGLang"),
        ("--lora-name=a", "--lora-name is known from SGLang"),
        ("--backend trt", "--backend trt is known from SGLang"),
        ("--backend tensorrt", "--backend tensorrt is unknown; valid: sglang, "),
        ("--dataset-name mmmu", "--dataset-name mmmu is known from SGLang"),
        ("--num-prompts 0", "--num-prompts must be more than 0"),
        ("--request-rate nan", "--request-rate must be more than 0"),
        ("--dataset-name random --random-range-ratio 2", "--random-range-ratio must be from 0 to 1"),
        ("--random-input-len 5", "--random-input-len is for --dataset-name random"),
        ("--dataset-name generated-shared-prefix --num-prompts 5", "--num-prompts is for"),
        ("--backend vllm --tokenize-prompt", "--tokenize-prompt is for --backend sglang"),
        ("--top-logprobs-num 3", "--top-logprobs-num is for --return-logprob"),
        ("--extra-request-body [1]", "--extra-request-body must be a JSON object"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_refusals(argv: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_args(argv.split())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as base_url:
        yield base_url


RESULT_KEYS = {
    "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "random_input_len",
    "random_output_len", "random_range_ratio", "server_info", "duration", "completed", "total_input_tokens",
    "total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens", "total_output_tokens_retokenized",
    "request_throughput", "input_throughput", "output_throughput", "total_throughput", "concurrency", "accept_length",
    "max_output_tokens_per_s", "max_concurrent_requests", "max_itl_ms",
    *(f"{k}_{name}_ms" for name in ("e2e_latency", "ttft", "tpot", "itl")
      for k in ("mean", "median", "std", "p90", "p95", "p99")),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_run(url: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the real HTTP server: every token is counted, whatever the endpoint."""
    path = tmp_path / "result.jsonl"
    argv = f"--backend {backend} --base-url {url}/ --dataset-name random --num-prompts 6 --random-input 20"
    argv += f" --random-output 8 --max-concurrency 3 --output-file {path} --disable-tqdm --tag t --seed 3"
    details = ["--output-details"] if backend == "vllm" else []
    result = run_benchmark(parse_args([*argv.split(), *details]))
    (plain,) = (json.loads(line) for line in path.read_text().splitlines())
    more = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
    assert set(plain) == RESULT_KEYS | (more if details else set())
    assert (plain["completed"], plain["tag"], plain["server_info"]["device"]) == (6, "t", "cpu")
    lens = np.random.RandomState(3)
    lens.randint(1, 21, size=6)
    assert result["output_lens"] == lens.randint(1, 9, size=6).tolist()
    assert plain["total_output_tokens"] == sum(result["output_lens"])
    assert all(ttft > 0 for ttft in result["ttfts"]) and not any(result["errors"])
    table = capsys.readouterr().out
    for label in (
        "Serving Benchmark Result",
        "Successful requests:                     6",
        "Mean TTFT (ms):",
        "P99 ITL",
    ):
        assert label in table


def test_failures(url: str, tmp_path: Path) -> None:
    argv = f"--base-url {url} --dataset-name random --num-prompts 2 --random-input 4 --disable-tqdm"
    argv += f" --output-file {tmp_path / 'x'}"
    too_long = ["--random-output", "999999", "--random-range-ratio", "1"]
    with pytest.raises(StartupError, match="warm-up request failed.*no_such_field"):
        run_benchmark(parse_args([*argv.split(), "--extra-request-body", '{"no_such_field": 1}']))
    with pytest.raises(StartupError, match="all 2 requests failed; the first error: HTTP 400"):
        run_benchmark(parse_args([*argv.split(), "--warmup-requests", "0", *too_long]))
    with pytest.raises(StartupError, match="does not answer after 0.1 s"):
        run_benchmark(parse_args(["--port", "1", "--ready-check-timeout-sec", "0.1"]))


def test_a_connection_for_each_request(tmp_path: Path) -> None:
    """One that was kept may be closed by the server while the tokenizer is loaded, and a POST isn't sent again."""
    seen: list[tuple[str, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append((self.path, self.client_address[1]))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({**generated("a", 1), "tokenizer_path": str(FIXTURE), "data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        argv = f"--port {server.server_port} --dataset-name random --num-prompts 2 --disable-tqdm --disable-stream"
        result = run_benchmark(parse_args([*argv.split(), "--output-file", str(tmp_path / "x")]))
    finally:
        server.shutdown()
        server.server_close()
    assert result["completed"] == 2
    assert [path for path, _ in seen] == ["/v1/models", "/model_info", *["/generate"] * 3, "/server_info"]
    assert len({port for _, port in seen}) == 6
