"""The ends of a server: its scheduler killed, itself killed, SIGTERM; and a queue that is full."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
from clients import Answer, ask, session
from rows import Row, none_of
from servers import ANSWER_SECONDS, Server, Setup, running

# Nothing of this has to be computed: told is told at once.
TOLD_SECONDS = 15.0
# Requests that run must do so when the next one is refused, and end within the grace.
WORK_SECONDS = 4.0


def _request(tokens: int, stream: bool) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": "Once upon a time", "sampling_params": params, "stream": stream}


async def _while_asked(server: Server, tokens: int, count: int, act: Any, pause: float) -> tuple[list[Answer], float]:
    """``count`` requests, every other one streaming; ``act`` happens when they run. All answers, and how long after
    ``act`` the last one came."""
    async with session() as http:
        tasks = [
            asyncio.ensure_future(ask(http, f"{server.url}/generate", _request(tokens, stream=i % 2 == 1)))
            for i in range(count)
        ]
        while sum((await asyncio.to_thread(server.load)).values()) < count:
            await asyncio.sleep(0.1)
        await asyncio.sleep(pause)
        await asyncio.to_thread(act)
        begin = time.monotonic()
        answers = await asyncio.gather(*tasks)
        return answers, time.monotonic() - begin


def _gone(processes: list[psutil.Process]) -> list[str]:
    """Those that are still there after a while."""
    _, alive = psutil.wait_procs(processes, timeout=TOLD_SECONDS)
    return [str(process) for process in alive]


def scheduler_killed(setup: Setup) -> Iterator[Row]:
    check = "scheduler killed"
    with running(setup, "--max-running-requests", "2") as server:
        tree = server.processes()
        scheduler = server.schedulers()[0]
        answers, seconds = asyncio.run(_while_asked(server, 1500, 24, scheduler.kill, 0.0))
        wrong = [
            f"{answer.status} {answer.text[-200:]}" for answer in answers if not (answer.error and answer.complete)
        ]
        yield none_of(check, wrong, "Of 24 clients that waited, those that got no error and an end.")
        yield Row(check, seconds, TOLD_SECONDS, "s", "From SIGKILL of the scheduler until the last of them had it.")
        yield Row(check, float(server.process.wait(60) == 0), 0, "cases", "The server's exit status was 0.")
        yield none_of(check, _gone(tree), "Processes of the server that outlive it.")
        yield none_of(check, [str(path) for path in server.sockets.iterdir()], "Sockets and folders that it leaves.")


def server_killed(setup: Setup) -> Iterator[Row]:
    check = "HTTP process killed"
    with running(setup) as server:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 2, "regex": "[ab]"}}
        grammar = server.post("/generate", body)
        tree = server.processes()
        server.process.kill()
        began = time.monotonic()
        yield none_of(check, _gone(tree), "Processes (scheduler, compiler of grammars) that outlive it.")
        yield Row(check, time.monotonic() - began, TOLD_SECONDS, "s", "From SIGKILL until the last one had ended.")
        yield none_of(check, [] if grammar.status_code == 200 else [grammar.text], "The request before it failed.")


def _tokens_of_seconds(server: Server, seconds: float) -> int:
    """How many tokens a request may have to take about so long, or longer among others."""
    probe = 32
    begin = time.monotonic()
    server.post("/generate", _request(probe, stream=False))
    return min(1500, max(probe, int(probe * seconds / (time.monotonic() - begin))))


def sigterm(setup: Setup) -> Iterator[Row]:
    check = "SIGTERM"
    with running(setup) as server:
        refused: list[int] = []
        tokens = _tokens_of_seconds(server, WORK_SECONDS)

        def terminate() -> None:
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + TOLD_SECONDS
            while server.get("/health").status_code != 503 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused.append(server.post("/generate", _request(1, stream=False)).status_code)

        answers, _ = asyncio.run(_while_asked(server, tokens, 8, terminate, 0.0))
        lost = [answer.text[-200:] for answer in answers if answer.error or not answer.complete]
        yield none_of(check, lost, "Of 8 requests that ran, those that did not come to their end.")
        yield none_of(check, [str(s) for s in refused if s != 503], "A new request was answered with another than 503.")
        yield Row(check, float(server.process.wait(60)), 0, "status", "Exit status.")
        yield none_of(check, server.faults_in_log(), "Errors in the log.")
    with running(setup, "--max-running-requests", "1") as server:
        tree = server.processes()
        answers, seconds = asyncio.run(
            _while_asked(server, 1900, 40, lambda: server.process.send_signal(signal.SIGTERM), 0.0)
        )
        wrong = [answer.text[-200:] for answer in answers if not answer.complete]
        yield none_of(
            check, wrong, "Of 40 requests, too many for the grace of 30 s, those left without result or error."
        )
        yield Row(check, seconds, 30 + TOLD_SECONDS, "s", "From SIGTERM until the last of them had one.")
        yield Row(check, float(server.process.wait(60)), 0, "status", "Exit status then.")
        yield none_of(check, _gone(tree), "Processes that outlive the server.")


def queue_full(setup: Setup) -> Iterator[Row]:
    check = "queue full"
    count, room = 32, 6

    async def all_of(server: Server) -> tuple[list[Answer], list[Answer], float]:
        async with session() as http:

            async def until_served() -> tuple[Answer, Answer]:
                first = answer = await ask(http, f"{server.url}/generate", _request(48, stream=False))
                while answer.status == 503:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", answer.headers.get("retry-after", 1))))
                    answer = await ask(http, f"{server.url}/generate", _request(48, stream=False))
                return first, answer

            pairs = await asyncio.gather(*(until_served() for _ in range(count)))
        firsts, lasts = [first for first, _ in pairs], [last for _, last in pairs]
        return firsts, lasts, max(first.seconds for first in firsts if first.status == 503)

    with running(setup, "--max-running-requests", "2", "--max-queued-requests", "4") as server:
        firsts, lasts, slowest = asyncio.run(all_of(server))
        full = [answer for answer in firsts if answer.status == 503]
        what = f"Of {count} requests at once to a server with room for {room}, those answered with 503."
        yield Row(check, len(full), 1, "requests", what, at_least=True)
        yield Row(check, slowest, ANSWER_SECONDS, "s", "The slowest 503.")
        silent = [str(answer.headers) for answer in full if "retry-after" not in map(str.lower, answer.headers)]
        yield none_of(check, silent, "503 without Retry-After.")
        others = [f"{answer.status} {answer.text}" for answer in firsts if answer.status not in (200, 503)]
        yield none_of(check, others, "Answers other than 200 and 503.")
        failed = [answer.text for answer in lasts if answer.status != 200 or answer.error]
        yield none_of(check, failed, "Requests that were not served although they came again as Retry-After says.")
        yield none_of(check, server.left_behind(), "What the requests left behind.")
