"""sglang-router in front of two servers: where prompts go, and what a client sees of a server that dies.

    python -m venv /tmp/router && /tmp/router/bin/pip install sglang-router
    python benchmark/clients/router.py --python /tmp/router/bin/python --record

1. What the router asks of a worker, from the workers' access logs.
2. Prompts of a few groups, each with a long common beginning, with the policies cache_aware and round_robin: how much
   of the prompts the workers' prefix caches had.
3. A worker is killed (SIGKILL) under load. Requests that are not streamed must all be answered, with the right text.
4. A worker is started in its place: the router takes it back. It counts as healthy first; requests it gets once the
   router's circuit breaker, which too many failures opened, lets one through. The breaker's waiting time is 2 s here, a
   minute by default.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import arguments, free_port, report, start_server, version

from sglang.srt.utils import kill_process_tree
from sglang.test.client import answers

GROUPS, PER_GROUP, PREFIX = 7, 4, 400  # an odd number, lest round robin meets each group with the same worker
REQUESTS, CLIENTS, NEW_TOKENS, KILL_AFTER = 160, 8, 48, 40


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 120) -> tuple[int, Any]:
    """Status and JSON of a GET, or a POST of ``body``; status 0 without an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read()
            return response.status, json.loads(text) if text.startswith((b"{", b"[")) else text
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:300]
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def router(python: str, policy: str, workers: list[str], log: Path) -> Iterator[str]:
    port, metrics = free_port(), free_port()
    command = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
        "--worker-urls", *workers, "--prometheus-port", str(metrics), "--health-check-interval-secs", "1",
        "--health-failure-threshold", "2", "--health-success-threshold", "1", "--retry-initial-backoff-ms", "20",
        "--cb-timeout-duration-secs", "2",
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": ""})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for_workers(url, len(workers))
        yield url
    finally:
        kill_process_tree(process.pid)


def healthy(url: str) -> int:
    status, body = call(f"{url}/workers", timeout=5)
    return sum(bool(worker["is_healthy"]) for worker in body["workers"]) if status == 200 else 0


def wait_for_workers(url: str, count: int, timeout: float = 60) -> float:
    """Seconds until the router has ``count`` healthy workers."""
    begin = time.monotonic()
    while healthy(url) != count:
        if time.monotonic() - begin > timeout:
            raise TimeoutError(f"the router has {healthy(url)} healthy workers, not {count}: {call(url + '/workers')}")
        time.sleep(0.1)
    return time.monotonic() - begin


def generations(log: Path) -> int:
    """How often the worker that writes ``log`` has been asked to generate."""
    return log.read_text(errors="replace").count('"POST /generate HTTP/1.1" 200')


def wait_until_asked(url: str, log: Path, timeout: float = 60) -> float:
    """Seconds until the router at ``url`` gives a request to the worker that writes ``log``."""
    begin, before = time.monotonic(), generations(log)
    while generations(log) == before:
        if time.monotonic() - begin > timeout:
            raise TimeoutError(f"the router gave the worker no request in {timeout:g} s")
        assert generate(url, [10, 20, 30], 1)[0] == 200
        time.sleep(0.1)
    return time.monotonic() - begin


def generate(url: str, ids: list[int], new_tokens: int, stream: bool = False) -> tuple[int, Any]:
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, "stream": stream}
    return call(f"{url}/generate", body) if not stream else stream_call(f"{url}/generate", body)


