"""The whole server on a GPU under load, and transformers' continuous batching beside it.

    python benchmark/bench_gpu_server.py --output benchmark/results/h200_server.json
    python benchmark/bench_gpu_server.py --device cpu --shape tiny --concurrency 1,2 --input 32 --output-len 8

One engine after the other has the machine: this server with random weights (``--load-format dummy``) quantised as
``w4a16_nvfp4`` and as ``bf16``, asked over HTTP by ``python -m sglang.bench_serving``; transformers in bf16, with
random weights of the same shape, called in its process. Each serves requests of ``--input`` tokens that want
``--output-len`` new ones, so many of them at a time as ``--concurrency`` says, and as many as fit into ``--seconds`` at
the rate of the level before (at least two rounds).

``output_throughput`` is new tokens per second, ``ttft_ms`` and ``itl_ms`` are the medians of the time to the first
token and between tokens (of transformers as it recorded them itself, without HTTP), ``requests`` how many were served.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dummy_models import QUANTS, Shape, environment, write_config, write_report, write_tokenizer

START_SECONDS = 300
FIRST_REQUESTS = 8
Row = dict[str, Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def serving(options: argparse.Namespace, quant: str, folder: Path) -> Iterator[tuple[str, float]]:
    """A server of the model in ``folder``: its URL and the seconds that it took to start.

    Raises:
        RuntimeError: it ended or did not start in time; the text has the end of its log.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    length = options.input + options.output_len + 16
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--load-format", "dummy",
        "--device", options.device, "--port", str(port), "--context-length", str(length), "--random-seed", "0",
        "--max-running-requests", str(max(options.concurrency)), "--chunked-prefill-size", str(options.chunk),
        "--log-level-http", "warning", *options.server_args.split(),
    ]  # fmt: skip
    if options.device == "cpu":
        command += ["--max-total-tokens", str(length * max(options.concurrency))]
    log = folder / "server.log"
    with log.open("wb") as stream:
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment(), stdout=stream, stderr=stream)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                pass
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"{quant}: the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield url, time.monotonic() - began
    except Exception:
        print(log.read_text()[-3000:], flush=True)
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def requests_for(options: argparse.Namespace, concurrency: int, before: Row | None) -> int:
    """How many requests a level serves: ``before`` is the row of the one before."""
    wanted = before["request_throughput"] * options.seconds if before else FIRST_REQUESTS
    return concurrency * min(max(2, int(wanted / concurrency)), options.rounds)


