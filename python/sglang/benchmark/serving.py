"""``python -m sglang.bench_serving``: load on a running server, and what its clients see. SGLang's flags and figures.

The server is this one or any that speaks ``/generate`` or OpenAI's protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tqdm.asyncio import tqdm

from sglang.benchmark.backends import BACKENDS, REFUSED_BACKENDS, Backend, RequestFuncOutput, send
from sglang.benchmark.datasets import DATASETS, REFUSED_DATASETS, DatasetRow, get_dataset
from sglang.benchmark.metrics import calculate_metrics, print_table
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.managers.hf_tokenizer import get_tokenizer
from sglang.srt.utils.cli import ArgumentParser, check_appendable, run_main
from sglang.srt.utils.open_files import raise_open_file_limit

TIMEOUT_SECONDS = 6 * 3600.0
# A line of a cumulative stream with log-probabilities is long.
READ_BUFFER_BYTES = 10 << 20
WARMUP_OUTPUT_LEN = 32

# SGLang's flags for what this version has not.
_NOT_HERE = """
agentic-max-turns dataset-offset fake-prefill flush-cache-timeout goodput gsp-fast-prepare gsp-group-distribution
gsp-num-turns gsp-send-routing-key gsp-zipf-alpha image-content image-count image-format image-resolution lora-name
lora-request-distribution lora-zipf-alpha mooncake-num-rounds mooncake-slowdown-factor mooncake-workload
pd-separated plot-throughput print-requests profile profile-activities profile-by-stage profile-decode-url
profile-num-steps profile-output-dir profile-prefill-url profile-prefix profile-stages profile-start-step
profile-steps random-image-count return-routed-experts rust-client rust-worker-threads speed-bench-category
speed-bench-output-len token-ids-logprob use-trace-timestamps
"""
REFUSED_FLAGS = frozenset(f"--{name}" for name in _NOT_HERE.split())

_SHAREGPT_FLAGS = ("sharegpt_output_len", "sharegpt_context_len", "apply_chat_template", "prompt_suffix")
_RANDOM_FLAGS = ("random_input_len", "random_output_len", "random_range_ratio")
_GSP_FLAGS = tuple(
    f"gsp_{name}"
    for name in ("num_groups", "prompts_per_group", "system_prompt_len", "question_len", "output_len", "range_ratio",
                 "ordered")
)  # fmt: skip


def make_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m sglang.bench_serving", "Benchmark the online serving throughput.")
    add = parser.add_argument
    add("--backend", default="sglang", help=f"{', '.join(BACKENDS)}: which endpoint is asked, and how")
    add("--base-url", help="server's URL, instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, help="default: 30000; 8000 with --backend vllm or vllm-chat")
    add("--ready-check-timeout-sec", type=float, default=60, help="wait for the server; 0: don't (default: 60)")
    add("--model", help="model name in requests (default: the first of the server's /v1/models)")
    add("--served-model-name", help="model name in requests, where --model names the tokenizer's folder")
    add("--tokenizer", help="its folder (default: what the server's /model_info says, else --model)")
    add("--dataset-name", default="sharegpt", help=", ".join(DATASETS))
    add(
        "--dataset-path", default="", help="a ShareGPT JSON file; for sharegpt, and for random if prompts shall be text"
    )
    add("--num-prompts", "--num-prompt", type=int, default=1000)
    add("--sharegpt-output-len", type=int, help="new tokens of each request (default: as the dataset's answer has)")
    add("--sharegpt-context-len", type=int, help="leave out conversations longer than this")
    add("--random-input-len", "--random-input", type=int, default=1024)
    add("--random-output-len", "--random-output", type=int, default=1024)
    add("--random-range-ratio", type=float, default=0.0, help="lengths are from this part of the above up to it")
    add("--gsp-num-groups", type=int, default=64, help="of generated-shared-prefix, as all --gsp flags")
    add("--gsp-prompts-per-group", type=int, default=16)
    add("--gsp-system-prompt-len", type=int, default=2048)
    add("--gsp-question-len", type=int, default=128)
    add("--gsp-output-len", type=int, default=256)
    add("--gsp-range-ratio", type=float, default=1.0)
    add("--gsp-ordered", action="store_true", help="groups one after the other, not shuffled")
    add("--request-rate", type=float, default=float("inf"), help="requests per second, Poisson (default: all at once)")
    add("--max-concurrency", type=int, help="requests under way at a time (default: any number)")
    add("--warmup-requests", type=int, default=1)
    add("--flush-cache", action="store_true", help="empty the server's prefix cache before the run")
    add("--disable-stream", action="store_true")
    add("--disable-ignore-eos", action="store_true", help="let a request end where the model ends it")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--return-logprob", action="store_true")
    add("--top-logprobs-num", type=int, default=0)
    add("--logprob-start-len", type=int, default=-1)
    add("--extra-request-body", default="{}", metavar="JSON", help="object whose fields are added to every request")
    add("--apply-chat-template", action="store_true", help="for sharegpt")
    add("--prompt-suffix", default="", help="for sharegpt")
    add("--tokenize-prompt", action="store_true", help="send token ids, whose number is exact; --backend sglang only")
    add("--header", nargs="+", default=[], metavar="KEY=VALUE")
    add("--cache-report", action="store_true", help="also say how many prompt tokens the prefix cache had")
    add("--seed", type=int, default=42)
    add("--tag", help="put into the result as it is")
    add("--output-file", help="JSONL file that the result is appended to")
    add("--output-details", action="store_true", help="with lengths, times, text and error of every request")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ArgumentError for what is unknown, not supported or contradictory."""
    for word in argv:
        if (flag := word.partition("=")[0]) in REFUSED_FLAGS:
            raise ArgumentError(f"{flag} is known from SGLang but not supported by this version")
    parser = make_parser()
    args = parser.parse_args(argv)
    for flag, value, known, refused in (
        ("--backend", args.backend, BACKENDS, REFUSED_BACKENDS),
        ("--dataset-name", args.dataset_name, DATASETS, REFUSED_DATASETS),
    ):
        if value not in known:
            text = "is known from SGLang but not supported by this version" if value in refused else "is unknown"
            raise ArgumentError(f"{flag} {value} {text}; valid: {', '.join(known)}")
    positive = ("num_prompts", "random_input_len", "random_output_len", "gsp_num_groups", "gsp_prompts_per_group",
                "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len", "max_concurrency", "request_rate",
                "sharegpt_output_len", "sharegpt_context_len")  # fmt: skip
    for name in positive:
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ArgumentError(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    for name in ("random_range_ratio", "gsp_range_ratio"):
        if not 0 <= getattr(args, name) <= 1:
            raise ArgumentError(f"--{name.replace('_', '-')} must be from 0 to 1, not {getattr(args, name)}")
    if args.warmup_requests < 0:
        raise ArgumentError(f"--warmup-requests must be 0 or more, not {args.warmup_requests}")
    for flags, used, when in (
        (_SHAREGPT_FLAGS, args.dataset_name == "sharegpt", "--dataset-name sharegpt"),
        (_RANDOM_FLAGS, args.dataset_name.startswith("random"), "--dataset-name random or random-ids"),
        (_GSP_FLAGS, args.dataset_name == "generated-shared-prefix", "--dataset-name generated-shared-prefix"),
        (
            ("num_prompts",),
            args.dataset_name != "generated-shared-prefix",
            "the other datasets; here --gsp-num-groups times --gsp-prompts-per-group counts",
        ),
        (("dataset_path",), args.dataset_name in ("sharegpt", "random"), "--dataset-name sharegpt or random"),
        (("top_logprobs_num", "logprob_start_len"), args.return_logprob, "--return-logprob"),
        (("logprob_start_len", "tokenize_prompt"), BACKENDS[args.backend].path == "/generate", "--backend sglang"),
    ):
        for name in flags:
            if not used and getattr(args, name) != parser.get_default(name):
                raise ArgumentError(f"--{name.replace('_', '-')} is for {when}; leave it out")
    for header in args.header:
        if "=" not in header:
            raise ArgumentError(f"--header {header} must be KEY=VALUE")
    try:
        args.extra_request_body = json.loads(args.extra_request_body)
    except ValueError as error:
        raise ArgumentError(f"--extra-request-body is no JSON: {error}") from None
    if not isinstance(args.extra_request_body, dict):
        raise ArgumentError("--extra-request-body must be a JSON object")
    return args


def _url(args: argparse.Namespace) -> str:
    if args.base_url:
        return str(args.base_url).rstrip("/")
    port = args.port or (8000 if args.backend.startswith("vllm") else 30000)
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http://{host}:{port}"


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = dict(header.split("=", 1) for header in args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    elif key := os.environ.get("API_KEY"):
        headers["Authorization"] = key
    return headers


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    """The JSON at ``url``; None if it isn't there."""
    with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError):
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
            if response.status == 200:
                return await response.json(content_type=None)
    return None


async def _wait_for(session: aiohttp.ClientSession, url: str, timeout: float) -> dict[str, Any]:
    """The server's /v1/models as soon as it answers.

    Raises:
        StartupError: it doesn't in ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not isinstance(models := await _get(session, f"{url}/v1/models"), dict):
        if time.monotonic() >= deadline:
            raise StartupError(
                f"{url}/v1/models does not answer after {timeout:g} s; is a server running there? See --base-url, "
                "--host, --port and, for a server with an API key, the environment variable OPENAI_API_KEY"
            )
        await asyncio.sleep(0.5)
    return models


def _tokenizer(path: str) -> Any:
    """Raises StartupError unless there is one at ``path``, which may be what a server elsewhere says of itself."""
    try:
        return get_tokenizer(path)
    except StartupError as error:
        raise StartupError(
            f"{error} Name the folder of the model's tokenizer on this machine with --tokenizer."
        ) from None


async def _arrivals(
    rows: Sequence[DatasetRow], request_rate: float, rng: np.random.RandomState
) -> AsyncIterator[DatasetRow]:
    for row in rows:
        yield row
        if request_rate != float("inf"):
            await asyncio.sleep(rng.exponential(1.0 / request_rate))


async def _run(
    session: aiohttp.ClientSession,
    url: str,
    backend: Backend,
    rows: Sequence[DatasetRow],
    model: str,
    args: argparse.Namespace,
    rng: np.random.RandomState,
) -> tuple[list[RequestFuncOutput], float]:
    """Warm up, send everything; the outputs in the order of ``rows`` and the seconds that it took."""
    limit: Any = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()

    async def one(row: DatasetRow) -> RequestFuncOutput:
        payload = backend.payload(row, model, args) | args.extra_request_body
        async with limit:
            return await send(session, url + backend.path, backend, row, payload)

    first = DatasetRow(rows[0].prompt, rows[0].prompt_len, min(rows[0].output_len, WARMUP_OUTPUT_LEN))
    print(f"Starting warmup with {args.warmup_requests} sequences...")
    warm = await asyncio.gather(*(one(first) for _ in range(args.warmup_requests)))
    if warm and not any(output.success for output in warm):
        raise StartupError(f"the warm-up request failed, so no other was sent: {warm[0].error}")
    if args.flush_cache:
        path = "/reset_prefix_cache" if args.backend.startswith("vllm") else "/flush_cache"
        async with session.post(url + path) as response:
            if response.status != 200:
                raise StartupError(f"--flush-cache: {path} was answered with HTTP {response.status}")
    await asyncio.sleep(1.0)

    begin = time.perf_counter()
    with tqdm(total=len(rows), disable=args.disable_tqdm) as progress:

        async def counted(row: DatasetRow) -> RequestFuncOutput:
            output = await one(row)
            progress.update(1)
            return output

        tasks = [asyncio.create_task(counted(row)) async for row in _arrivals(rows, args.request_rate, rng)]
        outputs = await asyncio.gather(*tasks)
    return outputs, time.perf_counter() - begin


async def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run what ``args`` ask for, print the table, append to the result file.

    Returns:
        SGLang's result object with the details of every request.

    Raises:
        StartupError: no server answers, or no request succeeded.
    """
    url, backend = _url(args), BACKENDS[args.backend]
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        read_bufsize=READ_BUFFER_BYTES,
        # A connection for each request, as SGLang: a kept one may be closed by the server just as it is used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers=_headers(args),
    )
    async with session:
        models = await _wait_for(session, url, args.ready_check_timeout_sec) if args.ready_check_timeout_sec else {}
        served = models.get("data") or [{}]
        args.model = args.model or served[0].get("id")
        if not args.model:
            raise StartupError(f"{url}/v1/models names no model; give it with --model")
        info = await _get(session, f"{url}/model_info") or {}
        tokenizer = _tokenizer(args.tokenizer or info.get("tokenizer_path") or args.model)
        shown = {name: value for name, value in vars(args).items() if name != "header"}  # which may hold a key
        print(f"benchmark_args={argparse.Namespace(**shown)}\n")
        rng = np.random.RandomState(args.seed)
        rows = get_dataset(args, tokenizer, rng)
        outputs, duration = await _run(session, url, backend, rows, args.served_model_name or args.model, args, rng)
        server_info = await _get(session, f"{url}/server_info")

    failed = [output for output in outputs if not output.success]
    if len(failed) == len(outputs):
        raise StartupError(f"all {len(outputs)} requests failed; the first error: {failed[0].error}")
    if failed:
        print(f"{len(failed)} of {len(outputs)} requests failed; the first error: {failed[0].error}", file=sys.stderr)
    retokenized = [len(tokenizer.encode(output.generated_text, add_special_tokens=False)) for output in outputs]
    metrics = calculate_metrics([row.prompt_len for row in rows], outputs, retokenized, duration)
    cache = _cache_report(outputs) if args.cache_report else {}
    head = {
        "Backend:": args.backend,
        "Traffic request rate:": args.request_rate,
        "Max request concurrency:": args.max_concurrency or "not set",
    }
    tail = {
        "Total prompt tokens:": f"{cache['total_prompt_tokens']}",
        "Total cached tokens:": f"{cache['total_cached_tokens']}",
        "Cache hit rate:": f"{cache['cache_hit_rate_pct']:.1f}%",
    } if cache else {}  # fmt: skip
    print_table(head, metrics, {"Cache Hit Details": tail} if tail else {})

    asked = ("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
             "random_input_len", "random_output_len", "random_range_ratio")  # fmt: skip
    result = {name: getattr(args, name) for name in asked} | {"server_info": server_info} | metrics
    result |= {"cache_report": cache} if cache else {}
    details = {
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": [output.output_len if output.success else 0 for output in outputs],
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
        "generated_texts": [output.generated_text for output in outputs],
        "errors": [output.error for output in outputs],
    }
    with _output_file(args).open("a", encoding="utf-8") as file:
        file.write(json.dumps(result | details if args.output_details else result) + "\n")
    return result | details


def _cache_report(outputs: Sequence[RequestFuncOutput]) -> dict[str, Any]:
    done = [output for output in outputs if output.success]
    total, cached = sum(output.prompt_len for output in done), sum(output.cached_tokens for output in done)
    return {
        "total_prompt_tokens": total,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": round(100 * cached / total, 2) if total else 0.0,
    }


def _output_file(args: argparse.Namespace) -> Path:
    if args.output_file:
        return Path(args.output_file)
    what = args.dataset_name
    if what.startswith("random"):
        what = f"{args.random_input_len}_{args.random_output_len}"
    return Path(f"{args.backend}_{datetime.now():%m%d}_{args.num_prompts}_{what}.jsonl")


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """:func:`benchmark` in an event loop of its own."""
    check_appendable(_output_file(args))
    raise_open_file_limit()
    return asyncio.run(benchmark(args))


def main() -> None:
    run_benchmark(parse_args(sys.argv[1:]))


if __name__ == "__main__":
    run_main(main)
