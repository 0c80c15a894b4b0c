"""OpenAI's request objects: what is acted on, what asks for nothing, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.request_validation import convert, select_supported
from sglang.srt.sampling.sampling_params import NEUTRAL_VALUES, SamplingParams, parse_sampling_params

# SGLang's default of "model": whatever is served.
DEFAULT_MODEL_NAME = "default"

_NOTHING: tuple[Any, ...] = (False, [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in NEUTRAL_VALUES.items() if name not in ("n", "sampling_seed")},
    "min_tokens": (0,),
    "logit_bias": _NOTHING,
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": _NOTHING,
    "metadata": _NOTHING,
    "lora_path": _NOTHING,
    "session_id": (),
    "session_params": _NOTHING,
    "custom_logit_processor": (),
    "return_hidden_states": _NOTHING,
    "return_routed_experts": _NOTHING,
    "return_token_ids": _NOTHING,
    "return_cached_tokens_details": _NOTHING,
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "data_parallel_rank": (),
    "extra_key": (),
    "cache_salt": (),
    "priority": (),
}
_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tools": _NOTHING,
    "functions": _NOTHING,
    # Without tools there is nothing to choose or to call in parallel.
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    # SGLang's defaults; without a reasoning parser there is nothing to separate.
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**_NEUTRAL, "suffix": ("",)}

# Fields that name the user or group requests for the provider's own purposes; they ask nothing of the answer.
_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # An OpenAI option against guessing text from packet sizes; padding nothing is its off position.
    include_obfuscation: bool = False


class _CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have, by OpenAI's or else SGLang's names."""

    model: str = DEFAULT_MODEL_NAME
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    rid: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(self, max_new_tokens: int | None) -> SamplingParams:
        """The sampling that is asked for.

        Raises:
            RequestError: a value is out of range, or ``seed`` is set for a request that is not greedy.
        """
        same = (
            "stop", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        )  # fmt: skip
        params = parse_sampling_params(
            {"max_new_tokens": max_new_tokens, **{name: getattr(self, name) for name in same}}
        )
        if self.seed is not None and not params.is_greedy:
            raise RequestError(
                "'seed' is not supported by this server: leave it out, or sample greedily (temperature 0).", "seed"
            )
        return params

    def check(self) -> None:
        if self.n < 1:
            raise RequestError(f"n must be at least 1, got {self.n}.", "n")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value < 0:
                raise RequestError(f"{name} must be at least 0, got {value}.", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise RequestError("'stream_options.include_obfuscation' is not supported.", "stream_options")


R = TypeVar("R", bound=_CommonRequest)


class ChatCompletionRequest(_CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False

    @property
    def output_limit(self) -> int | None:
        """Most new tokens; None: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}.", "top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")


class CompletionRequest(_CommonRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    @property
    def output_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    def check(self) -> None:
        super().check()
        if self.logprobs is not None and self.logprobs < 0:
            raise RequestError(f"logprobs must be at least 0, got {self.logprobs}.", "logprobs")
        if self.best_of not in (None, self.n):
            raise RequestError(
                "'best_of' is not supported by this server: leave it out, or make it equal to n.", "best_of"
            )


def parse_chat_request(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Raises RequestError naming the field that is wrong or not supported."""
    return _parse(body, ChatCompletionRequest, _CHAT_NEUTRAL)


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises RequestError naming the field that is wrong or not supported."""
    return _parse(body, CompletionRequest, _COMPLETION_NEUTRAL)


def _parse(body: Mapping[str, Any], target: type[R], neutral: dict[str, tuple[Any, ...]]) -> R:
    # null means the default everywhere.
    body = {name: value for name, value in body.items() if value is not None and name not in _LABELS}
    request = convert(select_supported(body, target.__struct_fields__, neutral), target)
    request.check()
    return request
