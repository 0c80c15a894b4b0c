"""SGLANG_REQ_WAITING_TIMEOUT and SGLANG_REQ_RUNNING_TIMEOUT: which requests have taken too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req


class RequestTimeouts:
    """Watches the requests of one scheduler; times are in seconds, None means no limit.

    A retracted request has run and so is not waiting.
    """

    def __init__(
        self, waiting: float | None, running: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._clock = clock
        self._arrived: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def overdue(self, waiting: Iterable[Req], running: Iterable[Req]) -> list[AbortReq]:
        """What ends the requests that are over their time now. To be asked in every turn of the loop: a request's time
        begins when it is first seen."""
        if self._waiting is None and self._running is None:
            return []
        now = self._clock()
        started = {req.rid: self._started.get(req.rid, now) for req in running}
        retracted = {req.rid: self._started[req.rid] for req in waiting if req.rid in self._started}
        self._arrived = {req.rid: self._arrived.get(req.rid, now) for req in waiting if req.rid not in retracted}
        self._started = started | retracted
        return [
            *_late("waiting", self._arrived, self._waiting, now),
            *_late("running", self._started, self._running, now),
        ]


def _late(what: str, since: dict[str, float], limit: float | None, now: float) -> list[AbortReq]:
    if limit is None:
        return []
    message = f"Request {what} timeout reached."
    return [AbortReq(rid=rid, message=message, status_code=503) for rid, begin in since.items() if now - begin > limit]
