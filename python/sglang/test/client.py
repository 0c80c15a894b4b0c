"""Requests to a server under test, by the standard library and past any proxy."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from sglang.srt.errors import StartupError

# A request may wait behind thousands of others.
TIMEOUT = 3600.0

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout: float = 30.0, api_key: str | None = None) -> bool:
    """Whether a GET of ``url`` is answered with status 200."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with _direct.open(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that a POST of ``body`` is answered with.

    Raises:
        StartupError: no answer, or another status than 200; the text has the server's.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with _direct.open(request, timeout=TIMEOUT) as response:
            reply: dict[str, Any] = json.load(response)
            return reply
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise StartupError(f"{url} answered with status {error.code}: {text}") from None
    except (OSError, http.client.HTTPException) as error:
        raise StartupError(f"no answer from {url}: {error}; is the server running there?") from None


def post_all(url: str, bodies: Sequence[Mapping[str, Any]], parallel: int) -> list[dict[str, Any]]:
    """The answers to ``bodies``, in their order, asked for by ``parallel`` threads behind a progress bar.

    Raises:
        StartupError: the first request that failed; those that have not begun are not sent.
    """
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(post, url, body) for body in bodies]
        try:
            for future in tqdm(as_completed(futures), total=len(futures)):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
