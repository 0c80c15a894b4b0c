"""What is told about requests while they are served."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.managers.request_state import ReqState


class RequestObserver(Protocol):
    """Called in the event loop of the HTTP process, so every call has to be short. ``stream``: the client gets the
    answer in pieces."""

    def received(self, state: ReqState, stream: bool) -> None:
        """A request is valid and goes to the scheduler."""

    def progressed(self, state: ReqState, stream: bool, new_tokens: int) -> None:
        """It got ``new_tokens``, maybe none."""

    def finished(self, state: ReqState, stream: bool) -> None:
        """It has ended; ``state.finish_reason`` None means that the client hung up."""


def is_aborted(state: ReqState) -> bool:
    """Whether an ended request did not come to an end of its own."""
    return state.finish_reason is None or state.finish_reason["type"] == "abort"
