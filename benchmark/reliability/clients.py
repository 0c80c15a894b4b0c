"""Clients, good and bad ones, for one event loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = ("the", "river", "was", "cold", "and", "every", "morning", "an", "old", "man", "walked", "to", "count", "boats")
SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
)


@dataclass(frozen=True)
class Answer:
    """``status`` 0: the connection broke. ``error``: an error, as a body or as an event of a stream."""

    status: int
    seconds: float
    text: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> bool:
        return self.status != 200 or '"error"' in self.text

    @property
    def complete(self) -> bool:
        """Has the end that its kind of answer must have."""
        return self.status != 0 and (not self.text.startswith("data:") or self.text.rstrip().endswith("data: [DONE]"))


def session() -> aiohttp.ClientSession:
    """Without bounds of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
    )


async def ask(http: aiohttp.ClientSession, url: str, body: object) -> Answer:
    """The whole answer to a POST."""
    begin = time.monotonic()
    try:
        async with http.post(url, json=body) as response:
            text = await response.text()
            return Answer(response.status, time.monotonic() - begin, text, dict(response.headers))
    except aiohttp.ClientError as error:
        return Answer(0, time.monotonic() - begin, repr(error))


async def hang_up(http: aiohttp.ClientSession, url: str, body: dict[str, Any], chunks: int, seconds: float) -> Answer:
    """Ask for a stream and leave behind so many pieces of it, or after that time if nothing comes."""
    begin = time.monotonic()
    try:
        limit = aiohttp.ClientTimeout(total=seconds)
        async with http.post(url, json={**body, "stream": True}, timeout=limit) as response:
            for _ in range(chunks):
                await response.content.readany()
            return Answer(response.status, time.monotonic() - begin, "")
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        return Answer(0, time.monotonic() - begin, repr(error))


async def abort(http: aiohttp.ClientSession, base: str, body: dict[str, Any], seconds: float) -> Answer:
    """Ask, and have the request aborted by its name after that time."""
    rid = f"aborted-{random.random()}"
    request = asyncio.ensure_future(ask(http, f"{base}/generate", {**body, "rid": rid}))
    await asyncio.sleep(seconds)
    await ask(http, f"{base}/abort_request", {"rid": rid})
    return await request


def prompt(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def good_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that has to be served."""
    text, tokens, stream = prompt(rng, rng.randrange(4, 40)), rng.randrange(4, 16), rng.random() < 0.5
    kind = rng.randrange(4)
    if kind < 2:
        prompts = text if kind else [text, text[:40]]
        return "/v1/completions", {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if kind == 2:
        params |= {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "stop": ["\n\n\n", "zzz"]}
    return "/generate", {"text": text, "sampling_params": params, "stream": stream}


Client = Callable[[aiohttp.ClientSession, str], Awaitable[Answer]]


def good_client(rng: random.Random) -> Client:
    path, body = good_body(rng)
    return lambda http, base: ask(http, base + path, body)


def bad_client(rng: random.Random, too_long: int) -> tuple[str, Client]:
    """What it does, and a client that does it. ``too_long``: words of a prompt that the model has no room for."""
    text, long_text = prompt(rng, rng.randrange(4, 200)), prompt(rng, too_long)
    pause, chunks = rng.random() * 2, rng.randrange(4)
    params: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"text": text, "sampling_params": params}
    openai: dict[str, Any] = {"prompt": text, "max_tokens": 64, "ignore_eos": True}
    constrained = {"max_new_tokens": 16, "json_schema": SCHEMA}
    kinds: list[tuple[str, Client]] = [
        ("hangs up", lambda http, base: hang_up(http, f"{base}/generate", body, chunks, 30)),
        ("hangs up", lambda http, base: hang_up(http, f"{base}/v1/completions", openai, chunks, 30)),
        ("hangs up at once", lambda http, base: hang_up(http, f"{base}/generate", body, 99, pause / 20)),
        ("times out", lambda http, base: hang_up(http, f"{base}/v1/completions", openai, 99, pause)),
        ("is aborted", lambda http, base: abort(http, base, body, pause)),
        ("too long", lambda http, base: ask(http, f"{base}/generate", {**body, "text": long_text})),
        ("no such field", lambda http, base: ask(http, f"{base}/generate", {**body, "no_such_field": 1})),
        (
            "one bad of a batch",
            lambda http, base: ask(http, f"{base}/generate", {"input_ids": [[1, 2], [1 << 30]], "stream": True}),
        ),
        ("grammar", lambda http, base: ask(http, f"{base}/generate", {**body, "sampling_params": constrained})),
        (
            "several samples",
            lambda http, base: ask(
                http, f"{base}/generate", {**body, "sampling_params": {**params, "max_new_tokens": 4, "n": 3}}
            ),
        ),
    ]
    return rng.choice(kinds)


def unexpected(kind: str, answer: Answer) -> str | None:
    """What is wrong with the answer to a bad client; None if nothing is."""
    served = kind in ("grammar", "several samples")
    refused = kind in ("too long", "no such field", "one bad of a batch")
    if served:
        right = answer.status == 200 and not answer.error and answer.complete
    elif refused:
        right = answer.status == 400
    else:
        right = answer.status in (0, 200)
    return None if right else f"{kind}: {answer.status} {answer.text}"
