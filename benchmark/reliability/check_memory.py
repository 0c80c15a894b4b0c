"""A KV cache that is too small, and a long time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

from clients import ask, bad_client, good_client, prompt, session, unexpected
from rows import Row, none_of
from servers import Server, Setup, running

DRIFT = 2.0  # % of resident memory over the soak, by the line of best fit
CLIENTS = 16
# Admission hopes that those that run generate 70 % of what they may, and these generate all. The short ones leave room
# for others while the long ones have most of their tokens before them.
NEW_TOKENS = [60, 440] * 12


def kv_exhausted(setup: Setup) -> Iterator[Row]:
    """The same greedy requests with room for all, and with room for a few, so that some are retracted."""
    check = "KV cache exhausted"
    rng = random.Random(0)
    params = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True} for count in NEW_TOKENS]
    body = {"text": [prompt(rng, 12) for _ in NEW_TOKENS], "sampling_params": params}

    async def answers(server: Server) -> list[list[int]]:
        async with session() as http:
            answer = await ask(http, f"{server.url}/generate", body)
        return [one["output_ids"] for one in json.loads(answer.text)]

    results, retracted, left = [], 0, []
    for tokens in ("32768", "3400"):
        with running(
            setup, "--dtype", "float32", "--max-total-tokens", tokens, "--max-running-requests", "24"
        ) as server:
            results.append(asyncio.run(answers(server)))
            retracted = server.get("/server_info").json()["internal_states"][0]["num_retracted_reqs"]
            left += server.left_behind()
    yield Row(check, retracted, 1, "requests", "Retracted, of 24 that need several times the cache.", at_least=True)
    compared = enumerate(zip(*results, NEW_TOKENS, strict=True))
    differ = [f"request {i}" for i, (a, b, count) in compared if a != b or len(a) != count]
    yield none_of(check, differ, "Greedy outputs in float32 that differ from those of a server with room for all.")
    yield none_of(check, left, "What the requests left behind.")


async def _soak(server: Server, seconds: float, wrong: list[str]) -> tuple[list[tuple[float, float]], int]:
    """Load for that long; (seconds, MB) of all processes, and how many requests were answered."""
    begin = time.monotonic()
    samples: list[tuple[float, float]] = []
    count = 0

    async def client(seed: int) -> None:
        nonlocal count
        rng = random.Random(seed)
        async with session() as http:
            while time.monotonic() - begin < seconds:
                if rng.random() < 0.6:
                    answer = await good_client(rng)(http, server.url)
                    problem = answer.text[-200:] if answer.error or not answer.complete else None
                else:
                    kind, one = bad_client(rng, too_long=20_000)
                    problem = unexpected(kind, await one(http, server.url))
                count += 1
                if problem:
                    wrong.append(problem)

    async def measure() -> None:
        while time.monotonic() - begin < seconds:
            samples.append((time.monotonic() - begin, await asyncio.to_thread(server.rss_mb)))
            await asyncio.sleep(1)

    await asyncio.gather(measure(), *(client(seed) for seed in range(CLIENTS)))
    return samples, count


def slope(samples: list[tuple[float, float]]) -> float:
    """Of the line of best fit (least squares), per unit of the first coordinate."""
    n = len(samples)
    mean_x, mean_y = (sum(column) / n for column in zip(*samples, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)


def soak(setup: Setup) -> Iterator[Row]:
    check = "soak"
    seconds = setup.minutes * 60
    wrong: list[str] = []
    with running(setup, "--max-total-tokens", "16384", "--max-running-requests", "32") as server:
        samples, count = asyncio.run(_soak(server, seconds, wrong))
        left = server.left_behind()
        faults = server.faults_in_log()
    warm = [(at, rss) for at, rss in samples if at >= seconds / 5]
    mean = sum(rss for _, rss in warm) / len(warm)
    per_second = slope(warm)
    drift = 100 * per_second * (warm[-1][0] - warm[0][0]) / mean
    what = (
        f"Growth of resident memory ({mean:.0f} MB, {per_second * 3600:+.1f} MB an hour) by the line of best fit "
        f"through the last four fifths of {setup.minutes:g} minutes, {CLIENTS} clients, {count} requests."
    )
    yield Row(check, drift, DRIFT, "%", what)
    yield none_of(check, wrong, "Wrong answers.")
    yield none_of(check, left, "Requests, KV slots and pages not back to zero.")
    yield none_of(check, faults, "Errors in the log.")