def stream_call(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """As :func:`call` for a stream: its last event, status 0 where it broke off."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    last: Any = None
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                elif line.startswith(b"data: [DONE]"):
                    return response.status, last
        return 0, f"the stream ended without [DONE] after {last and last['meta_info']['completion_tokens']} tokens"
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:300]
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


def text_prompt(group: int, question: int) -> str:
    # The router's tree is over text.
    return f"Group {group}. " + f"{group} is the number of this group. " * (PREFIX // 30) + f"Question {question}?"


def cache_hits(url: str) -> tuple[int, int]:
    """Prompt tokens that were cached, and all."""
    cached = total = 0
    for question in range(PER_GROUP):
        for group in range(GROUPS):
            params = {"temperature": 0, "max_new_tokens": 1}
            body = {"text": text_prompt(group, question), "sampling_params": params}
            status, reply = call(f"{url}/generate", body)
            assert status == 200, reply
            cached += reply["meta_info"]["cached_tokens"]
            total += reply["meta_info"]["prompt_tokens"]
    return cached, total


def under_load(url: str, expected: list[list[int]], stream: bool, victim: subprocess.Popen[bytes]) -> list[str]:
    """Requests from several clients at once; ``victim`` is killed after a number of answers."""
    outcomes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    lock, kill = threading.Lock(), threading.Event()

    def one(i: int) -> None:
        prompt = i % len(expected)
        status, reply = generate(url, [10 + prompt, 20, 30 + prompt], NEW_TOKENS, stream)
        good = status == 200 and reply.get("output_ids") == expected[prompt]
        with lock:
            outcomes["right" if good else "wrong text" if status == 200 else f"status {status}"] += 1
            if not good:
                problems.append(f"{status} {reply}"[:160])
            if sum(outcomes.values()) == KILL_AFTER:
                kill.set()

    def killer() -> None:
        kill.wait()
        kill_process_tree(victim.pid)

    thread = threading.Thread(target=killer)
    thread.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(REQUESTS)))
    thread.join()
    kind = "streamed" if stream else "not streamed"
    lines = [f"{kind}: {REQUESTS} requests of {CLIENTS} clients, a worker killed after {KILL_AFTER}: {dict(outcomes)}"]
    lines += [f"  e.g. {re.sub(r'127.0.0.1:[0-9]+', 'HOST:PORT', problems[0])}"] if problems else []
    if not stream:
        assert outcomes == {"right": REQUESTS}, (outcomes, problems[:3])
    return lines


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    folder = Path(tempfile.mkdtemp(prefix="router-"))
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    logs = [folder / "a.log", folder / "b.log"]
    workers = [start_server(args.model_path, port, log=log) for port, log in zip(ports, logs, strict=True)]
    lines = []
    try:
        with router(args.python, "round_robin", urls, folder / "round_robin.log") as url:
            unaware, total = cache_hits(url)
            lines.append(f"round_robin: {unaware} of {total} prompt tokens cached ({100 * unaware / total:.0f} %)")
        for each in urls:
            assert call(f"{each}/flush_cache", {})[0] == 200
        with router(args.python, "cache_aware", urls, folder / "cache_aware.log") as url:
            cached, total = cache_hits(url)
            lines.append(f"cache_aware: {cached} of {total} prompt tokens cached ({100 * cached / total:.0f} %)")
            assert cached > unaware
            chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            text = {"model": "default", "prompt": "hi", "max_tokens": 3, "logprobs": 1, "echo": True}
            for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
                status, reply = call(url + path, body)
                assert status == 200, (path, reply)
            expected = [generate(urls[0], [10 + i, 20, 30 + i], NEW_TOKENS)[1]["output_ids"] for i in range(8)]
            assert all(len(ids) == NEW_TOKENS for ids in expected)
        with router(args.python, "round_robin", urls, folder / "kill.log") as url:
            for stream in (False, True):
                before = generations(logs[1])
                lines += under_load(url, expected, stream, workers[1])
                # Else nothing was seen of what its death does.
                assert generations(logs[1]) > before, "the worker that was killed had not been asked"
                seconds = wait_for_workers(url, 1)
                lines.append(f"  the router had one healthy worker {seconds:.1f} s after the load")
                workers[1] = start_server(args.model_path, ports[1], log=logs[1])
                seconds = wait_for_workers(url, 2)
                asked = seconds + wait_until_asked(url, logs[1])
                lines.append(
                    f"  a new worker in its place: {seconds:.1f} s after it was ready the router called it healthy, "
                    f"{asked:.1f} s after it was ready it got a request"
                )
                assert generate(url, [10, 20, 30], NEW_TOKENS)[1]["output_ids"] == expected[0]
    finally:
        for worker in workers:
            kill_process_tree(worker.pid)
        assert not any(answers(f"{each}/health", 1) for each in urls)
    requests = collections.Counter(
        match.group(1)
        for log in logs
        for match in re.finditer(r'"((?:GET|POST) /[a-z_/0-9]*)[^"]*" (?=200|4)', log.read_text(errors="replace"))
    )
    lines.append(f"the workers were asked: {', '.join(sorted(requests))}")
    missing = re.findall(r'"((?:GET|POST) /\S*)[^"]*" 404', "".join(log.read_text(errors="replace") for log in logs))
    lines.append(f"of it answered with 404: {', '.join(sorted(set(missing))) or 'nothing'}")
    report(f"sglang-router {version(args.python, 'sglang-router')}", lines, args.record)
    print(f"logs: {folder}")


if __name__ == "__main__":
    main()