def our_rows(options: argparse.Namespace, quant: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_config(folder, options.shape, quant)
        write_tokenizer(folder, options.shape)
        with serving(options, quant, folder) as (url, start_s):
            before: Row | None = None
            for concurrency in options.concurrency:
                count = requests_for(options, concurrency, before)
                found = bench_serving(options, url, concurrency, count, folder / "bench.jsonl")
                before = {
                    "engine": f"sglang-nvfp4 {quant}",
                    "concurrency": concurrency,
                    "requests": found["completed"],
                    "output_throughput": round(found["output_throughput"], 1),
                    "request_throughput": round(found["request_throughput"], 3),
                    "ttft_ms": round(found["median_ttft_ms"], 2),
                    "itl_ms": round(found["median_itl_ms"], 3),
                    "p99_itl_ms": round(found["p99_itl_ms"], 3),
                    "start_s": round(start_s, 1),
                }
                yield before


def bench_serving(options: argparse.Namespace, url: str, concurrency: int, count: int, output: Path) -> Row:
    """The result of one run of ``sglang.bench_serving``."""
    command = [
        sys.executable, "-m", "sglang.bench_serving", "--base-url", url, "--dataset-name", "random-ids",
        "--tokenize-prompt", "--random-input-len", str(options.input), "--random-output-len", str(options.output_len),
        "--random-range-ratio", "1.0", "--num-prompts", str(count), "--max-concurrency", str(concurrency),
        "--seed", str(concurrency), "--flush-cache", "--disable-tqdm", "--output-file", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=options.limit)
    if done.returncode:
        raise RuntimeError(f"bench_serving failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: Row = json.loads(output.read_text().splitlines()[-1])
    if found["completed"] != count:
        raise RuntimeError(f"only {found['completed']} of {count} requests succeeded:\n{done.stdout[-2000:]}")
    return found


def transformers_rows(options: argparse.Namespace) -> Iterator[Row]:
    """In a process of its own, so that the device is empty before and after."""
    command = [sys.executable, __file__, *options.argv, "--peer"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"engine"'):
                yield json.loads(line)
        if process.wait():
            raise RuntimeError("transformers failed, see above")


def peer(options: argparse.Namespace) -> None:
    """Body of that process: prints its rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), options.shape)
        config = AutoConfig.from_pretrained(folder)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    generation = GenerationConfig(
        max_new_tokens=options.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    # Otherwise it may look for kernels in the network.
    has_flash = any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface"))
    fields: Row = {"max_requests_per_batch": max(options.concurrency), "auto_switch_to_flash": has_flash}
    known = {name: value for name, value in fields.items() if hasattr(ContinuousBatchingConfig, name)}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**known)
    ) as manager:
        ask(manager, options, count=2, concurrency=2, seed=0)
        start_s = time.monotonic() - began
        before: Row | None = None
        for concurrency in options.concurrency:
            count = requests_for(options, concurrency, before)
            before = {"engine": "transformers bf16", "concurrency": concurrency, "requests": count}
            before |= ask(manager, options, count, concurrency, seed=concurrency) | {"start_s": round(start_s, 1)}
            print(json.dumps(before), flush=True)


def ask(manager: Any, options: argparse.Namespace, count: int, concurrency: int, seed: int) -> Row:
    """Serve ``count`` requests, ``concurrency`` at a time.

    Raises:
        RuntimeError: a request failed.
    """
    import numpy as np

    random = np.random.RandomState(seed)
    prompts = [random.randint(2, options.shape.config["vocab_size"], options.input).tolist() for _ in range(count)]
    first_token: list[float] = []
    gaps: list[float] = []
    began = time.perf_counter()
    for prompt in prompts[:concurrency]:
        manager.add_request(prompt, max_new_tokens=options.output_len, record_timestamps=True)
    sent, done = min(concurrency, count), 0
    while done < count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running() or time.perf_counter() - began > options.limit:
                raise RuntimeError("transformers' generation has stopped")
            continue
        if not result.is_finished():
            continue
        if result.error or len(result.generated_tokens) != options.output_len:
            raise RuntimeError(f"{len(result.generated_tokens)} tokens were generated, {result.error}")
        done += 1
        if result.timestamps:
            first_token.append(result.timestamps[0] - result.created_time)
            gaps += [b - a for a, b in zip(result.timestamps, result.timestamps[1:], strict=False)]
        if sent < count:
            manager.add_request(prompts[sent], max_new_tokens=options.output_len, record_timestamps=True)
            sent += 1
    seconds = time.perf_counter() - began
    row = {"output_throughput": round(count * options.output_len / seconds, 1)}
    row["request_throughput"] = round(count / seconds, 3)
    if first_token and gaps:
        row["ttft_ms"] = round(statistics.median(first_token) * 1e3, 2)
        row["itl_ms"] = round(statistics.median(gaps) * 1e3, 3)
        row["p99_itl_ms"] = round(sorted(gaps)[int(len(gaps) * 0.99)] * 1e3, 3)
    return row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--shape", type=Shape.parse, default=Shape.parse("llama-3.1-8b"), help="NAME or NAME:LAYERS")
    add("--engines", default=",".join((*QUANTS, "transformers")))
    add("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64, 256])
    add("--input", type=int, default=512)
    add("--output-len", type=int, default=256)
    add("--seconds", type=float, default=10, help="of a level, about")
    add("--rounds", type=int, default=12, help="most requests of a level, as a multiple of its concurrency")
    add("--limit", type=float, default=120, help="seconds until a level is given up")
    add("--chunk", type=int, default=8192, help="--chunked-prefill-size of the server")
    add("--server-args", default="", help="further arguments of the server, in one word")
    add("--output", type=Path)
    add("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.argv = [word for word in sys.argv[1:] if word != "--peer"]
    return options


def main() -> None:
    options = parse_args()
    if options.peer:
        peer(options)
        return
    import torch
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
    from sglang import __version__
    from sglang.srt.platforms import device_name

    report: Row = {
        "machine": {
            "device": device_name(torch.device(options.device)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sglang-nvfp4": __version__,
        },
        "shape": options.shape.name,
        "input": options.input,
        "output": options.output_len,
        "rows": [],
        "failed": [],
    }
    for engine in options.engines.split(","):
        began = time.monotonic()
        try:
            for row in transformers_rows(options) if engine == "transformers" else our_rows(options, engine):
                report["rows"].append(row)
                print(json.dumps(row), flush=True)
                if options.output:  # whatever comes next may take longer than there is time
                    write_report(options.output, report)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            report["failed"].append({"engine": engine, "why": str(error)[-2000:]})
            print(f"{engine}: {error}", flush=True)
        print(f"{engine}: {time.monotonic() - began:.0f} s", flush=True)
    if options.output:
        write_report(options.output, report)
    sys.exit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()
