"""What one sequence may ask of the model that is served, and the scheduler's message of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import GenerateRequest, new_rid
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

# Log-probabilities that one sequence may return: each is an object of about a hundred bytes in both processes.
_MAX_LOGPROBS = 1 << 22


@dataclass(frozen=True)
class Limits:
    """``max_req_input_len``: longest prompt that the KV cache has room for; all in tokens."""

    vocab_size: int
    context_len: int
    max_req_input_len: int


def tokenized_request(request: GenerateRequest, ids: list[int], limits: Limits) -> TokenizedGenerateReqInput:
    """The scheduler's message of ``request`` with the prompt ``ids``.

    Raises:
        RequestError: it does not fit into the limits.
    """
    length = len(ids)
    if length >= limits.context_len:
        raise RequestError(
            f"The input ({length} tokens) is longer than the model's context length ({limits.context_len} tokens)."
        )
    if length > limits.max_req_input_len:
        raise RequestError(
            f"Input length ({length} tokens) exceeds the maximum allowed length ({limits.max_req_input_len} tokens): "
            "the KV cache has no more room. Use a shorter input, or start the server with more --max-total-tokens."
        )
    params = request.sampling_params
    room = limits.context_len - length
    if params.max_new_tokens is None or params.max_new_tokens > room:
        if request.max_new_tokens_given:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {limits.context_len} tokens. "
                f"You requested a total of {length + (params.max_new_tokens or 0)} tokens: {length} tokens from "
                f"the input messages and {params.max_new_tokens} tokens for the completion.",
                "max_new_tokens",
            )
        params = msgspec.structs.replace(params, max_new_tokens=room)
    assert params.max_new_tokens is not None
    if params.min_new_tokens > params.max_new_tokens:
        raise RequestError(
            f"min_new_tokens ({params.min_new_tokens}) is more than the {params.max_new_tokens} tokens that the "
            "context has room for.",
            "min_new_tokens",
        )
    _check_vocabulary(limits, "stop_token_ids", params.stop_token_ids)
    _check_vocabulary(limits, "logit_bias", map(int, params.logit_bias or ()))
    _check_vocabulary(limits, "token_ids_logprob", request.token_ids_logprob)
    if request.logprob_start_len > length:
        raise RequestError(
            f"logprob_start_len ({request.logprob_start_len}) is beyond the prompt ({length} tokens).",
            "logprob_start_len",
        )
    if request.top_logprobs_num > limits.vocab_size:
        raise RequestError(f"top_logprobs_num must be at most {limits.vocab_size}.", "top_logprobs_num")
    positions = params.max_new_tokens + (length - request.logprob_start_len if request.logprob_start_len >= 0 else 0)
    values = positions * (request.top_logprobs_num + len(request.token_ids_logprob))
    if values > _MAX_LOGPROBS:
        raise RequestError(
            f"{values} log-probabilities are asked for ({positions} tokens), {_MAX_LOGPROBS} may be; lower "
            "top_logprobs_num, token_ids_logprob or max_new_tokens, or raise logprob_start_len.",
            "top_logprobs_num" if request.top_logprobs_num else "token_ids_logprob",
        )
    return TokenizedGenerateReqInput(
        # A fresh name: what the scheduler still sends for an aborted request never meets a new one of that name.
        rid=new_rid(),
        input_ids=ids,
        sampling_params=params,
        return_logprob=request.return_logprob,
        logprob_start_len=length if request.logprob_start_len < 0 else request.logprob_start_len,
        top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=list(request.token_ids_logprob),
    )


def _check_vocabulary(limits: Limits, name: str, token_ids: Iterable[int]) -> None:
    if any(not 0 <= i < limits.vocab_size for i in token_ids):
        raise RequestError(f"{name} must be inside the vocabulary [0, {limits.vocab_size}).", name)
