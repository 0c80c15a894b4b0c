"""Requests against the document and against good sense, and clients that do not read, reuse names or leave midway."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
from clients import Answer, ask, hang_up, session
from odd_requests import odd_requests
from rows import Row, none_of
from servers import ANSWER_SECONDS, Server, Setup, running

# The event loop serves everybody; while it answers one client the others wait.
STALL_SECONDS = 3.0
EXAMPLES = 60  # per path and mode of schemathesis


async def _longest_wait(server: Server, until: asyncio.Future[Any]) -> float:
    """The longest that /health took meanwhile."""
    longest = 0.0
    async with session() as http:
        while not until.done():
            begin = time.monotonic()
            async with http.get(f"{server.url}/health") as response:
                await response.read()
            longest = max(longest, time.monotonic() - begin)
            await asyncio.sleep(0.05)
    return longest


async def _send(http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> Answer:
    begin = time.monotonic()
    try:
        async with http.post(url, data=body, headers={"content-type": "application/json", **headers}) as response:
            return Answer(response.status, time.monotonic() - begin, (await response.text())[:3000])
    except aiohttp.ClientError as error:
        return Answer(0, time.monotonic() - begin, repr(error))


async def _one_after_another(
    server: Server, vocab_size: int
) -> tuple[list[str], list[tuple[float, str]], list[tuple[float, str]]]:
    """Wrong answers; for each request how long others had to wait meanwhile, and by how many MB the server grew."""
    wrong: list[str] = []
    waits: list[tuple[float, str]] = []
    growth: list[tuple[float, str]] = []
    async with session() as http:
        for odd in odd_requests(vocab_size):
            before = server.rss_mb()
            request = asyncio.ensure_future(_send(http, server.url + odd.path, odd.body, odd.headers))
            waits.append((await _longest_wait(server, request), odd.name))
            answer = request.result()
            growth.append((server.rss_mb() - before, odd.name))
            if answer.status not in odd.statuses:
                wrong.append(f"{odd.name}: {answer.status} {answer.text[:150]}")
            if len(answer.text) > 2000 and answer.status != 200:
                wrong.append(f"{odd.name}: an error of more than 2000 characters")
    return wrong, waits, growth


async def _interleaved(server: Server, rounds: int = 20) -> list[str]:
    """Names that are used again while they run or right after an abort, and clients that leave at every stage."""
    rng = random.Random(0)
    wrong: list[str] = []
    body = {"text": "hello " * 300, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}}
    short = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "rid": "again"}
    url = f"{server.url}/generate"
    async with session() as http:
        for _ in range(rounds):
            running_one = asyncio.ensure_future(ask(http, url, {**body, "rid": "again"}))
            await asyncio.sleep(rng.random() / 10)
            second = await ask(http, url, short)
            if second.status not in (200, 400):
                wrong.append(f"a name in use: {second.status} {second.text}")
            await ask(http, f"{server.url}/abort_request", {"rid": "again"})
            third = await ask(http, url, short)  # at once, while the scheduler may still have the first one
            if third.status != 200 or json.loads(third.text)["meta_info"]["completion_tokens"] != 3:
                wrong.append(f"a name after an abort: {third.status} {third.text}")
            first = await running_one
            if first.status not in (200, 400):
                wrong.append(f"aborted: {first.status} {first.text}")
            await hang_up(http, url, body, chunks=rng.randrange(3), seconds=rng.choice([0.001, 0.01, 0.1, 30]))
        batch = {**body, "text": ["hello"] * 8, "stream": True}
        await asyncio.gather(*(hang_up(http, url, batch, chunks=i, seconds=30) for i in range(6)))
    return wrong


def _does_not_read(server: Server, clients: int) -> tuple[float, list[str]]:
    """Clients that ask for long streams and read nothing. MB by which the processes grow, and what was wrong."""
    before = server.rss_mb()
    body = json.dumps(
        {"text": "hello", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
    ).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    sockets = []
    for _ in range(clients):
        one = socket.create_connection(("127.0.0.1", server.port))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(head.encode() + body)
        sockets.append(one)
    largest = before
    deadline = time.monotonic() + 300
    time.sleep(1)
    while any(server.load().values()) and time.monotonic() < deadline:
        largest = max(largest, server.rss_mb())
        time.sleep(0.5)
    other = server.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    wrong = [] if other.status_code == 200 else [f"another client meanwhile: {other.status_code} {other.text}"]
    for one in sockets:
        one.close()
    return max(largest, server.rss_mb()) - before, wrong


_SHORT = b'{"text":"hello","sampling_params":{"max_new_tokens":2}}'
_POST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
# What is sent, in pieces, and how the answer must begin; None: nothing need come, the client leaves.
_RAW: tuple[tuple[str, tuple[bytes, ...], bytes | None], ...] = (
    ("chunks", (_POST + b"transfer-encoding: chunked\r\n\r\n", b"5\r\n" + _SHORT[:5] + b"\r\n",
                b"%x\r\n" % (len(_SHORT) - 5) + _SHORT[5:] + b"\r\n0\r\n\r\n"), b"HTTP/1.1 200"),
    ("two requests at once", (2 * (_POST + b"content-length: %d\r\n\r\n" % len(_SHORT) + _SHORT),), b"HTTP/1.1 200"),
    ("a chunk that is none", (_POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",), b"HTTP/1.1 400"),
    ("half a body", (_POST + b"content-length: 1000\r\n\r\n" + _SHORT,), None),
    ("half a head", (_POST,), None),
    ("no HTTP", (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), b"HTTP/1.1 400"),
    ("a long head", (_POST + b"x: " + b"a" * 100_000 + b"\r\n\r\n",), None),
    ("100-continue", (_POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(_SHORT), _SHORT), b"HTTP"),
)  # fmt: skip


def _raw_bytes(server: Server) -> list[str]:
    """What HTTP libraries don't send; every client is gone afterwards."""
    wrong = []
    for name, pieces, begin in _RAW:
        with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_SECONDS) as one:
            try:
                for piece in pieces:
                    one.sendall(piece)
                    time.sleep(0.05)
                answer = one.recv(1000) if begin is not None else b""
            except OSError as error:
                answer = repr(error).encode()
        if begin is not None and not answer.startswith(begin):
            wrong.append(f"{name}: {answer[:200]!r}")
    return wrong


