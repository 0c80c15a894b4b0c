"""One timed request: what is sent to which endpoint, and when its tokens come.

The definitions are SGLang's. An event counts when it brings text. TTFT is the time to the first such event, latency
the time to the last event of any kind. Each further event that brings text adds to ITL: of ``/generate``, which says
how many tokens there are by now, the gap divided by the new tokens, once for each of them; of the OpenAI endpoints the
gap. A response in one piece has its latency as TTFT, and so has one that succeeds without any text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang.benchmark.datasets import DatasetRow

# All times are of this clock, in seconds.
Clock = Callable[[], float]
Payload = dict[str, Any]


@dataclass
class RequestFuncOutput:
    """What became of one request; times in seconds. ``prompt_len`` is the server's count where it gives one."""

    prompt_len: int
    output_len: int
    generated_text: str = ""
    success: bool = False
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    error: str = ""
    start_time: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """What one event of a response says. ``text`` is what is new, or, if ``cumulative``, all so far; the counts are of
    tokens so far, None where the event has none."""

    text: str
    cumulative: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Backend:
    """An endpoint: ``payload(row, model, args)`` is the body of a request, ``parse(object)`` reads an event."""

    path: str
    payload: Callable[[DatasetRow, str, argparse.Namespace], Payload]
    parse: Callable[[Payload], Event]


def _generate_payload(row: DatasetRow, model: str, args: argparse.Namespace) -> Payload:
    sampling_params = {
        "temperature": args.temperature,
        "max_new_tokens": row.output_len,
        "ignore_eos": not args.disable_ignore_eos,
        **({"top_p": args.top_p} if args.top_p < 1 else {}),
    }
    payload: Payload = {
        "text" if isinstance(row.prompt, str) else "input_ids": row.prompt,
        "sampling_params": sampling_params,
        "stream": not args.disable_stream,
    }
    if args.return_logprob:
        payload |= {
            "return_logprob": True,
            "logprob_start_len": args.logprob_start_len,
            "top_logprobs_num": args.top_logprobs_num,
        }
    return payload


def _generate_event(data: Payload) -> Event:
    meta = data.get("meta_info") or {}
    return Event(
        text=data.get("text") or "",
        cumulative=True,
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=meta.get("completion_tokens"),
        cached_tokens=meta.get("cached_tokens"),
    )


def _openai_payload(row: DatasetRow, model: str, args: argparse.Namespace) -> Payload:
    return {
        "model": model,
        "temperature": args.temperature,
        **({"top_p": args.top_p} if args.top_p < 1 else {}),
        "ignore_eos": not args.disable_ignore_eos,
        "stream": not args.disable_stream,
        # Without it a streamed answer doesn't say how many tokens it has.
        **({} if args.disable_stream else {"stream_options": {"include_usage": True}}),
    }


def _completion_payload(row: DatasetRow, model: str, args: argparse.Namespace) -> Payload:
    logprobs = {"logprobs": args.top_logprobs_num} if args.return_logprob else {}
    return {**_openai_payload(row, model, args), "prompt": row.prompt, "max_tokens": row.output_len, **logprobs}


def _chat_payload(row: DatasetRow, model: str, args: argparse.Namespace) -> Payload:
    logprobs = {"logprobs": True, "top_logprobs": args.top_logprobs_num} if args.return_logprob else {}
    return {
        **_openai_payload(row, model, args),
        "messages": [{"role": "user", "content": row.prompt}],
        "max_completion_tokens": row.output_len,
        **logprobs,
    }


def _openai_event(data: Payload) -> Event:
    choice = (data.get("choices") or [{}])[0]
    message = choice.get("delta") or choice.get("message") or {}
    usage = data.get("usage") or {}
    return Event(
        text=choice.get("text") or (message.get("reasoning_content") or "") + (message.get("content") or ""),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


_GENERATE = Backend("/generate", _generate_payload, _generate_event)
_COMPLETIONS = Backend("/v1/completions", _completion_payload, _openai_event)
_CHAT = Backend("/v1/chat/completions", _chat_payload, _openai_event)
BACKENDS: dict[str, Backend] = {
    "sglang": _GENERATE,
    "sglang-native": _GENERATE,
    "sglang-oai": _COMPLETIONS,
    "sglang-oai-chat": _CHAT,
    "vllm": _COMPLETIONS,
    "vllm-chat": _CHAT,
}
REFUSED_BACKENDS = (
    "gserver", "lmdeploy", "lmdeploy-chat", "sglang-embedding", "trt", "truss", "vllm-embedding",
)  # fmt: skip


class RequestFailedError(Exception):
    """The server answered with an error; the text is its."""


async def read_events(
    lines: AsyncIterable[bytes], parse: Callable[[Payload], Event], output: RequestFuncOutput, clock: Clock
) -> None:
    """Fill ``output`` from the lines of a response, server-sent events or one JSON object, as they come.

    Raises:
        RequestFailedError: an event is an error.
        ValueError: an event is no JSON.
    """
    last_text_time, tokens_so_far, saw_text = output.start_time, 0, False
    async for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not data or data.startswith(b":"):
            continue
        now = clock()
        output.latency = now - output.start_time
        if data == b"[DONE]":
            continue
        body = json.loads(data)
        if not isinstance(body, dict) or "error" in body:
            raise RequestFailedError(data.decode(errors="replace"))
        event = parse(body)
        output.prompt_len = event.prompt_tokens or output.prompt_len
        output.cached_tokens = event.cached_tokens or output.cached_tokens
        if event.completion_tokens is not None:
            output.output_len = event.completion_tokens
        if not event.text:
            continue
        if not saw_text:
            output.ttft, saw_text = output.latency, True
        elif not event.cumulative:
            output.itl.append(now - last_text_time)
        elif new_tokens := output.output_len - tokens_so_far:
            output.itl += [(now - last_text_time) / new_tokens] * new_tokens
        else:
            continue
        output.generated_text = event.text if event.cumulative else output.generated_text + event.text
        last_text_time, tokens_so_far = now, output.output_len
    if not saw_text:
        output.ttft = output.latency


async def send(
    session: aiohttp.ClientSession,
    url: str,
    backend: Backend,
    row: DatasetRow,
    payload: Payload,
    clock: Clock = time.perf_counter,
) -> RequestFuncOutput:
    """Send one request and follow its answer. Errors of any kind are in the output, none is raised."""
    output = RequestFuncOutput(prompt_len=row.prompt_len, output_len=row.output_len)
    output.start_time = clock()
    try:
        async with session.post(url, json=payload) as response:
            if response.status != 200:
                raise RequestFailedError(f"HTTP {response.status} {response.reason}: {await response.text()}")
            await read_events(response.content, backend.parse, output, clock)
        output.success = True
    except (RequestFailedError, aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        output.error = str(error) if isinstance(error, RequestFailedError) else f"{type(error).__name__}: {error}"
    return output
