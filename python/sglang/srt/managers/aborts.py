"""What an abort concerns in the HTTP process, and how a request ends with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.io_struct import ReqOutput
from sglang.srt.managers.request_state import ReqState

ABORTED = {"type": "abort", "message": "Aborted by an abort request."}


def is_named(rid: str | None, *, abort_all: bool) -> Callable[[str], bool]:
    """Whether an abort of ``rid``, which also names all sequences of a batch that was given this one name, concerns
    the request of that name."""
    return lambda name: abort_all or name == rid or bool(rid and name.rpartition("_")[0] == rid)


def end_with(state: ReqState, reason: dict[str, Any]) -> None:
    """As if the scheduler had ended it: what the detokenizer held back belongs to the text."""
    out = ReqOutput(
        rid=state.rid,
        output_ids=[],
        finish_reason=reason,
        prompt_tokens=state.prompt_tokens,
        completion_tokens=len(state.output_ids),
        cached_tokens=state.cached_tokens,
    )
    state.push(out)


class Preparations:
    """Requests that have come but don't run yet, as they are being tokenised, their grammar is being compiled, or the
    weights are being updated. A name may occur more than once."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Sequence[GenerateRequest], set[str]]] = []

    @contextlib.contextmanager
    def of(self, requests: Sequence[GenerateRequest]) -> Iterator[set[str]]:
        """The names of those of ``requests`` that are aborted meanwhile; it grows until the end of the block."""
        aborted: set[str] = set()
        entry = (requests, aborted)
        self._under_way.append(entry)
        try:
            yield aborted
        finally:
            self._under_way = [other for other in self._under_way if other is not entry]

    def abort(self, is_meant: Callable[[str], bool]) -> None:
        for requests, aborted in self._under_way:
            aborted.update(request.rid for request in requests if is_meant(request.rid))