def odd(setup: Setup) -> Iterator[Row]:
    vocab_size = json.loads((setup.model / "config.json").read_text())["vocab_size"]
    with running(setup, "--max-total-tokens", "16384") as server:
        before = server.rss_mb()
        wrong, waits, growth = asyncio.run(_one_after_another(server, vocab_size))
        yield none_of(
            "odd requests", wrong, f"Of {len(waits)} odd requests, those answered with another status than theirs."
        )
        longest, _ = max(waits)
        worst = ", ".join(f"{one} {seconds:.1f} s" for seconds, one in sorted(waits)[-4:])
        yield Row("odd requests", longest, STALL_SECONDS, "s", f"Longest wait of another client meanwhile ({worst}).")
        yield none_of("odd requests", server.left_behind(), "What they left behind.")
        most = ", ".join(f"{one} {mb:+.0f} MB" for mb, one in sorted(growth)[-4:])
        grown = server.rss_mb() - before
        yield Row(
            "odd requests", grown, 1000, "MB", f"Growth of resident memory behind them, from {before:.0f} MB ({most})."
        )
        yield none_of("interleavings", asyncio.run(_interleaved(server)), "Reused names, aborts, clients that leave.")
        yield none_of("interleavings", server.left_behind(), "What they left behind.")
        yield none_of("raw bytes", _raw_bytes(server), f"Of {len(_RAW)} pieces of HTTP, those answered wrongly.")
        yield none_of("raw bytes", server.left_behind(), "What they left behind.")
        mb, wrong = _does_not_read(server, clients=32)
        yield Row(
            "clients that do not read", mb, 200, "MB", "Growth of the processes with 32 unread streams of 1500 tokens."
        )
        yield none_of(
            "clients that do not read", wrong + server.left_behind(), "What they do to others or leave behind."
        )
        yield none_of("odd requests", server.faults_in_log(), "Errors in the log.")


def _limited(body: Any) -> Any:
    """The same, without a wish for very many tokens."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 8)
        if "messages" in body or "prompt" in body:
            body.setdefault("max_tokens", 8)
        if isinstance(body.get("sampling_params"), dict):
            _limited(body["sampling_params"])
    return body


def fuzz(setup: Setup) -> Iterator[Row]:
    """schemathesis by our OpenAPI document, with bodies that keep to it and bodies that do not."""
    import schemathesis
    from hypothesis import HealthCheck, given, seed, settings
    from schemathesis.core import NotSet
    from schemathesis.generation import GenerationMode

    wrong: list[str] = []
    stuck: list[str] = []
    count = 0
    with running(setup, "--max-total-tokens", "16384") as server:
        document = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
        paths = [path for path, methods in document.raw_schema["paths"].items() if "post" in methods]

        def send(path: str, case: Any) -> None:
            nonlocal count
            count += 1
            raw = isinstance(case.body, bytes)
            body: dict[str, Any] = {"content": case.body} if raw else {"json": _limited(case.body)}
            try:
                answer = httpx.post(
                    server.url + path, timeout=ANSWER_SECONDS, **({} if isinstance(case.body, NotSet) else body)
                )
            except httpx.TimeoutException:
                stuck.append(f"{path} {case.body}")
                return
            if answer.status_code >= 500 and answer.status_code not in (501, 503):
                wrong.append(f"{path} {str(case.body)[:150]}: {answer.status_code} {answer.text}")

        def sender(path: str) -> Callable[[Any], None]:
            def run(case: Any) -> None:
                send(path, case)

            return run

        for path in paths:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                cases = document[path]["POST"].as_strategy(generation_mode=mode)
                options = settings(
                    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
                )

                seed(0)(options(given(cases)(sender(path))))()
        yield none_of("fuzz", wrong, f"Of {count} requests by the OpenAPI document, those answered with 5xx.")
        yield none_of("fuzz", stuck, f"Those without an answer after {ANSWER_SECONDS:g} s.")
        yield none_of("fuzz", server.left_behind(), "Requests, KV slots and pages not back to zero.")
        yield none_of("fuzz", server.faults_in_log(), "Errors in the log.")
