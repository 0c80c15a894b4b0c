"""``--log-requests``: one line when a request comes, one when it has ended."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from sglang.srt.managers.request_state import ReqState

logger = logging.getLogger(__name__)

# Characters of a prompt or an output at level 2.
_SHOWN = 2048


class RequestLogger:
    """A :class:`RequestObserver` that logs.

    Args:
        level: of ``--log-requests-level``. 0: metadata; 1: and sampling parameters; 2: and prompts and outputs, cut; 3:
            and all of them.
    """

    def __init__(self, level: int) -> None:
        self._level = level

    def received(self, state: ReqState, stream: bool) -> None:
        logger.info("Receive: obj=%s", self._request(state, stream))

    def progressed(self, state: ReqState, stream: bool, new_tokens: int) -> None:
        pass

    def finished(self, state: ReqState, stream: bool) -> None:
        out = state.to_dict()
        if self._level < 2:
            out = {"meta_info": {k: v for k, v in out["meta_info"].items() if "logprobs" not in k}}
        logger.info("Finish: obj=%s, out=%s", self._request(state, stream), self._cut(out))

    def _request(self, state: ReqState, stream: bool) -> str:
        request = state.request
        fields: dict[str, Any] = {"rid": request.rid}
        if self._level >= 2:
            fields |= {"text": request.text, "input_ids": request.input_ids}
        if self._level >= 1:
            fields["sampling_params"] = msgspec.structs.asdict(request.sampling_params)
        fields |= {"return_logprob": request.return_logprob, "stream": stream}
        return f"GenerateReqInput({', '.join(f'{name}={self._cut(value)}' for name, value in fields.items())})"

    def _cut(self, value: Any) -> str:
        """``repr(value)`` on one line; at level 2 without the middle of what is long in it."""
        if self._level == 2:
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k!r}: {self._cut(v)}" for k, v in value.items()) + "}"
            if isinstance(value, (str, list)) and len(value) > _SHOWN:
                half = _SHOWN // 2
                return f"{value[:half]!r} ... {value[-half:]!r}"
        return repr(value)
