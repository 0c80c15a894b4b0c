"""Hundreds of clients at once, half of them badly behaved."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator

from clients import Answer, bad_client, good_client, session, unexpected
from rows import Row, none_of
from servers import Server, Setup, running

GROWTH = 0.05  # of resident memory, from the second crowd to the last
# Twice as many requests, some of them for more tokens, may keep each one waiting for more than twice as long.
SLOWER = 3.0
ROUNDS = 3


async def _crowd(server: Server, good: int, bad: int, seed: int) -> tuple[list[Answer], list[str]]:
    """Answers of the good clients, and what was wrong with any."""
    rng = random.Random(seed)
    goods = [good_client(rng) for _ in range(good)]
    others = [bad_client(rng, too_long=20_000) for _ in range(bad)]
    async with session() as http:
        answers = asyncio.gather(*(client(http, server.url) for client in goods))
        rest = asyncio.gather(*(client(http, server.url) for _, client in others))
        wrong = [
            text for (kind, _), answer in zip(others, await rest, strict=True) if (text := unexpected(kind, answer))
        ]
        served = await answers
    wrong += [f"good: {a.status} {a.text[-200:]}" for a in served if a.error or not a.complete]
    return served, wrong


def _quantiles(answers: list[Answer]) -> tuple[float, float]:
    hundredths = statistics.quantiles((answer.seconds for answer in answers), n=100)
    return hundredths[49], hundredths[98]


def crowd(setup: Setup) -> Iterator[Row]:
    check = "crowd"
    good = setup.requests // 2
    bad = setup.requests - good
    wrong: list[str] = []
    left: list[str] = []
    alone: list[tuple[float, float]] = []
    together: list[tuple[float, float]] = []
    memory: list[float] = []
    # A small cache: what it touches of its memory would look like growth.
    with running(setup, "--max-total-tokens", "16384", "--max-running-requests", "64") as server:
        for seed in range(ROUNDS):
            for times, misbehaved in ((alone, 0), (together, bad)):
                answers, errors = asyncio.run(_crowd(server, good, misbehaved, seed))
                wrong += errors
                times.append(_quantiles(answers))
                left += server.left_behind()
            memory.append(server.rss_mb())
        faults = server.faults_in_log()
    what = f"{setup.requests} requests at once, {ROUNDS} times, {bad} of them"
    yield none_of(
        check, wrong, f"{what} hanging up, timing out, aborted, too long, wrong, with a grammar: wrong answers."
    )
    yield none_of(check, left, "Requests, KV slots and pages not back to zero after a crowd.")
    yield none_of(check, faults, "Errors in the log.")
    for name, index in (("p50", 0), ("p99", 1)):
        base = statistics.median(pair[index] for pair in alone)
        ratio = statistics.median(pair[index] for pair in together) / base
        what = (
            f"{name} latency of the {good} good ones among all {setup.requests}, to that of them alone ({base:.2f} s)."
        )
        yield Row(check, ratio, SLOWER, "times", what)
    growth = 100 * (memory[-1] / memory[1 if ROUNDS > 2 else 0] - 1)
    what = f"Resident memory of all processes after the last crowd over that after the second ({memory[-1]:.0f} MB)."
    yield Row(check, growth, 100 * GROWTH, "%", what)
